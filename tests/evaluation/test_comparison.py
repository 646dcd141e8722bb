"""A comparison's numbers, orderings and figure, from rows whose answers are known."""

import dataclasses
import json

import numpy as np
import pytest

from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.low_bit import LowBit
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import OURO_1P4B
from hla_jax.evaluation import comparison_report, orderings
from hla_jax.evaluation import orderings as curves
from hla_jax.evaluation.comparison import Bytes, Measurement, Row, bytes_of
from hla_jax.evaluation.schemes import FULL, REUSE, SHARED

QUESTIONS = 40


def row(curve: str, ratio: float, kl: float, right: int, given: int = QUESTIONS) -> Row:
    """A scheme that answers the first `right` of the questions, and gives any answer to the first `given`."""
    first = lambda count: tuple(index < count for index in range(QUESTIONS))
    by_sequence = tuple(kl * (1 + 0.1 * index) for index in range(5))
    measured = Measurement(
        bytes=Bytes(int(8192 / ratio), 0, ratio, ratio, 512),
        held_out_kl=by_sequence,
        output_error=(0.1, 0.2),
        decoding_kl=by_sequence,
        top1=(0.9,) * 5,
        right={"recall": first(right)},
        given={"recall": first(given)},
        speed={"1024": 0.5},
    )
    return Row(f"{curve} {ratio}", curve, {}, "distill", measured)


def rows() -> list[Row]:
    """Everything as the papers have it; the nearest ratio to 4x counts."""
    return [
        row(FULL, 1, 0.0, 40),
        row(curves.LLA, 1.33, 0.001, 40),
        row(curves.LLA, 4, 0.01, 36),
        row(curves.LLA, 10.67, 0.3, 20, given=25),
        row(curves.HEADS, 2, 0.005, 40),
        row(curves.HEADS, 4, 0.02, 34),
        row(curves.LAYERS, 4, 0.03, 32),
        row(curves.LOW_BIT, 3.76, 0.05, 30),
        row(curves.LOW_BIT, 1.9, 0.0001, 40),
        row(SHARED, 4, 0.08, 30),
        row(REUSE, 4, 2.0, 10),
        row(curves.HLA, 10.67, 0.02, 36),
        row(curves.LLA_EQUAL, 4, 0.015, 35),
        row(curves.LLA_RANDOM, 4, 0.7, 5),
        row(curves.LLA_ON_POLICY, 10.67, 0.25, 28, given=38),
    ]


def test_orderings_of_the_papers():
    found = {check.claim: check for check in orderings.orderings(rows())}
    assert len(found) == 9
    assert all(check.holds for check in found.values())
    heads = found["Latents over loops diverge less than latents over heads, at 4x."].measured
    # Means over five sequences, 1.2 times the first one's; the interval is of the paired differences.
    assert heads.startswith("LLA 4.00x 0.012 nats, head-axis latent 4.00x 0.024: +0.012 [")
    assert "low bits 3.76x" in found["Latents over loops diverge less than low bits, at 4x."].measured
    reuse = "Final-loop reuse collapses to less than half of the right answers."
    assert found[reuse].measured == "25.0% right against 100.0%"
    refined = found["On-policy refinement leaves fewer questions unanswered at 10.7x."]
    assert refined.measured.startswith("given: 62.5% to 95.0%: +32.5 [")


def test_what_does_not_hold_is_said_and_what_is_missing_is_not():
    worse = {curves.HEADS: 0.001, curves.LAYERS: 0.001, curves.LOW_BIT: 0.001, curves.LLA_EQUAL: 0.001}
    found = rows()
    for index, old in enumerate(found):
        if old.curve in worse:
            found[index] = row(old.curve, old.measured.bytes.ratio, worse[old.curve], 40)
        if old.curve in {REUSE, curves.LLA_RANDOM}:
            found[index] = row(old.curve, 4, 1e-3, 20)
        if old.curve in {curves.HLA, curves.LLA_ON_POLICY}:
            found[index] = row(old.curve, 10.67, 0.5, 10, given=20)
    checks = orderings.orderings(found)
    assert len(checks) == 9
    assert not any(check.holds for check in checks)
    assert orderings.orderings(found[:1]) == []
    assert [check.claim for check in orderings.orderings([*found[:3], *found[4:6]])] == [checks[0].claim]


