"""Numbers held against published ones: names that meet, verdicts, and measured numbers against independent ones."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.analysis import verification
from hla_jax.analysis.analyses import AROUND_MEAN, AS_THEY_ARE, Subject
from hla_jax.analysis.structure import AXES, PROJECTIONS
from hla_jax.analysis.verification import CHECKS, PUBLISHED, Published, released, verdicts
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention
from hla_jax.calibration.calibrate import calibrate
from hla_jax.config import OURO_1P4B, OURO_2P6B
from hla_jax.evaluation.fidelity import attention_divergence
from hla_jax.model import Model
from hla_jax.models import weights
from hla_jax.recipes import verify
from tiny import tiny_config, tiny_params, tiny_tokens


def real(config) -> Subject:
    """A released model without its numbers."""
    return Subject(Model(config, weights.abstract_params(config, "bfloat16")), None, None, lambda: None)


@pytest.fixture
def as_published(monkeypatch):
    """Measurements of Ouro-1.4B that give exactly what was published."""
    near = lambda kl, error: types.SimpleNamespace(kl=kl, error=error, mean_kl=0.13)
    table6 = {128: (1.04, 0.42, 1.04), 256: (0.51, 0.37, 0.44), 512: (0.29, 0.30, 0.23), 1024: (0.11, 0.22, 0.08)}
    table6[2048] = (0.03, 0.16, None)

    def divergence(model, attention, rows):
        scheme = attention.scheme
        kl, error = table6[scheme.rank_k][0], table6[scheme.rank_v][1]
        return near((table6[scheme.rank_loop1][2], kl, kl, kl), (9, error, error, error))

    ranked = {way: {"effective_rank": [0.62], "energy": [[0.6, 0.4]]} for way in (AS_THEY_ARE, AROUND_MEAN)}
    layer = lambda alone, together: {"alone": [[0, 9, 0], *[[0, alone, 0]] * 3], "together": [0, together, 0]}
    fake = {
        "effective_rank": {axis: {kind: ranked for kind in PROJECTIONS} for axis in AXES},
        "ridge": {"keys": [[0.66, 0.80, 0.93, 1.0]], "values": [[0.55, 0.71, 0.89, 1.0]]},
        "projection": {
            "ranks": [256, 512, 1024],
            "dimensions": 2048,
            "keys": [layer(0.80, 0.79)],
            "values": [layer(0.93, 0.89)],
        },
        "variance": {"keys": [{"loop": 0.02, "both": 0.04}], "values": [{"loop": 0.1, "both": 0.07}]},
    }
    for name, result in fake.items():
        monkeypatch.setattr(verification.analyses, name, lambda subject, result=result: result)
    bare = lambda scheme: Attention(scheme)
    monkeypatch.setattr(verification, "calibrate", lambda model, scheme, rows: bare(scheme))
    # Padding to one size must not hide which ranks are measured.
    monkeypatch.setattr(
        verification, "resized", lambda fitted, scheme, config: fitted if scheme.rank_k == 2048 == scheme.rank_v
        and scheme.rank_loop1 == 1024 else bare(scheme)
    )  # fmt: skip
    monkeypatch.setattr(verification, "attention_divergence", divergence)


def measured(config):
    return {name: check(real(config)) for name, check in CHECKS.items()}


def test_every_published_number_of_ouro_1p4b_has_its_check(as_published):
    rows = verdicts(measured(OURO_1P4B), PUBLISHED["Ouro-1.4B"])
    assert {row.name for row in rows if row.verdict == "pass"} == set(PUBLISHED["Ouro-1.4B"])
    assert {row.verdict for row in rows} == {"pass", "no published value"}


def test_counts_of_both_released_models_are_exact():
    for config, name in ((OURO_1P4B, "Ouro-1.4B"), (OURO_2P6B, "Ouro-2.6B-Thinking")):
        rows = verdicts({"sizes": verification.sizes(real(config))}, PUBLISHED[name])
        assert [row.verdict for row in rows] == ["pass"] * 5
    other = dataclasses.replace(OURO_1P4B, num_layers=25)
    rows = verdicts({"sizes": verification.sizes(real(other))}, PUBLISHED["Ouro-1.4B"])
    assert {row.verdict for row in rows} == {"fail"}


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(0.5, "pass"), (0.6, "pass"), (0.4, "pass"), (0.601, "fail"), (float("nan"), "fail"), (float("inf"), "fail")],
)
def test_verdicts(value, verdict):
    about = Published(0.5, 0.1, "a table")
    (row,) = verdicts({"check": {"x": value}}, {"x": about})
    assert row.verdict == verdict
    (row,) = verdicts({"check": {"x": value}}, {"x": dataclasses.replace(about, defined=False)})
    assert row.verdict == {"pass": "pass", "fail": "differs"}[verdict]
    (row,) = verdicts({"check": {"x": value}}, {})
    assert row.verdict == "no published value"


def test_a_released_model_is_known_by_its_sizes():
    assert released(dataclasses.replace(OURO_1P4B, eos_token_ids=(0, 2)), "my/copy") == "Ouro-1.4B"
    assert released(OURO_2P6B, "ByteDance/Ouro-2.6B-Thinking") == "Ouro-2.6B-Thinking"
    assert released(tiny_config(), "ByteDance/Ouro-1.4B") is None


@pytest.mark.usefixtures("quick_compile")
def test_errors_by_rank_are_those_of_maps_fitted_at_each_rank():
    config = tiny_config(num_layers=1)
    rows = np.asarray(tiny_tokens(config, 4, 24))
    model = Model(config, tiny_params(config))
    found = verification.errors_by_rank(Subject(model, rows, rows[:2], lambda: Attention(FullCache())))
    # One loop has 16 numbers: heads are whole, so some ranks of the table meet.
    assert list(found) == [
        "KL of loops 2-3, key rank 8",
        "KL of loops 2-3, key rank 16",
        *(f"output error, value rank {rank}" for rank in (1, 2, 4, 8, 16)),
        "KL of loop 1, loop-1 rank 8",
    ]
    # The divergence of keys does not depend on the value rank, so one size checks a cell of each column.
    direct = attention_divergence(model, calibrate(model, HLA(8, 2, 8, window=0), rows), rows[:2])
    assert found["output error, value rank 2"] == pytest.approx(np.mean(direct.error[1:]), rel=1e-4)
    assert found["KL of loops 2-3, key rank 8"] == pytest.approx(np.mean(direct.kl[1:]), rel=1e-4)
    assert found["KL of loop 1, loop-1 rank 8"] == pytest.approx(direct.kl[0], rel=1e-4)
    assert found["KL of loops 2-3, key rank 16"] < found["KL of loops 2-3, key rank 8"]


def test_a_run_continues_and_its_page_has_every_number(tmp_path, monkeypatch):
    calls = []

    def check(name, value):
        def run(subject):
            calls.append(name)
            assert subject.rows.shape == (3, 4)
            return {"parameters of the model": value, f"{name} of {len(subject.held_out_rows)}": 0.25}

        return run

    params = {"x": jnp.zeros(3)}
    monkeypatch.setattr(verify, "CHECKS", {"first": check("first", 1_434_652_673.0), "second": check("second", 7.0)})
    monkeypatch.setattr(verify, "load", lambda path, dtype, mesh: Model(OURO_1P4B, params))
    monkeypatch.setattr(verify.Job, "rows", lambda job, model, held_out: np.zeros((2 if held_out else 3, 4), np.int32))
    job = verify.Job("some/model", "float32", (), 3, 2, 4)
    assert [row.verdict for row in verify.run(job, ["first"], tmp_path, "command")] == ["pass", "no published value"]
    rows = verify.run(job, ["first", "second"], tmp_path, "command")
    assert calls == ["first", "second"]
    assert [row.verdict for row in rows] == ["pass", "no published value", "fail", "no published value"]
    page = (tmp_path / "verification.md").read_text()
    assert "| parameters of the model | 1,434,652,673 | 1,434,652,673 | 0 | the released shapes | pass |" in page
    assert "| second of 2 | 0.25 |  |  |  | no published value |" in page
    assert "compared with: Ouro-1.4B" in page
    rehearsed = verify.run(job, ["first"], tmp_path, "command", rehearse=True)
    assert {row.verdict for row in rehearsed} == {"no published value"}
    assert calls == ["first", "second"]
