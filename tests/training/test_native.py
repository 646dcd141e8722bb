"""Pretraining with HLA from the first step: within the window it is pretraining, beyond it the decoding rule."""

import dataclasses

import jax
import numpy as np
import pytest

from hla_jax.data.curriculum import Curriculum, Stage
from hla_jax.data.positions import ShiftConfig
from hla_jax.training import native, pretrain
from tests.tiny import random_hla, tiny_config

CONFIG = tiny_config(vocab_size=130, num_layers=1, num_loops=2)
STAGES = (Stage(2, 2, 48, {"copy": 1.0}, filler=0.0),)
RECIPE = pretrain.Recipe(CONFIG, STAGES, warmup_steps=1)

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.long
def test_loss_is_that_of_pretraining_within_the_window():
    """And another beyond it, with a gradient for all weights and maps."""
    batch = Curriculum(STAGES, ["x = 1\n" * 60], lambda text: [ord(c) for c in text], end=1, seed=0).batch(0)
    params = pretrain.init(RECIPE).params
    expected, (weight, metrics) = jax.jit(pretrain.make_loss(RECIPE))(params, batch, None, None)

    wide = random_hla(CONFIG, 48)
    state = native.init(RECIPE, wide.params, pretrain.optimizer(RECIPE))
    loss = jax.jit(native.make_loss(RECIPE, wide.scheme))
    value, (found_weight, found) = loss(state.params, batch, None, None)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert found_weight == weight
    assert found.keys() == metrics.keys()

    narrow = random_hla(CONFIG, 2)
    loss = jax.jit(jax.value_and_grad(native.make_loss(RECIPE, narrow.scheme), has_aux=True))
    (value, _), grads = loss({"base": params, "maps": narrow.params}, batch, None, None)
    assert abs(value - expected) > 1e-4
    assert all(np.any(grad) for grad in jax.tree.leaves(grads))


def test_shifted_positions_are_refused():
    shifted = dataclasses.replace(RECIPE, stages=(dataclasses.replace(STAGES[0], shift=ShiftConfig()),))
    with pytest.raises(ValueError, match="no stage may shift them"):
        native.make_loss(shifted, random_hla(CONFIG, 2).scheme)
