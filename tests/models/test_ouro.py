"""Ouro against the public PyTorch code's numbers (hidden states, gate, exit modes), and the passes' own rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hla_jax.attention.full import exact_stages
from hla_jax.models import layers, looped, ouro
from tiny import GOLDEN_MODELS, TOLERANCE, golden, tiny_config, tiny_params, tiny_tokens

pytestmark = pytest.mark.usefixtures("quick_compile")


def exact(config, params, tokens, segments=None, every_loop=False):
    positions = jnp.arange(tokens.shape[1])[None]
    return looped.run(params, config, tokens, exact_stages(config, positions, segments), None, every_loop=every_loop)[0]


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_golden_hidden_states_gate_and_exit_modes(name, dtype):
    g = golden(name, dtype)
    hidden = exact(g.config, g.params, jnp.asarray(g.values["input_ids"]), every_loop=True)
    close = lambda found, key: np.testing.assert_allclose(
        found, g.values[key], atol=TOLERANCE[dtype], rtol=0, err_msg=key
    )
    close(hidden, "hidden_per_loop")
    close(ouro.gate_logits(g.params, hidden), "gate_logit_per_loop")
    close(ouro.exit_logits(g.params, hidden), "logits")
    close(ouro.exit_logits(g.params, hidden, exit_at=1), "logits_exit_at_step_1")
    close(ouro.exit_logits(g.params, hidden, exit_threshold=0.5), "logits_exit_threshold_0.5")
    close(ouro.exit_logits(g.params, hidden, exit_weighted=True), "logits_weighted_exit")


def test_exit_probabilities_are_those_of_the_first_stop():
    gate = np.random.default_rng(0).normal(size=(4, 3, 5))
    stop = 1 / (1 + np.exp(-gate))
    probabilities = ouro.exit_probabilities(jnp.asarray(gate))
    np.testing.assert_allclose(probabilities[2], stop[2] * (1 - stop[1]) * (1 - stop[0]), atol=1e-6)
    np.testing.assert_allclose(probabilities.sum(0), 1, atol=1e-6)


def test_threshold_of_one_never_exits_early():
    """In 16 bits sigmoid rounds to 1 at the first loop; the reference then stops there, whatever the threshold."""
    config = tiny_config()
    params = tiny_params(config, "bfloat16")
    params["early_exit_gate"] = {
        "weight": jnp.zeros((1, config.hidden_size), "bfloat16"),
        "bias": jnp.full(1, 30, "bfloat16"),
    }
    hidden = jax.random.normal(jax.random.key(0), (3, 2, 5, config.hidden_size), "bfloat16")
    early = ouro.exit_logits(params, hidden, exit_threshold=0.99)
    np.testing.assert_array_equal(early, layers.logits(params, hidden[0]))
    np.testing.assert_array_equal(
        ouro.exit_logits(params, hidden, exit_threshold=1.0), layers.logits(params, hidden[-1])
    )


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (dict(exit_at=3), "exit_at must be in 0 .. 2 for a model of 3 loops, found 3"),
        (dict(exit_at=-1), "exit_at must be in 0 .. 2"),
        (dict(exit_threshold=0.0), r"exit_threshold must be in \(0, 1\], found 0.0"),
        (dict(exit_threshold=1.5), "exit_threshold must be in"),
        (dict(exit_at=0, exit_weighted=True), "give one of exit_at, exit_threshold and exit_weighted"),
        (dict(exit_at=0, exit_threshold=0.5), "give one of"),
    ],
)
def test_impossible_exit_modes_are_refused(mode, message):
    config = tiny_config()
    with pytest.raises(ValueError, match=message):
        ouro.exit_logits(tiny_params(config), jnp.zeros((3, 1, 2, config.hidden_size)), **mode)


def test_stages_must_cover_every_loop():
    config = tiny_config()
    stage = exact_stages(config, jnp.arange(4)[None])[0]
    for loops in (range(2), range(1, 3), range(4)):
        with pytest.raises(ValueError, match=r"stages must cover loops 0 .. 2 in order, found \[range"):
            looped.run(tiny_params(config), config, tiny_tokens(config, 1, 4), [stage._replace(loops=loops)], None)


def test_stages_may_be_split_anywhere(x64):
    config = tiny_config()
    params, tokens = tiny_params(config, "float64"), tiny_tokens(config, 2, 6)
    stage = exact_stages(config, jnp.arange(6)[None])[0]
    split = [stage._replace(loops=range(1)), stage._replace(loops=range(1, 3))]
    hidden, _ = looped.run(params, config, tokens, split, None, every_loop=True)
    np.testing.assert_allclose(hidden, exact(config, params, tokens, every_loop=True), atol=1e-12)


def test_segments_are_separate_documents(x64):
    """Two documents packed in one row, each with positions from 0, give what each gives alone."""
    config = tiny_config()
    params, tokens = tiny_params(config, "float64"), tiny_tokens(config, 1, 11)
    positions = jnp.asarray([[*range(5), *range(6)]])
    stages = exact_stages(config, positions, jnp.asarray([[0] * 5 + [1] * 6]))
    packed, _ = looped.run(params, config, tokens, stages, None)
    np.testing.assert_allclose(packed[:, :5], exact(config, params, tokens[:, :5]), atol=1e-12)
    np.testing.assert_allclose(packed[:, 5:], exact(config, params, tokens[:, 5:]), atol=1e-12)


def test_tied_head_is_the_embedding():
    config = tiny_config(tie_word_embeddings=True)
    params = tiny_params(config)
    hidden = jax.random.normal(jax.random.key(1), (2, 3, config.hidden_size))
    assert "lm_head" not in params
    np.testing.assert_allclose(layers.logits(params, hidden), hidden @ params["embed_tokens"].T, atol=1e-5)


def test_flax_module_holds_the_same_parameters():
    config = tiny_config()
    module, tokens = looped.LoopedModel(config, rngs=nnx.Rngs(0)), tiny_tokens(config, 2, 6)
    params = module.params()
    assert jax.tree.all(jax.tree.map(lambda leaf: isinstance(leaf, jax.Array), params))
    expected = layers.logits(params, exact(config, params, tokens))
    np.testing.assert_allclose(module(tokens, exact_stages(config, jnp.arange(6)[None])), expected, atol=1e-6)
    trainable = jax.tree.leaves(nnx.state(module, nnx.Param))
    assert sum(leaf.size for leaf in trainable) == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_norm_is_scaled_after_the_cast():
    """Normalised in float32, cast back, then scaled: in bfloat16 the order decides the last bit."""
    x = jax.random.normal(jax.random.key(0), (64,), "bfloat16") * 3
    weight = jax.random.normal(jax.random.key(1), (64,), "bfloat16")
    wide = np.asarray(x, np.float32)
    normed = jnp.asarray(wide / np.sqrt(np.mean(wide**2) + 1e-6), "bfloat16")
    np.testing.assert_array_equal(layers.rms_norm(x, weight, 1e-6), normed * weight)


def test_rotation_turns_half_split_pairs():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 6)).astype(np.float32)
    positions = np.array([[0, 5, 40]])
    turned = np.asarray(layers.rotate(jnp.asarray(x), jnp.asarray(positions), layers.inverse_frequencies(6, 50.0)))
    for pair in range(3):
        angle = positions[0][:, None] * 50.0 ** (-2 * pair / 6)
        z = (x[0, :, :, pair] + 1j * x[0, :, :, pair + 3]) * np.exp(1j * angle)
        np.testing.assert_allclose(turned[0, :, :, pair] + 1j * turned[0, :, :, pair + 3], z, atol=1e-5)


@pytest.mark.parametrize("tokens", [4, 5, 8, 11])
def test_blocks_of_tokens_change_nothing(tokens):
    x = jax.random.normal(jax.random.key(0), (2, tokens, 3))
    np.testing.assert_allclose(layers.in_blocks(lambda block: block[..., :2] ** 2, x, 4), x[..., :2] ** 2, atol=1e-6)
