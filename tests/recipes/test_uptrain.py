"""The main job in miniature: every part runs, a second start repeats nothing, and another job's folder is refused."""

import dataclasses
import json

import jax
import pytest

import hla_jax
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import SchemeError
from hla_jax.config import ConfigError
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import STANDARD_LIBRARY, Source
from hla_jax.evaluation.evaluate import EvaluationConfig
from hla_jax.models import weights
from hla_jax.recipes import uptrain
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.uptrain import LongDocuments, UptrainConfig
from tiny import copy_tokenizer, tiny_config

CONFIG = tiny_config(vocab_size=1024, num_loops=2, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> uptrain.Job:
    model = tmp_path_factory.mktemp("model") / "tiny"
    weights.save_params(weights.init_params(CONFIG, jax.random.key(0)), CONFIG, model)
    copy_tokenizer(model)
    return uptrain.Job(
        model=str(model),
        dtype="float32",
        scheme=HLA(rank_k=8, rank_v=8, rank_loop1=8, window=4),
        calibration=uptrain.Calibration(sequences=2, tokens=16),
        uptrain=UptrainConfig(
            sources=(Source(STANDARD_LIBRARY),),
            batches=BatchConfig(batch_size=2, length=16),
            optimizer=OptimizerConfig(peak_learning_rate=1e-3, total_steps=3),
            loop=LoopConfig(steps=3, log_every=1, evaluate_every=2, save_every=2),
            held_out_batches=1,
            long=LongDocuments((Source(STANDARD_LIBRARY),), 0, length=48, queries=6, held_out=1),
        ),
        evaluation=EvaluationConfig(
            sequences=2, tokens=24, prompt=8, tasks=(), contexts=(32,), speed_tokens=2, speed_rounds=1
        ),
        check_prompts=2,
        check_tokens=8,
        phase2=UptrainConfig(
            sources=(Source(STANDARD_LIBRARY),),
            batches=BatchConfig(batch_size=2, length=16),
            optimizer=OptimizerConfig(peak_learning_rate=1e-3, total_steps=2),
            loop=LoopConfig(steps=2, log_every=1, evaluate_every=2, save_every=2),
            held_out_batches=1,
            long=LongDocuments((Source(STANDARD_LIBRARY),), 2, length=48, queries=6, micro_batches=1, held_out=1),
            lanes=2,
        ),
    )


def read_metrics(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_runs_to_a_report_and_repeats_nothing(job, tmp_path, capsys, quick_compile):
    report = uptrain.run(job, tmp_path, "a test")
    text = report.read_text()
    assert "HLA uptrained" in text
    assert all(
        (tmp_path / name).exists() for name in ("results.json", "metrics.jsonl", "export/config.json", "job.json")
    )
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3]
    # The second phase begins where the first ended, and both are followed on both kinds of data, loop by loop.
    first, second = (read_metrics(tmp_path / name) for name in ("metrics.jsonl", "phase2/metrics.jsonl"))
    assert [line["step"] for line in read_metrics(tmp_path / "all_metrics.jsonl")] == [0, 1, 2, 3, 3, 4, 5]
    for kind in ("held_out/", "held_out/long/"):
        for name in ("kl", "kl/loop1", "kl/loop2"):
            assert second[0][kind + name] == pytest.approx(first[-1][kind + name], rel=1e-5)
            assert second[-1][kind + name] != second[0][kind + name]
    assert {"kl", "long/kl", "long/loss", "long/kl/loop2"} <= second[-1].keys()
    out = capsys.readouterr().out
    assert "the same 2 x 8 greedy tokens" in out
    exported = hla_jax.load(tmp_path / "export", dtype=None)
    assert exported.attention.scheme == job.scheme

    (tmp_path / "export" / "model.safetensors").touch()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "initial").iterdir()}
    uptrain.run(dataclasses.replace(job, evaluation=job.evaluation), tmp_path, "a test")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "initial").iterdir()} == before
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4

    with pytest.raises(ConfigError, match=r"started with another scheme \(see job.json\)"):
        uptrain.run(dataclasses.replace(job, scheme=dataclasses.replace(job.scheme, window=5)), tmp_path, "a test")


@pytest.mark.long
def test_an_export_that_changed_is_noticed(job, tmp_path, quick_compile):
    model = hla_jax.load(job.model, dtype="float32")
    attention = uptrain.initial_maps(job, model, tmp_path / "initial")
    hla_jax.export(model, attention, tmp_path / "export")
    damaged = {name: value * 0 for name, value in attention.params.items()}
    hla_jax.export(model, hla_jax.Attention(attention.scheme, damaged), tmp_path / "other")
    uptrain.check_export(job, model, attention, tmp_path / "export")
    with pytest.raises(ValueError, match="prompt 0 expected tokens"):
        uptrain.check_export(job, model, attention, tmp_path / "other")


def test_mistakes_leave_nothing_behind(job, tmp_path):
    with pytest.raises(SchemeError, match="rank_k must be a positive multiple"):
        uptrain.run(
            dataclasses.replace(job, scheme=dataclasses.replace(job.scheme, rank_k=9)), tmp_path / "new", "a test"
        )
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used as the work directory"):
        uptrain.run(job, tmp_path / "file" / "below", "a test")
