"""Structure of the cache against numpy over stacked tokens, in float64, and identities that hold on any data."""

import dataclasses

import jax
import numpy as np
import pytest

from hla_jax.analysis import structure
from hla_jax.analysis.structure import AXES, PROJECTIONS, Moments
from hla_jax.attention.capture import attention_inputs
from hla_jax.calibration import moments
from hla_jax.calibration.moments import Sequences
from tiny import tiny_config, tiny_params, tiny_tokens

CONFIG = tiny_config(hidden_size=16, num_loops=3, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4)
pytestmark = pytest.mark.usefixtures("quick_compile")
SIZES = {"loops": 3, "heads": 2, "layers": 2}


class Stacked:
    """Everything of a few tokens at once: h [N, L, T, d] and each kind's vectors [N, L, T, G, dh]."""

    def __init__(self, seed=0, rows=5, length=12):
        self.params = tiny_params(CONFIG, "float64")
        tokens = np.asarray(tiny_tokens(CONFIG, rows, length, seed))
        lengths = [length - row for row in range(rows)]
        self.sequences = Sequences.of([row[:end] for row, end in zip(tokens, lengths)])
        h = np.asarray(attention_inputs(self.params, CONFIG, tokens, np.arange(length)[None]))
        self.h = np.concatenate([np.moveaxis(h[:, :, row, :end], 2, 0) for row, end in enumerate(lengths)]).swapaxes(
            1, 2
        )
        self.weights = {kind: np.asarray(self.params["layers"][name]) for kind, name in PROJECTIONS.items()}
        self.x = {
            kind: np.einsum("nltd,led->nlte", self.h, weight).reshape(*self.h.shape[:3], 2, 4)
            for kind, weight in self.weights.items()
        }

    def moments(self):
        return structure.hidden_moments(self.params, CONFIG, self.sequences)


@pytest.fixture(scope="module")
def data():
    with jax.enable_x64(True):
        fit, held_out = Stacked(0), Stacked(1)
        yield fit, held_out, fit.moments(), held_out.moments()


@pytest.mark.parametrize("around_mean", [False, True])
@pytest.mark.parametrize("axis", AXES)
def test_energies_are_those_of_each_tokens_own_matrix(data, axis, around_mean, x64):
    fit, *_ = data
    mean = fit.h.mean(axis=0) if around_mean else None
    found = structure.axis_energies(fit.params, CONFIG, fit.sequences, axis, mean)
    for number, kind in enumerate(PROJECTIONS):
        x = fit.x[kind] - around_mean * fit.x[kind].mean(axis=0)
        rows = np.moveaxis(x, {"layers": 1, "loops": 2, "heads": 3}[axis], -2)
        singular = np.linalg.svd(rows, compute_uv=False)
        p = singular**2 / (singular**2).sum(-1, keepdims=True)
        rank = np.exp(-(p * np.log(p)).sum(-1)) / SIZES[axis]
        over = (0, *range(2, p.ndim - 1)) if axis != "layers" else tuple(range(p.ndim - 1))
        np.testing.assert_allclose(found.effective_rank[:, number], np.atleast_1d(rank.mean(over)), rtol=1e-8)
        np.testing.assert_allclose(found.spectrum[:, number], np.atleast_2d(p.mean(over)), rtol=1e-8)
    np.testing.assert_allclose(found.spectrum.sum(-1), 1)


def test_effective_rank_of_one_direction_and_of_equal_ones(x64):
    np.testing.assert_allclose(structure.normalised_rank(np.asarray([3.0, 0, 0, 0]), 8), 1 / 4)
    np.testing.assert_allclose(structure.normalised_rank(np.full(4, 0.1), 8), 1)
    # Rows that are longer in number than in size cannot have more directions than the size.
    np.testing.assert_allclose(structure.normalised_rank(np.asarray([1.0, 1, 0, 0]), 2), 1)
    np.testing.assert_allclose(structure.shares(np.zeros(3)), 0)


