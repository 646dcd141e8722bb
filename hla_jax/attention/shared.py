"""Sharing between loops: beyond a window of its own, every loop reads the keys and values of one of the last loops.

With one slot it is single-loop sharing (baseline of the HLA paper), with more of them a look-up of Huginn's own code
(arXiv:2502.05171): loop t keeps and reads slot t mod `slots`, so what stays of a token are its last `slots` loops.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from hla_jax.attention import window
from hla_jax.attention.full import head_angles, rotate_qk
from hla_jax.attention.parallel import exact_attention, hybrid_attention
from hla_jax.attention.scheme import (
    Cache,
    Maps,
    Scheme,
    SchemeError,
    Shape,
    Transform,
    merge_heads,
    new_token,
    once,
    put_tokens,
    split_heads,
)
from hla_jax.config import ModelConfig
from hla_jax.kernels.latent_decode.api import latent_decode
from hla_jax.models.stages import Attend, LayerInputs, Stage

if TYPE_CHECKING:
    from jaxtyping import Int

Buffers = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class SharedLoop(Scheme):
    """The last loops' keys and values of every token, and own ones of the last `window` tokens.

    Stores 2 slots G dh numbers a token and layer, and 2 T G dh W a sequence and layer.

    Attributes:
      window: W, recent tokens of which every loop reads its own keys and values.
      slots: how many of the last loops stay; a loop reads the one that is congruent to it modulo `slots`. One and
        `window=0` is final-loop reuse, as many as the model's loops the full cache.
    """

    interchange = "shared_loop"

    window: int
    slots: int = 1

    def check(self, config: ModelConfig) -> None:
        if self.window < 0:
            raise SchemeError(f"window must be at least 0, found {self.window}")
        if not 1 <= self.slots <= config.num_loops:
            raise SchemeError(f"slots must be in 1 .. {config.num_loops}, the model's loops; found {self.slots}")

    def window_tokens(self) -> int:
        return self.window

    def token_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        width = config.num_kv_heads * config.head_dim
        return dict.fromkeys(("last_k", "last_v"), (self.slots * config.num_layers, width))

    def reads(self, config: ModelConfig) -> dict[str, float]:
        return super().reads(config) | dict.fromkeys(("last_k", "last_v"), config.num_loops / self.slots)

    def to_config(self) -> dict[str, Any]:
        """Leaves `slots` out where there is one, as it was before there could be more."""
        entry = super().to_config()
        return entry if self.slots > 1 else {"window": self.window}

    def fill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        positions = jnp.arange(tokens)[None]

        def attend(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            q, k = rotate_qk(config, inputs, positions)
            return exact_attention(q, k, inputs.v), window.keep_prompt(config, buffers, inputs, k, lengths)

        def attend_last(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            _, k = rotate_qk(config, inputs, positions)
            out, buffers = attend(buffers, inputs)
            slot = self._slot(config, inputs)
            return out, buffers | {
                "last_k": put_tokens(buffers["last_k"], slot, merge_heads(k)),
                "last_v": put_tokens(buffers["last_v"], slot, merge_heads(inputs.v)),
            }

        return Transform(
            self._stages(config, attend, attend_last), cache.buffers, lambda buffers: Cache(buffers, lengths)
        )

    def decode(self, config: ModelConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        buffers, position = cache.buffers, cache.lengths
        at = once(head_angles(config, position[:, None], buffers["last_k"].dtype))
        past, filled = cache.stored("last_k", "last_v", self.window), window.filled(cache)

        def attend(new: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            q, k = rotate_qk(config, inputs, at)
            far, near, _ = latent_decode(
                q[:, 0],
                past._replace(slot=self._slot(config, inputs)),
                config.head_dim**-0.5,
                window.read(config, buffers, inputs, q, k, filled),
                implementation=implementation,
            )
            return (far + near)[:, None], window.note(config, new, inputs, k)

        def attend_last(new: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            _, k = rotate_qk(config, inputs, at)
            out, new = attend(new, inputs)
            slot = self._slot(config, inputs)
            return out, new | {
                "last_k": new["last_k"].at[slot].set(merge_heads(k[:, 0])),
                "last_v": new["last_v"].at[slot].set(merge_heads(inputs.v[:, 0])),
            }

        return Transform(self._stages(config, attend, attend_last), new_token(buffers), cache.store)

    def reread(self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        positions, buffers = jnp.arange(tokens)[None], cache.buffers

        def attend(state: None, inputs: LayerInputs) -> tuple[Array, None]:
            q, k = rotate_qk(config, inputs, positions)
            slot = self._slot(config, inputs)
            last_k, last_v = (split_heads(buffers[name][slot], config.num_kv_heads) for name in ("last_k", "last_v"))
            far, near = hybrid_attention((q, last_k, last_v), (q, k, inputs.v), self.window, eviction=cache.eviction)
            return far + near, None

        return Transform([Stage(range(config.num_loops), attend)], None, lambda _: cache)

    def _slot(self, config: ModelConfig, inputs: LayerInputs) -> Array:
        """Where a layer at a loop is stored, and read."""
        return inputs.loop % self.slots * config.num_layers + inputs.layer

    def _stages(self, config: ModelConfig, attend: Attend, attend_last: Attend) -> list[Stage]:
        """Loops that nothing stays of, and the last ones."""
        first = config.num_loops - self.slots
        stages = Stage(range(first), attend), Stage(range(first, config.num_loops), attend_last)
        return [stage for stage in stages if stage.loops]
