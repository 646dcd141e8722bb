"""The comparison in miniature: a second start repeats nothing, a filter leaves cells out, mistakes are told at once."""

import dataclasses
import json
import re
import shutil

import jax
import ml_collections
import numpy as np
import pytest
from dacite import Config, from_dict
from matplotlib import image

from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import SchemeError
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import ConfigError
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import Source
from hla_jax.evaluation import orderings as curves
from hla_jax.evaluation.evaluate import EvaluationConfig
from hla_jax.evaluation.schemes import FULL, REUSE
from hla_jax.models import weights
from hla_jax.recipes import compare
from hla_jax.recipes.compare import RANDOM, Cell, Comparison
from hla_jax.recipes.uptrain import Calibration
from hla_jax.training.distill import DistillConfig
from hla_jax.training.loop import LoopConfig
from hla_jax.training.on_policy import OnPolicyConfig
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.uptrain import UptrainConfig
from tiny import copy_tokenizer, tiny_config

CONFIG = tiny_config(vocab_size=1024, num_loops=2, num_layers=1, num_heads=2)
LOSSLESS = "LLA 1x"


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Comparison:
    model = tmp_path_factory.mktemp("model") / "tiny"
    weights.save_params(weights.init_params(CONFIG, jax.random.key(0)), CONFIG, model)
    copy_tokenizer(model)
    text = model / "text.jsonl"
    words = np.random.default_rng(0).choice(
        ["for x in y:", "return None", "def f(a, b):", "import os", "x += 1"], (40, 12)
    )
    text.write_text("".join(json.dumps({"text": " ".join(line)}) + "\n" for line in words))
    sources = (Source(str(text), held_out=10),)
    optimizer = OptimizerConfig(peak_learning_rate=1e-3, total_steps=2)
    loop = LoopConfig(steps=2, log_every=1, evaluate_every=1, save_every=1, best_metric="held_out/kl")
    batches = BatchConfig(batch_size=2, length=16, min_tokens=8, pack=False)
    distill = DistillConfig(sources, batches, optimizer, loop, held_out_batches=1)
    return Comparison(
        model=str(model),
        dtype="float32",
        cells=(
            Cell.of(FULL, FULL, FullCache()),
            Cell.of(REUSE, REUSE, SharedLoop(window=0)),
            Cell.of(LOSSLESS, curves.LLA, LLA(16, 16, single_pass=True)),
            Cell.of("LLA 4x", curves.LLA, LLA(3, 5, single_pass=True), "distill"),
            Cell.of("evicted", curves.LLA_EVICTION, Evicted(LLA(3, 5, single_pass=True), 12, 2), start="LLA 4x"),
        ),
        calibration=Calibration(sequences=2, tokens=32),
        distill=distill,
        uptrain=UptrainConfig(sources, BatchConfig(batch_size=2, length=16), optimizer, LoopConfig(steps=2)),
        on_policy=OnPolicyConfig(distill, prompt=8),
        evaluation=EvaluationConfig(
            sequences=3,
            tokens=16,
            prompt=8,
            batch_size=3,
            tasks=("recall",),
            lengths=((48, 16),),
            examples=4,
            contexts=(32,),
            speed_tokens=2,
            speed_rounds=1,
        ),
    )


