"""Parameters that share one tensor in a file, such as the queries, keys and values of a joined projection.

A tensor of `count` equal parts along its first axis is read part by part and written from all of them. Where a file has
the two coordinates of a rotary pair side by side, (2f, 2f + 1), its rows are put in the order of this package on the
way, (f, f + dh/2): nothing else then knows of another layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hla_jax.tensor_files import Index, PendingTensor, StoredTensor


@dataclasses.dataclass(frozen=True)
class Packed:
    """Which part of a tensor a parameter is.

    Attributes:
      index, count: part number `index` of `count` along the first axis.
      pairs: rotary pairs are interleaved in the file.
      by_head: the file's tensor is [count, 1, heads, dh], and the parameter [heads * dh].
    """

    index: int
    count: int
    pairs: bool = False
    by_head: bool = False

    def stored_shape(self, shape: tuple[int, ...], head_dim: int) -> tuple[int, ...]:
        """Of the tensor in the file, from the parameter's."""
        if self.by_head:
            return (self.count, 1, shape[0] // head_dim, head_dim)
        return (self.count * shape[0], *shape[1:])


@dataclasses.dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A part of a stored tensor, with its own shape."""

    packed: Packed
    head_dim: int
    whole: StoredTensor

    def read(self, index: Index = ()) -> np.ndarray:
        rows, *rest = index or (slice(None),)
        start, stop, _ = rows.indices(self.shape[0])
        # Rows are put in order within a head, so whole heads are read.
        size = self.head_dim if self.packed.pairs or self.packed.by_head else 1
        first, last = start // size, -(-stop // size)
        if self.packed.by_head:
            part = self.whole.read((slice(self.packed.index, self.packed.index + 1), slice(0, 1), slice(first, last)))
        else:
            at = self.packed.index * self.shape[0]
            part = self.whole.read((slice(at + first * size, at + last * size), *rest))
        part = part.reshape(-1) if self.packed.by_head else part
        if self.packed.pairs:
            part = part.reshape(-1, size // 2, 2, *part.shape[1:]).swapaxes(1, 2).reshape(part.shape)
        return part[start - first * size : stop - first * size]


def part_of(tensor: StoredTensor, packed: Packed, shape: tuple[int, ...], head_dim: int) -> PackedTensor:
    """The part of a tensor that is a parameter of this shape."""
    return PackedTensor(tensor.file, tensor.name, tensor.dtype, shape, packed, head_dim, tensor)


def joined(parts: Sequence[tuple[Packed, PendingTensor]], head_dim: int) -> PendingTensor:
    """The tensor to write from its parts, in their order."""

    def read() -> np.ndarray:
        arrays = [_as_in_file(packed, pending.read(), head_dim) for packed, pending in parts]
        return np.concatenate(arrays, axis=0)

    return PendingTensor(sum(pending.nbytes for _, pending in parts), read)


def _as_in_file(packed: Packed, part: np.ndarray, head_dim: int) -> np.ndarray:
    if packed.pairs:
        part = part.reshape(-1, 2, head_dim // 2, *part.shape[1:]).swapaxes(1, 2).reshape(part.shape)
    return part.reshape(1, 1, -1, head_dim) if packed.by_head else part
