"""Bootstrap intervals against the analytic ones of means, and of paired differences."""

import numpy as np

from hla_jax.evaluation.estimates import bootstrap


def test_interval_is_the_normal_one_of_a_mean():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = bootstrap(values, resamples=4000)
    half = 1.959964 * values.std(ddof=1) / np.sqrt(values.size)
    assert found.mean == values.mean()
    np.testing.assert_allclose([found.low, found.high], [values.mean() - half, values.mean() + half], atol=0.1 * half)


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(2)
    found = [bootstrap(rng.normal(1.0, 3.0, 50), resamples=400, seed=number) for number in range(400)]
    covered = np.mean([one.low <= 1.0 <= one.high for one in found])
    # The binomial error of 400 trials is 0.011, and percentiles of 50 values cover about 0.01 too little.
    assert 0.91 <= covered <= 0.97


def test_differences_are_paired():
    rng = np.random.default_rng(3)
    hard = rng.normal(0.0, 5.0, 100)
    one, other = hard + rng.normal(0.0, 0.1, 100), hard + 0.1 + rng.normal(0.0, 0.1, 100)
    difference = bootstrap(other - one)
    assert difference.low > 0
    # Questions that are hard for both make each mean uncertain, not the difference.
    assert difference.high - difference.low < 0.1 * (bootstrap(one).high - bootstrap(one).low)


def test_one_seed_gives_one_interval_and_equal_values_none():
    values = np.arange(9.0)
    assert bootstrap(values, seed=4) == bootstrap(values, seed=4) != bootstrap(values, seed=5)
    assert (bootstrap([True] * 8).low, bootstrap([True] * 8).high) == (1.0, 1.0)
