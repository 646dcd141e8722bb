"""Safetensors files: listed without being read, read into their final buffers, written in shards.

This file knows the layout of Hugging Face directories (`model.safetensors`, or `model-0000x-of-0000n.safetensors` and
an index) and nothing about which tensors a model has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax import Array
from jax.sharding import Sharding
from jax.typing import DTypeLike

from hla_jax.config import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 1 << 30

_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")

Index = tuple[slice, ...]


class WeightsError(ValueError):
    """Weight files are missing, damaged, or not those of the model that was asked for."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, as its header describes it. `dtype` is the file's tag, e.g. "BF16"."""

    file: pathlib.Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, index: Index = ()) -> np.ndarray:
        """Reads the part of the tensor that `index` (one slice for each of the leading dimensions) selects."""
        # safetensors refuses slices that reach beyond the end.
        cuts = tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(index, self.shape, strict=False))
        with _opened(self.file) as handle:
            return handle.get_slice(self.name)[cuts] if cuts else handle.get_tensor(self.name)


def open_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Lists the tensors of a directory, or of one safetensors file, from the headers alone.

    Raises:
      WeightsError: there are no safetensors files, one is truncated or corrupt, shards and index contradict each other,
        or a tensor is in two shards. Pickled weights (`pytorch_model.bin`) are never read.
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


def check_names(path: str | os.PathLike[str], stored: Mapping[str, StoredTensor], expected: Collection[str]) -> None:
    """Raises `WeightsError` unless exactly the expected tensors are stored, and says so where names carry a prefix."""
    missing = sorted(set(expected) - stored.keys())
    unknown = sorted(stored.keys() - set(expected))
    for name in unknown:
        _refuse_prefix(stored[name], expected)
    counts = f"config.json implies {len(expected)} tensors, found {len(stored)}"
    if unknown:
        also = f"; missing {_some(missing)}" if missing else ""
        raise WeightsError(f"{stored[unknown[0]].file}: unknown tensors {_some(unknown)}{also}; {counts}")
    if missing:
        raise WeightsError(f"{path}: missing tensors {_some(missing)}; {counts}")


def common_dtype(sources: Sequence[StoredTensor], shape: tuple[int, ...], dtype: DTypeLike | None) -> np.dtype:
    """The dtype in which tensors that must all have this shape are held: `dtype`, or the one they are stored in.

    Raises:
      WeightsError: a tensor has another shape or no floating-point dtype, `dtype` is no such dtype, or it is None and
        they differ.
    """
    for source in sources:
        where = f"{source.file}: tensor {source.name}"
        if source.shape != shape:
            raise WeightsError(f"{where}: config.json implies shape {list(shape)}, found {list(source.shape)}")
        if source.dtype not in _FLOATS:
            raise WeightsError(f"{where}: expected dtype {', '.join(_FLOATS)}, found {source.dtype}")
        if dtype is None and source.dtype != sources[0].dtype:
            raise WeightsError(
                f"{where}: expected dtype {sources[0].dtype} like {sources[0].name}, "
                f"found {source.dtype}; give a dtype to convert to"
            )
    try:
        held = jnp.dtype(_FLOATS[sources[0].dtype] if dtype is None else dtype)
    except TypeError:  # not a dtype's name
        held = np.dtype(object)
    if held.name not in _FLOATS.values():
        raise WeightsError(f"dtype must be one of {', '.join(_FLOATS.values())}, found {dtype!r}")
    if jax.dtypes.canonicalize_dtype(held) != held:
        raise WeightsError(
            f"{sources[0].file}: tensor {sources[0].name}: float64 needs jax_enable_x64; "
            "give a smaller dtype to convert to"
        )
    return held


def read_array(
    sources: Sequence[StoredTensor], stacked: bool, dtype: np.dtype, sharding: Sharding | None = None
) -> Array:
    """Reads one tensor, or, stacked, several of equal shape along a new leading axis, into one buffer.

    Holds one tensor beside the buffer at any time. With a sharding, each device's part is read for itself; devices that
    hold the same part share one read.
    """
    shape = (len(sources), *sources[0].shape) if stacked else sources[0].shape
    parts: dict[str, np.ndarray] = {}

    def fill(out: np.ndarray, tensor: StoredTensor, index: Index) -> None:
        out[...] = tensor.read(index)
        if dtype == np.float16 and not np.isfinite(out).all():
            raise WeightsError(f"{tensor.file}: tensor {tensor.name} ({tensor.dtype}) does not fit float16")

    def read(index: Index | None) -> np.ndarray:
        assert index is not None  # JAX gives None only for arrays without a shape
        if (part := parts.get(str(index))) is not None:
            return part
        part = _aligned_empty(tuple(len(range(n)[cut]) for n, cut in zip(shape, index, strict=True)), dtype)
        if stacked:
            for row, tensor in enumerate(sources[index[0]]):
                fill(part[row], tensor, index[1:])
        else:
            fill(part, sources[0], index)
        parts[str(index)] = part
        return part

    with np.errstate(over="ignore"):  # `fill` reports what overflows
        if sharding is None:
            return jax.device_put(read(tuple(slice(None) for _ in shape)))
        return jax.make_array_from_callback(shape, sharding, read)


