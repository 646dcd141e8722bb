"""Documents from MDS shards of token ids, such as ProLong's: a small reader in numpy.

A folder has `index.json`, which lists shards and their columns. A shard begins with the number n of its samples and
n + 1 offsets (uint32, from the start of the file). A sample begins with the sizes (uint32) of those columns that have
no fixed one, then come the columns' bytes in order. An array column without a fixed shape begins with a byte
4 x axes + s and its shape in unsigned integers of 2^s bytes.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hla_jax.data.streams import DataError, Flattened, Indexed, Stream

INDEX = "index.json"
_ARRAY = "ndarray:"


class Shards:
    """The samples of a folder of shards, by number. Raises `DataError` for what is not MDS, or compressed.

    Args:
      where: the folder, for messages.
      fetch: a file's name in the folder -> its local path; called when a shard is first needed.
    """

    def __init__(self, where: str, fetch: Callable[[str], pathlib.Path]):
        self._where, self._fetch = where, fetch
        index = fetch(INDEX)
        try:
            self._shards = json.loads(index.read_text(encoding="utf-8"))["shards"]
            starts = np.cumsum([0, *(shard["samples"] for shard in self._shards)])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{where}/{INDEX}: is not an index of MDS shards ({error!r})") from error
        if starts[-1] == 0:
            raise DataError(f"{where}: has no samples")
        for shard in self._shards:
            if shard.get("format") != "mds":
                raise DataError(f"{where}/{INDEX}: expected shards of format 'mds', found {shard.get('format')!r}")
        self._starts = starts
        # Samples are read in order, so few shards are open at a time.
        self._bytes = functools.lru_cache(maxsize=2)(self._open)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> dict[str, Any]:
        """The columns of a sample that hold arrays."""
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        shard, row = self._shards[at], number - int(self._starts[at])
        data = self._bytes(at)
        name = f"{self._where}/{shard['raw_data']['basename']}"
        try:
            if int(data[:4].view("<u4")[0]) != shard["samples"]:
                raise ValueError(f"holds {int(data[:4].view('<u4')[0])} samples, the index says {shard['samples']}")
            begin, end = data[4 + 4 * row : 12 + 4 * row].view("<u4")
            return _columns(shard, data[int(begin) : int(end)])
        except (ValueError, IndexError) as error:
            raise DataError(f"{name}: sample {row}: damaged MDS shard ({error})") from error

    def _open(self, at: int) -> np.ndarray:
        shard = self._shards[at]
        name = shard["raw_data"]["basename"]
        try:
            path = self._fetch(name)
            return np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            zipped = (shard.get("zip_data") or {}).get("basename")
            hint = f"; it is compressed: unpack {zipped} beside it" if zipped else ""
            raise DataError(f"{self._where}/{name}: cannot be read ({error}){hint}") from error


def _columns(shard: dict[str, Any], data: np.ndarray) -> dict[str, Any]:
    fixed = shard["column_sizes"]
    free = sum(size is None for size in fixed)
    lengths = iter(data[: 4 * free].view("<u4"))
    place, found = 4 * free, {}
    for name, encoding, size in zip(shard["column_names"], shard["column_encodings"], fixed, strict=True):
        size = int(next(lengths)) if size is None else size
        if encoding.startswith(_ARRAY):
            found[name] = _array(encoding.removeprefix(_ARRAY), data[place : place + size])
        place += size
    if place != len(data):
        raise ValueError(f"has {len(data)} bytes, its columns {place}")
    return found


def _array(kind: str, data: np.ndarray) -> np.ndarray:
    dtype, _, fixed = kind.partition(":")
    if fixed:
        shape = tuple(map(int, fixed.split(",")))
    else:
        axes, width = int(data[0]) >> 2, 1 << (int(data[0]) & 3)
        shape = tuple(map(int, np.frombuffer(data[1 : 1 + axes * width].tobytes(), f"<u{width}")))
        data = data[1 + axes * width :]
    values = np.frombuffer(data.tobytes(), np.dtype(dtype).newbyteorder("<"))
    if values.size != math.prod(shape):
        raise ValueError(f"array of shape {shape} has {values.size} numbers")
    return values.reshape(shape)


def open_token_documents(
    path: str, name: str | None, tokenizer: Any, *, skip: int = 0, take: int | None = None
) -> Stream[str]:
    """Endless documents of a folder of shards, in order: the text of each range of `indices` of each sample.

    Args:
      path: a local folder, or a hub data set "owner/name" whose shards are fetched one by one as they are needed.
      name: a folder in it.
      tokenizer: the one that made the ids.
      skip, take: leave out the first samples, then keep so many.

    Raises:
      DataError: no such folder, no MDS shards, no column `input_ids`, or nothing left.
    """
    shards = Shards(f"{path}/{name}" if name else path, _fetching(path, name))
    stop = len(shards) if take is None else min(skip + take, len(shards))
    if skip >= stop:
        raise DataError(f"{path}: has {len(shards)} samples, none is left after the first {skip}")

    def texts(number: int) -> list[str]:
        sample = shards[skip + number % (stop - skip)]
        if "input_ids" not in sample:
            raise DataError(f"{path}: expected a column 'input_ids' of an array type; arrays are {sorted(sample)}")
        ids = sample["input_ids"].reshape(-1)
        ranges = sample.get("indices", np.array([[0, len(ids)]])).reshape(-1, 2)
        parts = [ids[int(begin) : int(end)] for begin, end in ranges]
        # Special tokens frame documents; the model's own tokenizer puts its own. "Cleaning up" would change the text.
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [decode(part) for part in parts if len(part)]

    texts(0)  # says at once what is wrong with the first sample
    return Flattened(Indexed(texts))


def _fetching(path: str, name: str | None) -> Callable[[str], pathlib.Path]:
    local = pathlib.Path(path).expanduser()
    if local.is_dir():
        return lambda file: local / (name or "") / file
    if path.count("/") != 1 or path.startswith(("/", ".", "~")):
        raise DataError(f"{path}: no such folder (and not the name of a hub data set, owner/name)")

    def fetch(file: str) -> pathlib.Path:
        import huggingface_hub

        whole = f"{name}/{file}" if name else file
        # A file that was fetched before is used as it is: a run that continues reads what it read.
        if isinstance(kept := huggingface_hub.try_to_load_from_cache(path, whole, repo_type="dataset"), str):
            return pathlib.Path(kept)
        try:
            # The download would retry for half a minute before it says that there is no network.
            huggingface_hub.HfApi().dataset_info(path, timeout=10)
            return pathlib.Path(huggingface_hub.hf_hub_download(path, whole, repo_type="dataset"))
        except Exception as error:  # of the hub, http, the network: the name is what the user must look at
            raise DataError(
                f"{path}: no such local folder, and the hub does not give {whole} ({type(error).__name__}: {error}). "
                f"Without a network, copy it once with `hf download {path} --repo-type dataset --include "
                f"'{name or '*'}/*' --local-dir FOLDER` and give FOLDER instead."
            ) from error

    return fetch
