"""The export command: from maps, from a scheme, from a work directory; and what it says of mistakes."""

import dataclasses
import json

import numpy as np
import pytest

import hla_jax
from experiments import command_line
from hla_jax.attention.scheme import SchemeError
from hla_jax.config import OURO_1P4B, ConfigError
from hla_jax.recipes import export
from hla_jax.serving.export import ExportError
from hla_jax.tensor_files import WeightsError
from tiny import golden_copy, random_maps

HLA = hla_jax.HLA(rank_k=32, rank_v=24, rank_loop1=16, window=5)


@pytest.fixture
def base(tmp_path):
    return golden_copy("ouro-tiny", tmp_path / "base")


def job(directory, **changes):
    plain = dict(model=None, maps=None, scheme=None, data=("standard_library",), sequences=2, tokens=8, seed=0)
    return export.Job(str(directory), **plain | dict(maps_only=False, torch_code=False, dtype=None) | changes)


def test_maps_of_a_work_directory_become_a_whole_export(base, tmp_path):
    """Through a maps-only export, as a cell of a comparison leaves one; then from a base that has moved."""
    model = hla_jax.load(base, dtype=None)
    attention = random_maps(HLA, model.config)
    hla_jax.export(model, attention, tmp_path / "run" / "export", maps_only=True)
    lines = export.run(job(tmp_path / "out", maps=str(tmp_path / "run"), torch_code=True))
    found = hla_jax.load(tmp_path / "out", dtype=None)
    assert found.attention.scheme == HLA
    np.testing.assert_array_equal(found.attention.params["read_o"], attention.params["read_o"])
    text = "\n".join(lines)
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    total = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert f"read back, {len(files)} files, {total:,} bytes" in text
    assert all(name in text for name in files)
    # 3 layers of (32 + 24 + 2 x 16) float32 numbers; the full cache has 2 x 4 loops x 64.
    assert "cache: HLA, 1.031 KiB a token" in text
    assert "5.8 times fewer a token than the full cache's 6 KiB" in text
    assert "vllm serve" in text
    assert "trust_remote_code=True" in text

    base.rename(tmp_path / "moved")
    with pytest.raises(WeightsError, match="base_model not found"):
        export.run(job(tmp_path / "again", maps=str(tmp_path / "run")))
    export.run(job(tmp_path / "again", maps=str(tmp_path / "run"), model=str(tmp_path / "moved"), dtype="bfloat16"))
    again = hla_jax.load(tmp_path / "again", dtype=None)
    assert again.params["norm"].dtype == "bfloat16"
    assert again.attention.params["read_o"].dtype == "float32"


def test_maps_of_another_model_are_refused(base, tmp_path):
    model = hla_jax.load(base, dtype=None)
    hla_jax.export(model, random_maps(HLA, model.config), tmp_path / "maps", maps_only=True)
    tuned = dataclasses.replace(model, params=model.params | {"norm": model.params["norm"] * 2})
    hla_jax.export(tuned, None, tmp_path / "tuned")
    with pytest.raises(WeightsError, match=r"maps: these maps belong to another model than .*tuned"):
        export.run(job(tmp_path / "out", maps=str(tmp_path / "maps"), model=str(tmp_path / "tuned")))
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.usefixtures("quick_compile")
def test_a_scheme_is_fitted(tmp_path):
    scheme = command_line.scheme("scheme", "LLA(rank_k=8, rank_v=8, fold_heads=True)")
    text = "\n".join(export.run(job(tmp_path / "out", model=str(hla_jax.NANO), scheme=scheme, maps_only=True)))
    assert hla_jax.load(tmp_path / "out", dtype=None).attention.scheme == hla_jax.LLA(8, 8, fold_heads=True)
    assert "base_model" in json.loads((tmp_path / "out" / "config.json").read_text())
    assert "--no-enable-chunked-prefill --max-model-len" in text
    exact = command_line.scheme("scheme", "SharedLoop(window=4)")
    assert "not this scheme" in "\n".join(export.run(job(tmp_path / "b", model=str(hla_jax.NANO), scheme=exact)))


def test_mistakes_are_named(base, tmp_path):
    here = str(base)
    for changes, message in (
        (dict(maps=here, scheme=HLA), "--maps and --scheme: give one"),
        (dict(), "--model: give a directory or hub id, or --maps"),
        (dict(model=here, maps_only=True, dtype="float32"), "--dtype: a maps-only export has no weights"),
    ):
        with pytest.raises(ConfigError, match=message):
            job(tmp_path / "out", **changes)
    (tmp_path / "run" / "cells" / "LLA 4x" / "export").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has several exports; give one of them: .*cells/LLA 4x"):
        export.run(job(tmp_path / "out", maps=str(tmp_path / "run")))
    with pytest.raises(ExportError, match=r"torch_code: .* not SharedLoop"):
        export.run(job(tmp_path / "out", model=here, scheme=hla_jax.SharedLoop(4), torch_code=True))
    with pytest.raises(SchemeError, match="rank_k"):
        export.run(job(tmp_path / "out", model=here, scheme=dataclasses.replace(HLA, rank_k=20)))
    with pytest.raises(FileExistsError, match="not empty"):
        export.run(job(base, model=here))


def test_an_export_that_reads_back_otherwise_is_refused(base, tmp_path):
    model = hla_jax.load(base, dtype=None)
    hla_jax.export(model, None, tmp_path / "out")
    export.check(model, tmp_path / "out")
    other = dataclasses.replace(model, params=model.params | {"norm": model.params["norm"].at[3].add(1e-6)})
    with pytest.raises(WeightsError, match="reads back as something else"):
        export.check(other, tmp_path / "out")


@pytest.mark.parametrize("text", ["HLA", "GQA(rank=3)", "LLA(3, 4)", "LLA(rank_k=", "LLA(rank_k=x)", "(1).real()"])
def test_what_is_no_scheme_is_named(text):
    with pytest.raises(ConfigError, match=r"--scheme: expected one of FullCache, .* such as LLA"):
        command_line.scheme("scheme", text)


def test_a_scheme_without_a_field_is_named():
    with pytest.raises(SchemeError, match=r"lla_config: missing \['rank_v'\]"):
        command_line.scheme("scheme", "LLA(rank_k=96)")
    assert command_line.scheme("scheme", "FullCache()") == hla_jax.FullCache()


def test_what_vllm_is_told():
    assert export.vllm_flags(hla_jax.FullCache(), OURO_1P4B) == ()
    assert export.vllm_flags(HLA, OURO_1P4B)[-1] == "16384"
    assert export.vllm_flags(hla_jax.LLA(8, 8, first_pass="exact"), OURO_1P4B) is None
    assert export.vllm_flags(hla_jax.Evicted(HLA, 64), OURO_1P4B) is None
