"""Low-rank updates: nothing at the start, the same merged and applied on the side, and mistakes named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.models.layers import linear
from hla_jax.training import lora
from hla_jax.training.lora import Lora
from tests.tiny import tiny_config, tiny_params

CONFIG = tiny_config()
LORA = Lora(rank=2, alpha=6.0, targets=("q_proj", "down_proj"))


def test_updates_start_as_the_base_model():
    params = tiny_params(CONFIG, "bfloat16")
    updates = lora.init(LORA, params, jax.random.key(0))
    merged = lora.merge(LORA, params, updates)
    jax.tree.map(np.testing.assert_array_equal, merged, params)
    assert {name: update["a"].dtype for name, update in updates.items()} == dict.fromkeys(LORA.targets, jnp.float32)
    assert np.std(updates["q_proj"]["a"]) == pytest.approx(CONFIG.hidden_size**-0.5, rel=0.3)


@pytest.mark.usefixtures("x64")
def test_merged_is_unmerged():
    """W x + (alpha / r) B A x, layer by layer, and untouched matrices stay."""
    params = tiny_params(CONFIG, "float64")
    updates = lora.init(LORA, params, jax.random.key(0))
    updates = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(1), x.shape), updates)
    merged = lora.merge(LORA, params, updates)["layers"]
    rng = np.random.default_rng(0)
    for name, update in updates.items():
        for layer, matrix in enumerate(params["layers"][name]):
            x = jnp.asarray(rng.normal(size=(3, matrix.shape[1])))
            aside = linear(x, matrix) + 3.0 * linear(linear(x, update["a"][layer]), update["b"][layer])
            np.testing.assert_allclose(linear(x, merged[name][layer]), aside, atol=1e-12)
    np.testing.assert_array_equal(merged["k_proj"], params["layers"]["k_proj"])


def test_every_matrix_of_a_layer_can_have_one():
    params = tiny_params(CONFIG)
    matrices = {name for name, leaf in params["layers"].items() if leaf.ndim == 3}
    assert set(lora.MATRICES) == matrices
    assert lora.init(Lora(2, 4.0), params, jax.random.key(0)).keys() == matrices


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lora(-1, 1.0), "rank must be at least 0, found -1"),
        (lambda: Lora(2, 1.0, ("embed_tokens",)), "targets must be some of q_proj, .*; found embed_tokens"),
        (lambda: Lora(2, 1.0, ()), "found none"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
