"""Linear codecs of keys and values: a latent per token that keys and values are rebuilt from when they are read.

What a latent stands for is the codec's axis: the loops of one key-value head (LLA), loops and heads (LLA-2D), the heads
of one loop, or adjacent layers. Each is a pair of linear maps around a mean, on keys before rotation (a rebuilt key is
rotated at its token's position) and on values:

    z = sum (k - mean) down  over the keys the latent stands for,      k = mean + z up

so a latent is summed up while the loops and layers go by, in the cache itself when a prompt is read.

Shapes: B batch, S tokens, C capacity, G key-value heads, H query heads, dh head size, r rank, N latents a token (1 or
G), which buffers keep side by side.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from hla_jax.attention.full import decode_exact, rotate_qk
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
    put_tokens,
    split_heads,
)
from hla_jax.config import ModelConfig
from hla_jax.kernels.latent_decode import Stored
from hla_jax.models.layers import accumulation_dtype, inverse_frequencies, rotate
from hla_jax.models.stages import LayerInputs, Stage

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Buffers = dict[str, Array]


class Part(NamedTuple):
    """The maps of the keys (or values) of one layer and loop."""

    down: Float[Array, "G dh r"]
    up: Float[Array, "G r dh"]
    mean: Float[Array, "G dh"]


class Axis(NamedTuple):
    """What a latent stands for."""

    slots: int
    """Of the cache's buffers."""
    groups: int
    """Latents a token in each slot: one of all heads, or one a head."""
    size: int
    """Numbers that one stands for."""
    layers: int = 1
    """Adjacent layers that share it."""


