"""Documents from local files and from the Hugging Face hub, read as a stream by `datasets`.

The first of these reads the column "text"; the last leaves 1000 documents for evaluation:

    open_documents("notes.jsonl")
    open_documents("open-r1/OpenR1-Math-220k", VerifiedSolutions(model.tokenizer))
    open_documents("HuggingFaceFW/fineweb-edu", name="sample-10BT", skip=1000)

Texts in memory (the standard library's) and texts made from their index (synthetic tasks) are streams already:

    Indexed(texts.__getitem__, len(texts), seed)
    Indexed(lambda index: make(np.random.default_rng([seed, index])))
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from hla_jax.data.streams import DataError, State, Stream, T_co

T = TypeVar("T")

# How `datasets` reads each kind of file, by suffix. A text file is one document.
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}


class Render(Protocol[T_co]):
    """Turns a row of a data set into a document (a text, or a conversation); None skips the row."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads."""
        ...

    def __call__(self, row: Mapping[str, Any]) -> T_co | None:
        """Raises `DataError` for a row that is not what it should be; the reader adds the file and the row's number."""
        ...


@dataclasses.dataclass(frozen=True)
class Text:
    """The text in one column; rows where it is missing or empty are skipped."""

    column: str = "text"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, row: Mapping[str, Any]) -> str | None:
        text = row[self.column]
        if text is not None and not isinstance(text, str):
            raise DataError(f"column {self.column!r} should hold text; found {type(text).__name__}: {str(text)[:80]}")
        return text or None


@dataclasses.dataclass(frozen=True)
class Chat:
    """A column of messages [{role, content}], rendered by the tokenizer's chat template."""

    tokenizer: Any
    column: str = "messages"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, row: Mapping[str, Any]) -> str | None:
        messages = row[self.column]
        if not messages:
            return None
        if not isinstance(messages, list) or not all({"role", "content"} <= set(message) for message in messages):
            found = str(messages)[:80]
            raise DataError(f"column {self.column!r} should hold a list of {{role, content}}; found {found}")
        return self.tokenizer.apply_chat_template(messages, tokenize=False)


@dataclasses.dataclass(frozen=True)
class VerifiedSolutions:
    """OpenR1-Math: the problem as the user's turn, and as the answer the first generation that was verified as correct.

    Problems without one are skipped.
    """

    tokenizer: Any
    problem: str = "problem"
    generations: str = "generations"
    correct: str = "correctness_math_verify"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.problem, self.generations, self.correct)

    def __call__(self, row: Mapping[str, Any]) -> str | None:
        messages = self.messages(row)
        return None if messages is None else self.tokenizer.apply_chat_template(messages, tokenize=False)

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, str]] | None:
        """The same before the template."""
        verified = (text for text, correct in zip(row[self.generations] or [], row[self.correct] or []) if correct)
        solution = next(verified, None)
        if solution is None:
            return None
        return [{"role": "user", "content": row[self.problem]}, {"role": "assistant", "content": solution}]


def open_documents(path: str, render: Render[str] | None = None, **options: Any) -> Stream[str]:
    """A stream of texts: `open_rendered`, by default of the column "text"."""
    return open_rendered(path, Text() if render is None else render, **options)


def open_rendered(
    path: str,
    render: Render[T],
    *,
    name: str | None = None,
    split: str = "train",
    skip: int = 0,
    take: int | None = None,
    repeat: bool = True,
) -> Stream[T]:
    """A stream of what `render` makes of the rows of a data set.

    Args:
      path: a jsonl, parquet or text file, a folder of files of one of these kinds, or a hub data set's "owner/name".
      render: what a document is.
      name, split: configuration and split of a hub data set.
      skip, take: leave out the first `skip` rows, then keep `take`: disjoint ranges make training and held-out data.
      repeat: start again after the last row.

    Raises:
      DataError: no such file, an unknown kind of file, nothing in it, a missing column, a hub that cannot be reached;
        later, a row that cannot be read or rendered.
    """
    try:
        first = next(iter(open_rows(path, name, split)), None)
    except DataError:
        raise
    except Exception as error:  # of pyarrow, json, zlib, fsspec, ...: the file is what the user must look at
        raise DataError(f"{path}: cannot be read: {error}") from error
    if first is None:
        raise DataError(f"{path}: is empty")
    if missing := [column for column in render.columns if column not in first]:
        found = ", ".join(map(repr, first))
        raise DataError(f"{path}: has no column {', '.join(map(repr, missing))}; its columns are {found}")
    rows = open_rows(path, name, split).select_columns(list(render.columns)).skip(skip)
    return _Rows(path, rows if take is None else rows.take(take), skip, render, repeat)


