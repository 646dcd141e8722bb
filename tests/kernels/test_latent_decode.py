"""One decode step of attention against the direct formula, and the merge of parts by log-sum-exp."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hla_jax.kernels.latent_decode.reference import Window, latent_decode

pytestmark = pytest.mark.usefixtures("x64")
SCALE = 0.3


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of a step: 3 sequences, capacity 9, 4 heads."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    window: Window


def case(latent_heads: int, window: int, kv_heads: int = 2, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape)
    recent = Window(
        draw(3, 4, 6),
        draw(3, window, kv_heads, 6),
        draw(3, window, kv_heads, 6),
        rng.random((3, window)) < 0.7,
        draw(3, kv_heads, 6),
        draw(3, kv_heads, 6),
    )
    return Case(
        draw(3, 4, 10), draw(3, 9, latent_heads, 10), draw(3, 9, latent_heads, 5), Window(*map(jnp.asarray, recent))
    )


def direct(c: Case, b: int, h: int, length: int, with_window: bool) -> tuple[np.ndarray, np.ndarray, float]:
    group = lambda x: np.asarray(x)[..., h * x.shape[-2] // 4, :]
    scores, far, near = list(group(c.keys[b])[:length] @ c.q[b, h]), list(group(c.values[b])[:length]), []
    if with_window:
        w = c.window
        keep = np.flatnonzero(w.filled[b])
        keys = np.concatenate([group(w.keys[b])[keep], group(w.k[b])[None]])
        near = list(np.concatenate([group(w.values[b])[keep], group(w.v[b])[None]]))
        scores += list(keys @ np.asarray(w.q[b, h]))
    weights = np.exp(SCALE * np.array(scores))
    total = weights.sum()
    summed = lambda weights, values, size: weights @ np.array(values) / total if len(values) else np.zeros(size)
    return summed(weights[: len(far)], far, 5), summed(weights[len(far) :], near, 6), np.log(total)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 3]),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
    st.integers(0, 9),
)
def test_equals_the_direct_formula(latent_heads, window, lengths, seed):
    c = case(latent_heads, window, seed=seed)
    far, near, lse = latent_decode(
        jnp.asarray(c.q), jnp.asarray(c.keys), jnp.asarray(c.values), jnp.asarray(lengths), SCALE, c.window
    )
    for b, length in enumerate(lengths):
        for h in range(4):
            for found, expected in zip((far[b, h], near[b, h], lse[b, h]), direct(c, b, h, length, True), strict=True):
                np.testing.assert_allclose(found, expected, atol=1e-12)


def test_nothing_stored_gives_zeros_and_no_weight():
    c = case(2, 0)
    out, near, lse = latent_decode(
        jnp.asarray(c.q), jnp.asarray(c.keys), jnp.asarray(c.values), jnp.asarray([0, 4, 0]), SCALE
    )
    assert near is None
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_array_equal(np.isneginf(lse), [[True] * 4, [False] * 4, [True] * 4])
    np.testing.assert_allclose(lse[1, 3], direct(c, 1, 3, 4, False)[2], atol=1e-12)


def test_values_beyond_the_length_are_never_read():
    c = case(1, 3)
    lengths = jnp.asarray([0, 4, 9])
    beyond = np.arange(9)[None] >= np.asarray(lengths)[:, None]
    spoilt = np.where(beyond[..., None, None], 1e30, c.keys), np.where(beyond[..., None, None], 1e30, c.values)
    clean = latent_decode(jnp.asarray(c.q), jnp.asarray(c.keys), jnp.asarray(c.values), lengths, SCALE, c.window)
    dirty = latent_decode(jnp.asarray(c.q), *map(jnp.asarray, spoilt), lengths, SCALE, c.window)
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("cut", [1, 5])
def test_parts_merge_by_log_sum_exp(cut):
    """Attention over a split store is the average of the parts' outputs, weighted by exp(log-sum-exp)."""
    c = case(2, 0)
    lengths = jnp.asarray([9, 5, 2])
    attend = lambda part, n: latent_decode(
        jnp.asarray(c.q), jnp.asarray(c.keys[:, part]), jnp.asarray(c.values[:, part]), n, SCALE
    )
    whole, _, lse = attend(slice(None), lengths)
    head, _, lse_head = attend(slice(0, cut), jnp.minimum(lengths, cut))
    tail, _, lse_tail = attend(slice(cut, None), jnp.maximum(lengths - cut, 0))
    np.testing.assert_allclose(np.logaddexp(lse_head, lse_tail), lse, atol=1e-12)
    merged = head * np.exp(lse_head - lse)[..., None] + tail * np.exp(lse_tail - lse)[..., None]
    np.testing.assert_allclose(merged, whole, atol=1e-12)
