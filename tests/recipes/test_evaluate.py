"""A whole evaluation of a tiny model from the command's job: tasks and fidelity, one report, resumed, and refused."""

import dataclasses
import json
import shutil

import pytest

import hla_jax
from hla_jax.attention import registry
from hla_jax.config import ConfigError
from hla_jax.data.pipeline import SYNTHETIC, Source
from hla_jax.evaluation import fidelity, run_tasks
from hla_jax.evaluation.run_tasks import Running, answers_file, read_lines
from hla_jax.evaluation.schemes import FULL
from hla_jax.evaluation.task import TaskError
from hla_jax.models import weights
from hla_jax.recipes import evaluate
from hla_jax.recipes.evaluate import Answering, Candidate, EvaluationJob, FidelityConfig
from tiny import tiny_config, tiny_params

CONFIG = tiny_config(vocab_size=1024, max_position_embeddings=256, num_layers=1)
SHARED = Candidate("sharing", scheme=registry.to_entries(hla_jax.SharedLoop(3)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    weights.save_params(tiny_params(CONFIG), CONFIG, path)
    for file in hla_jax.NANO.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def job(directory) -> EvaluationJob:
    return EvaluationJob(
        str(directory),
        (SHARED,),
        ("recall_32", "fidelity"),
        "float32",
        answering=Answering(max_new_tokens=4, samples=2, temperature=1.0),
        running=Running(slots=4, limit=2),
        fidelity=FidelityConfig((Source(SYNTHETIC),), sequences=2, tokens=24, prompt=8, batch_size=2),
    )


@pytest.mark.long
@pytest.mark.usefixtures("quick_compile")
def test_one_report_of_everything_and_nothing_twice(job, tmp_path, monkeypatch):
    report = evaluate.run(job, tmp_path, "a command")
    text = report.read_text()
    for expected in (
        "command: `a command`",
        "| sharing |",
        "## recall_32",
        "2 items, 2 samples of each",
        "## Fidelity",
    ):
        assert expected in text
    lines = read_lines(answers_file(tmp_path, "recall_32", "sharing"))
    assert len(lines) == 4
    assert all(line["new_tokens"] <= 4 for line in lines)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["fidelity"]["sharing"]["decoding"]["kl"]["mean"] > 0
    assert found["memory"]["sharing"]["ratio"] == CONFIG.num_loops

    def never(*args, **settings):
        raise AssertionError("asked again")

    monkeypatch.setattr(run_tasks, "_generate", never)
    monkeypatch.setattr(fidelity, "measure", never)
    evaluate.run(job, tmp_path, "a command")
    assert json.loads((tmp_path / "results.json").read_text()) == found
    with pytest.raises(ConfigError, match="was started with another temperature"):
        evaluate.run(dataclasses.replace(job, answering=Answering(max_new_tokens=4, temperature=0.5)), tmp_path, "")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(tasks=("math600",)), TaskError, "no task 'math600'; there are"),
        (dict(candidates=(SHARED, SHARED)), ConfigError, "caches need names of their own"),
        (dict(candidates=(Candidate(FULL, maps="x"),)), ConfigError, "'full cache' is always there"),
        (dict(candidates=(Candidate("x"),)), ConfigError, "x: expected an export with maps, or a scheme without"),
        (
            dict(candidates=(Candidate("x", scheme=registry.to_entries(hla_jax.LLA(6, 6))),)),
            ConfigError,
            "x: LLA needs maps; fit it with experiments.compare",
        ),
    ],
)
def test_impossible_jobs_are_refused(job, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        evaluate.run(dataclasses.replace(job, **changes), tmp_path, "")
