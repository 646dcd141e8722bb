"""Every analysis by name on a tiny model, the page made of them, and a work directory that is taken up again."""

import dataclasses
import json

import dacite
import jax
import numpy as np
import pytest

from configs import nano_sweeps
from experiments import analyze
from hla_jax.analysis.analyses import ANALYSES, AROUND_MEAN, AS_THEY_ARE, Settings, Subject
from hla_jax.analysis.page import write_page
from hla_jax.calibration.calibrate import calibrate
from hla_jax.config import ConfigError
from hla_jax.model import Model
from tiny import tiny_config, tiny_params, tiny_tokens

CONFIG = tiny_config(num_loops=4)
SWEEPS = dacite.from_dict(analyze.Sweeps, nano_sweeps.get_config().to_dict(), dacite.Config(strict=True))
JOB = analyze.Job("nowhere", "float32", ("synthetic",), 4, 2, 20, 0, Settings(ranges=(0, 1, 8)), None, None, 0, SWEEPS)


@pytest.fixture(scope="module")
def results():
    jax.config.update("jax_disable_most_optimizations", True)
    model = Model(CONFIG, tiny_params(CONFIG))
    rows = np.asarray(tiny_tokens(CONFIG, 16, 20))
    scheme = analyze.HLA(*analyze.closed_form(CONFIG), window=0)
    subject = Subject(model, rows[:12], rows[12:], lambda: calibrate(model, scheme, rows), Settings(queries=5))
    yield {name: json.loads(json.dumps(function(subject))) for name, function in ANALYSES.items()}
    jax.config.update("jax_disable_most_optimizations", False)


def test_every_analysis_says_what_it_must(results):
    for axis, size in (("loops", 4), ("heads", 2), ("layers", 2)):
        for kind in ("keys", "values"):
            for way in (AS_THEY_ARE, AROUND_MEAN):
                found = results["effective_rank"][axis][kind][way]
                assert np.min(found["effective_rank"]) >= 1 / size
                assert np.max(found["effective_rank"]) <= 1 + 1e-6
                np.testing.assert_allclose(np.sum(found["energy"], axis=-1), 1, rtol=1e-5)
    for kind in ("keys", "values"):
        assert np.asarray(results["ridge"][kind]).shape == (2, 4)
        # The last loop's keys and values are linear in what the regression starts from.
        np.testing.assert_allclose(np.asarray(results["ridge"][kind])[:, -1], 1, atol=1e-3)
        assert np.max(results["ridge"][kind]) <= 1
        np.testing.assert_allclose([sum(one.values()) for one in results["variance"][kind]], 1)
        assert np.asarray(results["stabilisation"][kind]["to_last"]).shape == (2, 4)
        np.testing.assert_allclose(np.asarray(results["stabilisation"][kind]["to_last"])[:, -1], 0, atol=1e-6)
        assert np.asarray(results["stabilisation"][kind]["step"]).shape == (2, 3)
        for family in ("one loop", "loops 2-4", "one head, all loops"):
            shares = results["spectra"][family][kind]["variance"]
            assert np.all(np.diff(shares) >= 0)
            np.testing.assert_allclose(shares[-1], 1)
        for layer in results["projection"][kind]:
            kept = np.asarray([*layer["alone"], layer["together"]])
            assert np.all(np.diff(kept) >= 0)
            assert np.all((kept >= 0) & (kept <= 1))
    assert results["projection"]["ranks"] == [2, 4, 8]
    divergence = results["divergence"]
    assert divergence["ranges"] == ["0", "1 and more"]
    np.testing.assert_allclose(np.sum(divergence["attention"], axis=-1), 1, rtol=1e-5)
    assert np.min(divergence["kl"]) >= 0


def test_the_page_has_every_table_and_figure(results, tmp_path):
    page = write_page(results, {"model": "tiny"}, tmp_path).read_text()
    for text in ("0.66, 0.80, 0.93, 1.00", "26.6% of the attention", "0.61-0.63", "keys 6%, values 17%"):
        assert text in page
    named = {line.split("(")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")}
    assert named == {path.name for path in tmp_path.glob("*.png")}
    assert len(named) == 10
    assert "nan" not in page


def test_a_page_of_some_analyses(results, tmp_path):
    page = write_page({"variance": results["variance"]}, {}, tmp_path).read_text()
    assert "Variance over tokens and loops" in page
    assert "Ridge" not in page


@pytest.fixture
def counted(results, monkeypatch):
    """Analyses that are counted, and cost nothing; the one named last fails once."""
    calls = []

    def counting(name):
        def run(subject):
            calls.append(name)
            if name == "ridge" and calls.count(name) == 1:
                raise KeyboardInterrupt
            return results[name]

        return run

    monkeypatch.setattr(analyze, "ANALYSES", {name: counting(name) for name in ANALYSES})
    monkeypatch.setattr(analyze.hla_jax, "load", lambda *_: Model(CONFIG, {}), raising=False)
    monkeypatch.setattr(analyze, "draw", lambda *_, **__: None)
    return calls


def test_a_stopped_run_continues_and_keeps_what_is_finished(counted, tmp_path):
    names = ["variance", "ridge"]
    with pytest.raises(KeyboardInterrupt):
        analyze.run(JOB, names, tmp_path, "first")
    kept = (tmp_path / "variance" / "result.json").read_bytes()
    assert json.loads(kept)["command"] == "first"
    assert not (tmp_path / "ridge" / "result.json").exists()
    page = analyze.run(JOB, names, tmp_path, "second").read_text()
    assert counted == ["variance", "ridge", "ridge"]
    assert (tmp_path / "variance" / "result.json").read_bytes() == kept
    assert "`first`, `second`" in page
    analyze.run(JOB, ["stabilisation"], tmp_path, "third")
    assert counted[3:] == ["stabilisation"]


def test_a_directory_of_another_job_is_refused(counted, tmp_path):
    analyze.run(JOB, ["variance"], tmp_path, "first")
    with pytest.raises(ConfigError, match="started with another tokens"):
        analyze.run(dataclasses.replace(JOB, tokens=21), ["variance"], tmp_path, "second")
    # What decides one analysis alone may change as long as that one is not there.
    other = dataclasses.replace(JOB, settings=Settings(penalty=1.0))
    analyze.run(other, ["variance", "divergence"], tmp_path, "third")
    with pytest.raises(ConfigError, match="started with another ranges"):
        analyze.run(dataclasses.replace(other, settings=Settings(ranges=(0, 2))), ["divergence"], tmp_path, "fourth")


def test_an_unknown_analysis_is_refused():
    with pytest.raises(ConfigError, match="no analysis rigde; there are all, effective_rank"):
        analyze.chosen(["ridge", "rigde"], JOB)
    assert analyze.chosen(["passkey", "ridge", "spectra"], JOB) == ["spectra", "ridge", "passkey"]
    assert analyze.chosen(["all"], JOB) == [*ANALYSES, *list(analyze.SWEEPS)[:-1]]


def test_a_comparison_of_another_model_is_refused(tmp_path):
    (tmp_path / "job.json").write_text('{"model": "somewhere/Ouro-1.4B"}')
    with pytest.raises(ConfigError, match="quality needs --comparison"):
        analyze.chosen(["quality"], JOB)
    job = dataclasses.replace(JOB, comparison=str(tmp_path))
    with pytest.raises(ConfigError, match=r"compares caches of somewhere/Ouro-1.4B, not of --model=nowhere"):
        analyze.chosen(["all"], job)
    assert analyze.chosen(["all"], dataclasses.replace(job, model="Ouro-1.4B"))[-1] == "quality"
