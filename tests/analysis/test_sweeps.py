"""Maps at other sizes against calibration at these sizes; every sweep with trainings that cost nothing, its part of the
page, and a work directory that is taken up again.
"""

import dataclasses
import importlib
import json

import dacite
import jax
import numpy as np
import pytest

from hla_jax.analysis import bench, sweeps
from hla_jax.analysis.analyses import Settings, Subject
from hla_jax.analysis.bench import Bench, Passkey, ShiftSweep, Sweeps, resized
from hla_jax.analysis.page import write_page
from hla_jax.analysis.sweeps import BEFORE, RANDOM, SVD, SWEEPS, WITH, WITHOUT
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention
from hla_jax.calibration.calibrate import calibrate
from hla_jax.config import ConfigError
from hla_jax.data.positions import ShiftConfig
from hla_jax.evaluation.comparison import Bytes, Measurement, Row
from hla_jax.evaluation.fidelity import attention_divergence
from hla_jax.model import Model
from tiny import tiny_config, tiny_params, tiny_tokens

CONFIG = tiny_config()
NANO = dacite.from_dict(
    Sweeps, importlib.import_module("configs.nano_sweeps").get_config().to_dict(), dacite.Config(strict=True)
)
SIZES = dataclasses.replace(
    NANO,
    scheme=HLA(8, 8, 8, window=2),
    rank_k=(8, 16),
    rank_v=(4, 8),
    rank_loop1=(8, 16),
    trained=(HLA(8, 4, 8, 0), HLA(16, 16, 8, 2)),
    windows=(0, 2),
    rows=2,
    prompt=12,
    batch_size=2,
    shifted=ShiftSweep(by=(0, 9), queries=3, gap=4, uptrain=NANO.uptrain, shift=ShiftConfig()),
    lla=LLA(4, 8),
    passkey=Passkey("recall", (LLA(4, 8), LLA(2, 4)), contexts=(32, 64), questions=4, batch_size=2),
)


@pytest.fixture(scope="module", autouse=True)
def quick():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def model():
    return Model(CONFIG, tiny_params(CONFIG))


@pytest.fixture(scope="module")
def rows():
    return np.asarray(tiny_tokens(CONFIG, 8, 16))


def test_maps_at_other_sizes_are_those_of_calibration_there(model, rows):
    small, large = HLA(8, 5, 8, 2), HLA(16, 16, 16, 2)
    wide = calibrate(model, large, rows)
    part, expected = resized(wide, small, CONFIG), calibrate(model, small, rows)
    assert {name: x.shape for name, x in part.params.items()} == {name: x.shape for name, x in expected.params.items()}
    # Directions may point the other way: what is written along them is read along them.
    found = attention_divergence(model, expected, rows[:2])
    # With zeros behind them too.
    padded, whole = (attention_divergence(model, x, rows[:2]) for x in (resized(part, large, CONFIG), wide))
    np.testing.assert_allclose(padded.kl, found.kl, rtol=1e-3)
    np.testing.assert_allclose(padded.error, found.error, rtol=1e-3)
    assert whole.error[1] < 0.99 * padded.error[1]


@pytest.fixture
def made(model, rows, tmp_path, monkeypatch):
    """A bench whose trainings return their start a little changed, and whose questions cost nothing; and its calls."""
    calls = []

    def trained(model, attention, tokenizer, config, workdir):
        calls.append((workdir.name, getattr(config, "shift", None)))
        workdir.mkdir(parents=True, exist_ok=True)
        lines = ({"step": step, "held_out/kl": 1 / (1 + step), "loss": 1.0} for step in (0, 5, 10))
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Attention(attention.scheme, jax.tree.map(lambda x: 1.1 * x, attention.params))

    monkeypatch.setattr(bench, "uptrain", trained)
    monkeypatch.setattr(bench, "distill", trained)
    monkeypatch.setattr(bench, "random_maps", lambda scheme, config, seed: Attention(scheme))
    start = lambda model, scheme, rows: calibrate(model, scheme, rows) if type(scheme) is HLA else Attention(scheme)
    monkeypatch.setattr(bench, "calibrate", start)
    monkeypatch.setattr(Bench, "ask", lambda self, attention, context: 4 if attention.scheme == FullCache() else 2)
    monkeypatch.setattr(Model, "tokenizer", None)
    found = Measurement(Bytes(8, 0, 1.0, 1.0, 16), *[(0.1, 0.2)] * 4, {"recall": (True, False)}, {}, {"16": 1.0})
    cells = [Row(name, name, {}, "none", found) for name in ("full cache", "LLA")]
    results = {"command": "compare", "rows": [dataclasses.asdict(row) | {"summary": {}} for row in cells]}
    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / "results.json").write_text(json.dumps(results))
    subject = Subject(model, rows, rows[:2], lambda: None, Settings(queries=4, ranges=(0, 1, 4)))
    return Bench(subject, SIZES, tmp_path / "work", str(tmp_path / "compared")), calls