def read(workdir):
    return {row["name"]: row for row in json.loads((workdir / "results.json").read_text())["rows"]}


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.long
def test_runs_to_a_report_and_repeats_nothing(job, tmp_path, capsys, quick_compile, monkeypatch):
    compare.run(job, tmp_path, "a test", cells=f"{REUSE}, LLA [1]x")
    first = read(tmp_path)
    assert list(first) == [FULL, REUSE, LOSSLESS]
    assert "cell 3 of 3: LLA 1x" in capsys.readouterr().out

    # Stopped between its last checkpoint and its result, a cell does no step again.
    folder = tmp_path / "cells" / "LLA 4x"
    with monkeypatch.context() as stopped:
        stopped.setattr(compare, "measure", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compare.run(job, tmp_path, "a test", cells="LLA 4x")
    shutil.rmtree(folder / "export")
    capsys.readouterr()
    report = compare.run(job, tmp_path, "a test", cells="LLA 4x,evicted")
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]
    rows = read(tmp_path)
    assert list(rows) == [cell.name for cell in job.cells]
    assert all(rows[name] == first[name] for name in first)
    assert capsys.readouterr().out.count("cell ") == 2

    monkeypatch.setattr(compare, "run_cell", interrupt)
    monkeypatch.setattr(compare.Data, "of", interrupt)
    before = report.read_text()
    compare.run(job, tmp_path, "a test")
    assert report.read_text() == before

    # The numbers agree with each other, with the schemes' sizes, and with the table.
    measured = {name: row["measured"] for name, row in rows.items()}
    full = 2 * 2 * 2 * 8 * 2  # keys and values, loops, heads, their size, bytes
    assert [measured[name]["bytes"]["per_token"] for name in rows] == [full, full // 2, full, full // 4, full // 4]
    assert [measured[name]["bytes"]["ratio"] for name in rows] == [1, 2, 1, 4, 16]  # 12 of 48 tokens stay
    for name in (FULL, LOSSLESS):
        np.testing.assert_allclose(measured[name]["held_out_kl"], 0, atol=1e-5)
        np.testing.assert_allclose(measured[name]["decoding_kl"], 0, atol=1e-5)
        assert measured[name]["top1"] == [1.0] * 3
        assert measured[name]["right"] == measured[FULL]["right"]
    assert len(measured[REUSE]["right"]["recall"]) == len(measured[REUSE]["given"]["recall"]) == 4
    assert np.mean(measured["LLA 4x"]["held_out_kl"]) > 1e-6
    for row in rows.values():
        for name in ("held_out_kl", "decoding_kl", "top1"):
            found = row["summary"][name]
            np.testing.assert_allclose(found["mean"], np.mean(row["measured"][name]))
            assert min(row["measured"][name]) <= found["low"] <= found["mean"] <= found["high"]
        difference = np.mean(row["measured"]["right"]["recall"]) - np.mean(measured[FULL]["right"]["recall"])
        assert row["summary"]["accuracy_difference"]["mean"] == pytest.approx(difference)
        kl = row["summary"]["held_out_kl"]
        assert re.search(
            rf"\| {row['name']} \| .* \| {kl['mean']:.4f} \[{kl['low']:.4f}, {kl['high']:.4f}\] \|", before
        )
    assert np.ptp(image.imread(tmp_path / "quality.png")) > 0.5


def test_another_comparison_or_another_cell_of_the_name_is_refused(job, tmp_path):
    compare.claim(tmp_path, {"seed": 1})
    with pytest.raises(ConfigError, match=r"started with another .*seed.* \(see job.json\)"):
        compare.run(job, tmp_path, "a test")
    compare.claim(tmp_path / "new" / "cells" / REUSE, {"scheme": {}})
    with pytest.raises(ConfigError, match=r"cells/final-loop reuse: was started with another .*scheme"):
        compare.run(job, tmp_path / "new", "a test")


def replaced(job, **changes):
    """The comparison with its last cell changed."""
    return dataclasses.replace(job, cells=(*job.cells[:-1], dataclasses.replace(job.cells[-1], **changes)))


@pytest.mark.parametrize(
    ("change", "cells", "error", "message"),
    [
        ({}, "LLA 5x", ConfigError, "--cells: nothing matches 'LLA 5x'; there are full cache, final-loop reuse"),
        ({}, "LLA (", ConfigError, "--cells: 'LLA \\(' is not a regular expression"),
        ({}, "evicted", ConfigError, "'evicted': starts from 'LLA 4x', which has no result yet: add it to --cells"),
        ({"start": "LLA 9x"}, None, ConfigError, "'evicted': starts from 'LLA 9x', and no cell above it has that name"),
        (
            {"start": "evicted"},
            None,
            ConfigError,
            "'evicted': starts from 'evicted', and no cell above it has that name",
        ),
        ({"start": LOSSLESS}, None, ConfigError, "'evicted': starts from 'LLA 1x', whose maps have other shapes"),
        ({"scheme": {"lla_config": {"rank_k": 99, "rank_v": 1}}}, None, SchemeError, "'evicted': rank_k must be in 1"),
        ({"scheme": {"lla_config": {"rank": 1}}}, None, SchemeError, "'evicted': lla_config: missing"),
        (
            {"training": "uptrain", "start": None},
            None,
            ConfigError,
            "uptraining fits HLA's maps, the scheme is Evicted",
        ),
        ({"training": "more"}, None, ConfigError, "training must be none, distill, uptrain, on_policy; found 'more'"),
        ({"name": REUSE}, None, ConfigError, "'final-loop reuse': names must differ"),
        ({"name": "a/b"}, None, ConfigError, "'a/b': names must differ, and have no slash and no comma"),
        (
            {"scheme": {}, "start": None, "training": "distill"},
            None,
            ConfigError,
            "'evicted': FullCache has no maps to train",
        ),
        (
            {"scheme": {"hla_config": HLA(8, 8, 8, 4).to_config()}, "training": "none", "start": RANDOM},
            None,
            ConfigError,
            "only codecs have random maps to start from, not HLA",
        ),
    ],
)
def test_mistakes_are_one_error_before_anything_is_written(job, tmp_path, change, cells, error, message):
    with pytest.raises(error, match=message):
        compare.run(replaced(job, **change), tmp_path / "new", "a test", cells)
    assert not (tmp_path / "new").exists()


def test_the_full_cache_comes_first(job, tmp_path):
    with pytest.raises(ConfigError, match="the first must be 'full cache'"):
        compare.run(dataclasses.replace(job, cells=job.cells[1:]), tmp_path, "a test")


def test_training_is_a_field_of_the_comparison():
    assert compare.TRAINING.keys() < {field.name for field in dataclasses.fields(Comparison)}


def test_a_comparison_survives_its_config(job):
    stored = ml_collections.ConfigDict(dataclasses.asdict(job))
    assert from_dict(Comparison, stored.to_dict(), Config(strict=True)) == job
