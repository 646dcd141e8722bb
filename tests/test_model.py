"""The public passes: exact, and in parallel as a scheme reads the past."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hla_jax
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.attention.shared import SharedLoop
from hla_jax.model import Model, forward, forward_swapped
from tiny import TOLERANCE, full_rank_hla, golden, random_hla, tiny_config, tiny_params, tiny_tokens

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def model() -> Model:
    config = tiny_config()
    return Model(config, tiny_params(config))


def test_exit_modes_of_forward():
    g = golden("ouro-tiny", "float32")
    model, tokens = Model(g.config, g.params), g.values["input_ids"]
    modes = {"logits_exit_at_step_1": dict(exit_at=1), "logits_exit_threshold_0.5": dict(exit_threshold=0.5)}
    for name, mode in ({"logits": {}} | modes).items():
        np.testing.assert_allclose(forward(model, tokens, **mode), g.values[name], atol=TOLERANCE["float32"], rtol=0)


def test_padding_on_the_right_changes_nothing(model):
    tokens = tiny_tokens(model.config, 2, 9)
    padded = jnp.pad(tokens, ((0, 0), (0, 4)), constant_values=7)
    np.testing.assert_allclose(forward(model, padded)[:, :9], forward(model, tokens), atol=1e-5)


@pytest.mark.parametrize("make", [lambda config: Attention(FullCache()), lambda config: Attention(SharedLoop(12))])
def test_swapped_pass_of_a_scheme_that_loses_nothing_is_exact(make, model):
    tokens = tiny_tokens(model.config, 2, 12)
    np.testing.assert_allclose(forward_swapped(model, tokens, make(model.config)), forward(model, tokens), atol=1e-4)


@pytest.mark.long
def test_swapped_pass_teaches_every_map(x64):
    """Distillation's gradient reaches writers and readers of both latents, through the first pass's latents."""
    config = tiny_config(num_layers=1, num_loops=2, num_heads=2)
    model, tokens = Model(config, tiny_params(config, "float64")), tiny_tokens(config, 1, 8)
    attention = random_hla(config, 2, "float64")
    loss = lambda maps: jnp.sum(forward_swapped(model, tokens, Attention(attention.scheme, maps)) ** 2)
    gradient = jax.grad(loss)(attention.params)
    assert all(float(jnp.abs(value).max()) > 0 for value in gradient.values())
    step = lambda size: {name: value + size * gradient[name] for name, value in attention.params.items()}
    slope = sum(float(jnp.vdot(value, value)) for value in gradient.values())
    assert float(loss(step(1e-8)) - loss(step(-1e-8))) / 2e-8 == pytest.approx(slope, rel=1e-3)


def test_a_model_decodes_with_its_own_attention(model):
    tokens = tiny_tokens(model.config, 1, 9)
    own = Model(model.config, model.params, full_rank_hla(model.config, model.params, 2))
    np.testing.assert_allclose(hla_jax.decode_forced(own, tokens, 4), forward(model, tokens), atol=1e-4)
    lossy = Model(model.config, model.params, random_hla(model.config, 2))
    assert np.abs(hla_jax.decode_forced(lossy, tokens, 4) - forward(model, tokens)).max() > 1e-2


def test_rows_of_other_lengths_are_refused(model):
    with pytest.raises(ValueError, match="tokens must be rows of one length"):
        forward(model, [[1, 2], [3]])


@pytest.mark.parametrize("tokens", [[1, 2], [[]], [[0.5, 1.0]], [[[1]]]])
def test_only_a_batch_of_token_ids_is_accepted(tokens, model):
    for run in (forward, forward_swapped):
        with pytest.raises(ValueError, match=r"tokens must be a non-empty integer array \[batch, tokens\], found"):
            run(model, np.asarray(tokens))


@pytest.mark.parametrize("token", [-1, 40])
def test_token_ids_outside_the_vocabulary_are_refused(token, model):
    with pytest.raises(ValueError, match=f"tokens have id {token}, the vocabulary has 40"):
        forward(model, [[1, token, 3]])
