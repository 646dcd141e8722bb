"""The exact window: a ring of the W most recent tokens' keys and values, in every loop and layer.

Token j sits in slot j mod W. The current token is a separate operand and overwrites the oldest slot only after the
read, so a token attends exactly to itself and to the W tokens before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from hla_jax.attention.scheme import Cache, merge_heads, once, slot_of
from hla_jax.config import ModelConfig
from hla_jax.kernels.latent_decode import Window
from hla_jax.models.stages import LayerInputs

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Buffers = dict[str, Array]


def keep_prompt(
    config: ModelConfig, buffers: Buffers, inputs: LayerInputs, k: Float[Array, "B S G dh"], lengths: Int[Array, " B"]
) -> Buffers:
    """Fills the ring of one layer and loop with the last W tokens of each right-padded prompt."""
    if "window_k" not in buffers:
        return buffers
    window = buffers["window_k"].shape[2]
    slots = jnp.arange(window)
    last = lengths[:, None] - 1
    # The newest token of each slot; slots of prompts shorter than the window stay unfilled, whatever they hold.
    token = jnp.maximum(last - (last - slots) % window, 0)[:, :, None]
    take = lambda x, buffer: jnp.take_along_axis(merge_heads(x), token, axis=1).astype(buffer.dtype)
    return buffers | {
        name: buffers[name].at[slot_of(config, inputs)].set(take(x, buffers[name]))
        for name, x in (("window_k", k), ("window_v", inputs.v))
    }


def read(
    config: ModelConfig,
    buffers: Buffers,
    inputs: LayerInputs,
    q: Float[Array, "B 1 H dh"],
    k: Float[Array, "B 1 G dh"],
    filled: Int[Array, " B"],
) -> Window:
    """What a token sees exactly in one layer and loop: the ring's `filled` tokens (none for schemes without a window),
    and itself.
    """
    k, v = k[:, 0], inputs.v[:, 0]
    if "window_k" not in buffers:
        return only_itself(q[:, 0], k, v)
    keys, values = buffers["window_k"], buffers["window_v"]
    return Window(q[:, 0], keys, values, slot_of(config, inputs), filled, k, v)


def filled(cache: Cache) -> Int[Array, " B"]:
    """How many tokens the ring of each sequence has."""
    slots = cache.buffers["window_k"].shape[2] if "window_k" in cache.buffers else 0
    return once(jnp.minimum(cache.lengths, slots))


def only_itself(q: Float[Array, "B H dh"], k: Float[Array, "B G dh"], v: Float[Array, "B G dh"]) -> Window:
    """A window of the current token alone."""
    batch, heads, size = k.shape
    ring = jnp.zeros((1, batch, 0, heads * size), k.dtype)
    return Window(q, ring, ring, jnp.zeros((), jnp.int32), jnp.zeros(batch, jnp.int32), k, v)


def note(config: ModelConfig, new: Buffers, inputs: LayerInputs, k: Float[Array, "B 1 G dh"]) -> Buffers:
    """Notes the current token's keys and values of one layer and loop, for `Cache.store` to put in the oldest
    one's place.
    """
    if "window_k" not in new:
        return new
    slot = slot_of(config, inputs)
    return new | {
        "window_k": new["window_k"].at[slot].set(merge_heads(k[:, 0])),
        "window_v": new["window_v"].at[slot].set(merge_heads(inputs.v[:, 0])),
    }
