"""Random maps: what a closed-form initialisation is measured against, and what time and memory are measured with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.config import ModelConfig


def random_maps(scheme: Scheme, config: ModelConfig, seed: int, dtype: DTypeLike = jnp.float32) -> Attention:
    """Maps drawn as those of a linear layer are, with variance 1 / inputs of a linear codec; means and biases are zero.

    Raises:
      SchemeError: the scheme's sizes do not fit the model.
    """
    scheme.check(config)
    shapes = {name: (config.num_layers, *shape) for name, shape in scheme.map_shapes(config).items()}
    generator = np.random.default_rng(seed)  # jax.random would compile a program for every shape

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name.endswith("_mean") or name.startswith("bias"):
            return jnp.zeros(shape, dtype)
        return jnp.asarray(generator.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5), dtype)

    return Attention(scheme, {name: draw(name, shape) for name, shape in shapes.items()})
