"""Linear codecs along the other axes of a looped cache, which the LLA paper compares the loop axis with.

They write and rebuild as LLA does, but a latent stands for one loop only, so it is complete as soon as that loop is: a
new token takes one pass, reads the past rebuilt and itself exactly, and prompts are exact.

Shapes: L layers, T loops, G key-value heads, dh head size, ranks rk and rv.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.attention.codec import Axis, Codec, Part
from hla_jax.attention.scheme import Maps, SchemeError, Shape
from hla_jax.config import ModelConfig

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class HeadLatent(Codec):
    """A latent of all heads for each loop (multi-head latent attention, converted): T (rk + rv) numbers a token and
    layer.

    Attributes:
      rank_k, rank_v: of a latent that stands for the G dh numbers of one loop.
    """

    interchange = "head_latent"

    def leading(self, config: ModelConfig) -> Shape:
        return (config.num_loops,)

    def axis(self, config: ModelConfig) -> Axis:
        return Axis(config.num_loops * config.num_layers, 1, config.num_kv_heads * config.head_dim)

    def slot(self, config: ModelConfig, loop: Array | int, layer: Array | int) -> Array | int:
        return loop * config.num_layers + layer

    def part(self, config: ModelConfig, maps: Maps, name: str, loop: Array, layer: Array) -> Part:
        down, up, mean = (maps[f"{name}_{part}"][layer, loop] for part in ("down", "up", "mean"))
        heads = config.num_kv_heads, config.head_dim
        return Part(down.reshape(*heads, -1), jnp.moveaxis(up.reshape(-1, *heads), 0, 1), mean.reshape(heads))

    def trajectories(self, config: ModelConfig, x: Float[Array, "n T N G dh"]) -> Float[Array, "N latents size"]:
        return jnp.moveaxis(x[0], 0, 1).reshape(x.shape[2], config.num_loops, -1)

    def spread(
        self,
        config: ModelConfig,
        down: Float[np.ndarray, "latents size r"],
        up: Float[np.ndarray, "latents r size"],
        mean: Float[np.ndarray, "latents size"],
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        return [(down, up, mean)]


@dataclasses.dataclass(frozen=True)
class LayerLatent(Codec):
    """A latent that `layers` adjacent layers share, for each loop and head: T G (rk + rv) / layers numbers a token and
    layer.

    Attributes:
      rank_k, rank_v: of a latent that stands for the `layers` dh numbers of one head at one loop.
      layers: how many share one; the model's layers are a multiple of it.
    """

    interchange = "layer_latent"

    layers: int = 2

    def check(self, config: ModelConfig) -> None:
        if self.layers < 1 or config.num_layers % self.layers:
            raise SchemeError(f"layers must divide the model's {config.num_layers}, found {self.layers}")
        super().check(config)

    def leading(self, config: ModelConfig) -> Shape:
        return config.num_loops, config.num_kv_heads

    def axis(self, config: ModelConfig) -> Axis:
        slots = config.num_loops * config.num_layers // self.layers
        return Axis(slots, config.num_kv_heads, self.layers * config.head_dim, self.layers)

    def slot(self, config: ModelConfig, loop: Array | int, layer: Array | int) -> Array | int:
        return loop * (config.num_layers // self.layers) + layer // self.layers

    def part(self, config: ModelConfig, maps: Maps, name: str, loop: Array, layer: Array) -> Part:
        return Part(*(maps[f"{name}_{part}"][layer, loop] for part in ("down", "up", "mean")))

    def trajectories(self, config: ModelConfig, x: Float[Array, "n T N G dh"]) -> Float[Array, "N latents size"]:
        return jnp.einsum("ntjge->jtgne", x).reshape(x.shape[2], -1, self.layers * config.head_dim)

    def spread(
        self,
        config: ModelConfig,
        down: Float[np.ndarray, "latents size r"],
        up: Float[np.ndarray, "latents r size"],
        mean: Float[np.ndarray, "latents size"],
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        latents = config.num_loops, config.num_kv_heads
        down = down.reshape(*latents, self.layers, config.head_dim, -1)
        up = up.reshape(*latents, -1, self.layers, config.head_dim)
        mean = mean.reshape(*latents, self.layers, config.head_dim)
        return [(down[:, :, layer], up[:, :, :, layer], mean[:, :, layer]) for layer in range(self.layers)]
