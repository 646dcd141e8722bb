"""Every config file gives what its experiment reads, and sizes that fit its model."""

import dataclasses
import importlib.util
import pathlib

import dacite
import pytest

import hla_jax
from hla_jax.analysis.bench import Sweeps
from hla_jax.analysis.steps import schemes_of
from hla_jax.attention import registry
from hla_jax.config import HUGINN_3P5B, OURO_1P4B, OURO_2P6B, ModelConfig, OuroConfig
from hla_jax.evaluation.comparison import bytes_of
from hla_jax.recipes import compare, finetune, native
from hla_jax.recipes.compare import Comparison
from hla_jax.recipes.uptrain import Job

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"


def read(name: str, kind: type = Job) -> Job | Comparison:
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dacite.from_dict(kind, module.get_config().to_dict(), dacite.Config(strict=True))


@pytest.mark.parametrize(("name", "model"), [("ouro_1p4b_hla", OURO_1P4B), ("ouro_2p6b_hla", OURO_2P6B)])
def test_real_models(name, model):
    job = read(name)
    job.scheme.check(model)
    numbers = sum(size[-1] for size in job.scheme.token_shapes(model).values())
    assert 2 * model.num_loops * model.num_kv_heads * model.head_dim / numbers == pytest.approx(10.67, abs=0.01)


def test_huginn():
    job = read("huginn_3p5b_hla")
    job.scheme.check(HUGINN_3P5B)
    assert bytes_of(HUGINN_3P5B, job.scheme, context=2048).ratio == pytest.approx(84, abs=0.2)
    assert job.uptrain.shift.max_distance <= HUGINN_3P5B.max_position_embeddings
    hidden = HUGINN_3P5B.num_loops * HUGINN_3P5B.num_layers * 2048 * HUGINN_3P5B.hidden_size * 2
    assert hidden / 2**30 == pytest.approx(2.6, abs=0.05)


def test_the_papers_recipe():
    """HLA, section 4.1 and appendix C."""
    job = read("ouro_1p4b_hla")
    phases = (job.uptrain, job.phase2)
    assert [phase.loop.steps for phase in phases] == [1000, 200]
    assert [phase.optimizer.total_steps for phase in phases] == [1000, 200]
    rates = [(p.optimizer.peak_learning_rate, p.optimizer.warmup_steps, p.optimizer.final_fraction) for p in phases]
    assert rates == [(1e-3, 50, 0.1), (3e-4, 10, 0.1)]
    for phase in phases:
        assert [source.weight for source in phase.sources] == [3, 2]
        assert (phase.batches.batch_size, phase.batches.min_tokens, phase.batches.length) == (128, 64, 2048)
        assert (phase.shift.fraction, phase.shift.max_chunks, phase.shift.max_distance) == (0.75, 4, 16_384)
        optimizer = phase.optimizer
        assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip_norm) == (0.9, 0.95, 0.01, 1.0)
        assert (phase.long.length, phase.long.queries) == (16_384, 1024)
        assert [source.weight for source in phase.long.sources] == [983, 967]
    assert [phase.rows() for phase in phases] == [{"short": 128}, {"short": 128, "long": 8}]


def test_nano():
    job = read("nano_hla")
    assert job.uptrain.optimizer.total_steps == job.uptrain.loop.steps


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("nano_compare", OuroConfig.from_directory(hla_jax.NANO)),
        ("ouro_1p4b_compare", OURO_1P4B),
        ("ouro_2p6b_thinking_compare", OURO_2P6B),
        ("huginn_3p5b_compare", HUGINN_3P5B),
    ],
)
def test_comparisons(name, model, tmp_path):
    job = read(name, Comparison)
    compare.check(job.cells, compare.select(job.cells, None), model, tmp_path)
    for cell in job.cells:
        found = bytes_of(model, registry.from_entries(cell.scheme), context=2048).ratio
        if cell.name.endswith("x"):
            named = float(cell.name.split()[-1].removesuffix("x"))
            assert found == pytest.approx(named, rel=4e-3), cell.name
        else:
            assert cell.name in {"full cache", "8 bits", "4 bits", "2 bits", "eviction", "LLA 4x and eviction"}
    assert job.distill.optimizer.total_steps == job.distill.loop.steps
    assert job.on_policy.distill.optimizer.total_steps == job.on_policy.distill.loop.steps


@pytest.mark.parametrize(
    ("name", "model"), [("nano_sweeps", OuroConfig.from_directory(hla_jax.NANO)), ("ouro_1p4b_sweeps", OURO_1P4B)]
)
def test_sweeps(name, model):
    sweeps = read(name, Sweeps)
    sweeps.check(model, tokens=512 if name == "nano_sweeps" else 2048)
    assert bytes_of(model, sweeps.scheme, context=2048).ratio == pytest.approx(10.67, abs=0.01)
    assert bytes_of(model, sweeps.lla, context=2048).ratio == 4
    assert sweeps.scheme.window in sweeps.windows
    assert sweeps.lla in sweeps.passkey.schemes
    for training in (sweeps.uptrain, sweeps.shifted.uptrain, sweeps.distill):
        assert training.optimizer.total_steps == training.loop.steps


@pytest.mark.parametrize(
    ("name", "model", "tokens"),
    [
        ("nano_sweeps", OuroConfig.from_directory(hla_jax.NANO), 512),
        ("ouro_1p4b_sweeps", OURO_1P4B, 2048),
        ("nano_huginn_sweeps", ModelConfig.from_directory(hla_jax.NANO.with_name("nano_huginn")), 256),
        ("huginn_3p5b_sweeps", HUGINN_3P5B, 2048),
    ],
)
def test_every_size_of_the_sweep_over_loops_fits(name, model, tokens):
    sweeps = read(name, Sweeps)
    sweeps.check(model, tokens)
    for loops in sweeps.steps.numbers:
        config = dataclasses.replace(model, num_loops=loops)
        for schemes in schemes_of(config, sweeps.steps).values():
            assert len(schemes) >= 3
            for scheme in schemes:
                scheme.check(config)


@pytest.mark.parametrize("name", ["nano_finetune", "ouro_1p4b_finetune"])
def test_fine_tuning(name):
    job = read(name, finetune.Job)
    assert job.finetune.optimizer.total_steps == job.finetune.loop.steps
    assert job.evaluation.longest <= max(job.finetune.batches.lengths)


def test_native():
    job = read("nano_native", native.Job)
    job.scheme.check(job.recipe.model)
    assert sum(stage.steps for stage in job.standard.stages) + job.uptrain.total_steps == 610


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_docstring_has_its_command(path):
    assert f"--config=configs/{path.name}" in path.read_text()
