"""Pretraining with HLA from the first step, so that hidden states adapt to the latent (what section 6 of the HLA paper
leaves to future work).

The loss is that of `training.pretrain`, with the two passes of fine-tuning in the place of exact attention. There is no
exact prompt: every token reads the past as decoding does. Weights and maps train together.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Maps
from hla_jax.training import pretrain, step
from hla_jax.training.two_pass import two_pass_hidden


def init(recipe: pretrain.Recipe, maps: Maps, optimizer: optax.GradientTransformation) -> step.TrainState:
    """The state before the first update: the weights of pretraining, and the maps beside them."""
    base = pretrain.init(recipe).params
    return step.init({"base": base, "maps": dict(maps)}, optimizer, recipe.seed)


def make_loss(recipe: pretrain.Recipe, scheme: HLA, repetitions: int = 0) -> step.Loss:
    """The loss of {"base": weights, "maps": maps} on one batch of `Curriculum.batch`.

    Raises:
      ValueError: a stage shifts positions, which two passes count from the start of each document.
    """
    config = recipe.model
    scheme.check(config)
    if any(stage.shift for stage in recipe.stages):
        raise ValueError("two passes count positions from the start of each document: no stage may shift them")

    def loss(
        params: dict[str, Any], batch: dict[str, Array], rng: Array, constants: None
    ) -> tuple[Array, tuple[Array, step.Metrics]]:
        base, tokens = params["base"], batch["tokens"]
        everywhere = jnp.ones(tokens.shape, bool)
        hidden = two_pass_hidden(
            base,
            params["maps"],
            scheme,
            config,
            tokens,
            everywhere,
            batch["segments"],
            repetitions=repetitions,
            every_loop=True,
        )
        return pretrain.of_hidden(recipe, base, hidden, batch)

    return loss
