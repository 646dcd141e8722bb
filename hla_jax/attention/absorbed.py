"""LLA without rebuilding: maps absorbed into queries and outputs, and a small rotary key for the position.

A rotation between a stored latent and its key cannot be absorbed, so content and position are scored apart (decoupled
rotary embedding): query i at loop t scores token j with

    [ (D q)^T (mean_t + up_t z_j) + (R_i P_t q)^T (R_j c_j) ] / sqrt(dh)

where c is linear in the keys of all loops and stored rotated, and D is the optional query adapter. The mean's part is
the same for all stored tokens; it only weighs them against a token that is read exactly.

Shapes: B batch, S tokens, C capacity, N latent heads (G, or 1 with folded heads), H query heads, dh head size, r rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.attention.full import rotate_qk
from hla_jax.attention.parallel import exact_attention
from hla_jax.attention.scheme import Cache, Eviction, Maps, merge_heads, split_heads
from hla_jax.config import ModelConfig
from hla_jax.kernels.latent_decode.api import latent_decode
from hla_jax.models.layers import accumulation_dtype, inverse_frequencies, rotate
from hla_jax.models.stages import LayerInputs

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from hla_jax.attention.lla import LLA

Buffers = dict[str, Array]


class Query(NamedTuple):
    """A layer's query at a loop."""

    latent: Float[Array, "B S H r"]
    """Scores [latent_k; rope_k]."""
    content: Float[Array, "B S H dh"]
    """Scores a key or a mean without position."""


def with_rotary_key(
    scheme: LLA, config: ModelConfig, maps: Maps, inputs: LayerInputs, latent: Float[Array, "B S Nrk"]
) -> Float[Array, "B S Nr"]:
    """What the keys of a layer at a loop add to each stored key, the latent and the rotary key behind it, which is not
    rotated yet.
    """
    shape = config.num_kv_heads, config.num_loops, config.head_dim, -1
    down = maps["rope_down"][inputs.layer].reshape(shape)[:, inputs.loop]
    groups = scheme.axis(config).groups
    rotary = jnp.einsum("bsge,ger->bsgr", inputs.k, down)
    rotary = rotary.sum(2, keepdims=True) if groups == 1 else rotary
    return merge_heads(jnp.concatenate([split_heads(latent, groups), rotary], axis=-1))


def turn_keys(
    scheme: LLA, config: ModelConfig, keys: Float[Array, "B S Nr"], positions: Int[Array, "#B S"]
) -> Float[Array, "B S Nr"]:
    """Stored keys with their rotary part turned."""
    latent, rotary = jnp.split(split_heads(keys, scheme.axis(config).groups), [scheme.rank_k], axis=-1)
    return merge_heads(jnp.concatenate([latent, rotate_key(config, rotary, positions)], axis=-1))


