"""Hybrid Latent Attention (arXiv:2610.07940): one latent a token that every loop reads directly, and an exact window.

A token's main latent c = sum_{t>=2} E_t h_t (Eq. 2) serves loops 2 .. T, its loop-1 latent serves loop 1. Loop t scores
the stored key part with A_t^T q and maps the weighted sum of the value part back with B_t (Eqs. 3 and 4). Nothing is
rebuilt.

Shapes: B batch, S tokens, C capacity, d hidden size, T loops, H heads, dh head size; ranks rk, rv of the main latent,
r1 of each half of the loop-1 latent. Code counts loops from 0, so the main latent's maps of loop t are at index t - 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.attention import window
from hla_jax.attention.full import head_angles, rotate_qk
from hla_jax.attention.parallel import exact_attention, hybrid_attention
from hla_jax.attention.scheme import (
    Cache,
    Eviction,
    Maps,
    Scheme,
    SchemeError,
    Shape,
    Transform,
    new_token,
    once,
    put_tokens,
    slot_of,
)
from hla_jax.config import ModelConfig
from hla_jax.kernels.latent_decode import Rotation, Stored
from hla_jax.kernels.latent_decode.api import latent_decode
from hla_jax.models.layers import accumulation_dtype, inverse_frequencies, linear, rotate
from hla_jax.models.stages import LayerInputs, Stage

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Buffers = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class HLA(Scheme):
    """Sizes of Hybrid Latent Attention: rk + rv + 2 r1 numbers a token and layer, and 2 T G dh W a sequence and layer.

    Attributes:
      rank_k: rk, key part of the main latent; a multiple of the head size, since every rotary frequency gets as many
        pairs.
      rank_v: rv, value part of the main latent.
      rank_loop1: r1, key part and value part of the loop-1 latent; a multiple of the head size.
      window: W, recent tokens read exactly (besides the token itself).
      pair_frequency: optional frequency index of each of the rk/2 latent pairs, instead of pair p having p mod (dh/2).
      pair_frequency_loop1: the same for the r1/2 pairs of the loop-1 latent.
    """

    interchange = "hla"

    rank_k: int
    rank_v: int
    rank_loop1: int
    window: int
    pair_frequency: tuple[int, ...] | None = None
    pair_frequency_loop1: tuple[int, ...] | None = None

    def check(self, config: ModelConfig) -> None:
        loops, heads, size = config.num_loops, config.num_kv_heads, config.head_dim
        if loops < 2:
            raise SchemeError(f"HLA needs at least 2 loops: the main latent serves loops 2 .. T; the model has {loops}")
        if self.window < 0:
            raise SchemeError(f"window must be at least 0, found {self.window}")
        for name, rank, directions in (
            ("rank_k", self.rank_k, (loops - 1) * heads),
            ("rank_loop1", self.rank_loop1, heads),
        ):
            if rank < size or rank % size:
                raise SchemeError(
                    f"{name} must be a positive multiple of head_dim {size}, so that every rotary frequency gets "
                    f"the same number of latent pairs; found {rank}"
                )
            if rank > directions * size:
                raise SchemeError(
                    f"{name} must be at most {directions * size}, the full rank of the keys it stands for; found {rank}"
                )
        full = (loops - 1) * heads * size
        if not 1 <= self.rank_v <= full:
            raise SchemeError(
                f"rank_v must be in 1 .. {full}, the full rank of the values of loops 2 .. {loops}; found {self.rank_v}"
            )
        for name, pairs, rank, most in (
            ("pair_frequency", self.pair_frequency, self.rank_k, (loops - 1) * heads),
            ("pair_frequency_loop1", self.pair_frequency_loop1, self.rank_loop1, heads),
        ):
            if pairs is None:
                continue
            if len(pairs) != rank // 2:
                raise SchemeError(f"{name} must have one entry per latent pair, {rank // 2}; found {len(pairs)}")
            if min(pairs) < 0 or max(pairs) >= size // 2:
                raise SchemeError(
                    f"{name} must index the {size // 2} rotary frequencies, found {min(pairs)} .. {max(pairs)}"
                )
            if (largest := int(np.bincount(pairs).max())) > most:
                raise SchemeError(f"{name} gives one frequency {largest} pairs, more than the {most} key pairs it has")

    def map_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        rest, heads, size, d = config.num_loops - 1, config.num_heads, config.head_dim, config.hidden_size
        return {
            "write_k": (rest, self.rank_k, d),
            "write_v": (rest, self.rank_v, d),
            "write_k1": (self.rank_loop1, d),
            "write_v1": (self.rank_loop1, d),
            "read_q": (rest, heads, size, self.rank_k),
            "read_o": (rest, heads, self.rank_v, size),
            "read_q1": (heads, size, self.rank_loop1),
            "read_o1": (heads, self.rank_loop1, size),
        } | ({"bias_k": (self.rank_k,), "bias_k1": (self.rank_loop1,)} if config.qk_bias else {})

    def map_axes(self) -> dict[str, tuple[str | None, ...]]:
        return {
            "write_k": (None, None, "embed"),
            "write_v": (None, None, "embed"),
            "write_k1": (None, "embed"),
            "write_v1": (None, "embed"),
            "read_q": (None, "heads", None, "rank"),
            "read_o": (None, "heads", "rank", None),
            "read_q1": ("heads", None, "rank"),
            "read_o1": ("heads", "rank", None),
            "bias_k": (None,),
            "bias_k1": (None,),
        }

    def window_tokens(self) -> int:
        return self.window

    def token_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        layers = config.num_layers
        return {
            "latent_k": (layers, self.rank_k),
            "latent_v": (layers, self.rank_v),
            "latent_k1": (layers, self.rank_loop1),
            "latent_v1": (layers, self.rank_loop1),
        }

    def reads(self, config: ModelConfig) -> dict[str, float]:
        return super().reads(config) | dict.fromkeys(("latent_k", "latent_v"), config.num_loops - 1)

    def fill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        """The main latent is summed over the loops in the cache's own buffers, so a prompt needs no more memory than
        its cache and the keys and values of one layer at one loop."""
        positions = jnp.arange(tokens)[None]

        def attend_first(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            latent_k, latent_v = self.write_first(config, maps, inputs, positions)
            buffers = buffers | {
                "latent_k1": put_tokens(buffers["latent_k1"], inputs.layer, latent_k),
                "latent_v1": put_tokens(buffers["latent_v1"], inputs.layer, latent_v),
            }
            return attend(buffers, inputs)

        def attend_rest(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            add = lambda buffer, part: put_tokens(buffer, inputs.layer, buffer[inputs.layer, :, :tokens] + part)
            part_k, part_v = self.write_rest(maps, inputs)
            buffers = buffers | {
                "latent_k": add(buffers["latent_k"], part_k),
                "latent_v": add(buffers["latent_v"], part_v),
            }
            return attend(buffers, inputs)

        def attend(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            q, k = rotate_qk(config, inputs, positions)
            return exact_attention(q, k, inputs.v), window.keep_prompt(config, buffers, inputs, k, lengths)

        def finish(buffers: Buffers) -> Cache:
            turn = lambda layer, buffer: put_tokens(
                buffer, layer, self.rotate_main(config, buffer[layer, :, :tokens, None], positions)[:, :, 0]
            )
            rotated = jax.lax.fori_loop(0, config.num_layers, turn, buffers["latent_k"])
            return Cache(buffers | {"latent_k": rotated}, lengths)

        return Transform(_stages(config, attend_first, attend_rest), cache.buffers, finish)

    def decode(self, config: ModelConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        """A new token reads no latent of its own, so what the writers need is noted on the way, and all layers' latents
        are written after the last loop, in one product for each map.
        """
        buffers, position = cache.buffers, cache.lengths
        dtype = buffers["latent_k"].dtype
        main = cache.stored("latent_k", "latent_v", self.window)
        first = cache.stored("latent_k1", "latent_v1", self.window)
        filled, angles = window.filled(cache), once(head_angles(config, position[:, None], dtype))
        rotation = _rotation(config, self.rank_k, self.pair_frequency, position, dtype)
        rotation_first = _rotation(config, self.rank_loop1, self.pair_frequency_loop1, position, dtype)

        def attend_first(new: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            query = _query(inputs.q, maps["read_q1"][inputs.layer])
            return attend(new, inputs, query, first, rotation_first, maps["read_o1"][inputs.layer])

        def attend_rest(new: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            at = inputs.layer, inputs.loop - 1
            query = _query(inputs.q, maps["read_q"][at])
            return attend(new, inputs, query, main, rotation, maps["read_o"][at])

        def attend(
            new: Buffers, inputs: LayerInputs, query: Array, stored: Stored, rotation: Rotation, read: Array
        ) -> tuple[Array, Buffers]:
            q, k = rotate_qk(config, inputs, angles)
            recent = window.read(config, buffers, inputs, q, k, filled)
            latent, exact, _ = latent_decode(
                query[:, 0],
                stored._replace(slot=inputs.layer),
                config.head_dim**-0.5,
                recent,
                rotation,
                implementation=implementation,
            )
            new = new | {"h": new["h"].at[slot_of(config, inputs)].set(inputs.h[:, 0])}
            return output(latent[:, None], read) + exact[:, None], window.note(config, new, inputs, k)

        def finish(new: Buffers) -> Cache:
            h = new["h"].reshape(config.num_loops, config.num_layers, *position.shape, config.hidden_size)
            return cache.store(new | self.write_token(config, maps, h, position))

        rings = new_token({name: buffer for name, buffer in buffers.items() if name.startswith("window")})
        shape = config.num_loops * config.num_layers, position.shape[0], config.hidden_size
        noted = rings | {"h": jnp.zeros(shape, dtype)}
        return Transform(_stages(config, attend_first, attend_rest), noted, finish)

    def reread(self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        """Main latents come from the pass that filled the cache, loop-1 latents and the window from this pass (HLA,
        section 4.2).
        """
        main = cache.buffers["latent_k"], cache.buffers["latent_v"]
        stages = self.reading(config, maps, main, jnp.arange(tokens)[None], eviction=cache.eviction)
        return Transform(stages, None, lambda _: cache)

    def reading(
        self,
        config: ModelConfig,
        maps: Maps,
        main: tuple[Float[Array, "L B C rk"], Float[Array, "L B C rv"]],
        positions: Int[Array, "#B S"],
        segments: Int[Array, "B S"] | None = None,
        exact: Bool[Array, "B S"] | None = None,
        eviction: Eviction | None = None,
    ) -> list[Stage]:
        """One parallel pass under the decoding rule that reads `main`, the main latents of all tokens in order, their
        key part rotated. The other arguments are those of `hybrid_attention`.
        """

        def attend_first(state: None, inputs: LayerInputs) -> tuple[Array, None]:
            # Maps may be wider than the model: in the model's dtype, latents are what a cache would hold.
            latent_k, latent_v = (x.astype(inputs.h.dtype) for x in self.write_first(config, maps, inputs, positions))
            query = self.query_first(config, maps, inputs, positions)
            return attend(inputs, query, latent_k, latent_v, maps["read_o1"][inputs.layer]), None

        def attend_rest(state: None, inputs: LayerInputs) -> tuple[Array, None]:
            query = self.query_rest(config, maps, inputs, positions)
            latent_k, latent_v = (part[inputs.layer] for part in main)
            return attend(inputs, query, latent_k, latent_v, maps["read_o"][inputs.layer, inputs.loop - 1]), None

        def attend(inputs: LayerInputs, query: Array, latent_k: Array, latent_v: Array, read: Array) -> Array:
            q, k = rotate_qk(config, inputs, positions)
            stored = query, latent_k[:, :, None], latent_v[:, :, None]
            latent, near = hybrid_attention(stored, (q, k, inputs.v), self.window, segments, eviction, exact)
            return output(latent, read) + near

        return _stages(config, attend_first, attend_rest)

    # What the maps compute for one layer and loop.

    def write_first(
        self, config: ModelConfig, maps: Maps, inputs: LayerInputs, positions: Int[Array, "B S"]
    ) -> tuple[Float[Array, "B S r1"], Float[Array, "B S r1"]]:
        """Loop-1 latent E_1 h_1, its key part rotated."""
        key = linear(inputs.h, maps["write_k1"][inputs.layer])
        if config.qk_bias:
            key = key + maps["bias_k1"][inputs.layer]
        return self.rotate_first(config, key[:, :, None], positions)[:, :, 0], linear(
            inputs.h, maps["write_v1"][inputs.layer]
        )

    def write_rest(self, maps: Maps, inputs: LayerInputs) -> tuple[Float[Array, "B S rk"], Float[Array, "B S rv"]]:
        """This loop's share E_t h_t of the main latent, not rotated. What the keys' bias adds comes with loop 2's."""
        at = (inputs.layer, inputs.loop - 1)
        key = linear(inputs.h, maps["write_k"][at])
        if "bias_k" in maps:
            key = key + jnp.where(inputs.loop == 1, maps["bias_k"][inputs.layer], 0)
        return key, linear(inputs.h, maps["write_v"][at])

    def write_token(
        self, config: ModelConfig, maps: Maps, h: Float[Array, "T L B d"], position: Int[Array, " B"]
    ) -> dict[str, Float[Array, "L B r"]]:
        """All latents of one token from the states of all loops, summed over the loops in float32, keys rotated."""
        wide = accumulation_dtype(h.dtype)
        first = lambda name: jnp.einsum("lbd,lrd->lbr", h[0], maps[name])
        main = lambda name: jnp.einsum("tlbd,ltrd->ltbr", h[1:], maps[name]).astype(wide).sum(1)

        def turn(rotate: Callable, keys: Float[Array, "L B r"]) -> Float[Array, "L B r"]:
            return jax.vmap(lambda x: rotate(config, x[:, None, None], position[:, None])[:, 0, 0])(keys)

        key, key_first = main("write_k"), first("write_k1")
        if config.qk_bias:
            key, key_first = key + maps["bias_k"][:, None], key_first + maps["bias_k1"][:, None]
        return {
            "latent_k": turn(self.rotate_main, key),
            "latent_v": main("write_v"),
            "latent_k1": turn(self.rotate_first, key_first),
            "latent_v1": first("write_v1"),
        }

    def query_first(
        self, config: ModelConfig, maps: Maps, inputs: LayerInputs, positions: Array
    ) -> Float[Array, "B S H r1"]:
        """Loop 1's rotated latent query."""
        return self.rotate_first(config, _query(inputs.q, maps["read_q1"][inputs.layer]), positions)

    def query_rest(
        self, config: ModelConfig, maps: Maps, inputs: LayerInputs, positions: Array
    ) -> Float[Array, "B S H rk"]:
        """Rotated latent query A_t^T q of loops 2 .. T (Eq. 3)."""
        return self.rotate_main(config, _query(inputs.q, maps["read_q"][inputs.layer, inputs.loop - 1]), positions)

    def rotate_main(
        self, config: ModelConfig, x: Float[Array, "B S N rk"], positions: Array
    ) -> Float[Array, "B S N rk"]:
        """Rotates main latents, or queries to them."""
        return rotate_latent(config, x, positions, self.pair_frequency)

    def rotate_first(
        self, config: ModelConfig, x: Float[Array, "B S N r1"], positions: Array
    ) -> Float[Array, "B S N r1"]:
        """Rotates loop-1 latents, or queries to them."""
        return rotate_latent(config, x, positions, self.pair_frequency_loop1)