@dataclasses.dataclass(frozen=True)
class Codec(Scheme):
    """What every linear codec shares: how it writes and rebuilds, and single-pass decoding.

    A new token reads rebuilt keys and values of the past, and its own exactly. Prompts are exact.

    Attributes:
      rank_k, rank_v: numbers of a latent of keys and of values.
    """

    rank_k: int
    rank_v: int

    @abc.abstractmethod
    def axis(self, config: ModelConfig) -> Axis:
        """How many latents a token has, and what each stands for."""

    @abc.abstractmethod
    def leading(self, config: ModelConfig) -> Shape:
        """Leading axes of a layer's maps: one map for each latent that the layer has a part in."""

    @abc.abstractmethod
    def slot(self, config: ModelConfig, loop: Array | int, layer: Array | int) -> Array | int:
        """Slot of a layer and loop in the latents' buffers."""

    @abc.abstractmethod
    def part(self, config: ModelConfig, maps: Maps, name: str, loop: Array, layer: Array) -> Part:
        """The maps `<name>_down`, `<name>_up`, `<name>_mean` of one layer and loop; `name` is "k" or "v"."""

    @abc.abstractmethod
    def trajectories(self, config: ModelConfig, x: Float[Array, "n T N G dh"]) -> Float[Array, "N latents size"]:
        """What the latents of N tokens stand for, from their keys or values in the n layers that share latents."""

    @abc.abstractmethod
    def spread(
        self,
        config: ModelConfig,
        down: Float[np.ndarray, "latents size r"],
        up: Float[np.ndarray, "latents r size"],
        mean: Float[np.ndarray, "latents size"],
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The maps of the layers that share latents, one layer after the other, from maps of whole trajectories."""

    def check(self, config: ModelConfig) -> None:
        most = self.axis(config).size
        for name, rank in (("rank_k", self.rank_k), ("rank_v", self.rank_v)):
            if not 1 <= rank <= most:
                raise SchemeError(f"{name} must be in 1 .. {most}, the numbers that a latent stands for; found {rank}")

    def map_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        leading, axis = self.leading(config), self.axis(config)
        size = axis.size // axis.layers
        shapes: dict[str, Shape] = {}
        for name, rank in (("k", self.rank_k), ("v", self.rank_v)):
            shapes |= {f"{name}_down": (*leading, size, rank), f"{name}_up": (*leading, rank, size)}
            shapes |= {f"{name}_mean": (*leading, size)}
        return shapes

    def token_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        axis = self.axis(config)
        return {
            "latent_k": (axis.slots, axis.groups * self.rank_k),
            "latent_v": (axis.slots, axis.groups * self.rank_v),
        }

    def reads(self, config: ModelConfig) -> dict[str, float]:
        readers = config.num_loops * config.num_layers // self.axis(config).slots
        return super().reads(config) | dict.fromkeys(("latent_k", "latent_v"), readers * self.passes)

    # What the maps compute for one layer and loop.

    def encode(self, config: ModelConfig, maps: Maps, inputs: LayerInputs) -> dict[str, Float[Array, "B S Nr"]]:
        """What the keys (before rotation) and values of a layer at a loop add to their latents."""
        each = self.axis(config).groups > 1

        def latent(name: str, x: Float[Array, "B S G dh"]) -> Float[Array, "B S Nr"]:
            part = self.part(config, maps, name, inputs.loop, inputs.layer)
            if each:
                return merge_heads(jnp.einsum("bsge,ger->bsgr", x - part.mean, part.down))
            return jnp.einsum("bsge,ger->bsr", x - part.mean, part.down)

        return {"latent_k": latent("k", inputs.k), "latent_v": latent("v", inputs.v)}

    def rebuilt(
        self,
        config: ModelConfig,
        maps: Maps,
        loop: Array,
        layer: Array,
        latents: Buffers,
        positions: Int[Array, "#B C"],
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "B C G dh"], Float[Array, "B C G dh"]]:
        """Rotated keys, and values, of one layer and loop from their latents."""
        each = self.axis(config).groups > 1

        def rebuild(name: str) -> Float[Array, "B C G dh"]:
            part, latent = self.part(config, maps, name, loop, layer), latents[f"latent_{name}"]
            # Heads first: one matrix product each, which XLA's CPU backend does twice as fast as with heads inside.
            if each:
                by_head = jnp.einsum("bcgr,gre->gbce", split_heads(latent, part.up.shape[0]), part.up)
            else:
                by_head = jnp.einsum("bcr,gre->gbce", latent, part.up)
            return jnp.moveaxis(by_head, 0, 2) + part.mean

        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, accumulation_dtype(jnp.dtype(dtype)))
        return rotate(rebuild("k"), positions, frequencies).astype(dtype), rebuild("v").astype(dtype)

    # How a layer at a loop reads latents.

    def latents(self, config: ModelConfig, buffers: Buffers, inputs: LayerInputs) -> Buffers:
        """The latents of a layer at a loop: [B, C, N r] of a cache, [B, N r] of a new token."""
        slot = self.slot(config, inputs.loop, inputs.layer)
        return {name: buffers[name][slot] for name in self.token_shapes(config)}

    def read_all(
        self, config: ModelConfig, maps: Maps, inputs: LayerInputs, latents: Buffers, eviction: Eviction | None
    ) -> Float[Array, "B S H dh"]:
        """Every token reads the latents of all tokens up to itself."""
        positions = jnp.arange(inputs.h.shape[1])[None]
        q, _ = rotate_qk(config, inputs, positions)
        k, v = self.rebuilt(config, maps, inputs.loop, inputs.layer, latents, positions, q.dtype)
        return exact_attention(q, k, v, eviction=eviction)

    def read_past(
        self,
        config: ModelConfig,
        maps: Maps,
        inputs: LayerInputs,
        cache: Cache,
        own: Buffers | None,
        implementation: str | None = None,
    ) -> Float[Array, "B 1 H dh"]:
        """A new token reads the latents of the past, and its own (`own`), or its own keys and values exactly (None)."""
        rebuild = functools.partial(self.rebuilt, config, maps, inputs.loop, inputs.layer, dtype=inputs.q.dtype)
        stored = self.latents(config, cache.buffers, inputs)
        past = rebuild(latents=stored, positions=cache.positions(stored["latent_k"].shape[1]))
        q, k = rotate_qk(config, inputs, cache.lengths[:, None])
        v = inputs.v
        if own is not None:
            one = {name: latent[:, None] for name, latent in own.items()}
            k, v = rebuild(latents=one, positions=cache.lengths[:, None])
        return decode_exact(q, k, v, rebuilt_past(cache, *past), implementation)

    # The contract.

    def fill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        """Latents are summed up in the cache's own buffers, so a prompt needs no more memory than its cache and the
        keys and values of one layer at one loop.
        """
        positions = jnp.arange(tokens)[None]

        def attend(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            q, k = rotate_qk(config, inputs, positions)
            slot = self.slot(config, inputs.loop, inputs.layer)
            added = {
                name: put_tokens(buffers[name], slot, buffers[name][slot, :, :tokens] + part)
                for name, part in self.encode(config, maps, inputs).items()
            }
            return exact_attention(q, k, inputs.v), buffers | added

        return Transform(
            [Stage(range(config.num_loops), attend)], cache.buffers, lambda buffers: Cache(buffers, lengths)
        )

    def decode(self, config: ModelConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        def attend(new: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            out = self.read_past(config, maps, inputs, cache, None, implementation)
            return out, self.write(config, maps, inputs, new)

        return Transform([Stage(range(config.num_loops), attend)], new_token(cache.buffers), cache.store)

    def write(self, config: ModelConfig, maps: Maps, inputs: LayerInputs, new: Buffers) -> Buffers:
        """Adds what a layer at a loop knows of a new token's latents."""
        slot = self.slot(config, inputs.loop, inputs.layer)
        parts = self.encode(config, maps, inputs)
        return new | {name: new[name].at[slot].add(part[:, 0].astype(new[name].dtype)) for name, part in parts.items()}

    def reread(self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        """Every token reads rebuilt keys and values, its own included."""
        buffers = {name: cache.buffers[name][:, :, :tokens] for name in self.token_shapes(config)}

        def attend(state: None, inputs: LayerInputs) -> tuple[Array, None]:
            latents = self.latents(config, buffers, inputs)
            return self.read_all(config, maps, inputs, latents, cache.eviction), None

        return Transform([Stage(range(config.num_loops), attend)], None, lambda _: cache)


def rebuilt_past(cache: Cache, k: Float[Array, "B C G dh"], v: Float[Array, "B C G dh"]) -> Stored:
    """What a new token reads of keys and values that were rebuilt for all slots of a cache."""
    lengths, visible = cache.past(k.shape[1])
    only = jnp.zeros((), jnp.int32)
    return Stored(merge_heads(k)[None], merge_heads(v)[None], only, lengths, visible=visible)
