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

import jax.numpy as jnp
from jax import Array

from hla_jax.attention.full import rotate_qk
from hla_jax.attention.parallel import exact_attention
from hla_jax.attention.scheme import Cache, Eviction, Maps
from hla_jax.config import OuroConfig
from hla_jax.kernels.latent_decode.reference import Window, latent_decode
from hla_jax.models.layers import accumulation_dtype, inverse_frequencies, rotate
from hla_jax.models.ouro import LayerInputs

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


def rotary_key(scheme: LLA, config: OuroConfig, maps: Maps, inputs: LayerInputs) -> Buffers:
    """What the keys of a layer at a loop add to the rotary key, which is not rotated yet."""
    shape = config.num_kv_heads, config.num_loops, config.head_dim, -1
    down = maps["rope_down"][inputs.layer].reshape(shape)[:, inputs.loop]
    sums = "bsge,ger->bsr" if scheme.axis(config).groups == 1 else "bsge,ger->bsgr"
    return {"rope_k": jnp.einsum(sums, inputs.k, down)}


def rotate_key(
    config: OuroConfig, key: Float[Array, "B S ... r"], positions: Int[Array, "#B S"]
) -> Float[Array, "B S ... r"]:
    """Rotates rotary keys, or queries to them: pair p of r/2, coordinates (p, p + r/2), has frequency p mod (dh/2)."""
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, accumulation_dtype(key.dtype))
    mine = frequencies[jnp.arange(key.shape[-1] // 2) % frequencies.size]
    return rotate(key.reshape(*key.shape[:2], -1, key.shape[-1]), positions, mine).reshape(key.shape)


def read_all(
    scheme: LLA, config: OuroConfig, maps: Maps, inputs: LayerInputs, latents: Buffers, eviction: Eviction | None
) -> Float[Array, "B S H dh"]:
    """Every token reads the latents of all tokens up to itself."""
    query = _query(scheme, config, maps, inputs, jnp.arange(inputs.h.shape[1])[None])
    keys, values = _stored(scheme, config, latents)
    out = exact_attention(query.latent, keys, values, eviction=eviction, scale=config.head_dim**-0.5)
    return _output(scheme, config, maps, inputs, out, jnp.ones((), out.dtype))


def read_past(
    scheme: LLA, config: OuroConfig, maps: Maps, inputs: LayerInputs, cache: Cache, own: Buffers | None
) -> Float[Array, "B 1 H dh"]:
    """A new token reads the latents of the past, and its own (`own`), or its own keys and values exactly (None)."""
    scale, position = config.head_dim**-0.5, cache.lengths[:, None]
    query = _query(scheme, config, maps, inputs, position)
    keys, values = _stored(scheme, config, scheme.latents(config, cache.buffers, inputs))
    lengths, visible = cache.past(keys.shape[1])

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        nothing = lambda x: jnp.zeros((x.shape[0], 0, *x.shape[1:]), x.dtype)
        itself = Window(q[:, 0], nothing(k), nothing(v), jnp.zeros((k.shape[0], 0), bool), k, v)
        return latent_decode(query.latent[:, 0], keys, values, lengths, scale, itself, visible)

    if own is not None:
        key, value = _stored(scheme, config, {name: latent[:, None] for name, latent in own.items()})
        past, itself, _ = attend(query.latent, key[:, 0], value[:, 0])
        return _output(scheme, config, maps, inputs, (past + itself)[:, None], jnp.ones((), past.dtype))
    # The stored tokens' scores lack the mean's part: take it from the token's own score instead.
    q, k = rotate_qk(config, inputs, position)
    mean = scheme.part(config, maps, "k", inputs.loop, inputs.layer).mean
    own_q = jnp.concatenate([q, query.content], axis=-1)
    own_k = jnp.concatenate([k[:, 0], jnp.broadcast_to(-mean, k[:, 0].shape).astype(k.dtype)], axis=-1)
    past, itself, lse = attend(own_q, own_k, inputs.v[:, 0])
    grouped = own_q[:, 0].reshape(own_q.shape[0], own_k.shape[1], -1, own_q.shape[-1])
    own_score = jnp.einsum("bgmr,bgr->bgm", grouped, own_k).reshape(lse.shape) * scale
    stored_weight = 1 - jnp.exp(own_score.astype(lse.dtype) - lse)
    stored = _output(scheme, config, maps, inputs, past[:, None], stored_weight[:, None, :, None].astype(past.dtype))
    return stored + itself[:, None]


def _query(scheme: LLA, config: OuroConfig, maps: Maps, inputs: LayerInputs, positions: Int[Array, "#B S"]) -> Query:
    at = inputs.layer, inputs.loop
    content = inputs.q
    if scheme.query_adapter:
        content = jnp.einsum("bshe,hef->bshf", content, maps["query_adapter"][at]).astype(content.dtype)
    up = scheme.part(config, maps, "k", inputs.loop, inputs.layer).up
    grouped = content.reshape(*content.shape[:2], config.num_kv_heads, -1, config.head_dim)
    latent = jnp.einsum("bsgme,gre->bsgmr", grouped, up).reshape(*content.shape[:3], -1)
    rotary = rotate_key(config, jnp.einsum("bshe,her->bshr", inputs.q, maps["rope_query"][at]), positions)
    return Query(jnp.concatenate([latent, rotary], axis=-1).astype(content.dtype), content)


def _stored(
    scheme: LLA, config: OuroConfig, latents: Buffers
) -> tuple[Float[Array, "B C N r"], Float[Array, "B C N rv"]]:
    """Keys [latent_k; rope_k] and values of the latent heads."""
    keys, values = jnp.concatenate([latents["latent_k"], latents["rope_k"]], axis=-1), latents["latent_v"]
    split = lambda x: x.reshape(*x.shape[:2], scheme.axis(config).groups, x.shape[-1])
    return split(keys), split(values)


def _output(
    scheme: LLA,
    config: OuroConfig,
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
