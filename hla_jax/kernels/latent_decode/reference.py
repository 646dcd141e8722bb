"""`latent_decode` in plain jnp: what every kernel is compared with. Shapes as in the package's docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from hla_jax.kernels.latent_decode import Rotation, Stored, Window

if TYPE_CHECKING:
    from jaxtyping import Float


def latent_decode(
    q: Float[Array, "B H rk"],
    stored: Stored,
    scale: float,
    window: Window | None = None,
    rotation: Rotation | None = None,
) -> tuple[Float[Array, "B H rv"], Float[Array, "B H dh"] | None, Float[Array, "B H"]]:
    """See `api.latent_decode`."""
    if rotation is not None:
        q = rotate(q, rotation)
    keys, values = (_of_sequences(buffer, stored, q.shape[-1], stored.keys.shape[-1]) for buffer in stored[:2])
    tokens = keys.shape[1]
    read = jnp.arange(tokens) < stored.lengths[:, None]
    read = read if stored.visible is None else read & stored.visible
    scores = jnp.where(read[:, None], _scores(q, keys) * scale, -jnp.inf)
    # Weights of zero do not silence what is no number.
    values = jnp.where(read[:, :, None, None], values, 0)
    if window is None:
        weights, lse = _softmax(scores)
        return _weighted(weights, values), None, lse
    heads = window.k.shape[1]
    near_k, near_v = (_heads(buffer[window.slot], heads) for buffer in (window.keys, window.values))
    filled = jnp.arange(near_k.shape[1]) < window.filled[:, None]
    recent = jnp.where(filled[:, None], _scores(window.q, near_k) * scale, -jnp.inf)
    current = _scores(window.q, window.k[:, None]) * scale
    weights, lse = _softmax(jnp.concatenate([scores, recent, current], axis=-1))
    far, near, self_weight = jnp.split(weights, [tokens, weights.shape[-1] - 1], axis=-1)
    near_v = jnp.where(filled[:, :, None, None], near_v, 0)
    exact = _weighted(near, near_v) + _weighted(self_weight, window.v[:, None])
    return _weighted(far, values), exact, lse


def rotate(q: Float[Array, "B H rk"], rotation: Rotation) -> Float[Array, "B H rk"]:
    """Turns latent queries."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    blocks = (-1, 2 * rotation.half)
    first, second = jnp.split(q.astype(wide).reshape(*q.shape[:2], *blocks), 2, axis=-1)
    cos, sin = (x.reshape(x.shape[0], 1, -1, rotation.half).astype(wide) for x in rotation[:2])
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(q.shape).astype(q.dtype)


def _of_sequences(buffer: Array, stored: Stored, rank_k: int, width_k: int) -> Float[Array, "B C N r"]:
    """Each sequence's tokens of the slot, in order."""
    pages = buffer[stored.slot]
    if stored.tables is not None:
        # Ids beyond the length may be anything.
        used = stored.tables.shape[1] * pages.shape[1]
        first = jnp.arange(0, used, pages.shape[1])
        tables = jnp.where(first < stored.lengths[:, None], stored.tables, 0)
        pages = pages[tables].reshape(tables.shape[0], used, -1)
    return _heads(pages, width_k // rank_k)


def _heads(x: Float[Array, "B C Nr"], heads: int) -> Float[Array, "B C N r"]:
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


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
