"""Tensor parallelism: which heads a process has, and its part of the maps. Latents are the same in every process."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Share(NamedTuple):
    """One of `ranks` processes that split the heads of every layer."""

    rank: int
    ranks: int

    def check(self, scheme: Any, heads: int, kv_heads: int) -> None:
        """Raises `ValueError` if the heads cannot be split so."""
        if heads % self.ranks or (kv_heads % self.ranks and self.ranks % kv_heads):
            raise ValueError(
                f"--tensor-parallel-size {self.ranks} must divide the {heads} heads, and divide the {kv_heads} "
                "key-value heads or be a multiple of them"
            )
        if scheme.name == "lla" and scheme.fold_heads and self.ranks > kv_heads:
            raise ValueError(
                f"--tensor-parallel-size must be at most {kv_heads}: with fold_heads the latent is a sum over "
                f"key-value heads, and {self.ranks} processes would hold some of them twice"
            )

    def queries(self, x: Tensor, axis: int) -> Tensor:
        """This process's part of an axis of query heads."""
        size = x.shape[axis] // self.ranks
        return x.narrow(axis, self.rank * size, size)

    def keys(self, x: Tensor, axis: int) -> Tensor:
        """This process's part of an axis of key-value heads; fewer heads than processes are held by several."""
        size = max(1, x.shape[axis] // self.ranks)
        return x.narrow(axis, self.rank * x.shape[axis] // self.ranks, size)
