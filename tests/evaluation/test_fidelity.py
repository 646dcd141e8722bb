"""Decoding KL and attention KL against values computed another way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.evaluation import fidelity, together
from hla_jax.evaluation.estimates import Estimate
from hla_jax.evaluation.schemes import FULL, HLA_INITIAL, HLA_UPTRAINED, REUSE, SHARED, side_by_side
from hla_jax.generation import decode
from hla_jax.generation.generate import decode_forced
from hla_jax.model import Model, forward, forward_swapped
from hla_jax.training.uptrain import divergence
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
PROMPT = 5


@pytest.fixture(scope="module")
def model() -> Model:
    config = tiny.tiny_config()
    return Model(config, tiny.tiny_params(config))


@pytest.fixture(scope="module")
def schemes(model):
    return side_by_side(
        tiny.random_hla(model.config, window=3), tiny.full_rank_hla(model.config, model.params, window=3)
    )


@pytest.fixture(scope="module")
def tokens(model):
    return np.asarray(tiny.tiny_tokens(model.config, 3, 18))


@pytest.fixture(scope="module")
def found(model, schemes, tokens):
    """In batches of two, so that the last is filled up."""
    return fidelity.compare_decoding(model, schemes, tokens, PROMPT, batch_size=2)


def test_agrees_with_logits_of_forced_decoding(model, schemes, tokens, found):
    assert set(found) == {HLA_INITIAL, HLA_UPTRAINED, SHARED, REUSE}
    full, other = (
        np.asarray(decode_forced(model, tokens, PROMPT, schemes[name]), np.float64)[:, PROMPT:]
        for name in (FULL, SHARED)
    )
    full, other = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (full, other))
    kl = np.sum(np.exp(full) * (full - other), axis=-1)
    got = found[SHARED]
    np.testing.assert_allclose(got.kl.mean, kl.mean(), rtol=1e-4)
    np.testing.assert_allclose(got.kl.stderr, np.std(kl.mean(1), ddof=1) / np.sqrt(3), rtol=1e-4)
    np.testing.assert_allclose(got.top1.mean, (full.argmax(-1) == other.argmax(-1)).mean(), rtol=1e-6)
    assert [(part.start, part.stop) for part in got.by_position] == [(5, 6), (6, 12), (12, 18)]
    np.testing.assert_allclose(
        [part.kl.mean for part in got.by_position],
        [kl[:, :1].mean(), kl[:, 1:7].mean(), kl[:, 7:].mean()],
        rtol=1e-4,
    )
    same = full.argmax(-1) == other.argmax(-1)
    assert [part.top1.mean for part in got.by_position] == pytest.approx(
        [same[:, :1].mean(), same[:, 1:7].mean(), same[:, 7:].mean()]
    )


def test_what_loses_nothing_does_not_diverge(found):
    assert found[HLA_UPTRAINED].kl.mean < 1e-6
    assert found[HLA_UPTRAINED].top1.mean == 1
    assert found[HLA_INITIAL].kl.mean > 1e-3
    assert found[REUSE].kl.mean > 1e-3


def test_swapped_divergence_is_that_of_the_swapped_logits(model, schemes, tokens):
    kl, error = fidelity.swapped_divergence(model, schemes[SHARED], tokens)
    exact, swapped = (
        np.asarray(x, np.float64) for x in (forward(model, tokens), forward_swapped(model, tokens, schemes[SHARED]))
    )
    exact, swapped = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (exact, swapped))
    np.testing.assert_allclose(kl, np.sum(np.exp(exact) * (exact - swapped), axis=-1).mean(axis=1), rtol=1e-3)
    assert error.shape == (3, model.config.num_loops)
    # The last loop reads its own keys and values, though of hidden states that the others have changed.
    assert np.all(error > 1e-3)
    full, none = fidelity.swapped_divergence(model, schemes[FULL], tokens)
    np.testing.assert_allclose(full, 0, atol=1e-6)
    np.testing.assert_allclose(none, 0, atol=1e-8)


def test_attention_divergence_is_that_of_uptraining(model, schemes, tokens):
    hla = schemes[HLA_INITIAL]
    got = fidelity.attention_divergence(model, hla, tokens, batch_size=2)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    direct = jax.jit(divergence, static_argnums=(0, 1))
    expected = direct(hla.scheme, model.config, hla.params, model.params, tokens, positions, jnp.ones_like(positions))
    np.testing.assert_allclose(got.kl, expected.kl, rtol=1e-5)
    np.testing.assert_allclose(got.error, expected.error, rtol=1e-5)
    np.testing.assert_allclose(got.mean_kl, np.mean(expected.kl), rtol=1e-5)
    assert np.shape(got.kl_by_layer) == (model.config.num_layers, model.config.num_loops)
    np.testing.assert_allclose(np.mean(got.kl_by_layer, axis=0), expected.kl, rtol=1e-5)
    assert np.ptp(got.kl_by_layer, axis=0).min() > 1e-4


@pytest.mark.long
def test_one_pass_fills_every_cache_as_its_own_pass_would(model, schemes, tokens):
    lengths = jnp.asarray([18, 7, 1])
    fill = jax.jit(
        lambda params: together.prefill_hidden(params, model.config, schemes, jnp.asarray(tokens), lengths, 20)
    )
    hidden, caches = fill(model.params)
    for name, attention in schemes.items():
        own = jax.jit(decode.prefill_hidden, static_argnums=(1, 5))
        alone, cache = own(model.params, model.config, attention, jnp.asarray(tokens), lengths, 20)
        np.testing.assert_allclose(hidden[name], alone, atol=1e-5)
        for buffer, expected in cache.buffers.items():
            np.testing.assert_allclose(caches[name].buffers[buffer], expected, atol=2e-5, err_msg=f"{name} {buffer}")
        np.testing.assert_array_equal(decode.last_hidden(hidden[name], lengths)[1], hidden[name][1, 6])


def test_prompts_that_leave_nothing_to_decode_are_refused(model, schemes, tokens):
    with pytest.raises(ValueError, match=r"1 \.\. 17 for sequences of 18 tokens, found 18"):
        fidelity.compare_decoding(model, schemes, tokens, 18)
    with pytest.raises(TypeError, match="FullCache"):
        fidelity.attention_divergence(model, Attention(FullCache()), tokens)


def test_estimates():
    assert Estimate.of(np.array([2.0])) == Estimate(2.0, None, 1)
    assert Estimate.of(np.array([1.0, 3.0])) == Estimate(2.0, 1.0, 2)