@dataclasses.dataclass(frozen=True)
class PendingTensor:
    """A tensor still to be written: its size, and how to get it when its shard's turn comes."""

    nbytes: int
    read: Callable[[], np.ndarray]


def pending(array: Array | np.ndarray) -> PendingTensor:
    """An array, brought to the host only when it is written."""
    return PendingTensor(array.nbytes, lambda: np.asarray(array))


def pending_layer(stack: Array | np.ndarray, layer: int) -> PendingTensor:
    """One layer of a stacked array, brought to the host only when it is written."""
    return PendingTensor(stack.nbytes // stack.shape[0], lambda: np.asarray(stack[layer]))


def write_tensors(
    directory: pathlib.Path, tensors: Mapping[str, PendingTensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes one file, or an index and shards of at most `max_shard_bytes` (a larger tensor has a shard of its own).

    Holds one shard in memory at a time.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += tensor.nbytes
    if len(shards) == 1:
        files = {SINGLE: shards[0]}
    else:
        files = {f"model-{n:05d}-of-{len(shards):05d}.safetensors": names for n, names in enumerate(shards, start=1)}
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for file, names in files.items():
        # safetensors writes memory as it lies: an array that is not in C order would come back with wrong values.
        arrays = {name: np.ascontiguousarray(tensors[name].read()) for name in names}
        safetensors.numpy.save_file(arrays, directory / file, metadata={"format": "pt"})
        del arrays  # before the next shard's are made
        (directory / file).chmod(directory.stat().st_mode & 0o666)  # safetensors makes files private to this user


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object, indented, with a newline at its end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary sibling of `path` to write, then renames it into place; an error leaves nothing of it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_new(directory: pathlib.Path) -> None:
    """Raises `FileExistsError` where there is something else than an empty directory."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory}: exists and is not empty")


@contextlib.contextmanager
def new_directory(directory: str | os.PathLike[str], replace: bool = False) -> Iterator[pathlib.Path]:
    """Yields a temporary sibling of `directory` to fill, then renames it into place; an error leaves nothing of it.

    Raises:
      FileExistsError: `directory` exists, is not an empty directory, and `replace` is false.
    """
    directory = pathlib.Path(directory).absolute()
    if not replace:
        check_new(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that a rename suffices; all in one place, so that a crash leaves one thing to delete.
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        (scratch / "new").mkdir()
        yield scratch / "new"
        if directory.exists():
            directory.rename(scratch / "old")
        (scratch / "new").rename(directory)
    finally:
        shutil.rmtree(scratch)


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[Any]:
    try:
        # "pread", not a memory map: mapped pages would be resident beside the buffers they are copied into.
        with safetensors.safe_open(file, framework="np", backend="pread") as handle:
            yield handle
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{file}: truncated or corrupt safetensors file ({error})") from None


def _headers(file: pathlib.Path) -> dict[str, StoredTensor]:
    with _opened(file) as handle:
        found = [(name, handle.get_slice(name)) for name in handle.offset_keys()]
        return {name: StoredTensor(file, name, str(part.get_dtype()), tuple(part.get_shape())) for name, part in found}


def _sharded(index: pathlib.Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightsError(f"{index}: weight_map must map tensor names to file names")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        if pathlib.PurePath(file).name != file or not (index.parent / file).is_file():
            raise WeightsError(f"{index}: names shard {file!r}, which is not in the directory")
        for name, tensor in _headers(index.parent / file).items():
            if name in tensors:
                first = tensors[name].file.name
                raise WeightsError(f"{index.parent}: tensor {name} is in two shards, {first} and {file}")
            tensors[name] = tensor
    for name in sorted(weight_map.keys() | tensors.keys()):
        expected, found = weight_map.get(name), tensors[name].file.name if name in tensors else None
        if expected != found:
            raise WeightsError(f"{index}: tensor {name} expected in {expected or 'none'}, found in {found or 'none'}")
    return tensors


def _why_no_weights(path: pathlib.Path) -> str:
    if not path.is_dir():
        return f"{path}: no such directory"
    if any(path.glob("pytorch_model*.bin")):
        return f"{path}: has only pickled weights, which are never read; convert pytorch_model.bin to safetensors"
    if any(path.glob("model-*-of-*.safetensors")):
        return f"{path}: has shards but no {INDEX}"
    return f"{path}: expected {SINGLE} or {INDEX}, found neither"


def _refuse_prefix(tensor: StoredTensor, expected: Collection[str]) -> None:
    """Wrappers (DataParallel, torch.compile, FSDP) and saving from the wrong module change every name alike."""

    def refuse(fault: str, name: str) -> None:
        raise WeightsError(f"{tensor.file}: tensor names {fault}: expected {name}, found {tensor.name}")

    for wrapper in _WRAPPERS:
        if (name := tensor.name.replace(wrapper, "")) in expected:
            refuse(f"carry the prefix {wrapper!r}", name)
    for name in expected:
        if tensor.name.endswith(f".{name}"):
            refuse(f"carry the prefix {tensor.name.removesuffix(name)!r}", name)
        if name.endswith(f".{tensor.name}"):
            refuse(f"lack the prefix {name.removesuffix(tensor.name)!r}", name)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory at a 64-byte boundary: JAX's CPU backend adopts such a buffer instead of copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)
