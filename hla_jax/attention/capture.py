"""The normed attention inputs of every loop and layer in one exact pass: what calibration measures and uptraining
fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax import sharding
from hla_jax.attention.full import exact_outer, exact_stages
from hla_jax.config import ModelConfig
from hla_jax.models import looped
from hla_jax.models.stages import Attend, LayerInputs, Params

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CAPTURED = (None, None, "batch", "tokens", "captured")
"""Logical axes of what is kept: the largest array of uptraining."""


def attention_inputs(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"] | None = None,
    layers: range | None = None,
) -> Float[Array, "T L B S d"]:
    """h_t of every token (after input_layernorm) in the given layers, from the exact pass at the given positions.

    Args:
      params: the parameter tree.
      config: sizes.
      tokens: token ids.
      positions: of each token, for the rotation.
      segments: only tokens of the same segment see each other.
      layers: consecutive layers to keep; None for all.
    """
    layers = layers or range(config.num_layers)
    captured = jnp.zeros(
        (config.num_loops, len(layers), *tokens.shape, config.hidden_size), params["embed_tokens"].dtype
    )
    captured = sharding.constrain(captured, *CAPTURED)

    def keeping(attend: Attend) -> Attend:
        def attend_and_keep(captured: Array, inputs: LayerInputs) -> tuple[Array, Array]:
            out, _ = attend(None, inputs)
            # Layers outside the range get an index outside the buffer, where writes are dropped.
            index = jnp.where(inputs.layer < layers.start, len(layers), inputs.layer - layers.start)
            return out, captured.at[inputs.loop, index].set(inputs.h, mode="drop")

        return attend_and_keep

    stages = [stage._replace(attend=keeping(stage.attend)) for stage in exact_stages(config, positions, segments)]
    outer = exact_outer(config, positions, segments)
    _, captured = looped.run(params, config, tokens, stages, captured, outer)
    return jax.lax.stop_gradient(sharding.constrain(captured, *CAPTURED))
