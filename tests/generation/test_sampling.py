"""Sampling against numpy on small vocabularies: which tokens stay, how often they come, and what a seed decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hla_jax.generation.sampling import Sampling, filtered, request_keys, sample

LOGITS = np.array([1.2, -0.3, 2.5, 0.9, -4.0, 2.1, 0.0])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def expected(logits: np.ndarray, temperature: float, top_p: float, top_k: int | None) -> np.ndarray:
    """Probabilities by the definition: the k likeliest, then the fewest of them that reach top_p."""
    logits = logits / temperature
    order = np.argsort(-logits)[:top_k]
    probabilities = softmax(logits[order])
    keep = int(np.searchsorted(np.cumsum(probabilities), top_p - 1e-12)) + 1
    out = np.zeros(logits.size)
    out[order[:keep]] = softmax(logits[order[:keep]])
    return out


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(7)), st.floats(0.2, 3), st.floats(0.05, 1), st.none() | st.integers(1, 9))
def test_filtered_distribution(x64, order, temperature, top_p, top_k):
    logits = LOGITS[np.array(order)]
    allowed = filtered(jnp.asarray(logits)[None] / temperature, Sampling(temperature, top_p, top_k))
    np.testing.assert_allclose(jax.nn.softmax(allowed[0]), expected(logits, temperature, top_p, top_k), atol=1e-9)


@pytest.mark.parametrize(
    "sampling", [Sampling(0.8), Sampling(1.5, top_p=0.8), Sampling(1.0, top_k=3), Sampling(2.0, 0.9, 4)]
)
def test_frequencies(sampling):
    draws = 20000
    tokens = sample(
        jnp.tile(jnp.asarray(LOGITS, jnp.float32), (draws, 1)),
        sampling,
        request_keys(jnp.arange(draws)),
        jnp.zeros(draws, int),
    )
    probabilities = expected(LOGITS, sampling.temperature, sampling.top_p, sampling.top_k)
    frequencies = np.bincount(tokens, minlength=7) / draws
    assert not frequencies[probabilities == 0].any()
    deviation = np.sqrt(probabilities * (1 - probabilities) / draws)
    assert (np.abs(frequencies - probabilities) <= 5 * deviation).all()


def test_temperature_zero_is_greedy():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7)))
    tokens = sample(logits, Sampling(), request_keys(jnp.arange(5)), jnp.arange(5))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    assert tokens.dtype == jnp.int32


def test_a_token_depends_on_its_own_seed_and_step_only():
    logits = jnp.tile(jnp.zeros(1000), (4, 1))
    draw = lambda seeds, steps: sample(
        logits[: len(seeds)], Sampling(1.0), request_keys(jnp.asarray(seeds)), jnp.asarray(steps)
    ).tolist()
    one = draw([3, 8, 8, 5], [0, 1, 2, 7])
    other = draw([5, 8, 3, 8], [7, 2, 0, 1])
    assert [one[3], one[2], one[0], one[1]] == other
    assert draw([8], [2]) == [one[2]]
    assert len(set(one)) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(temperature=-1.0), "temperature must be at least 0, found -1.0"),
        (dict(temperature=float("nan")), "temperature must be at least 0, found nan"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\], found 0.0"),
        (dict(top_p=1.1), r"top_p must be in \(0, 1\], found 1.1"),
        (dict(top_k=0), "top_k must be at least 1, found 0"),
    ],
)
def test_impossible_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)