def rotate_key(
    config: ModelConfig, key: Float[Array, "B S ... r"], positions: Int[Array, "#B S"]
) -> Float[Array, "B S ... r"]:
    """Rotates rotary keys, or queries to them: pair p of r/2, coordinates (p, p + r/2), has frequency p mod (dh/2)."""
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, accumulation_dtype(key.dtype))
    mine = frequencies[jnp.arange(key.shape[-1] // 2) % frequencies.size]
    return rotate(key.reshape(*key.shape[:2], -1, key.shape[-1]), positions, mine).reshape(key.shape)


def read_all(
    scheme: LLA, config: ModelConfig, maps: Maps, inputs: LayerInputs, latents: Buffers, eviction: Eviction | None
) -> Float[Array, "B S H dh"]:
    """Every token reads the latents of all tokens up to itself."""
    query = _query(scheme, config, maps, inputs, jnp.arange(inputs.h.shape[1])[None])
    keys, values = (split_heads(latents[name], scheme.axis(config).groups) for name in ("latent_k", "latent_v"))
    out = exact_attention(query.latent, keys, values, eviction=eviction, scale=config.head_dim**-0.5)
    return _output(scheme, config, maps, inputs, out, jnp.ones((), out.dtype))


def read_past(
    scheme: LLA,
    config: ModelConfig,
    maps: Maps,
    inputs: LayerInputs,
    cache: Cache,
    own: Buffers | None,
    implementation: str | None,
) -> Float[Array, "B 1 H dh"]:
    """A new token reads the latents of the past, and its own (`own`), or its own keys and values exactly (None)."""
    scale, position = config.head_dim**-0.5, cache.lengths[:, None]
    query = _query(scheme, config, maps, inputs, position)
    stored = cache.stored("latent_k", "latent_v")._replace(slot=inputs.layer)
    past, _, lse = latent_decode(query.latent[:, 0], stored, scale, implementation=implementation)

    def weight(score: Float[Array, "B H"]) -> Float[Array, "B H 1"]:
        """The token's attention to itself."""
        return jax.nn.sigmoid(score.astype(lse.dtype) * scale - lse)[..., None]

    if own is not None:
        key, value = (split_heads(own[name], scheme.axis(config).groups) for name in ("latent_k", "latent_v"))
        itself = weight(_dot(query.latent[:, 0], key))
        mixed = past * (1 - itself) + _per_query(value, past.shape[1]) * itself
        return _output(scheme, config, maps, inputs, mixed[:, None].astype(past.dtype), jnp.ones((), past.dtype))
    # The stored tokens' scores lack the mean's part: take it from the token's own score instead.
    q, k = rotate_qk(config, inputs, position)
    mean = scheme.part(config, maps, "k", inputs.loop, inputs.layer).mean
    itself = weight(_dot(q[:, 0], k[:, 0]) - _dot(query.content[:, 0], mean[None]))
    rest = (1 - itself).astype(past.dtype)
    out = _output(scheme, config, maps, inputs, (past * rest)[:, None], rest[:, None])
    return out + (_per_query(inputs.v[:, 0], past.shape[1]) * itself).astype(out.dtype)[:, None]


def _dot(q: Float[Array, "B H r"], k: Float[Array, "#B G r"]) -> Float[Array, "B H"]:
    """Each query head with the key head of its group, in float32."""
    wide = accumulation_dtype(q.dtype)
    return jnp.sum(q.astype(wide) * _per_query(k.astype(wide), q.shape[1]), axis=-1)


def _per_query(x: Float[Array, "B G r"], heads: int) -> Float[Array, "B H r"]:
    """The key-value head of every query head."""
    return jnp.repeat(x, heads // x.shape[1], axis=1)


def _query(scheme: LLA, config: ModelConfig, maps: Maps, inputs: LayerInputs, positions: Int[Array, "#B S"]) -> Query:
    at = inputs.layer, inputs.loop
    content = inputs.q
    if scheme.query_adapter:
        content = jnp.einsum("bshe,hef->bshf", content, maps["query_adapter"][at]).astype(content.dtype)
    up = scheme.part(config, maps, "k", inputs.loop, inputs.layer).up
    grouped = content.reshape(*content.shape[:2], config.num_kv_heads, -1, config.head_dim)
    latent = jnp.einsum("bsgme,gre->bsgmr", grouped, up).reshape(*content.shape[:3], -1)
    rotary = rotate_key(config, jnp.einsum("bshe,her->bshr", inputs.q, maps["rope_query"][at]), positions)
    return Query(jnp.concatenate([latent, rotary], axis=-1).astype(content.dtype), content)


def _output(
    scheme: LLA,
    config: ModelConfig,
    maps: Maps,
    inputs: LayerInputs,
    latent: Float[Array, "B S H rv"],
    weight: Float[Array, "#B #S #H 1"],
) -> Float[Array, "B S H dh"]:
    """Heads' output from their sum of value latents; `weight` is the attention that these have."""
    part = scheme.part(config, maps, "v", inputs.loop, inputs.layer)
    grouped = latent.reshape(*latent.shape[:2], config.num_kv_heads, -1, latent.shape[-1])
    out = jnp.einsum("bsgmr,gre->bsgme", grouped, part.up).reshape(*latent.shape[:3], config.head_dim)
    mean = jnp.repeat(part.mean, config.heads_per_kv, axis=0)
    return (out + weight * mean).astype(latent.dtype)
