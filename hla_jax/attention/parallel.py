"""Attention of many tokens at once, in blocks of queries: exact, and hybrid (latent beyond a window, exact within).

No S x S array is stored: one block of queries is scored against all tokens, and its scores are recomputed in the
backward pass. Shapes: B sequences, S tokens, H query heads, G key-value heads, N latent heads, dh head size, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax import sharding
from hla_jax.attention.scheme import Eviction

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# Scores of one block of queries, in numbers over all sequences and heads: 16 MiB in float32, which large caches hold.
_BLOCK_NUMBERS = 1 << 22


def exact_attention(
    q: Float[Array, "B S H dh"],
    k: Float[Array, "B S G dh"],
    v: Float[Array, "B S G dh"],
    segments: Int[Array, "B S"] | None = None,
    eviction: Eviction | None = None,
    scale: float | None = None,
) -> Float[Array, "B S H dh"]:
    """Causal softmax attention of rotated queries and keys, with scores times `scale`, by default dh^-1/2.

    With `segments`, only tokens of the same segment see each other; with `eviction`, only those that stay.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def attend(index: Int[Array, " S"], q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        def block(index: Int[Array, " Q"], q: Float[Array, "B Q H dh"]) -> Float[Array, "B Q H dh"]:
            visible = causal_mask(index, k.shape[1], segments, eviction)
            scores = jnp.where(visible, grouped_scores(q, k) * scale, -jnp.inf)
            return grouped_sum(jax.nn.softmax(scores, axis=-1), v)

        return over_query_blocks(block, index, q.shape[0] * q.shape[2] * k.shape[1], q)

    # On a mesh each device attends for its own rows, heads and queries, to all of their keys.
    queries, keys = ("batch", "queries", "kv_heads", None), ("batch", None, "kv_heads", None)
    inputs = [("queries",), queries, keys, keys, None if segments is None else ("batch", None)]
    return sharding.split(attend, inputs, queries)(jnp.arange(q.shape[1]), q, k, v, segments)


def hybrid_attention(
    far: tuple[Float[Array, "B S H rk"], Float[Array, "B C N rk"], Float[Array, "B C N rv"]],
    near: tuple[Float[Array, "B S H dh"], Float[Array, "B S G dh"], Float[Array, "B S G dh"]],
    window: int,
    segments: Int[Array, "B S"] | None = None,
    eviction: Eviction | None = None,
    exact: Bool[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B S H rv"], Float[Array, "B S H dh"]]:
    """HLA's attention (Eq. 4) for all tokens: queries, keys and values of the latent for j < i - W and exact ones for j
    >= i - W. With `eviction`, of the tokens beyond the window those that stay.

    With `segments`, only tokens of the same segment see each other. Tokens that are `exact`, such as a prompt's, read
    exact keys and values at any distance.

    Returns:
      The weighted sums of latent values and of exact values; one softmax covers both.
    """
    scale = near[0].shape[-1] ** -0.5
    tokens = near[1].shape[1]

    def block(index: Array, q_far: Array, q_near: Array) -> tuple[Array, Array]:
        visible = causal_mask(index, tokens, segments, eviction, window)
        recent = (index[:, None] - jnp.arange(tokens) <= window)[None, None]
        if exact is not None:
            recent = recent | exact[:, None, index, None]
        scores = jnp.where(recent, grouped_scores(q_near, near[1]), grouped_scores(q_far, far[1][:, :tokens])) * scale
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return (
            grouped_sum(jnp.where(recent, 0, weights), far[2][:, :tokens]),
            grouped_sum(jnp.where(recent, weights, 0), near[2]),
        )

    numbers = near[0].shape[0] * near[0].shape[2] * tokens
    return over_query_blocks(block, jnp.arange(tokens), numbers, far[0], near[0])


def causal_mask(
    index: Int[Array, " Q"],
    tokens: int,
    segments: Int[Array, "B S"] | None,
    eviction: Eviction | None = None,
    window: int = 0,
) -> Bool[Array, "#B 1 Q S"]:
    """Which tokens each query sees. Every query sees itself, padding included, so no softmax is empty."""
    visible = (jnp.arange(tokens) <= index[:, None])[None]
    if eviction is not None:
        recent = max(eviction.budget - eviction.first, window)
        visible = visible & ((jnp.arange(tokens) < eviction.first) | (index[:, None] - jnp.arange(tokens) <= recent))
    if segments is not None:
        visible = visible & (segments[:, index, None] == segments[:, None, :])
    return visible[:, None]


def grouped_scores(q: Float[Array, "B Q H r"], k: Float[Array, "B S G r"]) -> Float[Array, "B H Q S"]:
    """Dot products of query heads with the key-value head of their group, accumulated in float32."""
    batch, queries, heads, rank = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], -1, rank)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqgmr,bkgr->bgmqk", grouped, k, preferred_element_type=wide)
    return scores.reshape(batch, heads, queries, -1)


def grouped_sum(weights: Float[Array, "B H Q S"], v: Float[Array, "B S G r"]) -> Float[Array, "B Q H r"]:
    """Weighted sums of the values of each query head's group."""
    batch, heads, queries, tokens = weights.shape
    grouped = weights.reshape(batch, v.shape[2], -1, queries, tokens).astype(v.dtype)
    out = jnp.einsum("bgmqk,bkgr->bqgmr", grouped, v, preferred_element_type=weights.dtype)
    return out.reshape(batch, queries, heads, -1).astype(v.dtype)


def query_block(tokens: int, numbers_per_query: int) -> int:
    """Queries per block: a power of two that keeps a block's scores near 2^22 numbers, or all of them."""
    block = max(16, 1 << max(0, (_BLOCK_NUMBERS // numbers_per_query).bit_length() - 1))
    return min(block, tokens)


def over_query_blocks(
    block: Callable, index: Int[Array, " S"], numbers_per_query: int, *queries: Float[Array, "B S H r"]
):
    """Applies `block(index [Q], *queries [B, Q, H, r])` to consecutive blocks of queries and joins the results [B, S,
    ...].
    """
    tokens = index.shape[0]
    size = query_block(tokens, numbers_per_query)
    if size == tokens:
        return block(index, *queries)
    count = -(-tokens // size)
    # Queries of the padding repeat the last index: their results are cut off, and no row of the mask is empty.
    index = index[jnp.minimum(jnp.arange(count * size), tokens - 1)].reshape(count, size)
    split = lambda x: jnp.moveaxis(
        jnp.pad(x, ((0, 0), (0, count * size - tokens), (0, 0), (0, 0))).reshape(x.shape[0], count, size, *x.shape[2:]),
        1,
        0,
    )
    out = jax.lax.map(lambda xs: jax.checkpoint(block)(*xs), (index, *map(split, queries)))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], count * size, *x.shape[3:])[:, :tokens]
    return jax.tree.map(join, out)
