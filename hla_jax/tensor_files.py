"""Directories of safetensors files: opened without being read, written in shards, put in place in one rename.

This file knows the layout Hugging Face directories have (`model.safetensors`, or `model-0000x-of-0000n.safetensors` and an index),
and nothing about which tensors a model has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (registers "bfloat16" with numpy)
import numpy as np
import safetensors
import safetensors.numpy

from hla_jax.config import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 1 << 30


class WeightsError(ValueError):
    """Weight files are missing, damaged, or not those of the model that was asked for."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file: where it is and what its header says. `dtype` is the file's tag, e.g. "BF16"."""

    file: pathlib.Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads the tensor, or the part of it that `index` (one slice a leading dimension) selects."""
        with _opened(self.file) as file:
            part = file.get_slice(self.name)
            # An empty index on a slice object is an error in safetensors.
            return part[index] if index else file.get_tensor(self.name)


def open_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Lists the tensors of a directory (or of one safetensors file) by name, from the headers alone.

    Raises:
      WeightsError: there are no safetensors files, one is truncated or corrupt, shards and index contradict each other, or a tensor is
        in two shards. Pickled weights (`pytorch_model.bin`) are never read.
    """
    path = pathlib.Path(path)
    if path.is_file():
        return _headers(path)
    index, single = path / INDEX, path / SINGLE
    if index.exists() and single.exists():
        raise WeightsError(f"{path}: has both {SINGLE} and {INDEX}; remove the one that is stale")
    if single.exists():
        return _headers(single)
    if index.exists():
        return _sharded(index)
    raise WeightsError(_why_no_weights(path))


@dataclasses.dataclass(frozen=True)
class PendingTensor:
    """A tensor still to be written: its size, and how to get it when its shard's turn comes."""

    nbytes: int
    read: Callable[[], np.ndarray]


def write_tensors(directory: pathlib.Path, tensors: Mapping[str, PendingTensor], max_shard_bytes: int = MAX_SHARD_BYTES,
                  progress: Callable[[int], Any] = lambda nbytes: None) -> None:
    """Writes tensors as one file, or as shards of at most `max_shard_bytes` (a larger tensor has a shard of its own) and an index.

    Holds one shard in memory at a time; `progress` is told the bytes of each shard once it is written.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += tensor.nbytes
    files = [SINGLE] if len(shards) == 1 else [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        # safetensors writes the buffer as it lies in memory: anything but C order would come back with wrong values.
        arrays = {name: np.ascontiguousarray(tensors[name].read()) for name in names}
        safetensors.numpy.save_file(arrays, directory / file, metadata={"format": "pt"})
        progress(sum(array.nbytes for array in arrays.values()))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object, indented, with a newline at its end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_directory(directory: str | os.PathLike[str], replace: bool = False) -> Iterator[pathlib.Path]:
    """Yields a temporary sibling of `directory` to fill, and renames it into place at the end; nothing stays behind after an error.

    Raises:
      FileExistsError: `directory` exists, is not an empty directory, and `replace` is false.
    """
    directory = pathlib.Path(directory).absolute()
    if not replace and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory}: exists and is not empty")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # A directory of its own next to the target: same file system, and a crash leaves one thing to delete.
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        partial = scratch / "new"
        partial.mkdir()
        yield partial
        if directory.exists():
            directory.rename(scratch / "old")
        partial.rename(directory)
    finally:
        shutil.rmtree(scratch)


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[Any]:
    try:
        # "pread" rather than a memory map: mapped pages would count as resident beside the buffers they are copied into.
        with safetensors.safe_open(file, framework="np", backend="pread") as handle:
            yield handle
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{file}: truncated or corrupt safetensors file ({error})") from None


def _headers(file: pathlib.Path) -> dict[str, StoredTensor]:
    with _opened(file) as handle:
        parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (a handle is no mapping)
        return {name: StoredTensor(file, name, str(part.get_dtype()), tuple(part.get_shape())) for name, part in parts.items()}


def _sharded(index: pathlib.Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightsError(f"{index}: expected weight_map to map tensor names to file names")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        if pathlib.PurePath(file).name != file or not (index.parent / file).exists():
            raise WeightsError(f"{index}: names shard {file!r}, which is not in the directory")
        for name, tensor in _headers(index.parent / file).items():
            if name in tensors:
                raise WeightsError(f"{index.parent}: tensor {name} is in two shards, {tensors[name].file.name} and {file}")
            tensors[name] = tensor
    for name in sorted(weight_map.keys() | tensors.keys()):
        expected, found = weight_map.get(name), tensors[name].file.name if name in tensors else None
        if expected != found:
            raise WeightsError(f"{index}: tensor {name} expected in {expected or 'no shard'}, found in {found or 'none'}")
    return tensors


def _why_no_weights(path: pathlib.Path) -> str:
    if not path.is_dir():
        return f"{path}: no such directory"
    if any(path.glob("pytorch_model*.bin")):
        return f"{path}: holds only pickled weights (pytorch_model.bin), which are never read; convert them to safetensors"
    if any(path.glob("model-*-of-*.safetensors")):
        return f"{path}: holds shards but no {INDEX}"
    return f"{path}: expected {SINGLE} or {INDEX}, found neither"
