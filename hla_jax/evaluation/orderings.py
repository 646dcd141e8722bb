"""The orderings that the papers report, held against a comparison: what was measured, and whether each holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hla_jax.evaluation.comparison import Measurement, Row
from hla_jax.evaluation.estimates import Interval, bootstrap
from hla_jax.evaluation.results import Check
from hla_jax.evaluation.schemes import FULL, REUSE, SHARED

LLA, LLA_2D, HLA = "LLA", "LLA-2D", "HLA"
LLA_INITIAL, LLA_RANDOM = "LLA at initialisation", "LLA from random maps"
LLA_EQUAL, LLA_ON_POLICY = "LLA with equal ranks", "LLA on-policy"
LLA_LOGITS = "LLA without the output term"
LLA_ABSORBED, LLA_ADAPTED = "LLA absorbed", "LLA absorbed with adapter"
HEADS, LAYERS, LOW_BIT = "head-axis latent", "adjacent-layer latent", "low bits"
EVICTION, LLA_EVICTION = "eviction", "LLA and eviction"

CURVES = (
    *(FULL, LLA, HLA, LLA_2D, HEADS, LAYERS, LOW_BIT, SHARED, REUSE, EVICTION, LLA_EVICTION),
    *(LLA_ON_POLICY, LLA_EQUAL, LLA_INITIAL, LLA_RANDOM, LLA_LOGITS, LLA_ABSORBED, LLA_ADAPTED),
)
"""In the order of legends and colours."""


def orderings(rows: Sequence[Row]) -> list[Check]:
    """Every claim of the papers about which the rows say something. Differences come with paired 95% intervals."""
    by_curve: dict[str, list[Row]] = {}
    for row in rows:
        by_curve.setdefault(row.curve, []).append(row)

    def nearest(curve: str, ratio: float) -> Row | None:
        """The curve's row whose compression is nearest to `ratio`, if it is not another one."""
        far = lambda row: abs(np.log(row.measured.bytes.ratio / ratio))
        return min((row for row in by_curve.get(curve, []) if far(row) < np.log(1.5)), key=far, default=None)

    lla = nearest(LLA, 4)
    full = nearest(FULL, 1)
    checks: list[Check | None] = [
        _less_divergence(lla, nearest(HEADS, 4), "Latents over loops diverge less than latents over heads, at 4x."),
        _less_divergence(lla, nearest(LAYERS, 4), "Latents over loops diverge less than latents over layers, at 4x."),
        _less_divergence(lla, nearest(LOW_BIT, 4), "Latents over loops diverge less than low bits, at 4x."),
        _collapse(nearest(REUSE, 4), full),
        _less_divergence(lla, nearest(LLA_EQUAL, 4), "More ranks for values than keys diverge less than equal ones."),
        _beside(nearest(HLA, 10.67), lla),
        _less_divergence(lla, nearest(LLA_RANDOM, 4), "Starting from SVD diverges less than from random maps."),
        _less_divergence(lla, nearest(LLA_LOGITS, 4), "Matching attention outputs diverges less than logits alone."),
        _less_divergence(lla, nearest(LLA_ADAPTED, 4), "Rebuilding keys diverges less than absorbing the maps."),
        _less_divergence(
            nearest(LLA_ADAPTED, 4), nearest(LLA_ABSORBED, 4), "A query adapter brings absorbed LLA closer."
        ),
    ]
    for refined in by_curve.get(LLA_ON_POLICY, []):
        checks += _on_policy(refined, nearest(LLA, refined.measured.bytes.ratio))
    return [check for check in checks if check is not None]


def _less_divergence(one: Row | None, other: Row | None, claim: str) -> Check | None:
    """The held-out KL of `one` is below the other's."""
    if one is None or other is None:
        return None
    a, b = one.measured.held_out_kl, other.measured.held_out_kl
    difference = bootstrap(np.subtract(b, a))
    measured = f"{_named(one)} {np.mean(a):.4g} nats, {_named(other)} {np.mean(b):.4g}: {_interval(difference)} more"
    return Check(claim, measured, difference.mean > 0)


def _collapse(reuse: Row | None, full: Row | None) -> Check | None:
    if reuse is None or full is None or not full.measured.right:
        return None
    a, b = _right(reuse.measured), _right(full.measured)
    measured = f"{100 * a.mean():.1f}% right against {100 * b.mean():.1f}%"
    return Check(
        "Final-loop reuse collapses to less than half of the right answers.", measured, bool(2 * a.sum() < b.sum())
    )


def _beside(hla: Row | None, lla: Row | None) -> Check | None:
    """HLA at its ratio keeps up with LLA at 4x: accuracy where tasks were asked, else top-1 agreement."""
    if hla is None or lla is None:
        return None
    kl = ", ".join(f"{_named(row)}: KL {np.mean(row.measured.held_out_kl):.4g} nats" for row in (hla, lla))
    if hla.measured.right:
        what, values = "right answers", [_right(row.measured) for row in (hla, lla)]
    else:
        what, values = "top-1 agreement", [np.asarray(row.measured.top1) for row in (hla, lla)]
    difference = bootstrap(values[0] - values[1])
    measured = f"{kl}; {what} {100 * values[0].mean():.1f}% and {100 * values[1].mean():.1f}%"
    claim = f"HLA at 10.7x is not below LLA at 4x in {what} by more than chance."
    return Check(claim, f"{measured}: {_interval(difference, 100)} points", difference.high >= 0)


def _on_policy(refined: Row, distilled: Row | None) -> Iterator[Check]:
    """What refinement changes in long rollouts: fewer of them end without an answer, and more of them rightly."""
    if distilled is None or not refined.measured.right:
        return
    given = lambda found: np.asarray(found.all_given, float)
    for claim, values in (("leaves fewer questions unanswered", given), ("answers more questions rightly", _right)):
        after, before = (values(row.measured) for row in (refined, distilled))
        means = f"{100 * before.mean():.1f}% to {100 * after.mean():.1f}%"
        difference = bootstrap(after - before)
        yield Check(
            f"On-policy refinement {claim} at {refined.measured.bytes.ratio:.1f}x.",
            f"{'given' if values is given else 'right'}: {means}: {_interval(difference, 100)} points",
            difference.mean > 0,
        )


def _right(found: Measurement) -> np.ndarray:
    return np.asarray(found.all_right, float)


def _named(row: Row) -> str:
    return f"{row.curve} {row.measured.bytes.ratio:.2f}x"


def _interval(found: Interval, scale: float = 1) -> str:
    return f"{scale * found.mean:+.3g} [{scale * found.low:.3g}, {scale * found.high:.3g}]"
