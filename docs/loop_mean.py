"""A cache scheme in one file: beyond a window of exact tokens, every loop reads a weighted mean over the loops.

Of a token and layer it stores sum_t w_t k_t and sum_t u_t v_t: as many numbers as single-loop sharing, which is the
weights (0, .., 0, 1). A head has weights of its own; they start equal, and distillation fits them.

Shapes: B batch, S tokens, T loops, G key-value heads, dh head size, W window.
"""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.attention import window
from hla_jax.attention.full import head_angles, rotate_qk
from hla_jax.attention.parallel import exact_attention, hybrid_attention
from hla_jax.attention.registry import register
from hla_jax.attention.scheme import (
    Cache,
    Maps,
    Scheme,
    Transform,
    merge_heads,
    new_token,
    once,
    put_tokens,
    split_heads,
)
from hla_jax.calibration.calibrate import principal_maps
from hla_jax.config import OuroConfig
from hla_jax.kernels.latent_decode.api import latent_decode
from hla_jax.models.stages import LayerInputs, Stage

Buffers = dict[str, Array]


@register
@dataclasses.dataclass(frozen=True)
class LoopMean(Scheme):
    """2 G dh numbers a token and layer, and 2 T G dh W a sequence and layer."""

    interchange = "loop_mean"

    window: int

    # What there is: maps of a layer, buffers that grow with the tokens, the exact window.

    def map_shapes(self, config: OuroConfig) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("weight_k", "weight_v"), (config.num_loops, config.num_kv_heads))

    def token_shapes(self, config: OuroConfig) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("mean_k", "mean_v"), (config.num_layers, config.num_kv_heads * config.head_dim))

    def window_tokens(self) -> int:
        return self.window

    # Attention: `attend(state, inputs)` stands for one layer at one loop.

    def parts(self, maps: Maps, inputs: LayerInputs, k: Array) -> Buffers:
        """What a loop adds to the means, [B, S, G dh]. Rotation is linear: a mean of rotated keys is a rotated mean."""
        weight = lambda name: maps[name][inputs.layer, inputs.loop][:, None]
        return {"mean_k": merge_heads(k * weight("weight_k")), "mean_v": merge_heads(inputs.v * weight("weight_v"))}

    def fill(self, config: OuroConfig, maps: Maps, cache: Cache, tokens: int, lengths: Array) -> Transform[Cache]:
        positions = jnp.arange(tokens)[None]

        def attend(buffers: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            q, k = rotate_qk(config, inputs, positions)
            for name, part in self.parts(maps, inputs, k).items():
                sums = buffers[name][inputs.layer, :, :tokens] + part
                buffers = buffers | {name: put_tokens(buffers[name], inputs.layer, sums)}
            return exact_attention(q, k, inputs.v), window.keep_prompt(config, buffers, inputs, k, lengths)

        return Transform([Stage(range(config.num_loops), attend)], cache.buffers, lambda full: Cache(full, lengths))

    def decode(self, config: OuroConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        at = once(head_angles(config, cache.lengths[:, None], cache.buffers["mean_k"].dtype))
        past, filled = cache.stored("mean_k", "mean_v", self.window), window.filled(cache)

        def attend(new: Buffers, inputs: LayerInputs) -> tuple[Array, Buffers]:
            q, k = rotate_qk(config, inputs, at)
            stored, recent = past._replace(slot=inputs.layer), window.read(config, cache.buffers, inputs, q, k, filled)
            far, near, _ = latent_decode(q[:, 0], stored, config.head_dim**-0.5, recent, implementation=implementation)
            for name, part in self.parts(maps, inputs, k).items():
                new = new | {name: new[name].at[inputs.layer].add(part[:, 0])}
            return (far + near)[:, None], window.note(config, new, inputs, k)

        return Transform([Stage(range(config.num_loops), attend)], new_token(cache.buffers), cache.store)

    def reread(self, config: OuroConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        positions = jnp.arange(tokens)[None]

        def attend(state: None, inputs: LayerInputs) -> tuple[Array, None]:
            q, k = rotate_qk(config, inputs, positions)
            mean_k, mean_v = (cache.buffers[name][inputs.layer] for name in ("mean_k", "mean_v"))
            stored = q, split_heads(mean_k, config.num_kv_heads), split_heads(mean_v, config.num_kv_heads)
            far, near = hybrid_attention(stored, (q, k, inputs.v), self.window, eviction=cache.eviction)
            return far + near, state

        return Transform([Stage(range(config.num_loops), attend)], None, lambda _: cache)


@principal_maps.register(LoopMean)
def equal_weights(scheme: LoopMean, params, config: OuroConfig, sequences) -> Iterator[dict[str, np.ndarray]]:
    """Where training starts, layer by layer; maps that follow from data take it from `sequences`."""
    for _ in range(config.num_layers):
        yield {name: np.full(shape, 1 / config.num_loops) for name, shape in scheme.map_shapes(config).items()}