def _query(q: Float[Array, "B S H dh"], read: Float[Array, "H dh r"]) -> Float[Array, "B S H r"]:
    """A_t^T q (Eq. 3), not rotated."""
    return jnp.einsum("bshe,her->bshr", q, read).astype(q.dtype)


def output(latent: Float[Array, "B S H rv"], read: Float[Array, "H rv dh"]) -> Float[Array, "B S H dh"]:
    """B_t^T of the weighted sum of value latents (Eq. 4)."""
    return jnp.einsum("bshr,hre->bshe", latent, read).astype(latent.dtype)


def rotate_latent(
    config: ModelConfig,
    x: Float[Array, "B S N r"],
    positions: Int[Array, "B S"],
    pair_frequency: tuple[int, ...] | None,
) -> Float[Array, "B S N r"]:
    """Rotates a latent as r/dh blocks, each like one ordinary head (HLA, Appendix A)."""
    *leading, heads, rank = x.shape
    blocks = rank // config.head_dim
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, accumulation_dtype(x.dtype))
    if pair_frequency is not None:
        frequencies = frequencies[jnp.asarray(pair_frequency)].reshape(blocks, -1)
        frequencies = jnp.tile(frequencies, (heads, 1))
    return rotate(x.reshape(*leading, heads * blocks, config.head_dim), positions, frequencies).reshape(x.shape)


def _rotation(
    config: ModelConfig,
    rank: int,
    pair_frequency: tuple[int, ...] | None,
    positions: Int[Array, " B"],
    dtype: jnp.dtype,
) -> Rotation:
    """What `rotate_latent` does to one token's query, for the kernel to do."""
    half = config.head_dim // 2
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, accumulation_dtype(dtype))
    of_pair = np.arange(rank // 2) % half if pair_frequency is None else np.asarray(pair_frequency)
    angles = positions[:, None] * frequencies[of_pair]
    cos, sin = once((jnp.cos(angles), jnp.sin(angles)))
    return Rotation(cos, sin, half)


def _stages(config: ModelConfig, first, rest) -> list[Stage]:
    return [Stage(range(1), first), Stage(range(1, config.num_loops), rest)]
