"""The divergence by distance and of queries that are moved: nonnegative terms, against numpy in float64 and against
uptraining's loss.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import naive
from hla_jax.analysis.divergence import ByDistance, by_distance, by_shift, terms
from hla_jax.attention.capture import attention_inputs
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.training import uptrain
from tiny import full_rank_hla, random_hla, tiny_config, tiny_params, tiny_tokens

CONFIG = tiny_config(num_layers=2, num_loops=3)
STARTS = (0, 1, 3, 9, 40)
LENGTH = 14
pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def tiny(x64):
    params = tiny_params(CONFIG, "float64")
    return params, np.asarray(tiny_tokens(CONFIG, 2, LENGTH))


def test_terms_are_nonnegative_and_exact(x64):
    rng = np.random.default_rng(0)
    a = np.exp(rng.uniform(-20, 0, 2000))
    b = np.concatenate(
        [
            a[:1000] * np.exp(rng.normal(size=1000) * 10.0 ** rng.integers(-6, 1, 1000)),
            np.exp(rng.uniform(-20, 0, 1000)),
        ]
    )
    found = np.asarray(terms(jnp.log(a), jnp.log(b)))
    wide = a.astype(np.longdouble), b.astype(np.longdouble)
    expected = wide[0] * np.log(wide[0] / wide[1]) - wide[0] + wide[1]
    assert (found >= 0).all()
    np.testing.assert_allclose(found, expected.astype(float), rtol=1e-7, atol=1e-18)


def test_terms_in_float32_never_go_below_nothing():
    rng = np.random.default_rng(1)
    log_a = jnp.asarray(rng.uniform(-110, 0, 5000), jnp.float32)
    for scale in (1e-6, 1e-3, 0.049, 0.051, 1, 100):
        log_b = jnp.minimum(log_a + scale * jnp.asarray(rng.normal(size=5000), jnp.float32), 0)
        found = np.asarray(terms(log_a, log_b))
        assert np.isfinite(found).all()
        assert found.min() >= 0
    # Both of them nothing, or one of them.
    np.testing.assert_allclose(terms(jnp.asarray([-500.0, -500.0]), jnp.asarray([-800.0, 0.0])), [0, 1])


def scores_one_by_one(params, attention, tokens, queries, shift=0):
    """Yields layer, loop, query and the exact and the latent scores [i + 1, H] of all that it sees."""
    h = np.asarray(attention_inputs(params, CONFIG, jnp.asarray(tokens), jnp.arange(LENGTH)[None]))
    store = naive.LatentStore(CONFIG, attention.params)
    for row in range(len(tokens)):
        for layer in range(CONFIG.num_layers):
            weights = {name: np.asarray(value[layer]) for name, value in params["layers"].items()}
            for loop in range(CONFIG.num_loops):
                for token in range(LENGTH):
                    one = h[loop, layer, row, token]
                    heads = lambda name: (weights[name] @ one).reshape(-1, CONFIG.head_dim)  # noqa: B023
                    store.note(token, loop, layer, one, heads("k_proj"), heads("v_proj"))
            for loop in range(CONFIG.num_loops):
                for i in queries:
                    q = (weights["q_proj"] @ h[loop, layer, row, i]).reshape(-1, CONFIG.head_dim)
                    read = lambda way: np.stack([way(i + shift, j, loop, layer, q)[0] for j in range(i + 1)])  # noqa: B023
                    yield layer, loop, i, read(store.exact), read(store.read)


def softmax(scores):
    return np.exp(scores - scores.max(0)) / np.exp(scores - scores.max(0)).sum(0)


@pytest.mark.parametrize("window", [0, 2])
def test_ranges_against_one_pair_at_a_time(tiny, window):
    params, tokens = tiny
    attention = random_hla(CONFIG, window, "float64")
    found = by_distance(params, CONFIG, attention, tokens, queries=3, starts=STARTS)
    held, split = np.zeros((2, 2, 3, 4))
    for layer, loop, i, exact, read in scores_one_by_one(params, attention, tokens, [3, 8, 13]):
        read = np.where((i - np.arange(i + 1) <= window)[:, None], exact, read)
        a, b = softmax(exact), softmax(read)
        kl = a * np.log(a / b) - a + b
        for j in range(i + 1):
            part = max(n for n, start in enumerate(STARTS) if start <= i - j)
            held[layer, loop, part] += a[j].mean() / 6
            split[layer, loop, part] += kl[j].mean() / 6
    assert found.starts == STARTS[:-1]
    np.testing.assert_allclose(found.attention, held, rtol=1e-8)
    np.testing.assert_allclose(found.kl, split, rtol=1e-6, atol=1e-12)


def test_all_ranges_together_are_uptrainings_divergence(tiny):
    params, tokens = tiny
    attention = random_hla(CONFIG, 2, "float64")
    found = by_distance(params, CONFIG, attention, tokens, queries=None, starts=STARTS)
    positions, segments = np.broadcast_to(np.arange(LENGTH), tokens.shape), np.ones_like(tokens)
    batch = map(jnp.asarray, (tokens, positions, segments))
    whole = uptrain.divergence(attention.scheme, CONFIG, attention.params, params, *batch)
    np.testing.assert_allclose(found.kl.sum(-1).mean(0), whole.kl, rtol=1e-6)
    np.testing.assert_allclose(found.attention.sum(-1), 1)
    assert (found.kl >= 0).all()
    per_unit = found.kl.mean(0) / found.attention.mean(0)
    np.testing.assert_allclose(found.per_attention, per_unit)


def test_maps_of_full_rank_do_not_err_and_a_planted_fault_shows_where_it_is(tiny):
    """The fault: loop 3's reader alone, in layer 2."""
    params, tokens = tiny
    attention = full_rank_hla(CONFIG, params, 1, shuffle=3)
    split = lambda attention: by_distance(params, CONFIG, attention, tokens, queries=3, starts=STARTS).kl.sum(-1)
    assert split(attention).max() < 1e-12
    wrong = {**attention.params, "read_q": attention.params["read_q"].at[1, 1].multiply(0.5)}
    found = split(Attention(attention.scheme, wrong))
    assert found[1, 2] > 1e-4
    found[1, 2] = 0
    assert found.max() < 1e-12


