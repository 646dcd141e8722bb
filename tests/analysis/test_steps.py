"""The sweep over the number of loops: nothing is lost where the rank is full, and its part of the page."""

import dataclasses
import importlib

import dacite
import numpy as np
import pytest

from hla_jax.analysis.analyses import Settings, Subject
from hla_jax.analysis.bench import Bench, StepSweep, Sweeps
from hla_jax.analysis.page import write_page
from hla_jax.analysis.steps import steps_sweep
from hla_jax.config import ConfigError
from hla_jax.model import Model
from tiny import tiny_config, tiny_huginn, tiny_params, tiny_tokens

pytestmark = pytest.mark.usefixtures("quick_compile")
NANO = dacite.from_dict(
    Sweeps, importlib.import_module("configs.nano_huginn_sweeps").get_config().to_dict(), dacite.Config(strict=True)
)
# Keys of 3 heads of 8: the main latent is of full rank 24 at two steps, and of 48 at three.
SIZES = StepSweep(numbers=(2, 3), ranks=(8, 24), rank_loop1=24, ratios=(1, 4))


def bench(config, tmp_path, steps=SIZES):
    model = Model(config, tiny_params(config, scale=0.15))
    rows = np.asarray(tiny_tokens(config, 6, 14))
    subject = Subject(model, rows, rows[:2], lambda: None, Settings(queries=4, ranges=(0, 1, 4)))
    sizes = dataclasses.replace(NANO, steps=steps, rows=2, prompt=8, batch_size=2)
    return Bench(subject, sizes, tmp_path)


@pytest.mark.long
def test_nothing_is_lost_at_full_rank_and_the_page_has_it(tmp_path):
    found = steps_sweep(bench(tiny_huginn(), tmp_path, dataclasses.replace(SIZES, numbers=(2,))))
    kl = lambda kind, steps: [cell["decoding_kl"]["mean"] for cell in found[kind][str(steps)]]
    assert [cell["scheme"]["rank_k"] for cell in found["hla"]["2"]] == [24, 8]
    whole, part = kl("hla", 2)
    assert whole < 1e-6 < 1e-4 < part
    whole, part = kl("lla", 2)
    assert whole < 1e-6 < 1e-4 < part
    assert [round(cell["ratio"]) for cell in found["lla"]["2"]] == [1, 4]
    # The model's own number of steps is 4: maps for it lose something at 2, by the rule as well as fitted anew.
    for name in ("hla", "lla"):
        one = found["adapted"]["2"][name]
        assert one["adapted"]["decoding_kl"]["mean"] > 1e-4
        assert one["fitted"] != one["adapted"]
    (tmp_path / "page").mkdir()
    page = write_page({"steps": found}, {"commands": "`steps`"}, tmp_path / "page").read_text()
    assert "| 24 | 0.000" in page
    assert (tmp_path / "page" / "steps_hla.png").exists()


@pytest.mark.long
def test_ouro_after_fewer_loops(tmp_path):
    found = steps_sweep(bench(tiny_config(num_kv_heads=3, num_heads=3), tmp_path))
    kl = {steps: cells[0]["decoding_kl"]["mean"] for steps, cells in found["hla"].items()}
    assert kl["2"] < 1e-6 < 1e-4 < kl["3"]
    assert found["adapted"] == {}


def test_more_loops_than_there_are_and_no_sizes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="the model has 3 loops, the sweep asks for 4"):
        steps_sweep(bench(tiny_config(), tmp_path, dataclasses.replace(SIZES, numbers=(2, 4))))
    with pytest.raises(ConfigError, match="--config has no sizes for it"):
        steps_sweep(bench(tiny_huginn(), tmp_path, steps=None))
