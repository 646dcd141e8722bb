"""Random maps of a linear codec: what its closed-form initialisation is measured against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hla_jax.attention.codec import Codec
from hla_jax.attention.scheme import Attention
from hla_jax.config import OuroConfig


def random_maps(scheme: Codec, config: OuroConfig, seed: int) -> Attention:
    """Maps drawn as those of a linear layer are, with variance 1 / inputs; the means are zero.

    Raises:
      SchemeError: the scheme's sizes do not fit the model.
    """
    scheme.check(config)
    shapes = {name: (config.num_layers, *shape) for name, shape in scheme.map_shapes(config).items()}
    keys = jax.random.split(jax.random.key(seed), len(shapes))

    def draw(key: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
        return jnp.zeros(shape) if name.endswith("_mean") else jax.random.normal(key, shape) * shape[-2] ** -0.5

    return Attention(scheme, {name: draw(key, name, shape) for key, (name, shape) in zip(keys, shapes.items())})
