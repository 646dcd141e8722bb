"""Bytes of each cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from hla_jax.attention.outer import whole
from hla_jax.config import ModelConfig
from hla_jax.evaluation.schemes import FULL, Schemes, distinct


@dataclasses.dataclass(frozen=True)
class Memory:
    """Cache of one scheme.

    Attributes:
      per_token: bytes that each token adds.
      per_sequence: bytes that a sequence takes at any length: the window.
      at: context length in tokens -> bytes of one sequence.
      ratio: the full cache's `per_token` over this one's.
      ratio_at: the same at each context length, the window counted.
    """

    per_token: int
    per_sequence: int
    at: dict[int, int]
    ratio: float
    ratio_at: dict[int, float]


def cache_memory(config: ModelConfig, schemes: Schemes, contexts: Sequence[int], dtype: DTypeLike) -> dict[str, Memory]:
    """Bytes of every distinct scheme's cache at `dtype`, and the full cache's over them."""
    schemes = distinct(schemes)

    def bytes_at(name: str, tokens: int) -> int:
        return whole(config, schemes[name].scheme).cache_bytes(config, tokens, jnp.dtype(dtype))

    per_token = {name: bytes_at(name, 1) - bytes_at(name, 0) for name in schemes}
    at = {name: {context: bytes_at(name, context) for context in contexts} for name in schemes}
    return {
        name: Memory(
            per_token[name],
            bytes_at(name, 0),
            at[name],
            per_token[FULL] / per_token[name],
            {context: at[FULL][context] / at[name][context] for context in contexts},
        )
        for name in schemes
    }
