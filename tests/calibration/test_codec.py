"""Calibration of linear codecs: the oracle's maps, exactness at full rank, and every way to stream the same moments."""

import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.attention.baselines import HeadLatent, LayerLatent
from hla_jax.attention.capture import attention_inputs
from hla_jax.attention.codec import Codec
from hla_jax.attention.lla import LLA
from hla_jax.calibration import moments, principal
from hla_jax.calibration.calibrate import calibrate
from hla_jax.generation.generate import decode_forced
from hla_jax.model import Model, forward, forward_swapped
from tiny import GOLDEN_MODELS, golden, long_cases, tiny_config, tiny_params, tiny_tokens

CONFIG = tiny_config()
TRAJECTORY = CONFIG.num_loops * CONFIG.head_dim
ALL = CONFIG.num_kv_heads * CONFIG.head_dim
FULL_RANK = {
    "lla": LLA(TRAJECTORY, TRAJECTORY),
    "lla_exact": LLA(TRAJECTORY, TRAJECTORY, first_pass="exact"),
    "lla_2d": LLA(CONFIG.num_loops * ALL, CONFIG.num_loops * ALL, fold_heads=True),
    "head": HeadLatent(ALL, ALL),
    "layer": LayerLatent(2 * CONFIG.head_dim, 2 * CONFIG.head_dim, layers=2),
}


@pytest.fixture(scope="module")
def tokens():
    return tiny_tokens(CONFIG, 2, 14)


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_agrees_with_the_oracle(name: str, x64: None) -> None:
    """Directions are unique up to sign: what they span, and the means, are the oracle's."""
    truth = golden(name, "float64")
    found = calibrate(Model(truth.config, truth.params), truth.lla, truth.values["input_ids"], "float64").params
    assert found.keys() == truth.lla_maps.keys()
    for part in ("k", "v"):
        np.testing.assert_allclose(found[f"{part}_mean"], truth.lla_maps[f"{part}_mean"], atol=2e-6)
        span = lambda maps: maps[f"{part}_down"] @ maps[f"{part}_up"]  # noqa: B023
        np.testing.assert_allclose(span(found), span(truth.lla_maps), atol=2e-5)


@pytest.mark.parametrize("name", ["lla", *long_cases(*(name for name in FULL_RANK if name != "lla"))])
def test_full_rank_is_exact(name: str, x64: None, quick_compile: None, tokens) -> None:
    model = Model(CONFIG, tiny_params(CONFIG, "float64"))
    attention = calibrate(model, FULL_RANK[name], np.asarray(tokens), "float64")
    exact = forward(model, tokens)
    np.testing.assert_allclose(decode_forced(model, tokens, 5, attention), exact, atol=1e-9)
    np.testing.assert_allclose(forward_swapped(model, tokens, attention), exact, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(
    "scheme", [LLA(5, 7), LLA(9, 4, fold_heads=True, rank_rope=4), HeadLatent(5, 3), LayerLatent(6, 3, 2)]
)
def test_streamed_directions_are_the_formed_ones(scheme: Codec, x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(CONFIG, tiny_params(CONFIG, "float64"))
    rows = np.asarray(tiny_tokens(CONFIG, 3, 40)).tolist()
    rows[1] = rows[1][:25]
    formed = calibrate(model, scheme, rows, "float64").params
    monkeypatch.setattr(principal, "LARGEST_MOMENT", 0)
    monkeypatch.setattr(principal, "ROUNDS_STREAMED", 40)
    monkeypatch.setattr(moments, "MOMENT_BYTES", 1)
    monkeypatch.setattr(moments, "CAPTURE_BYTES", 1)
    streamed = calibrate(model, scheme, rows, "float64").params
    for part in ("k", "v"):
        np.testing.assert_allclose(streamed[f"{part}_mean"], formed[f"{part}_mean"], atol=1e-6)
        span = lambda maps: maps[f"{part}_down"] @ maps[f"{part}_up"]  # noqa: B023
        np.testing.assert_allclose(span(streamed), span(formed), atol=1e-5)


@pytest.mark.long
def test_trajectories_are_laid_out_as_the_papers_say(x64: None) -> None:
    """Per head: loop, coordinate. Folded: head, loop, coordinate. In what a latent is written from, too."""
    model = Model(CONFIG, tiny_params(CONFIG, "float64"))
    tokens = np.asarray(tiny_tokens(CONFIG, 2, 9))
    h = attention_inputs(model.params, CONFIG, jnp.asarray(tokens), jnp.arange(9)[None])[:, 1]
    k = np.einsum("tbsd,od->tbso", h, model.params["layers"]["k_proj"][1]).reshape(CONFIG.num_loops, 18, -1, 8)
    trajectories = {
        LLA(5, 7): np.einsum("tjge->gjte", k).reshape(CONFIG.num_kv_heads, 18, -1),
        LLA(5, 7, fold_heads=True): np.einsum("tjge->jgte", k).reshape(18, -1),
    }
    for scheme, expected in trajectories.items():
        maps = calibrate(model, scheme, tokens, "float64").params
        np.testing.assert_allclose(maps["k_mean"][1], expected.mean(axis=-2), atol=1e-12)
        centred = expected - expected.mean(axis=-2, keepdims=True)
        left = centred - centred @ maps["k_down"][1] @ maps["k_up"][1]
        squares = np.linalg.svd(centred, compute_uv=False) ** 2
        np.testing.assert_allclose((left**2).sum((-2, -1)), squares[..., 5:].sum(-1), rtol=1e-9)
