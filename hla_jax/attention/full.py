"""The full cache: exact keys and values of every loop, and the exact parallel pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.attention import window
from hla_jax.attention.parallel import exact_attention
from hla_jax.attention.scheme import (
    Cache,
    Eviction,
    Maps,
    Scheme,
    SchemeError,
    Shape,
    Transform,
    merge_heads,
    new_token,
    once,
    put_tokens,
    slot_of,
)
from hla_jax.config import ModelConfig
from hla_jax.kernels.latent_decode import Stored
from hla_jax.kernels.latent_decode.api import latent_decode
from hla_jax.models import looped
from hla_jax.models.layers import Angles, accumulation_dtype, angles, inverse_frequencies, turn
from hla_jax.models.stages import Attend, LayerInputs, Params, Stage

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def rotate_qk(config: ModelConfig, inputs: LayerInputs, at: Int[Array, "B S"] | Angles) -> tuple[Array, Array]:
    """Rotated queries and keys of one layer, from the tokens' positions, or from their angles where these are known."""
    by = at if isinstance(at, Angles) else head_angles(config, at, inputs.q.dtype)
    return turn(inputs.q, by), turn(inputs.k, by)


def head_angles(config: ModelConfig, positions: Int[Array, "B S"], dtype: jnp.dtype) -> Angles:
    """Angles of queries and keys."""
    wide = accumulation_dtype(dtype)
    return angles(positions, inverse_frequencies(config.head_dim, config.rope_theta, wide), wide)


def exact_stages(
    config: ModelConfig,
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


def exact_outer(
    config: ModelConfig,
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"] | None = None,
    eviction: Eviction | None = None,
) -> Attend | None:
    """The same of the layers outside of the loops; None for a model without any."""
    return exact_stages(config, positions, segments, eviction)[0].attend if config.outer_layers else None


def exact_pass(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"] | None = None,
    segments: Int[Array, "B S"] | None = None,
    **how: Any,
) -> Float[Array, "... B S d"]:
    """Hidden states of one exact pass; `how` is of `models.looped.run`."""
    at = jnp.arange(tokens.shape[1])[None] if positions is None else positions
    stages, outer = exact_stages(config, at, segments), exact_outer(config, at, segments)
    return looped.run(params, config, tokens, stages, None, outer, **how)[0]


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
    """Rotated keys and values of every loop and layer, slot t * L + l: 2 T L G dh numbers a token.

    Attributes:
      loops: loops that there are slots for; None for the model's. A token that runs fewer of them fills the slots of
        the others with its last loop's keys and values, which those that run more then read.
    """

    interchange = "full_cache"

    loops: int | None = None

    def check(self, config: ModelConfig) -> None:
        if self.loops is not None and self.loops < config.num_loops:
            raise SchemeError(f"loops must be at least {config.num_loops}, the model's; found {self.loops}")

    def with_loops(self, loops: int) -> FullCache:
        return dataclasses.replace(self, loops=loops)

    def token_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        slots = (self.loops or config.num_loops) * config.num_layers
        return dict.fromkeys(("k", "v"), (slots, config.num_kv_heads * config.head_dim))

    def reads(self, config: ModelConfig) -> dict[str, float]:
        return dict.fromkeys(super().reads(config), config.num_loops / (self.loops or config.num_loops))

    def fill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        positions = jnp.arange(tokens)[None]

        def attend(buffers: dict[str, Array], inputs: LayerInputs) -> tuple[Array, dict[str, Array]]:
            q, k = rotate_qk(config, inputs, positions)
            slot = slot_of(config, inputs)
            written = {"k": merge_heads(k), "v": merge_heads(inputs.v)}
            buffers = {name: put_tokens(buffer, slot, written[name]) for name, buffer in buffers.items()}
            return exact_attention(q, k, inputs.v), buffers

        finish = lambda buffers: Cache(_last_loop_onwards(config, buffers), lengths)
        return Transform([Stage(range(config.num_loops), attend)], cache.buffers, finish)

    def decode(self, config: ModelConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
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

        finish = lambda new: cache.store(_last_loop_onwards(config, new))
        return Transform([Stage(range(config.num_loops), attend)], new_token(cache.buffers), finish)

    def reread(self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        """Every token reads exact keys and values, so this is the exact pass."""
        stages = exact_stages(config, jnp.arange(tokens)[None], eviction=cache.eviction)
        return Transform(stages, None, lambda _: cache)


def _last_loop_onwards(config: ModelConfig, buffers: dict[str, Array]) -> dict[str, Array]:
    """Buffers [slots, ...] with the last loop's slots repeated in those of loops that the model does not run."""
    layers, loops = config.num_layers, config.num_loops

    def repeated(buffer: Array) -> Array:
        more = buffer.shape[0] // layers
        if more == loops:
            return buffer
        put = lambda loop, buffer: jax.lax.dynamic_update_slice_in_dim(
            buffer, buffer[(loops - 1) * layers : loops * layers], loop * layers, axis=0
        )
        return jax.lax.fori_loop(loops, more, put, buffer)

    return {name: repeated(buffer) for name, buffer in buffers.items()}
