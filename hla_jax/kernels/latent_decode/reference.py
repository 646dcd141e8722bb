"""One decode step of attention over stored tokens and an exact window, in plain jnp: the reference of every kernel.

Shapes: B sequences, C capacity, N latent heads (1 for HLA, G for a cache of keys and values), H query heads, rk and rv
sizes of a stored key and value, W window, G key-value heads, dh head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, overload

import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Window(NamedTuple):
    """The exact part: W recent tokens (a ring, in any order), and the current token."""

    q: Float[Array, "B H dh"]
    keys: Float[Array, "B W G dh"]
    values: Float[Array, "B W G dh"]
    filled: Bool[Array, "B W"]
    k: Float[Array, "B G dh"]
    v: Float[Array, "B G dh"]


@overload
def latent_decode(
    q: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    scale: float,
    window: Window,
    visible: Array | None = None,
) -> tuple[Array, Array, Array]: ...


@overload
def latent_decode(
    q: Array,
    keys: Array,
    values: Array,
    lengths: Array,
    scale: float,
    window: None = None,
    visible: Array | None = None,
) -> tuple[Array, None, Array]: ...


def latent_decode(
    q: Float[Array, "B H rk"],
    keys: Float[Array, "B C N rk"],
    values: Float[Array, "B C N rv"],
    lengths: Int[Array, " B"],
    scale: float,
    window: Window | None = None,
    visible: Bool[Array, "B C"] | None = None,
) -> tuple[Float[Array, "B H rv"], Float[Array, "B H dh"] | None, Float[Array, "B H"]]:
    """Attends to the first `lengths` stored tokens of each sequence and to the window, with one softmax over both (HLA,
    Eq. 4). With `visible`, to those among the stored tokens that it marks.

    Returns:
      The attention-weighted sum of stored values, that of the window's values (None without a window), and the
      log-sum-exp of all scores, in float32.
    """
    stored = _scores(q, keys) * scale
    read = jnp.arange(keys.shape[1]) < lengths[:, None]
    read = read if visible is None else read & visible
    stored = jnp.where(read[:, None], stored, -jnp.inf)
    if window is None:
        weights, lse = _softmax(stored)
        return _weighted(weights, values), None, lse
    recent = jnp.where(window.filled[:, None], _scores(window.q, window.keys) * scale, -jnp.inf)
    current = _scores(window.q, window.k[:, None]) * scale
    weights, lse = _softmax(jnp.concatenate([stored, recent, current], axis=-1))
    far, near, self_weight = jnp.split(weights, [keys.shape[1], weights.shape[-1] - 1], axis=-1)
    exact = _weighted(near, window.values) + _weighted(self_weight, window.v[:, None])
    return _weighted(far, values), exact, lse


def _scores(q: Float[Array, "B H r"], keys: Float[Array, "B C N r"]) -> Float[Array, "B H C"]:
    batch, heads, rank = q.shape
    grouped = q.reshape(batch, keys.shape[2], heads // keys.shape[2], rank)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.einsum("bnmr,bcnr->bnmc", grouped, keys, preferred_element_type=wide).reshape(
        batch, heads, keys.shape[1]
    )


def _weighted(weights: Float[Array, "B H C"], values: Float[Array, "B C N r"]) -> Float[Array, "B H r"]:
    batch, heads, tokens = weights.shape
    grouped = weights.reshape(batch, values.shape[2], heads // values.shape[2], tokens).astype(values.dtype)
    out = jnp.einsum("bnmc,bcnr->bnmr", grouped, values, preferred_element_type=weights.dtype)
    return out.reshape(batch, heads, values.shape[3]).astype(values.dtype)


def _softmax(scores: Float[Array, "B H C"]) -> tuple[Float[Array, "B H C"], Float[Array, "B H"]]:
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), jnp.finfo(scores.dtype).min)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # Nothing to attend to gives zeros and a log-sum-exp of minus infinity, not 0/0.
    return weights / jnp.where(total == 0, 1, total), (top + jnp.log(total))[..., 0]
