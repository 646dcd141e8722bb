"""Wilson's interval against scipy's, and at its ends."""

import numpy as np
import pytest
from scipy import stats

from hla_jax.evaluation.estimates import Proportion


@pytest.mark.parametrize(("right", "count"), [(0, 10), (3, 10), (63, 64), (64, 64)])
def test_interval(right, count):
    expected = stats.binomtest(right, count).proportion_ci(method="wilson")
    np.testing.assert_allclose(Proportion(right, count).interval, (expected.low, expected.high), atol=1e-12)


def test_sum():
    assert Proportion(1, 2) + Proportion(3, 4) == Proportion(4, 6)
    assert Proportion(1, 2).rate == 0.5
