"""The full cache: exact keys and values of every loop, and the exact parallel pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from hla_jax.attention import window
from hla_jax.attention.parallel import exact_attention
from hla_jax.attention.scheme import (
    Cache,
    Eviction,
    Maps,
    Scheme,
    Shape,
    Transform,
    merge_heads,
    new_token,
    once,
    put_tokens,
    slot_of,
)
from hla_jax.config import OuroConfig
from hla_jax.kernels.latent_decode import Stored
from hla_jax.kernels.latent_decode.api import latent_decode
from hla_jax.models.layers import Angles, accumulation_dtype, angles, inverse_frequencies, turn
from hla_jax.models.ouro import LayerInputs, Stage

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def rotate_qk(config: OuroConfig, inputs: LayerInputs, at: Int[Array, "B S"] | Angles) -> tuple[Array, Array]:
    """Rotated queries and keys of one layer, from the tokens' positions, or from their angles where these are known."""
    by = at if isinstance(at, Angles) else head_angles(config, at, inputs.q.dtype)
    return turn(inputs.q, by), turn(inputs.k, by)


def head_angles(config: OuroConfig, positions: Int[Array, "B S"], dtype: jnp.dtype) -> Angles:
    """Angles of queries and keys."""
    wide = accumulation_dtype(dtype)
    return angles(positions, inverse_frequencies(config.head_dim, config.rope_theta, wide), wide)


def exact_stages(
    config: OuroConfig,
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"] | None = None,
    eviction: Eviction | None = None,
) -> Sequence[Stage]:
    """One exact parallel pass that keeps nothing: attention of training, scoring and the reference. With `eviction`,
    queries see what would still be there.
    """

    def attend(state: Any, inputs: LayerInputs) -> tuple[Array, Any]:
        q, k = rotate_qk(config, inputs, positions)
        return exact_attention(q, k, inputs.v, segments, eviction), state

    return [Stage(range(config.num_loops), attend)]


def decode_exact(
    q: Float[Array, "B 1 H dh"],
    k: Float[Array, "B 1 G dh"],
    v: Float[Array, "B 1 G dh"],
    past: Stored,
    implementation: str | None,
) -> Float[Array, "B 1 H dh"]:
    """A new token reads stored keys and values, and its own."""
    itself = window.only_itself(q[:, 0], k[:, 0], v[:, 0])
    stored, own, _ = latent_decode(q[:, 0], past, q.shape[-1] ** -0.5, itself, implementation=implementation)
    return (stored + own)[:, None]


@dataclasses.dataclass(frozen=True)
class FullCache(Scheme):
    """Rotated keys and values of every loop and layer, slot t * L + l: 2 T L G dh numbers a token."""

    interchange = "full_cache"

    def token_shapes(self, config: OuroConfig) -> dict[str, Shape]:
        slots = config.num_loops * config.num_layers
        return dict.fromkeys(("k", "v"), (slots, config.num_kv_heads * config.head_dim))

    def fill(
        self, config: OuroConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        positions = jnp.arange(tokens)[None]

        def attend(buffers: dict[str, Array], inputs: LayerInputs) -> tuple[Array, dict[str, Array]]:
            q, k = rotate_qk(config, inputs, positions)
            slot = slot_of(config, inputs)
            written = {"k": merge_heads(k), "v": merge_heads(inputs.v)}
            buffers = {name: put_tokens(buffer, slot, written[name]) for name, buffer in buffers.items()}
            return exact_attention(q, k, inputs.v), buffers

        return Transform(
            [Stage(range(config.num_loops), attend)], cache.buffers, lambda buffers: Cache(buffers, lengths)
        )

    def decode(self, config: OuroConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        dtype = cache.buffers["k"].dtype
        at, past = once(head_angles(config, cache.lengths[:, None], dtype)), cache.stored("k", "v")

        def attend(new: dict[str, Array], inputs: LayerInputs) -> tuple[Array, dict[str, Array]]:
            q, k = rotate_qk(config, inputs, at)
            slot = slot_of(config, inputs)
            out = decode_exact(q, k, inputs.v, past._replace(slot=slot), implementation)
            return out, {
                "k": new["k"].at[slot].set(merge_heads(k[:, 0])),
                "v": new["v"].at[slot].set(merge_heads(inputs.v[:, 0])),
            }

        return Transform([Stage(range(config.num_loops), attend)], new_token(cache.buffers), cache.store)

    def reread(self, config: OuroConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        """Every token reads exact keys and values, so this is the exact pass."""
        stages = exact_stages(config, jnp.arange(tokens)[None], eviction=cache.eviction)
        return Transform(stages, None, lambda _: cache)
