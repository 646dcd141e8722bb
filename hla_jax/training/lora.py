"""Low-rank updates of the base weights (LoRA, arXiv:2106.09685): W + (alpha / r) B A, merged before a pass.

The update of a stack of matrices [L, out, in] is {"a": [L, r, in], "b": [L, out, r]}. B starts at zero, so training
starts from the base model itself.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import PRNGKeyArray

Updates = dict[str, dict[str, Array]]

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Lora:
    """Sizes of the low-rank updates.

    Attributes:
      rank: r of every update; 0 is none at all.
      alpha: the updates are scaled by alpha / r.
      targets: matrices of the layers that have one.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = MATRICES

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank must be at least 0, found {self.rank}")
        if not self.targets or (unknown := set(self.targets) - set(MATRICES)):
            found = ", ".join(sorted(unknown)) if self.targets else "none"
            raise ValueError(f"targets must be some of {', '.join(MATRICES)}; found {found}")


ALL_WEIGHTS = Lora(rank=0, alpha=16.0)


def init(lora: Lora, params: Params, key: PRNGKeyArray) -> Updates:
    """Updates that change nothing yet, in float32: A normal with variance 1 / inputs, B zero."""

    def start(key: Array, matrix: Array) -> dict[str, Array]:
        layers, outputs, inputs = matrix.shape
        dtype = accumulation_dtype(matrix.dtype)
        a = jax.random.normal(key, (layers, lora.rank, inputs), dtype) * inputs**-0.5
        return {"a": a, "b": jnp.zeros((layers, outputs, lora.rank), dtype)}

    keys = jax.random.split(key, len(lora.targets))
    return {name: start(key, params["layers"][name]) for key, name in zip(keys, lora.targets)}


def merge(lora: Lora, params: Params, updates: Updates) -> Params:
    """The parameters with the updates added, each sum rounded once to the parameter's dtype."""

    def merged(name: str, update: dict[str, Array]) -> Array:
        matrix = params["layers"][name]
        change = lora.alpha / lora.rank * jnp.einsum("lor,lri->loi", update["b"], update["a"])
        return (matrix.astype(change.dtype) + change).astype(matrix.dtype)

    layers = {name: merged(name, update) for name, update in updates.items()}
    return params | {"layers": params["layers"] | layers}
