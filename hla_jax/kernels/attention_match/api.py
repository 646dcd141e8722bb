"""`attention_match`: the loss of uptraining, by the implementation for the platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax import sharding
from hla_jax.kernels import implementations
from hla_jax.kernels.attention_match import Fitted, Fixed, blockwise, reference
from hla_jax.kernels.attention_match.reference import Match

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def attention_match(
    fitted: Fitted,
    fixed: Fixed,
    index: Int[Array, "B Q"],
    counted: Float[Array, "B Q"],
    window: int,
    implementation: str | None = None,
) -> tuple[Float[Array, ""], Match]:
    """KL + output error of hybrid latent attention against exact attention, differentiable in `fitted` alone.

    Args:
      fitted, fixed: one layer and loop, see the package.
      index: the token of each query, in any order.
      counted: the weight of each query.
      window: tokens further back than this are read through their latent.
      implementation: "reference" (all scores at once), "blockwise" or "pallas_tpu" (memory linear in the tokens);
        None: by platform, see `choose`.

    Returns:
      The loss, and its two terms.

    Raises:
      ValueError: the named implementation is unknown, does not run on this platform, or cannot take these inputs.
    """
    name, _ = choose(implementation, fitted, fixed)
    if name == "pallas_tpu":
        from hla_jax.kernels.attention_match import pallas_tpu

        return pallas_tpu.attention_match(fitted, fixed, index, counted, window)

    def part(fitted: Fitted, fixed: Fixed, index: Array, counted: Array) -> tuple[Array, Match]:
        if name == "reference":
            match = reference.attention_match(fitted, fixed, index, counted, window)
            found = match.kl + match.error, match
        else:
            found = blockwise.attention_match(fitted, fixed, index, counted, window)
        return jax.tree.map(lambda x: x[None], found)

    # On a mesh each device takes its own rows and queries; the heads stay with XLA, because the error joins them.
    queries, keys = ("batch", "queries", None, None), ("batch", None, None, None)
    latent, rows = ("batch", None, None), ("batch", "queries")
    of_fitted = queries, latent, latent, (None, None, None)
    of_fixed = queries, keys, keys, (None, None), ("batch", None)
    each = sharding.split(part, (*of_fitted, *of_fixed, rows, rows), ("parts",), without=("tensor",))
    parts = each(fitted, fixed, index, counted)
    return jax.tree.map(jnp.sum, parts)


def choose(
    implementation: str | None = None, fitted: Fitted | None = None, fixed: Fixed | None = None
) -> tuple[str, str]:
    """The implementation that `attention_match` takes, and why, in words for the banner."""
    arrays = [*(fitted or ()), *(fixed[:4] if fixed else ())]
    others = sorted({str(x.dtype) for x in arrays if x.dtype not in (jnp.bfloat16, jnp.float32)})
    problem = f"takes bfloat16 and float32, and these are {', '.join(others)}" if others else None
    return implementations.choose("attention_match", implementation, {"pallas_tpu": problem}, plain="blockwise")
