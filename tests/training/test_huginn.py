"""Training of maps and two-pass fine-tuning run unchanged on Huginn: biased keys, layers outside of the loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hla_jax
from hla_jax.attention.scheme import Attention
from hla_jax.training import distill, two_pass, uptrain
from tiny import tiny_huginn, tiny_params, tiny_tokens

pytestmark = pytest.mark.usefixtures("quick_compile")
CONFIG = tiny_huginn(num_loops=3, num_coda=1)
REST, ONE = (CONFIG.num_loops - 1) * CONFIG.hidden_size, CONFIG.hidden_size
FULL_RANK = hla_jax.HLA(rank_k=REST, rank_v=REST, rank_loop1=ONE, window=0)


def lossless(scheme, dtype="float64"):
    model = hla_jax.Model(CONFIG, tiny_params(CONFIG, dtype))
    tokens = tiny_tokens(CONFIG, 2, 10)
    return model, tokens, hla_jax.calibrate(model, scheme, np.asarray(tokens), dtype=dtype)


@pytest.mark.long
def test_uptraining_finds_nothing_to_fit_at_full_rank_and_the_bias_counts(x64):
    model, tokens, attention = lossless(FULL_RANK)
    loss = uptrain.make_loss(FULL_RANK, CONFIG)
    shape = tokens.shape
    batch = {
        "tokens": tokens,
        "positions": jnp.broadcast_to(jnp.arange(shape[1]), shape),
        "segments": jnp.ones(shape, jnp.int32),
    }
    value = jax.jit(lambda maps: loss(maps, batch, jax.random.key(0), model.params)[0])
    assert abs(float(value(attention.params))) < 1e-10
    gradient = jax.jit(jax.grad(value))
    for name in ("bias_k", "bias_k1"):
        moved = attention.params | {name: attention.params[name] + 0.1}
        assert float(value(moved)) > 1e-5
        # Against the difference quotient, along one direction.
        direction = jnp.asarray(np.random.default_rng(0).normal(size=moved[name].shape))
        step = lambda size: float(value(moved | {name: moved[name] + size * direction}))  # noqa: B023
        quotient = (step(1e-5) - step(-1e-5)) / 2e-5
        np.testing.assert_allclose(jnp.vdot(gradient(moved)[name], direction), quotient, rtol=1e-5)


@pytest.mark.parametrize("fold", [False, True])
def test_distillation_finds_nothing_to_fit_at_full_rank(fold, x64):
    trajectory = CONFIG.num_loops * CONFIG.head_dim * (CONFIG.num_heads if fold else 1)
    scheme = hla_jax.LLA(rank_k=trajectory, rank_v=trajectory, fold_heads=fold)
    model, tokens, attention = lossless(scheme)
    counted = jnp.ones(tokens.shape, bool)
    both = jax.jit(lambda maps: distill.divergence(scheme, CONFIG, maps, model.params, tokens, counted))
    kl, errors = both(attention.params)
    assert abs(float(kl)) < 1e-10
    assert float(jnp.max(errors)) < 1e-10
    worse = {name: value * 0.9 for name, value in attention.params.items()}
    kl, errors = both(worse)
    assert float(kl) > 1e-5
    assert bool(jnp.all(errors > 1e-5))


@pytest.mark.long
def test_two_passes_at_full_rank_are_the_exact_pass(x64):
    model, tokens, attention = lossless(FULL_RANK)
    response = jnp.arange(tokens.shape[1])[None] >= jnp.asarray([[3], [5]])
    hidden = two_pass.two_pass_hidden(
        model.params, attention.params, FULL_RANK, CONFIG, tokens, response, repetitions=1
    )
    np.testing.assert_allclose(hidden, two_pass.exact_hidden(model.params, CONFIG, tokens), atol=1e-9)


@pytest.mark.long
def test_two_passes_are_sequential_decoding_where_the_window_covers_the_response(x64):
    scheme = dataclasses.replace(FULL_RANK, rank_k=CONFIG.head_dim, rank_v=5, rank_loop1=CONFIG.head_dim, window=6)
    model, tokens, attention = lossless(scheme)
    response = jnp.broadcast_to(jnp.arange(tokens.shape[1]) >= 4, tokens.shape)
    hidden = two_pass.two_pass_hidden(model.params, attention.params, scheme, CONFIG, tokens, response)
    decoded = hla_jax.decode_forced(model, tokens, 4, Attention(scheme, attention.params))
    logits = hidden @ model.params["embed_tokens"].T
    np.testing.assert_allclose(logits, decoded, atol=1e-9)
