"""Numbers with their uncertainty."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

_Z95 = 1.959963984540054


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over sequences. Tokens of one sequence are correlated, so the error comes from the sequences' own means.

    Attributes:
      mean: over all tokens.
      stderr: standard error of the mean; None for one sequence.
      sequences: how many.
    """

    mean: float
    stderr: float | None
    sequences: int

    @classmethod
    def of(cls, by_sequence: np.ndarray) -> Estimate:
        """From one mean a sequence, [N]."""
        count = by_sequence.size
        stderr = float(np.std(by_sequence, ddof=1) / math.sqrt(count)) if count > 1 else None
        return cls(float(np.mean(by_sequence)), stderr, count)

    def __format__(self, spec: str) -> str:
        """`f"{estimate:.3f}"`: the mean ± its error, each so written; no minus before what rounds to nothing."""
        spread = "" if self.stderr is None else f" ± {self.stderr:{spec}}"
        return f"{self.mean:z{spec}}{spread}"


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float


def bootstrap(by_unit: Sequence[float] | np.ndarray, resamples: int = 2000, seed: int = 0) -> Interval:
    """Percentile bootstrap of a mean over units (sequences or questions), [N].

    Two schemes asked the same questions are compared by the differences of their answers, question by question:
    resampling these is resampling pairs. Where all values are equal the interval has no width.
    """
    values = np.asarray(by_unit, np.float64)
    drawn = np.random.default_rng(seed).integers(values.size, size=(resamples, values.size))
    low, high = np.quantile(values[drawn].mean(axis=1), (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))


def bootstrap_ratio(
    by_unit: Sequence[float] | np.ndarray, reference: Sequence[float] | np.ndarray, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of a mean over another one's, of the same units [N]: pairs are resampled together.

    A resample without anything in `reference` is left out, so at least one unit must have something there.
    """
    values, others = np.asarray(by_unit, np.float64), np.asarray(reference, np.float64)
    drawn = np.random.default_rng(seed).integers(values.size, size=(resamples, values.size))
    above, below = values[drawn].sum(axis=1), others[drawn].sum(axis=1)
    low, high = np.quantile(above[below > 0] / below[below > 0], (0.025, 0.975))
    return Interval(float(values.sum() / others.sum()), float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Proportion:
    """`right` of `count`."""

    right: int
    count: int

    @property
    def rate(self) -> float:
        return self.right / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval, which stays within 0 and 1 and is not empty at either end."""
        centre = self.right + _Z95**2 / 2
        spread = _Z95 * math.sqrt(self.right * (self.count - self.right) / self.count + _Z95**2 / 4)
        total = self.count + _Z95**2
        return max(0.0, (centre - spread) / total), min(1.0, (centre + spread) / total)

    def __add__(self, other: Proportion) -> Proportion:
        return Proportion(self.right + other.right, self.count + other.count)
