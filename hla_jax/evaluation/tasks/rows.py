"""Rows of benchmarks: from a local folder with one sub-folder a data set, or from the hub."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from hla_jax.data.streams import DataError
from hla_jax.evaluation.task import Options, TaskError

Row = dict[str, Any]

_KINDS = (".jsonl", ".parquet")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Where the rows of a benchmark are.

    Attributes:
      folder: its name below the user's data folder.
      hub: "owner/name".
      columns: that every row must have.
      config, split: on the hub; local files are those whose name begins with the split.
    """

    folder: str
    hub: str
    columns: tuple[str, ...]
    config: str | None = None
    split: str = "test"

    def rows(self, options: Options) -> list[Row]:
        """All rows, in their order. A file that is the folder's only one is taken whatever its name.

        Raises:
          TaskError: no data, or not this data; the message says what to do.
        """
        from hla_jax.data.sources import open_rows  # imports `datasets` when it opens something

        where = [self.hub] if options.data is None else [str(file) for file in self._files(options.data)]
        found: list[Row] = []
        try:
            for path in where:
                found += open_rows(path, self.config, self.split)
        except DataError as error:
            if options.data is not None:
                raise TaskError(str(error)) from error
            raise TaskError(
                f"{self.hub}: the hub does not give it ({error.__cause__ or error}); copy it where there is a network, "
                f"`hf download {self.hub} --repo-type dataset --local-dir FOLDER/{self.folder}`, and give --data=FOLDER"
            ) from error
        except Exception as error:  # of json, pyarrow, ...: the file is what the user must look at
            raise TaskError(f"{', '.join(where)}: cannot be read: {error}") from error
        missing = sorted(set(self.columns) - set(found[0])) if found else list(self.columns)
        if missing:
            raise TaskError(
                f"{', '.join(where)}: expected rows with {', '.join(self.columns)}; no {', '.join(missing)}"
            )
        return found

    def _files(self, data: pathlib.Path) -> list[pathlib.Path]:
        folder = data / self.folder
        there = sorted(file for file in folder.rglob("*") if file.suffix in _KINDS)
        chosen = [file for file in there if file.name.startswith(self.split)] or (there if len(there) == 1 else [])
        if self.config:  # hub copies keep one folder a configuration
            chosen = [file for file in chosen if self.config in file.relative_to(folder).parts[:-1]] or chosen
        if not chosen:
            names = ", ".join(file.name for file in there) or "nothing"
            raise TaskError(
                f"{folder}: expected {self.split}*.jsonl or .parquet, found {names}; copy it with "
                f"`hf download {self.hub} --repo-type dataset --local-dir {folder}`"
            )
        return chosen


def made_file(options: Options, folder: str, name: str, source: str) -> pathlib.Path:
    """A file that has no form of rows, below the user's data folder.

    Raises:
      TaskError: it is not there, or no folder was given; `source` says where it comes from.
    """
    if options.data is None:
        raise TaskError(f"needs --data=FOLDER with FOLDER/{folder}/{name} ({source})")
    path = options.data / folder / name
    if not path.exists():
        raise TaskError(f"{path}: not found; it comes from {source}")
    return path
