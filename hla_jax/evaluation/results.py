"""What an evaluation of HLA found, in one tree that becomes `results.json`, and the expectations it is held against."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hla_jax.evaluation.accuracy import TaskScore
from hla_jax.evaluation.estimates import Proportion
from hla_jax.evaluation.fidelity import AttentionDivergence, Decoding
from hla_jax.evaluation.memory import Memory
from hla_jax.evaluation.schemes import FULL, HLA_INITIAL, HLA_UPTRAINED, REUSE, SHARED
from hla_jax.evaluation.speed import Speed


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything the report shows. Names of schemes are those of `evaluation.schemes`.

    Attributes:
      command: the command that made this.
      date: when, ISO 8601.
      versions: package -> version.
      device: what it ran on.
      model: its name and sizes.
      scheme: HLA's sizes.
      dtype: of weights and caches.
      settings: sizes of the evaluation (sequences, tokens, questions), by name.
      attention: scheme -> attention divergence, for HLA before and after uptraining.
      decoding: scheme -> next-token distributions against the full cache's.
      tasks: scores of every scheme, task and distance.
      memory: scheme -> bytes.
      speed: one entry a context length.
      training: lines of the run's `metrics.jsonl`.
    """

    command: str
    date: str
    versions: dict[str, str]
    device: str
    model: dict[str, Any]
    scheme: dict[str, Any]
    dtype: str
    settings: dict[str, Any]
    attention: dict[str, AttentionDivergence]
    decoding: dict[str, Decoding]
    tasks: list[TaskScore]
    memory: dict[str, Memory]
    speed: list[Speed]
    training: list[dict[str, float]]

    def overall(self, scheme: str) -> Proportion:
        """All questions together."""
        return sum((score.answers for score in self.tasks if score.scheme == scheme), Proportion(0, 0))

    def retained(self, scheme: str) -> float:
        """Right answers over the full cache's, to all questions together; NaN where the full cache has none."""
        return _ratio(self.overall(scheme).right, self.overall(FULL).right)

    def to_json(self) -> dict[str, Any]:
        """A JSON object: the tree as nested objects, and `checks`."""
        return dataclasses.asdict(self) | {"checks": [dataclasses.asdict(check) for check in checks(self)]}


@dataclasses.dataclass(frozen=True)
class Check:
    """An expected ordering, what was measured, and whether it holds."""

    claim: str
    measured: str
    holds: bool


def checks(results: Results) -> list[Check]:
    """The orderings that the papers report and the embedded model is expected to show, as far as they were measured."""
    return [*_divergence_checks(results), *(_accuracy_checks(results) if results.tasks else [])]


def _divergence_checks(results: Results) -> list[Check]:
    before, after = (results.attention[name].mean_kl for name in (HLA_INITIAL, HLA_UPTRAINED))
    start, end, shared = (results.decoding[name].kl.mean for name in (HLA_INITIAL, HLA_UPTRAINED, SHARED))
    cut, decoding_cut, less = _ratio(before, after), _ratio(start, end), _ratio(shared, end)
    return [
        Check(
            "Uptraining cuts the attention KL at least 4 times.",
            f"{before:.3g} to {after:.3g} nats: {cut:.1f} times",
            cut >= 4,
        ),
        Check(
            "Uptraining cuts the decoding KL at least 10 times.",
            f"{start:.3g} to {end:.3g} nats: {decoding_cut:.1f} times",
            decoding_cut >= 10,
        ),
        Check(
            "HLA's decoding KL is below single-loop sharing's.",
            f"{end:.3g} against {shared:.3g} nats: {less:.1f} times less",
            less > 1,
        ),
    ]


def _accuracy_checks(results: Results) -> list[Check]:
    full, hla, reuse = (results.overall(name) for name in (FULL, HLA_UPTRAINED, REUSE))
    smaller = results.memory[HLA_UPTRAINED].ratio
    kept, reused = results.retained(HLA_UPTRAINED), results.retained(REUSE)
    return [
        Check(
            f"HLA at {smaller:.1f}x fewer bytes per token keeps at least 97% of the full cache's accuracy.",
            f"{hla.right} of {hla.count} right against {full.right}: {100 * kept:.1f}%",
            kept >= 0.97,
        ),
        Check(
            "Final-loop reuse collapses: it keeps less than half of the full cache's accuracy.",
            f"{reuse.right} of {reuse.count} right against {full.right}: {100 * reused:.1f}%",
            reused < 0.5,
        ),
    ]


def _ratio(numerator: float, denominator: float) -> float:
    """Plain division, without an error where nothing diverges or nothing is right: a comparison with NaN is false."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.float64(numerator) / np.float64(denominator))
