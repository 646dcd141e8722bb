"""Single-loop sharing: every loop reads the last loop's keys and values beyond a window of its own (baseline of the HLA
paper).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

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
from hla_jax.config import OuroConfig
from hla_jax.kernels.latent_decode.api import latent_decode
from hla_jax.models.ouro import LayerInputs, Stage

if TYPE_CHECKING:
    from jaxtyping import Int

Buffers = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class SharedLoop(Scheme):
    """The last loop's keys and values of every token, and own ones of the last `window` tokens; `window=0` is
    final-loop reuse.

    Stores 2 G dh numbers a token and layer, and 2 T G dh W a sequence and layer.
    """

    interchange = "shared_loop"

    window: int

    def check(self, config: OuroConfig) -> None:
        if self.window < 0:
            raise SchemeError(f"window must be at least 0, found {self.window}")

    def window_tokens(self) -> int:
        return self.window

    def token_shapes(self, config: OuroConfig) -> dict[str, Shape]:
        return dict.fromkeys(("last_k", "last_v"), (config.num_layers, config.num_kv_heads * config.head_dim))

    def reads(self, config: OuroConfig) -> dict[str, int]:
        return super().reads(config) | dict.fromkeys(("last_k", "last_v"), config.num_loops)

    def fill(
        self, config: OuroConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        positions = jnp.arange(tokens)[None]

        def attend(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            q, k = rotate_qk(config, inputs, positions)
            return exact_attention(q, k, inputs.v), window.keep_prompt(config, buffers, inputs, k, lengths)

        def attend_last(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            _, k = rotate_qk(config, inputs, positions)
            out, buffers = attend(buffers, inputs)
            return out, buffers | {
                "last_k": put_tokens(buffers["last_k"], inputs.layer, merge_heads(k)),
                "last_v": put_tokens(buffers["last_v"], inputs.layer, merge_heads(inputs.v)),
            }

        return Transform(
            self._stages(config, attend, attend_last), cache.buffers, lambda buffers: Cache(buffers, lengths)
        )

    def decode(self, config: OuroConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        buffers, position = cache.buffers, cache.lengths
        at = once(head_angles(config, position[:, None], buffers["last_k"].dtype))
        past, filled = cache.stored("last_k", "last_v", self.window), window.filled(cache)

        def attend(new: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            q, k = rotate_qk(config, inputs, at)
            far, near, _ = latent_decode(
                q[:, 0],
                past._replace(slot=inputs.layer),
                config.head_dim**-0.5,
                window.read(config, buffers, inputs, q, k, filled),
                implementation=implementation,
            )
            return (far + near)[:, None], window.note(config, new, inputs, k)

        def attend_last(new: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            _, k = rotate_qk(config, inputs, at)
            out, new = attend(new, inputs)
            return out, new | {
                "last_k": new["last_k"].at[inputs.layer].set(merge_heads(k[:, 0])),
                "last_v": new["last_v"].at[inputs.layer].set(merge_heads(inputs.v[:, 0])),
            }

        return Transform(self._stages(config, attend, attend_last), new_token(buffers), cache.store)

    def reread(self, config: OuroConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        positions, buffers = jnp.arange(tokens)[None], cache.buffers

        def attend(state: None, inputs: LayerInputs) -> tuple[Array, None]:
            q, k = rotate_qk(config, inputs, positions)
            last_k, last_v = (split_heads(buffers[n][inputs.layer], config.num_kv_heads) for n in ("last_k", "last_v"))
            far, near = hybrid_attention((q, last_k, last_v), (q, k, inputs.v), self.window, eviction=cache.eviction)
            return far + near, None

        return Transform([Stage(range(config.num_loops), attend)], None, lambda _: cache)

    def _stages(self, config: OuroConfig, attend, attend_last) -> list[Stage]:
        last = config.num_loops - 1
        return [Stage(range(last), attend), Stage(range(last, last + 1), attend_last)]
