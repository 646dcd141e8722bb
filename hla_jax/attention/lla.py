"""Looped Latent Attention (arXiv:2607.15456): a latent of a token's trajectory of keys and values across the loops.

Per head by default; `fold_heads` (LLA-2D) makes one latent of all heads. Decoding takes two passes a token: the first
runs the model on the new token and yields its keys and values of every loop, hence its latent; the second runs it again
with every key and value, its own included, read through latents, and its logits count. A prompt is read exactly, and
then once more through its latents.

Shapes: B batch, S tokens, C capacity, T loops, G key-value heads, H query heads, dh head size, ranks rk, rv and rr.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.attention import absorbed
from hla_jax.attention.codec import Axis, Codec, Part
from hla_jax.attention.full import decode_exact, rotate_qk
from hla_jax.attention.scheme import (
    Cache,
    Eviction,
    Maps,
    SchemeError,
    Shape,
    Transform,
    merge_heads,
    new_token,
    put_tokens,
    slot_of,
)
from hla_jax.config import ModelConfig
from hla_jax.models.stages import LayerInputs, Stage

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Buffers = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class LLA(Codec):
    """Sizes of Looped Latent Attention: (rk + rv) G numbers a token and layer, rk + rv with `fold_heads`.

    Attributes:
      rank_k: rk, of the keys' latent, which stands for T dh numbers of one head, or G T dh of all.
      rank_v: rv, of the values'.
      fold_heads: LLA-2D, one latent of all heads.
      first_pass: what the first pass reads of the past: "latent" (rebuilt), or "exact": exact keys and values, kept
        beside the latents (no memory is saved; the upper bound of the method).
      single_pass: takes the first pass's logits, and the exact pass's for a prompt.
      full_memory: keeps the rebuilt keys and values beside the latents: fast, saves no memory, single pass.
      rank_rope: rr, absorbs the maps into queries and outputs instead of rebuilding keys; the position is scored by a
        rotary key of rr numbers a token and layer (times G without `fold_heads`). None rebuilds.
      query_adapter: with `rank_rope`, a learned map of the query of the content score.
    """

    interchange = "lla"

    fold_heads: bool = False
    first_pass: str = "latent"
    single_pass: bool = False
    full_memory: bool = False
    rank_rope: int | None = None
    query_adapter: bool = False

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        if self.first_pass not in ("latent", "exact"):
            raise SchemeError(f'first_pass must be "latent" or "exact", found {self.first_pass!r}')
        if self.full_memory and (self.first_pass == "exact" or self.rank_rope is not None):
            raise SchemeError('full_memory reads rebuilt keys and values: it excludes first_pass "exact" and rank_rope')
        if self.query_adapter and self.rank_rope is None:
            raise SchemeError("query_adapter adapts the query of the absorbed score: it needs rank_rope")
        if self.rank_rope is not None:
            pairs = config.num_loops * (config.num_kv_heads if self.fold_heads else 1) * config.head_dim
            if self.rank_rope % 2 or not 2 <= self.rank_rope <= pairs:
                raise SchemeError(f"rank_rope must be an even number in 2 .. {pairs}, found {self.rank_rope}")

    def map_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        shapes = super().map_shapes(config)
        if self.rank_rope is not None:
            per_query = config.num_loops, config.num_heads, config.head_dim
            trajectories = *self.leading(config), self.axis(config).size
            shapes |= {"rope_down": (*trajectories, self.rank_rope), "rope_query": (*per_query, self.rank_rope)}
            if self.query_adapter:
                shapes |= {"query_adapter": (*per_query, config.head_dim)}
        return shapes

    def token_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        shapes = super().token_shapes(config)
        if self.rank_rope is not None:
            slots, groups = self.axis(config)[:2]
            shapes |= {"latent_k": (slots, groups * (self.rank_k + self.rank_rope))}
        if self.first_pass == "exact" or self.full_memory:
            slots = config.num_loops * config.num_layers
            shapes |= dict.fromkeys(("k", "v"), (slots, config.num_kv_heads * config.head_dim))
        return shapes

    @property
    def passes(self) -> int:
        return 1 if self.single_pass or self.full_memory else 2

    def reads(self, config: ModelConfig) -> dict[str, float]:
        latents = ("latent_k", "latent_v")
        if self.full_memory:
            return super().reads(config) | dict.fromkeys(latents, 0)
        if self.first_pass == "exact":
            return super().reads(config) | dict.fromkeys(latents, config.num_loops * (self.passes - 1))
        return super().reads(config)

    def axis(self, config: ModelConfig) -> Axis:
        trajectory = config.num_loops * config.head_dim
        if self.fold_heads:
            return Axis(config.num_layers, 1, config.num_kv_heads * trajectory)
        return Axis(config.num_layers, config.num_kv_heads, trajectory)

    def leading(self, config: ModelConfig) -> Shape:
        return () if self.fold_heads else (config.num_kv_heads,)

    def slot(self, config: ModelConfig, loop: Array | int, layer: Array | int) -> Array | int:
        return layer

    def part(self, config: ModelConfig, maps: Maps, name: str, loop: Array, layer: Array) -> Part:
        trajectory = config.num_kv_heads, config.num_loops, config.head_dim
        down, up, mean = (maps[f"{name}_{part}"][layer] for part in ("down", "up", "mean"))
        down, mean = down.reshape(*trajectory, -1)[:, loop], mean.reshape(trajectory)[:, loop]
        if self.fold_heads:
            return Part(down, jnp.moveaxis(up.reshape(-1, *trajectory)[:, :, loop], 0, 1), mean)
        return Part(down, up.reshape(trajectory[0], -1, *trajectory[1:])[:, :, loop], mean)

    def trajectories(self, config: ModelConfig, x: Float[Array, "n T N G dh"]) -> Float[Array, "N latents size"]:
        return jnp.moveaxis(x[0], 0, 2).reshape(x.shape[2], -1, self.axis(config).size)

    def spread(
        self,
        config: ModelConfig,
        down: Float[np.ndarray, "latents size r"],
        up: Float[np.ndarray, "latents r size"],
        mean: Float[np.ndarray, "latents size"],
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        return [(down[0], up[0], mean[0]) if self.fold_heads else (down, up, mean)]

    # How a layer at a loop writes and reads latents: rebuilt, or absorbed.

    def encode(self, config: ModelConfig, maps: Maps, inputs: LayerInputs) -> dict[str, Float[Array, "B S Nr"]]:
        parts = super().encode(config, maps, inputs)
        if self.rank_rope is None:
            return parts
        return parts | {"latent_k": absorbed.with_rotary_key(self, config, maps, inputs, parts["latent_k"])}

    def read_all(
        self, config: ModelConfig, maps: Maps, inputs: LayerInputs, latents: Buffers, eviction: Eviction | None
    ) -> Float[Array, "B S H dh"]:
        if self.rank_rope is None:
            return super().read_all(config, maps, inputs, latents, eviction)
        return absorbed.read_all(self, config, maps, inputs, latents, eviction)

    def read_past(
        self,
        config: ModelConfig,
        maps: Maps,
        inputs: LayerInputs,
        cache: Cache,
        own: Buffers | None,
        implementation: str | None = None,
    ) -> Float[Array, "B 1 H dh"]:
        if self.rank_rope is None:
            return super().read_past(config, maps, inputs, cache, own, implementation)
        return absorbed.read_past(self, config, maps, inputs, cache, own, implementation)

    # The contract.

    def fill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        positions = jnp.arange(tokens)[None]
        latents = super().fill(config, maps, cache, tokens, lengths)
        (stage,) = latents.stages

        def attend(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            out, buffers = stage.attend(buffers, inputs)
            if self.first_pass == "exact":
                slot, (_, k) = slot_of(config, inputs), rotate_qk(config, inputs, positions)
                buffers = buffers | {
                    "k": put_tokens(buffers["k"], slot, merge_heads(k)),
                    "v": put_tokens(buffers["v"], slot, merge_heads(inputs.v)),
                }
            return out, buffers

        def finish(buffers: Buffers) -> Cache:
            if self.rank_rope is not None:
                turn = lambda layer, buffer: put_tokens(
                    buffer, layer, absorbed.turn_keys(self, config, buffer[layer, :, :tokens], positions)
                )
                buffers = buffers | {"latent_k": jax.lax.fori_loop(0, config.num_layers, turn, buffers["latent_k"])}
            if self.full_memory:
                buffers = self._rebuild_into(config, maps, buffers, tokens)
            return Cache(buffers, lengths)

        return Transform([Stage(stage.loops, attend)], latents.state, finish)

    def prefill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform:
        exact = self.fill(config, maps, cache, tokens, lengths)
        return exact.then(lambda cache: self.reread(config, maps, cache, tokens)) if self.passes == 2 else exact

    def decode(self, config: ModelConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        position, loops = cache.lengths, range(config.num_loops)
        kept = self.first_pass == "exact" or self.full_memory

        def first(new: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            new = self.write(config, maps, inputs, new)
            if not kept:
                return self.read_past(config, maps, inputs, cache, None, implementation), new
            slot, (q, k) = slot_of(config, inputs), rotate_qk(config, inputs, position[:, None])
            if self.first_pass == "exact":
                new = new | {
                    "k": new["k"].at[slot].set(merge_heads(k[:, 0])),
                    "v": new["v"].at[slot].set(merge_heads(inputs.v[:, 0])),
                }
            return decode_exact(q, k, inputs.v, cache.stored("k", "v")._replace(slot=slot), implementation), new

        def finish(new: Buffers) -> Cache | Transform:
            if self.rank_rope is not None:
                turned = jax.vmap(lambda key: absorbed.turn_keys(self, config, key[:, None], position[:, None])[:, 0])
                new = new | {"latent_k": turned(new["latent_k"])}
            if self.full_memory:
                one = {name: buffer[:, :, None] for name, buffer in new.items()}
                rebuilt = self._rebuild_into(config, maps, one, 1, position[:, None])
                new = {name: buffer[:, :, 0] for name, buffer in rebuilt.items()}
            if self.passes == 1:
                return cache.store(new)

            def second(lengths: Array, inputs: LayerInputs) -> tuple[Array, Array]:
                own = self.latents(config, new, inputs)
                return self.read_past(config, maps, inputs, cache, own, implementation), jnp.maximum(lengths, 0)

            # The lengths go through the pass unchanged, so that storing waits for its end: XLA copies a cache that it
            # might write while it is still read.
            store = lambda lengths: dataclasses.replace(cache, lengths=lengths).store(new)
            return Transform([Stage(loops, second)], position, store)

        return Transform([Stage(loops, first)], new_token(cache.buffers), finish)

    def _rebuild_into(
        self, config: ModelConfig, maps: Maps, buffers: Buffers, tokens: int, positions: Array | None = None
    ) -> Buffers:
        """Fills the buffers of rebuilt keys and values from the latents, one layer and loop at a time."""
        positions = jnp.arange(tokens)[None] if positions is None else positions

        def one(slot: Array, kept: tuple[Array, Array]) -> tuple[Array, Array]:
            loop, layer = slot // config.num_layers, slot % config.num_layers
            latents = {name: buffers[name][layer, :, :tokens] for name in ("latent_k", "latent_v")}
            k, v = self.rebuilt(config, maps, loop, layer, latents, positions, kept[0].dtype)
            return put_tokens(kept[0], slot, merge_heads(k)), put_tokens(kept[1], slot, merge_heads(v))

        slots = config.num_loops * config.num_layers
        k, v = jax.lax.fori_loop(0, slots, one, (buffers["k"], buffers["v"]))
        return buffers | {"k": k, "v": v}
