"""`latent_decode` in plain jnp, block by block of tokens, for platforms without a kernel. Shapes as in the package's
docstring.

A block is taken out of the cache while it is read, and fits a CPU's own cache: to take out a whole slot would cost more
than to read it. A CPU reads one sequence after the other, each as far as it goes, whatever the capacity. Elsewhere the
products of one sequence are too little work, and all are read as far as the longest goes. Where one block is all of a
slot, a loop only costs: one latent for all heads is then read by the formula of `reference`. (Several are still read
here, for one product serves them all.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.kernels import implementations
from hla_jax.kernels.latent_decode import Rotation, Stored, Window, reference

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

BLOCK_NUMBERS = 1 << 13  # of one sequence
_BLOCK_OF_ALL = 1 << 17
SMALLEST_BLOCK = 64


def latent_decode(
    q: Float[Array, "B H rk"],
    stored: Stored,
    scale: float,
    window: Window | None = None,
    rotation: Rotation | None = None,
) -> tuple[Float[Array, "B H rv"], Float[Array, "B H dh"] | None, Float[Array, "B H"]]:
    """See `api.latent_decode`."""
    if stored.tables is not None:
        return reference.latent_decode(q, stored, scale, window, rotation)
    if rotation is not None:
        q = reference.rotate(q, rotation)
    batch, heads, rank = q.shape
    _, _, capacity, width = stored.keys.shape
    latent_heads, wide = width // rank, jnp.promote_types(q.dtype, jnp.float32)
    alone = implementations.platform() == "cpu"
    numbers = BLOCK_NUMBERS if alone else _BLOCK_OF_ALL // batch
    most = max(SMALLEST_BLOCK, numbers // max(width, stored.values.shape[-1]))
    if latent_heads == 1 and capacity <= most:
        return reference.latent_decode(q, stored, scale, window)
    query = _spread(q, latent_heads)
    block = -(-capacity // -(-capacity // most)) if capacity else 0  # all blocks alike

    together = 1 if alone else batch
    past = jax.lax.map(
        lambda first: _past(query, stored, scale, block, first, together), jnp.arange(0, batch, together)
    )
    top, total, sums = (x.reshape(batch, *x.shape[2:]) for x in past)
    exact = jnp.zeros((batch, heads, 0), wide)
    if window is not None:
        kv_heads = window.k.shape[1]
        near_q = _spread(window.q, kv_heads)
        near_k, near_v = (
            jnp.concatenate([ring[window.slot], own.reshape(batch, 1, -1)], axis=1)
            for ring, own in ((window.keys, window.k), (window.values, window.v))
        )
        slots = jnp.arange(near_k.shape[1])
        read = (slots < window.filled[:, None]) | (slots == near_k.shape[1] - 1)
        scores = jnp.where(read[..., None], _scores(near_q, near_k) * scale, -jnp.inf)
        none = jnp.zeros((batch, heads, near_v.shape[-1]), wide)
        before, (top, total, exact) = top, _add((top, total, none), scores, jnp.where(read[..., None], near_v, 0))
        sums = sums * jnp.exp(before - top)[..., None]
    # Nothing to attend to gives zeros and a log-sum-exp of minus infinity, not 0/0.
    over = jnp.where(total == 0, 1, total)[..., None]
    out = _own(sums / over, latent_heads).astype(stored.values.dtype)
    near = None if window is None else _own(exact / over, window.k.shape[1]).astype(window.values.dtype)
    return out, near, top + jnp.log(total)


def _past(
    query: Float[Array, "B H Nr"], stored: Stored, scale: float, block: int, first: Array, count: int
) -> tuple[Float[Array, "b H"], Float[Array, "b H"], Float[Array, "b H Nrv"]]:
    """`count` sequences from `first` on: maximum of the scores, sum of the weights and weighted sum of the values."""
    rows = lambda x: jax.lax.dynamic_slice_in_dim(x, first, count)
    query, lengths = rows(query), rows(stored.lengths)
    visible = None if stored.visible is None else rows(stored.visible)
    capacity, wide = stored.keys.shape[2], jnp.promote_types(query.dtype, jnp.float32)

    def take(buffer: Float[Array, "slots B C Nr"], start: Array) -> Float[Array, "b c Nr"]:
        starts = (at.astype(jnp.int32) for at in (stored.slot, first, start, jnp.zeros((), jnp.int32)))
        return jax.lax.dynamic_slice(buffer, tuple(starts), (1, count, block, buffer.shape[3]))[0]

    def one(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # The last block begins earlier, and its first tokens have been read already.
        start = jnp.minimum(number * block, capacity - block)
        token = start + jnp.arange(block)
        read = (token >= number * block) & (token < lengths[:, None])
        if visible is not None:
            read = read & jax.lax.dynamic_slice_in_dim(visible, start, block, axis=1)
        scores = jnp.where(read[..., None], _scores(query, take(stored.keys, start)) * scale, -jnp.inf)
        # Weights of zero do not silence what is no number.
        return _add(carry, scores, jnp.where(read[..., None], take(stored.values, start), 0))

    lowest = jnp.full(query.shape[:2], jnp.finfo(wide).min, wide)
    empty = lowest, jnp.zeros_like(lowest), jnp.zeros((*lowest.shape, stored.values.shape[-1]), wide)
    return jax.lax.fori_loop(0, -(-jnp.max(lengths, initial=0) // block) if block else 0, one, empty)


def _scores(query: Float[Array, "B H Nr"], keys: Float[Array, "B c Nr"]) -> Float[Array, "B c H"]:
    # Keys first: XLA's CPU backend multiplies so three times as fast as the other way round.
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.einsum("bcw,bhw->bch", keys, query, preferred_element_type=wide)


def _add(
    carry: tuple[Array, Array, Array], scores: Float[Array, "B c H"], values: Float[Array, "B c Nr"]
) -> tuple[Array, Array, Array]:
    """Online softmax: running maximum, sum of weights, weighted sum of values."""
    top, total, sums = carry
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    weights, shrink = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
    added = jnp.einsum("bch,bcw->bhw", weights.astype(values.dtype), values, preferred_element_type=sums.dtype)
    return higher, total * shrink + jnp.sum(weights, axis=1), sums * shrink[..., None] + added


def _spread(q: Float[Array, "B H r"], latent_heads: int) -> Float[Array, "B H Nr"]:
    """Queries that are zero outside their latent head's numbers: one product serves all heads."""
    mine = _mine(q.shape[1], latent_heads)[:, :, None].astype(q.dtype)
    return (q[:, :, None] * mine).reshape(*q.shape[:2], latent_heads * q.shape[2])


def _own(sums: Float[Array, "B H Nr"], latent_heads: int) -> Float[Array, "B H r"]:
    """Each query head's sum of its own latent head's values."""
    apart = sums.reshape(*sums.shape[:2], latent_heads, sums.shape[2] // latent_heads)
    return jnp.sum(jnp.where(_mine(sums.shape[1], latent_heads)[:, :, None], apart, 0), axis=2)


def _mine(heads: int, latent_heads: int) -> Bool[Array, "H N"]:
    """Which latent head each query head reads."""
    return jnp.arange(heads)[:, None] // (heads // latent_heads) == jnp.arange(latent_heads)
