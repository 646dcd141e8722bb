"""Fine-tuning around its training: both caches run to one report, nothing is repeated, and mistakes are named."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import hla_jax
from hla_jax.config import ConfigError
from hla_jax.data.supervised import ChatBatches, ChatSource
from hla_jax.models import weights
from hla_jax.recipes import finetune
from hla_jax.training.finetune import FinetuneConfig, Finetuned
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig
from tests.tiny import copy_tokenizer, random_hla, tiny_config

CONFIG = tiny_config(vocab_size=1024, num_loops=2, num_layers=1)


def save(directory, attention=None):
    """A model with the embedded one's tokenizer."""
    params = weights.init_params(CONFIG, jax.random.key(0))
    hla_jax.export(hla_jax.Model(CONFIG, params), attention, directory)
    copy_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> finetune.Job:
    return finetune.Job(
        model=save(tmp_path_factory.mktemp("model") / "tiny", random_hla(CONFIG, 4)),
        dtype="float32",
        caches=("full cache", "HLA"),
        finetune=FinetuneConfig(
            sources=(ChatSource("synthetic", tasks=("reverse",), tokens=(8, 16)),),
            batches=ChatBatches(tokens=96, lengths=(48,), block=8),
            optimizer=OptimizerConfig(peak_learning_rate=1e-3, total_steps=2),
            loop=LoopConfig(steps=2, evaluate_every=1),
            held_out_batches=1,
        ),
        evaluation=finetune.Evaluation(conversations=4, longest=48, batch_size=4),
    )


def moved(model, attention, config, workdir, mesh):
    """In the place of training, which has tests of its own: every number a little larger."""
    workdir.mkdir(parents=True)
    lines = [{"step": step, "held_out/loss": 3.0 - step} for step in range(3)]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    larger = lambda tree: jax.tree.map(lambda x: 1.1 * x + 0.01, tree)
    tuned = dataclasses.replace(attention, params=larger(attention.params))
    model = dataclasses.replace(model, params=larger(model.params), attention=tuned)
    return Finetuned(model, {"conversations": 8, "dropped": 1, "cut": 0})


@pytest.mark.long
def test_both_caches_run_to_one_report(job, tmp_path, capsys, monkeypatch, quick_compile):
    monkeypatch.setattr(finetune, "finetune", moved)
    report = finetune.run(job, tmp_path, "a test")
    text = report.read_text()
    for line in ("| full cache, before |", "| HLA, after |", "less the full cache", "8 conversations read, 1 dropped"):
        assert line in text
    results = json.loads((tmp_path / "results.json").read_text())
    for cache in job.caches:
        found = results["caches"][cache]
        assert [len(found["after"][name]) for name in ("loss", "decoded_loss", "right")] == [4, 4, 4]
        assert [line["step"] for line in found["training"]] == [0, 1, 2]
    # The window holds a fifth of a conversation: decoding is not the exact pass.
    start = {cache: np.asarray(results["caches"][cache]["before"]["decoded_loss"]) for cache in job.caches}
    assert np.abs(start["HLA"] - start["full cache"]).max() > 1e-4
    assert capsys.readouterr().out.count("the same 4 x 16 greedy tokens") == 2
    tuned = hla_jax.load(tmp_path / "HLA" / "export", dtype=None)
    base = hla_jax.load(job.model, dtype=None)
    assert tuned.attention.scheme == base.attention.scheme
    for one, other in ((tuned.params["lm_head"], base.params["lm_head"]), (tuned.attention, base.attention)):
        assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*") if path.is_file()}
    finetune.run(job, tmp_path, "a test")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    other = dataclasses.replace(job, evaluation=dataclasses.replace(job.evaluation, conversations=5))
    with pytest.raises(ConfigError, match="started with another evaluation"):
        finetune.run(other, tmp_path, "a test")


def test_mistakes_are_named(job, tmp_path):
    plain = save(tmp_path / "plain")
    with pytest.raises(ConfigError, match="expected a model with HLA's maps, found FullCache; fit them"):
        finetune.run(dataclasses.replace(job, model=plain), tmp_path / "run", "a test")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="caches must be some of 'full cache' and 'HLA'"):
        dataclasses.replace(job, caches=("LLA",))