@pytest.mark.long
def test_every_sweep_and_its_part_of_the_page(made, tmp_path, monkeypatch):
    bench, calls = made
    first = sweeps.window_sweep
    stop = iter([False, True])

    def stopping(self, scheme):
        if next(stop, False):
            raise KeyboardInterrupt
        return uptrained(self, scheme)

    uptrained = Bench.uptrained
    monkeypatch.setattr(Bench, "uptrained", stopping)
    with pytest.raises(KeyboardInterrupt):
        first(bench)
    # Both sizes before training and the first of them after it are there; the run goes on at the next cell.
    kept = {path.name: path.stat().st_mtime_ns for path in (bench.workdir / "cells").iterdir()}
    assert len(kept) == 3
    results = {name: json.loads(json.dumps(sweep(bench))) for name, sweep in SWEEPS.items()}
    assert {path.name: path.stat().st_mtime_ns for path in (bench.workdir / "cells").iterdir()}.items() >= kept.items()
    assert calls[0][0] == "HLA 8-8-8 window 0"
    assert [shift for name, shift in calls if name.endswith(" shifts")] == [None, SIZES.shifted.shift]

    ranks = results["rank_sweep"]
    kl = {name: [np.mean(cell["kl"][1:]) for cell in cells] for name, cells in ranks["initial"].items()}
    assert kl["rank_k"][0] > kl["rank_k"][1]
    # Loops 2 and later have the key rank alone, whatever the others are (HLA, Appendix G).
    np.testing.assert_allclose(kl["rank_v"], kl["rank_v"][0], rtol=1e-6)
    np.testing.assert_allclose(kl["rank_loop1"], kl["rank_v"][0], rtol=1e-6)
    assert [cell["scheme"]["rank_k"] for cell in ranks["trained"]] == [8, 16]
    bytes_of = [cell["bytes"]["per_sequence"] for cell in results["window_sweep"]["trained"]]
    assert bytes_of == [0, 2 * 2 * 3 * 2 * 2 * 8 * 2]
    shifted = results["shifted_positions"]
    assert np.asarray([shifted["kl"][name] for name in (BEFORE, WITHOUT, WITH)]).shape == (3, 2, 3)
    assert "uptrain" not in shifted
    assert results["initialisation"]["curves"][RANDOM] == {"steps": [0, 5, 10], "kl": [1, 1 / 6, 1 / 11]}
    assert list(results["initialisation"]["curves"]) == [SVD, RANDOM]
    assert results["passkey"]["right"] == {"full cache": [4, 4], "HLA 3x": [2, 2], "LLA 4x": [2, 2], "LLA 8x": [2, 2]}
    assert results["divergence_uptrained"]["scheme"]["window"] == 0

    # Nothing is measured or trained again.
    before = len(calls)
    assert json.loads(json.dumps(sweeps.window_sweep(bench))) == results["window_sweep"]
    assert len(calls) == before

    page = write_page(results, {"model": "tiny"}, tmp_path).read_text()
    named = {line.split("(")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")}
    assert named == {path.name for path in tmp_path.glob("*.png")}
    assert len(named) == 9
    assert "nan" not in page
    for text in ("1.04 at 1/16", "0.105 from SVD", "to 64K at 5.33x", "0.022 to 0.098", "48.7% of the divergence"):
        assert text in page


def test_a_size_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="rank_k must be a positive multiple of head_dim 8"):
        dataclasses.replace(SIZES, trained=(HLA(9, 4, 8, 0),)).check(CONFIG, tokens=16)
    with pytest.raises(ConfigError, match="need rows of at least 13 tokens, found 12"):
        SIZES.check(CONFIG, tokens=12)


def test_adding_a_cell_leaves_the_others_claims_alone():
    shared, own = SIZES.claims()
    more_shared, more_own = dataclasses.replace(SIZES, windows=(0, 2, 4)).claims()
    assert shared == more_shared
    assert [name for name in own if own[name] != more_own[name]] == ["window_sweep"]
    assert set(own) == {*SWEEPS, "steps"}