def test_moved_queries_against_one_pair_at_a_time(tiny):
    params, tokens = tiny
    attention, shifts, gap = random_hla(CONFIG, 2, "float64"), (0, 5, 40), 4
    found = by_shift(params, CONFIG, attention, tokens, shifts, queries=2, gap=gap)
    expected = np.zeros((3, 2, 3))
    for number, shift in enumerate(shifts):
        for layer, loop, i, exact, read in scores_one_by_one(params, attention, tokens, [12, 13], shift):
            a, b = softmax(exact[: i - gap + 1]), softmax(read[: i - gap + 1])
            expected[number, layer, loop] += (a * np.log(a / b)).sum(0).mean() / 4
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    assert not np.isclose(found[0], found[2], rtol=1e-2).all()


def test_maps_of_full_rank_do_not_err_at_any_distance_and_a_wrong_rotation_does(tiny):
    params, tokens = tiny
    attention = full_rank_hla(CONFIG, params, 1, shuffle=3)
    moved = lambda attention: by_shift(params, CONFIG, attention, tokens, (0, 1000), queries=3, gap=2).max()
    assert moved(attention) < 1e-12
    turned = attention.scheme.pair_frequency[1:] + attention.scheme.pair_frequency[:1]
    assert moved(Attention(dataclasses.replace(attention.scheme, pair_frequency=turned), attention.params)) > 1e-4


def test_a_gap_that_reads_the_window_or_nothing_is_refused(tiny):
    params, tokens = tiny
    for gap in (2, 12):
        with pytest.raises(ValueError, match=f"gap must be beyond the window of 2 and up to 11, .* found {gap}"):
            by_shift(params, CONFIG, random_hla(CONFIG, 2, "float64"), tokens, (0,), queries=3, gap=gap)


def test_what_cannot_be_split_is_refused(tiny):
    params, tokens = tiny
    with pytest.raises(TypeError, match="defined for HLA, found FullCache"):
        by_distance(params, CONFIG, Attention(FullCache()), tokens)
    for starts in ((), (1, 2), (0, 4, 4)):
        with pytest.raises(ValueError, match="ranges must start at 0 and grow"):
            by_distance(params, CONFIG, random_hla(CONFIG, 0, "float64"), tokens, starts=starts)


def test_names_of_ranges():
    assert ByDistance((0, 1, 3, 1024), np.ones(()), np.ones(())).names == ["0", "1-2", "3-1,023", "1,024 and more"]
