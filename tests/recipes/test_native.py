"""HLA from the first step against uptraining: both arms read the same batches, and the report has every number."""

import dataclasses

import pytest

from hla_jax.data.curriculum import TASKS, Stage
from hla_jax.evaluation import native_report
from hla_jax.evaluation.native_report import AFTER_PROMPT, EXACT, FROM_FIRST, NATIVE, STANDARD, UPTRAINED
from hla_jax.recipes import native
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.pretrain import Recipe
from tests.tiny import tiny_config

CONFIG = tiny_config(vocab_size=130, num_layers=1, num_loops=2)
tokenize = lambda text: [ord(character) for character in text]


def job(**changes) -> native.Job:
    stages = (Stage(1, 2, 64, {"recall": 1.0}, filler=0.0), Stage(2, 1, 96, {"recall": 1.0}, filler=0.0))
    sizes = dict(
        recipe=Recipe(CONFIG, stages, warmup_steps=1, evaluate_every=1),
        scheme=native.HLA(8, 8, 8, window=4),
        repetitions=0,
        uptrain=OptimizerConfig(1e-3, total_steps=1),
        calibration_batches=1,
        tasks=("recall",),
        lengths=(64,),
        examples=2,
        log_every=1,
    )
    return native.Job(**(sizes | changes))


def test_questions_and_answers_of_a_row():
    rows, prompts = native.question_rows(TASKS["recall"], 3, 64, tokenize)
    for row in range(3):
        text = "".join(map(chr, rows["tokens"][row, : rows["segments"][row].sum()]))
        answers = "".join(map(chr, rows["tokens"][row, rows["response"][row] > 0]))
        asked = [part.split("\n")[0] for part in text.split("?")[1:]]
        given = [entry.lstrip("abcdefghijklmnopqrstuvwxyz") for entry in asked]
        assert answers == "".join(f"{value}\n" for value in given)[: len(answers)]
        assert text[: prompts[row]].rsplit("?", 1)[1].isalpha()


def test_both_arms_read_the_same_tokens():
    counts = {arm: native.tokens_by_step(job(), arm) for arm in (NATIVE, STANDARD, UPTRAINED)}
    assert counts == {NATIVE: [128, 224, 320], STANDARD: [128, 224], UPTRAINED: [320]}
    assert [stage.steps for stage in job().standard.stages] == [1, 1]


def test_the_report_has_every_arm_and_way(tmp_path):
    """From results made up: of each row, answers right by arm and way."""
    ways = {STANDARD: (EXACT,), UPTRAINED: (EXACT, AFTER_PROMPT, FROM_FIRST), NATIVE: (EXACT, AFTER_PROMPT, FROM_FIRST)}
    scores = {"recall/64": {"cross_entropy": [0.1, 0.3], "right": [1.0, 0.5]}, "text/64": {"cross_entropy": [2.0, 3.0]}}
    estimate = {"mean": 1e-4, "stderr": 1e-5, "sequences": 2}
    agreement = {"kl": estimate, "cross_entropy_change": estimate}
    lines = [{"step": step, "right/recall/64": step / 3, "tokens": 64 * step} for step in range(4)]
    results = {
        "command": "a test",
        "job": dataclasses.asdict(job()),
        "tokens": dict.fromkeys(ways, 320),
        "answers": {arm: dict.fromkeys(of, scores) for arm, of in ways.items()},
        "decoding": {
            arm: {"passes": {"two passes": agreement}, "full_cache": {"kl": estimate, "top1": estimate}} for arm in ways
        },
        "training": {NATIVE: lines, STANDARD: lines[:2], UPTRAINED: []},
    }
    page = native_report.write_report(results, tmp_path).read_text()
    for arm in ("exact attention, then uptraining", "HLA from the first step"):
        assert f"| {arm}; two passes | 1 ± 0.1 |" in page
        for way in (AFTER_PROMPT, FROM_FIRST):
            assert (
                f"| {arm}; read with {way} | 0.200 [0.100, 0.300] | 75.0 [50.0, 100.0] | 2.500 [2.000, 3.000] |" in page
            )
    assert f"| exact attention; read with {EXACT} |" in page
    assert all((tmp_path / name).is_file() for name in ("results.json", "learning_recall.png", "accuracy.png"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uptrain": OptimizerConfig(1e-3, total_steps=2)}, "must be below the last stage's 2 steps, found 2"),
        ({"tasks": ("sums",)}, "tasks must be of .*; found sums"),
    ],
)
def test_mistakes_in_configs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(job(), **changes)