def test_loops_that_are_alike_have_one_direction(data, x64):
    """The first loop's input in every loop: rank 1 of 3, whatever heads and layers do."""
    fit, *_ = data
    measure = structure._Axis(CONFIG, "loops", centred=False)
    h = np.repeat(fit.h[:, 0, :1].swapaxes(0, 1), 3, axis=0)
    projections = {name: fit.weights[kind][0] for kind, name in PROJECTIONS.items()}
    total = measure(h, np.ones(h.shape[1], bool), projections, np.zeros((3, 16)))
    np.testing.assert_allclose(total[:, 0] / h.shape[1], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(total[:, 1] / h.shape[1], 1, rtol=1e-6)


def test_one_layer_is_all_of_its_axis(x64):
    config = dataclasses.replace(CONFIG, num_layers=1)
    found = structure.axis_energies(tiny_params(config, "float64"), config, Sequences.of([[1, 2, 3], [4]]), "layers")
    np.testing.assert_allclose(found.effective_rank, 1)
    np.testing.assert_allclose(found.spectrum, 1)


def test_moments_are_those_of_all_tokens_at_once(data):
    fit, _, found, _ = data
    assert found.tokens == len(fit.h) == 50
    centred = fit.h - fit.h.mean(axis=0)
    np.testing.assert_allclose(found.mean, fit.h.mean(axis=0), rtol=1e-9, atol=1e-12)
    expected = np.einsum("nltd,nlue->ltdue", centred, centred) / len(fit.h)
    np.testing.assert_allclose(found.covariance, expected, rtol=1e-9, atol=1e-12)


def test_streaming_equals_all_at_once(data, monkeypatch, x64):
    fit, _, found, _ = data
    monkeypatch.setattr(moments, "CAPTURE_BYTES", 1)
    monkeypatch.setattr(moments, "MOMENT_BYTES", 1)
    streamed = fit.moments()
    np.testing.assert_allclose(streamed.covariance, found.covariance, rtol=1e-9, atol=1e-12)
    one_by_one = structure.axis_energies(fit.params, CONFIG, fit.sequences, "layers")
    monkeypatch.undo()
    together = structure.axis_energies(fit.params, CONFIG, fit.sequences, "layers")
    np.testing.assert_allclose(one_by_one.spectrum, together.spectrum, rtol=1e-9)


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_changes_and_variance_against_stacked_tokens(data, kind):
    fit, _, found, _ = data
    for layer in range(2):
        projected = structure.projected(found, layer, fit.weights[kind][layer])
        x = fit.x[kind][:, layer].reshape(len(fit.h), 3, 8)
        size = np.sqrt((x[:, -1] ** 2).sum(-1).mean())
        rms = lambda difference: np.sqrt((difference**2).sum(-1).mean(0)) / size  # noqa: B023
        changes = structure.changes(projected)
        np.testing.assert_allclose(changes.step, rms(np.diff(x, axis=1)), rtol=1e-8)
        np.testing.assert_allclose(changes.to_last, rms(x - x[:, -1:]), rtol=1e-8, atol=1e-7)

        grand, of_loop, of_token = x.mean((0, 1)), x.mean(0), x.mean(1)
        total = ((x - grand) ** 2).sum()
        shares = structure.variance(projected)
        np.testing.assert_allclose(shares.loop, len(x) * ((of_loop - grand) ** 2).sum() / total, rtol=1e-8)
        np.testing.assert_allclose(shares.token, 3 * ((of_token - grand) ** 2).sum() / total, rtol=1e-8)
        np.testing.assert_allclose(sum(shares), 1)
        within = ((x - of_token[:, None]) ** 2).sum() / total
        np.testing.assert_allclose(shares.along_loops, within, rtol=1e-8)


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_spectra_and_kept_variance_against_svd(data, kind):
    fit, held_out, found, found_held_out = data
    weight = fit.weights[kind][1]
    one, other = (structure.projected(x, 1, weight) for x in (found, found_held_out))
    stacked = lambda x, loops: (x.x[kind] - x.x[kind].mean(0))[:, 1, loops].reshape(len(x.h), -1)
    for loops in ([0], [1, 2]):
        rows, held_out_rows = stacked(fit, loops), stacked(held_out, loops)
        _, singular, directions = np.linalg.svd(rows, full_matrices=False)
        covariance = structure.joint(one, loops)
        np.testing.assert_allclose(structure.variances(covariance), singular**2 / len(rows), atol=1e-10)
        kept = structure.kept(covariance, structure.joint(other, loops), [1, 3, 8 * len(loops)])
        expected = [((held_out_rows @ directions[:rank].T) ** 2).sum() for rank in (1, 3, 8 * len(loops))]
        np.testing.assert_allclose(kept, np.asarray(expected) / (held_out_rows**2).sum(), rtol=1e-7)
    head = (fit.x[kind] - fit.x[kind].mean(0))[:, 1, :, 1].reshape(len(fit.h), -1)
    np.testing.assert_allclose(structure.trajectory(one, 1, 4), head.T @ head / len(head), atol=1e-10)


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_ridge_against_regression_on_stacked_tokens(data, kind):
    fit, held_out, found, found_held_out = data
    for layer in range(2):
        scores = structure.ridge_r2(found, found_held_out, layer, fit.weights[kind][layer], penalty=0.1)
        inputs, held_out_inputs = fit.h[:, layer, -1], held_out.h[:, layer, -1]
        centred = inputs - inputs.mean(0)
        penalty = 0.1 * (centred**2).sum() / inputs.shape[1]
        for loop in range(3):
            x, held_out_x = (one.x[kind][:, layer, loop].reshape(len(one.h), -1) for one in (fit, held_out))
            gram = centred.T @ centred + penalty * np.eye(centred.shape[1])
            solution = np.linalg.solve(gram, centred.T @ (x - x.mean(0)))
            predicted = x.mean(0) + (held_out_inputs - inputs.mean(0)) @ solution
            total = ((held_out_x - held_out_x.mean(0)) ** 2).sum()
            np.testing.assert_allclose(scores[loop], 1 - ((held_out_x - predicted) ** 2).sum() / total, rtol=1e-7)


def test_ridge_finds_what_is_linear_and_nothing_in_noise():
    """Loop 1 is an affine map of the last loop, loop 2 is independent of it."""
    rng = np.random.default_rng(0)
    turn = rng.normal(size=(6, 6))

    def draw(count):
        last = rng.normal(size=(count, 6)) + 3
        h = np.stack([last @ turn + 1, rng.normal(size=(count, 6)), last], axis=1)
        centred = (h - h.mean(0)).reshape(count, -1)
        return Moments(count, h.mean(0)[None], (centred.T @ centred / count).reshape(1, 3, 6, 3, 6))

    fit, held_out = draw(4000), draw(4000)
    linear, noise, own = structure.ridge_r2(fit, held_out, 0, rng.normal(size=(4, 6)), penalty=1e-10)
    np.testing.assert_allclose([linear, own], 1, atol=1e-6)
    assert -0.02 < noise < 0.01


def test_ridge_is_not_scored_on_the_data_it_was_fitted_to():
    """With as many inputs as tokens, noise is fitted perfectly, and held-out noise is not."""
    rng = np.random.default_rng(0)

    def draw(count):
        h = rng.normal(size=(count, 2, 8))
        centred = (h - h.mean(0)).reshape(count, -1)
        return Moments(count, h.mean(0)[None], (centred.T @ centred / count).reshape(1, 2, 8, 2, 8))

    fit, held_out = draw(9), draw(500)
    weight = rng.normal(size=(3, 8))
    assert structure.ridge_r2(fit, fit, 0, weight, penalty=1e-12)[0] > 0.999
    assert structure.ridge_r2(fit, held_out, 0, weight, penalty=1e-12)[0] < 0


def test_too_many_joint_dimensions_are_refused(data, monkeypatch):
    fit, *_ = data
    monkeypatch.setattr(structure, "LARGEST_JOINT", 40)
    with pytest.raises(ValueError, match=r"loops x hidden size is 48; its covariance is formed up to 40"):
        fit.moments()
