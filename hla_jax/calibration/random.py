"""Random maps: what a closed-form initialisation is measured against, and what time and memory are measured with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.config import OuroConfig


def random_maps(scheme: Scheme, config: OuroConfig, seed: int, dtype: DTypeLike = jnp.float32) -> Attention:
    """Maps drawn as those of a linear layer are, with variance 1 / inputs of a linear codec; means are zero.

    Raises:
      SchemeError: the scheme's sizes do not fit the model.
    """
    scheme.check(config)
    shapes = {name: (config.num_layers, *shape) for name, shape in scheme.map_shapes(config).items()}
    keys = jax.random.split(jax.random.key(seed), max(1, len(shapes)))

    def draw(key: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
        if name.endswith("_mean"):
            return jnp.zeros(shape, dtype)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-2] ** -0.5, dtype)

    return Attention(scheme, {name: draw(key, name, shape) for key, (name, shape) in zip(keys, shapes.items())})
