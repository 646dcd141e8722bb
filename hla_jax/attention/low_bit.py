"""Low-bit keys and values: uniform codes of 8, 4 or 2 bits (the precision baseline of the LLA paper).

Keys have outlying channels that are the same for all tokens, values do not (KIVI, arXiv:2402.02750): a channel of the
keys has a fixed quantiser from calibration, before rotation mixes channels (KVQuant, arXiv:2401.18079), and the values
of each token, head, loop and layer have their own. All levels are

    low + step code,      code = 0 .. 2^bits - 1

A new token reads rebuilt keys and values of the past, and its own exactly. Prompts are exact.

Shapes: B batch, S tokens, C capacity, L layers, T loops, G key-value heads, dh head size.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from hla_jax.attention.codec import rebuilt_past
from hla_jax.attention.full import decode_exact, rotate_qk
from hla_jax.attention.parallel import exact_attention, hybrid_attention
from hla_jax.attention.scheme import (
    Cache,
    Maps,
    Scheme,
    SchemeError,
    Shape,
    Transform,
    new_token,
    put_tokens,
    slot_of,
)
from hla_jax.config import ModelConfig
from hla_jax.models.layers import accumulation_dtype, inverse_frequencies, rotate
from hla_jax.models.stages import LayerInputs, Stage

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt8

Buffers = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class LowBit(Scheme):
    """Codes of `bits` bits for keys and values: 2 T G dh bits / 8 + 4 T G bytes a token and layer."""

    interchange = "low_bit"

    bits: int

    def check(self, config: ModelConfig) -> None:
        if self.bits not in (8, 4, 2):
            raise SchemeError(f"bits must be 8, 4 or 2, found {self.bits}")
        if config.head_dim * self.bits % 8:
            raise SchemeError(
                f"head_dim must be a multiple of {8 // self.bits}, the codes of {self.bits} bits in a byte; "
                f"found {config.head_dim}"
            )

    def map_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        return dict.fromkeys(("k_center", "k_step"), (config.num_loops, config.num_kv_heads, config.head_dim))

    def token_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        heads = config.num_loops * config.num_layers, config.num_kv_heads
        codes, scales = (*heads, config.head_dim * self.bits // 8), heads
        return {"code_k": codes, "code_v": codes, "low_v": scales, "step_v": scales}

    def cache_shapes(
        self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike
    ) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = super().cache_shapes(config, batch, capacity, dtype)
        kind = lambda name: jnp.uint8 if name.startswith("code") else jnp.float16
        return {name: jax.ShapeDtypeStruct(buffer.shape, kind(name)) for name, buffer in shapes.items()}

    def fill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        positions = jnp.arange(tokens)[None]

        def attend(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            q, k = rotate_qk(config, inputs, positions)
            slot = slot_of(config, inputs)
            written = self.encode(maps, inputs)
            buffers = {name: put_tokens(buffer, slot, written[name]) for name, buffer in buffers.items()}
            return exact_attention(q, k, inputs.v), buffers

        return Transform(
            [Stage(range(config.num_loops), attend)], cache.buffers, lambda buffers: Cache(buffers, lengths)
        )

    def decode(self, config: ModelConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        positions = cache.positions(cache.buffers["code_k"].shape[2])

        def attend(new: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            slot = slot_of(config, inputs)
            stored = {name: buffer[slot] for name, buffer in cache.buffers.items()}
            past = self.rebuilt(config, maps, inputs, stored, positions)
            written = self.encode(maps, inputs)
            new = {name: value.at[slot].set(written[name][:, 0].astype(value.dtype)) for name, value in new.items()}
            q, k = rotate_qk(config, inputs, cache.lengths[:, None])
            return decode_exact(q, k, inputs.v, rebuilt_past(cache, *past), implementation), new

        return Transform([Stage(range(config.num_loops), attend)], new_token(cache.buffers), cache.store)

    def reread(self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        positions = jnp.arange(tokens)[None]
        buffers = {name: buffer[:, :, :tokens] for name, buffer in cache.buffers.items()}

        def attend(state: None, inputs: LayerInputs) -> tuple[Array, None]:
            q, k = rotate_qk(config, inputs, positions)
            stored = {name: buffer[slot_of(config, inputs)] for name, buffer in buffers.items()}
            past = self.rebuilt(config, maps, inputs, stored, positions)
            far, itself = hybrid_attention((q, *past), (q, k, inputs.v), 0, eviction=cache.eviction)
            return far + itself, None

        return Transform([Stage(range(config.num_loops), attend)], None, lambda _: cache)

    def encode(self, maps: Maps, inputs: LayerInputs) -> Buffers:
        """What a layer at a loop stores of its keys (before rotation) and values: [B, S, G, ...] for each buffer."""
        v = inputs.v.astype(accumulation_dtype(inputs.v.dtype))
        low = jnp.min(v, axis=-1).astype(jnp.float16)
        # Codes are chosen for the scales as they are stored, so that rounding these costs little.
        step = ((jnp.max(v, axis=-1) - low) / (2**self.bits - 1)).astype(jnp.float16)
        return {
            "code_k": quantise(inputs.k, *self._scales_k(maps, inputs), self.bits),
            "code_v": quantise(v, low[..., None], step[..., None], self.bits),
            "low_v": low,
            "step_v": step,
        }

    def rebuilt(
        self, config: ModelConfig, maps: Maps, inputs: LayerInputs, stored: Buffers, positions: Int[Array, "#B C"]
    ) -> tuple[Float[Array, "B C G dh"], Float[Array, "B C G dh"]]:
        """Rotated keys, and values, of one layer and loop from what it stored."""
        dtype = inputs.q.dtype
        wide = accumulation_dtype(dtype)
        low, step = (stored[name][..., None].astype(wide) for name in ("low_v", "step_v"))
        k = dequantise(stored["code_k"], *self._scales_k(maps, inputs), self.bits)
        v = dequantise(stored["code_v"], low, step, self.bits)
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, wide)
        return rotate(k, positions, frequencies).astype(dtype), v.astype(dtype)

    def _scales_k(self, maps: Maps, inputs: LayerInputs) -> tuple[Float[Array, "G dh"], Float[Array, "G dh"]]:
        """Lowest level and step of every channel of the keys of a layer at a loop."""
        center, step = (maps[name][inputs.layer, inputs.loop] for name in ("k_center", "k_step"))
        return center - (2**self.bits - 1) / 2 * step, step


def quantise(x: Float[Array, "... n"], low: Array, step: Array, bits: int) -> UInt8[Array, "... n*bits/8"]:
    """Codes of the nearest levels, packed."""
    # Numbers that do not vary have step 0, and any code.
    codes = jnp.round((x - low) / jnp.where(step == 0, 1, step))
    return pack(jnp.clip(codes, 0, 2**bits - 1).astype(jnp.uint8), bits)


def dequantise(packed: UInt8[Array, "... n*bits/8"], low: Array, step: Array, bits: int) -> Float[Array, "... n"]:
    """The levels of packed codes."""
    return low + unpack(packed, bits) * step


def pack(codes: UInt8[Array, "... n"], bits: int) -> UInt8[Array, "... n*bits/8"]:
    """8 / bits adjacent codes in a byte, the first in its lowest bits."""
    grouped = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    return jnp.bitwise_or.reduce(grouped << jnp.arange(0, 8, bits, dtype=jnp.uint8), axis=-1)


def unpack(packed: UInt8[Array, "... n*bits/8"], bits: int) -> UInt8[Array, "... n"]:
    """The inverse of `pack`."""
    codes = packed[..., None] >> jnp.arange(0, 8, bits, dtype=jnp.uint8) & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)