def open_rows(path: str, name: str | None = None, split: str = "train") -> Any:
    """A `datasets.IterableDataset` of the rows of a local file or folder, or of a hub data set.

    Raises `DataError` for a path that is neither, or files of several kinds.
    """
    import datasets  # takes a second to import, which help texts and models should not wait for

    local = pathlib.Path(path).expanduser()
    if local.exists():
        files = [local] if local.is_file() else sorted(f for f in local.rglob("*") if f.suffix in _READERS)
        kinds = {_READERS.get(file.suffix) for file in files}
        if len(kinds) != 1 or None in kinds:
            found = ", ".join(sorted({file.suffix or file.name for file in files})) or "none"
            raise DataError(f"{path}: expected files of one kind of {', '.join(_READERS)}; found {found}")
        if not any(file.stat().st_size for file in files):
            raise DataError(f"{path}: is empty")
        (reader,) = kinds
        options = {"sample_by": "document"} if reader == "text" else {}
        return datasets.load_dataset(
            reader, data_files=[str(file) for file in files], split="train", streaming=True, **options
        )
    if path.count("/") != 1 or path.startswith(("/", ".", "~")) or local.suffix in _READERS:
        raise DataError(f"{path}: no such file or folder (and not the name of a hub data set, owner/name)")
    import huggingface_hub

    try:
        # `datasets` would retry for half a minute before it says that there is no network.
        huggingface_hub.HfApi().dataset_info(path, timeout=10)
    except Exception as error:
        raise DataError(
            f"{path}: no such local file, and the hub does not give it ({type(error).__name__}: {error}). "
            f"Without a network, copy it once with `hf download {path} --repo-type dataset --local-dir FOLDER` "
            f"and give the folder that holds its parquet or jsonl files instead."
        ) from error
    return datasets.load_dataset(path, name, split=split, streaming=True)


class _Rows(Stream[T]):
    """Documents rendered from the rows of a `datasets.IterableDataset`, which follow the first `skip` of `path`."""

    def __init__(self, path: str, rows: Any, skip: int, render: Render[T], repeat: bool):
        self._path, self._rows, self._skip, self._render, self._repeat = path, rows, skip, render, repeat
        self._beginning = copy.deepcopy(rows.state_dict())
        self._iterator = iter(rows)
        self._read, self._rendered = 0, 0  # rows and documents of this epoch so far

    def __next__(self) -> T:
        while True:
            try:
                row = next(self._iterator)
            except StopIteration:
                if not self._rendered:
                    where = f"{self._path}, after its first {self._skip} rows" if self._skip else self._path
                    raise DataError(
                        f"{where}: no row gives a document (none left, all empty, or none verified)"
                    ) from None
                if not self._repeat:
                    raise
                self._start_at(self._beginning, read=0, rendered=0)
                continue
            except Exception as error:  # of pyarrow, json, zlib, fsspec, ...
                read = self._skip + self._read
                raise DataError(f"{self._path}: cannot be read after {read} rows: {error}") from error
            self._read += 1
            try:
                document = self._render(row)
            except DataError as error:
                raise DataError(f"{self._path}, row {self._skip + self._read}: {error}") from None
            if document is not None:
                self._rendered += 1
                return document

    def _start_at(self, position: State, read: int, rendered: int) -> None:
        # An IterableDataset begins at the position loaded last, each time it is iterated.
        self._rows.load_state_dict(copy.deepcopy(position))
        self._iterator, self._read, self._rendered = iter(self._rows), read, rendered

    def get_state(self) -> State:
        return {"rows": copy.deepcopy(self._rows.state_dict()), "read": self._read, "rendered": self._rendered}

    def set_state(self, state: State) -> None:
        self._start_at(state["rows"], state["read"], state["rendered"])
