"""Uptraining: the loss against the direct formula, locality of the gradient, and a run that improves and resumes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.attention.capture import attention_inputs
from hla_jax.kernels.attention_match import reference
from hla_jax.training import uptrain
from hla_jax.training.optimizer import OptimizerConfig, adamw
from hla_jax.training.step import init, make_step
from tiny import full_rank_hla, random_hla, tiny_config, tiny_params, tiny_tokens

CONFIG = tiny_config()


def batch(length: int = 20) -> dict[str, jax.Array]:
    segments = np.ones((2, length), np.int32)
    segments[0, 12:], segments[1, 15:] = 2, 0
    positions = np.broadcast_to(np.arange(length), segments.shape) + np.where(np.arange(length) > 5, 7, 0)
    return {
        "tokens": tiny_tokens(CONFIG, 2, length),
        "segments": jnp.asarray(segments),
        "positions": jnp.asarray(positions),
    }


def test_loss_and_gradient_equal_the_direct_formula(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autodiff of the S x S formula through all layers at once gives what the local, block-wise gradients give."""
    params, attention, data = tiny_params(CONFIG, "float64"), random_hla(CONFIG, 3, "float64"), batch()
    loss = uptrain.make_loss(attention.scheme, CONFIG)
    (found, (weight, metrics)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        attention.params, data, None, params
    )

    def direct(maps: dict[str, jax.Array]) -> jax.Array:
        h = attention_inputs(params, CONFIG, **data)
        counted = (data["segments"] > 0) / jnp.sum(data["segments"] > 0)
        index = uptrain.all_queries(*data["tokens"].shape)
        total = 0.0
        for layer in range(CONFIG.num_layers):
            mine, p = jax.tree.map(lambda x: x[layer], (maps, params["layers"]))  # noqa: B023
            total += uptrain.layer_divergence(
                attention.scheme, CONFIG, mine, p, h[:, layer], data["positions"], data["segments"], index, counted
            )[0]
        return total / CONFIG.num_layers

    def plain(fitted, fixed, index, counted, window, implementation):
        match = reference.attention_match(fitted, fixed, index, counted, window)
        return match.kl + match.error, match

    monkeypatch.setattr(uptrain, "attention_match", plain)
    expected, expected_gradient = jax.jit(jax.value_and_grad(direct))(attention.params)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert weight == 35
    np.testing.assert_allclose(metrics["kl"] + metrics["error"], expected, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-14), gradient, expected_gradient)


def test_the_divergence_of_a_lossless_latent_is_zero(x64: None) -> None:
    params = tiny_params(CONFIG, "float64")
    attention = full_rank_hla(CONFIG, params, window=0)
    found = jax.jit(lambda maps: uptrain.divergence(attention.scheme, CONFIG, maps, params, **batch()))(
        attention.params
    )
    np.testing.assert_allclose(found.kl, 0, atol=1e-12)
    np.testing.assert_allclose(found.error, 0, atol=1e-12)


@pytest.mark.long
def test_tokens_of_other_documents_and_padding_do_not_matter(x64: None) -> None:
    params, attention, data = tiny_params(CONFIG, "float64"), random_hla(CONFIG, 3, "float64"), batch()
    measure = jax.jit(lambda data: uptrain.divergence(attention.scheme, CONFIG, attention.params, params, **data))
    before = measure(data)
    padding = data["segments"] == 0
    after = measure(data | {"tokens": jnp.where(padding, (data["tokens"] + 1) % CONFIG.vocab_size, data["tokens"])})
    jax.tree.map(np.testing.assert_array_equal, after, before)
    alone = {name: x[:1, :12] for name, x in data.items()}, {name: x[:1, 12:] for name, x in data.items()}
    both = {name: x[:1] for name, x in data.items()}
    kl, first, second = (measure(part).kl for part in (both, *alone))
    np.testing.assert_allclose(kl, (12 * first + 8 * second) / 20, rtol=1e-10)


def test_the_window_goes_by_index(x64: None) -> None:
    """Positions are thousands apart, and random maps are read nowhere, since every token is within the window."""
    params, attention, data = tiny_params(CONFIG, "float64"), random_hla(CONFIG, 20, "float64"), batch()
    data["positions"] = data["positions"] + jnp.where(jnp.arange(20) > 9, 5000, 0)
    measure = jax.jit(lambda data: uptrain.divergence(attention.scheme, CONFIG, attention.params, params, **data))
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 0, atol=1e-12), measure(data))


def test_even_queries_cover_a_row() -> None:
    np.testing.assert_array_equal(uptrain.even_queries(2, 8, 4), [[1, 3, 5, 7]] * 2)
    np.testing.assert_array_equal(uptrain.even_queries(1, 5, 5), [range(5)])
    assert (np.diff(uptrain.even_queries(1, 16_384, 1024)[0]) == 16).all()


def test_random_queries_are_an_unbiased_sample() -> None:
    index = uptrain.random_queries(jax.random.key(0), 64, 10, 4)
    assert index.shape == (64, 4)
    assert (np.diff(index) > 0).all()
    assert set(np.unique(index)) == set(range(10))


@pytest.mark.long
def test_training_lowers_the_loss_and_leaves_the_model_alone() -> None:
    params, attention, data = tiny_params(CONFIG), random_hla(CONFIG, 3), batch()
    before = jax.tree.map(np.asarray, params)
    optimizer = adamw(OptimizerConfig(1e-2, total_steps=30))
    step = make_step(uptrain.make_loss(attention.scheme, CONFIG, queries=10), optimizer, micro_batches=2)
    state = init(attention.params, optimizer, seed=0)
    losses = []
    for _ in range(30):
        state, metrics = step(state, data, params)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    jax.tree.map(np.testing.assert_array_equal, params, before)
    assert set(metrics) == {"loss", "grad_norm", "kl", "error", "kl/loop1", "kl/loop2", "kl/loop3"}


def test_only_hla_is_fitted(tmp_path) -> None:
    from hla_jax.attention.full import FullCache
    from hla_jax.attention.scheme import Attention
    from hla_jax.model import Model

    with pytest.raises(TypeError, match="HLA's maps; found FullCache"):
        uptrain.uptrain(Model(CONFIG, tiny_params(CONFIG)), Attention(FullCache()), None, None, tmp_path)
