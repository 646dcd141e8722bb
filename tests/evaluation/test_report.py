"""The report: every expectation with its number, whether it holds or not, and figures that exist."""

import dataclasses
import json
import re

import numpy as np
import pytest
from matplotlib import image

from hla_jax.analysis import figures
from hla_jax.evaluation.accuracy import TaskScore
from hla_jax.evaluation.estimates import Estimate, Proportion
from hla_jax.evaluation.fidelity import AttentionDivergence, Decoding, PositionRange
from hla_jax.evaluation.memory import cache_memory
from hla_jax.evaluation.report import write_report
from hla_jax.evaluation.results import Results, checks
from hla_jax.evaluation.schemes import FULL, HLA_INITIAL, HLA_UPTRAINED, REUSE, SHARED, side_by_side
from hla_jax.evaluation.speed import Ratio, Speed
from tests import tiny

RIGHT = {FULL: 100, HLA_UPTRAINED: 98, HLA_INITIAL: 60, SHARED: 90, REUSE: 10}
KL = {HLA_UPTRAINED: 0.016, HLA_INITIAL: 0.367, SHARED: 0.087, REUSE: 3.19}


def decoding(kl: float) -> Decoding:
    ranges = (PositionRange(32, 64, Estimate(kl / 2, kl / 9, 8)), PositionRange(64, 96, Estimate(2 * kl, None, 1)))
    return Decoding(Estimate(kl, kl / 10, 8), Estimate(0.9, 0.01, 8), ranges)


@pytest.fixture
def results() -> Results:
    config = tiny.tiny_config()
    hla = tiny.random_hla(config, window=4)
    schemes = side_by_side(hla, hla)
    speeds = {FULL: 10.0, HLA_UPTRAINED: 30.0, SHARED: 12.0, REUSE: 12.0}
    held_out = {f"held_out/kl/loop{loop}": 0.1 * loop for loop in (1, 2, 3)}
    return Results(
        command="python -m experiments.uptrain",
        date="2026-11-30T00:00:00+00:00",
        versions={"jax": "0.10.2"},
        device="1 x cpu",
        model={"path": "tiny", "num_loops": 3},
        scheme=hla.scheme.to_config(),
        dtype="float32",
        settings={"sequences": 8},
        attention={
            HLA_INITIAL: AttentionDivergence((0.6, 0.4, 0.3), (0.3, 0.3, 0.3)),
            HLA_UPTRAINED: AttentionDivergence((0.12, 0.04, 0.03), (0.03, 0.03, 0.03)),
        },
        decoding={name: decoding(kl) for name, kl in KL.items()},
        tasks=[
            TaskScore(name, "recall", distance, Proportion(right, 100), lost=100 - right, gained=0)
            for name, right in RIGHT.items()
            for distance in (64, 256)
        ],
        memory=cache_memory(config, schemes, [64, 256], "float32"),
        speed=[Speed(64, 2, speeds, {name: Ratio(speed / 10, 0.9, 4.0) for name, speed in speeds.items()})],
        training=[
            {"step": 0, "held_out/kl": 0.2, **held_out},
            {"step": 9, "loss": 0.5, "held_out/kl": 0.1, **held_out},
        ],
    )


def test_report_tells_everything(results, tmp_path):
    report = write_report(results, tmp_path / "report")
    text = report.read_text()
    for part in (
        "`python -m experiments.uptrain`",
        "jax 0.10.2",
        "6.8 times",
        "22.9 times",
        "5.4 times less",
        "98.0%",
        "10.0%",
        "98 [93, 99] −2 +0",
        "0.0160 ± 0.0016",
        "30.0 (3.00x, 0.90 to 4.00)",
    ):
        assert part in text, part
    assert "**no**" not in text
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(pictures) == 7
    assert {path.name for path in report.parent.iterdir()} == {"report.md", "results.json", *pictures}
    for picture in pictures:
        assert np.ptp(image.imread(report.parent / picture)) > 0.5
    stored = json.loads((report.parent / "results.json").read_text())
    assert stored["decoding"][SHARED]["kl"]["mean"] == 0.087
    assert [check["holds"] for check in stored["checks"]] == [True] * 5


def test_what_does_not_hold_is_said(results, tmp_path):
    worse = dataclasses.replace(
        results,
        attention={name: results.attention[HLA_INITIAL] for name in results.attention},
        decoding={name: decoding(0.2) for name in KL},
        tasks=[
            dataclasses.replace(score, answers=Proportion(96 if score.scheme != FULL else 100, 100))
            for score in results.tasks
        ],
    )
    assert [check.holds for check in checks(worse)] == [False] * 5
    assert write_report(worse, tmp_path).read_text().count("**no**") == 5


def test_a_model_without_tasks_or_training_has_a_report(results, tmp_path):
    less = dataclasses.replace(results, tasks=[], speed=[], training=[])
    text = write_report(less, tmp_path).read_text()
    assert "## Accuracy" not in text
    assert len(checks(less)) == 3


def test_nothing_right_is_not_a_success(results):
    none = [dataclasses.replace(score, answers=Proportion(0, 100)) for score in results.tasks]
    assert not any(check.holds for check in checks(dataclasses.replace(results, tasks=none))[3:])


def test_colours_follow_the_scheme_not_the_figure():
    colour = lambda figure: figure.axes[0].lines[-1].get_color()
    both = figures.lines([1, 2], {"a": [1, 2], "b": [2, 3]}, "x", "y", styles=["a", "b"])
    alone = figures.lines([1, 2], {"b": [2, 3]}, "x", "y", styles=["a", "b"])
    assert colour(both) == colour(alone)