def test_without_tasks_agreement_is_compared():
    found = [dataclasses.replace(one, measured=dataclasses.replace(one.measured, right={}, given={})) for one in rows()]
    claims = [check.claim for check in orderings.orderings(found)]
    assert "HLA at 10.7x is not below LLA at 4x in top-1 agreement by more than chance." in claims
    assert not any("answers" in claim for claim in claims)
    assert comparison_report.quality_figure(found).axes[1].get_ylabel() == "top-1 agreement (%)"


def test_report(tmp_path):
    text = comparison_report.write_report(rows(), tmp_path, "a test").read_text()
    assert "| LLA 4 | distill | 4.00x | 4.00x | 2,048 | 0 | 0.0120 [" in text
    assert "| 90.0 [80.0, 97.5] | -10.0 [-20.0, -2.5] |" in text
    stored = json.loads((tmp_path / "results.json").read_text())
    lla = stored["rows"][2]["summary"]
    assert lla["accuracy/recall"] == lla["accuracy"]
    assert lla["accuracy_difference"]["mean"] == pytest.approx(-0.1)
    assert lla["unanswered"]["mean"] == 0
    assert [check["holds"] for check in stored["orderings"]] == [True] * 9


def test_every_curve_has_a_style_of_its_own():
    found = [row(curve, 4, 0.1, 20) for curve in curves.CURVES] + [row(curves.LLA, 2, 0.05, 30)]
    left, right = comparison_report.quality_figure(found).axes
    assert (left.get_xscale(), left.get_yscale(), right.get_yscale()) == ("log", "log", "linear")
    lines = [container.lines[0] for container in right.containers]
    looks = {(line.get_color(), line.get_marker(), line.get_fillstyle()) for line in lines}
    assert len(looks) == len(lines) == len(curves.CURVES)
    assert len(left.containers) == len(lines) - 1  # the full cache has no KL from itself
    (lla,) = (line for line in lines if len(line.get_xdata()) == 2)
    np.testing.assert_allclose(lla.get_xydata(), [(2, 75), (4, 50)])


@pytest.mark.parametrize(
    ("scheme", "per_token", "per_sequence", "ratio", "ratio_at"),
    [
        (FullCache(), 768, 0, 1, 1),
        (LLA(96, 160), 192, 0, 4, 4),
        (HLA(512, 512, 256, 128), 72, 96 * 1024, 32 / 3, 1 / (3 / 32 + 128 / 4096)),
        (SharedLoop(0), 192, 0, 4, 4),
        # Codes of 4 bits, and two 16-bit scales for a head's values: 132 bytes for 512.
        (LowBit(4), 198, 0, 512 / 132, 512 / 132),
        (Evicted(LLA(96, 160), 1024), 192, 0, 16, 16),
    ],
)
def test_bytes_of_ouro(scheme, per_token, per_sequence, ratio, ratio_at):
    found = bytes_of(OURO_1P4B, scheme, 4096)
    assert (found.per_token, found.per_sequence) == (per_token * 1024, per_sequence * 1024)
    np.testing.assert_allclose((found.ratio, found.ratio_at_context), (ratio, ratio_at))


def test_a_million_tokens_in_36_mebibytes():
    """LLA at 21.3x with a budget of 1,024 tokens, as the LLA paper counts."""
    found = bytes_of(OURO_1P4B, Evicted(LLA(18, 30), 1024), 2**20)
    assert found.ratio * 36 * 2**20 == 2**20 * 768 * 1024
