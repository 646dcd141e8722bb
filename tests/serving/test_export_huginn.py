"""Exports of Huginn: every scheme reads back bit by bit, beside the tensors of the published file."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hla_jax import attention_files
from hla_jax.attention.baselines import HeadLatent, LayerLatent
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.low_bit import LowBit
from hla_jax.attention.shared import SharedLoop
from hla_jax.model import load, load_attention
from hla_jax.serving.export import ExportError, export
from hla_jax.tensor_files import WeightsError
from tiny import golden_copy, random_maps

SCHEMES = (
    HLA(24, 18, 12, 3),
    LLA(6, 5),
    LLA(9, 7, fold_heads=True),
    LLA(9, 7, rank_rope=4, query_adapter=True),
    HeadLatent(8, 8),
    LayerLatent(8, 8),
    LowBit(4),
    SharedLoop(3),
    Evicted(HLA(24, 18, 12, 3), 9, first=2),
)


@pytest.fixture
def base(tmp_path):
    return golden_copy("huginn-tiny", tmp_path / "base")


@pytest.fixture
def model(base):
    return load(base, dtype=None)


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True), a, b)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_scheme_reads_back(scheme, model, tmp_path):
    attention = random_maps(scheme, model.config)
    kinds = {"merged": False, "maps": True} if attention.params else {"merged": False}
    for name, maps_only in kinds.items():
        export(model, attention, tmp_path / name, maps_only)
        found = load(tmp_path / name, dtype=None)
        assert found.config == model.config
        assert found.attention.scheme == scheme
        same(found.params, model.params)
        same(dict(found.attention.params), dict(attention.params))
        same(dict(load_attention(tmp_path / name, model).params), dict(attention.params))
    if attention.params:
        assert attention_files.fingerprint(tmp_path / "merged") == attention_files.fingerprint(model.path)


def test_names_are_those_of_the_family(model, tmp_path):
    attention = random_maps(HLA(24, 18, 12, 3), model.config)
    export(model, attention, tmp_path / "out")
    written, published = (load_file(path / "model.safetensors") for path in (tmp_path / "out", model.path))
    maps = {f"transformer.core_block.{layer}.attn.hla.{name}" for layer in range(2) for name in attention.params}
    assert written.keys() == published.keys() | maps
    assert {name for name in written if attention_files.is_map(name)} == maps
    for name, array in published.items():
        np.testing.assert_array_equal(written[name], array, strict=True)
    np.testing.assert_array_equal(written["transformer.core_block.1.attn.hla.bias_k"], attention.params["bias_k"][1])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["RavenHLAForCausalLM"]
    assert config["hla_config"] == {"rank_k": 24, "rank_v": 18, "rank_loop1": 12, "window": 3}


def test_the_full_cache_leaves_the_published_model(model, tmp_path):
    export(model, None, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["RavenForCausalLM"]
    same(load_file(tmp_path / "out" / "model.safetensors"), load_file(model.path / "model.safetensors"))


def test_another_base_is_refused(model, tmp_path):
    export(model, random_maps(LLA(6, 5), model.config), tmp_path / "out", maps_only=True)
    tensors = load_file(model.path / "model.safetensors")
    tensors["transformer.prelude.0.attn.qk_bias"][0, 0, 1, 2] += 1e-6
    save_file(tensors, model.path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"another base model .* expected sha256 \w{64}, found \w{64}"):
        load(tmp_path / "out")


def test_maps_of_another_family_are_named(model, tmp_path):
    """A map under Ouro's names is a map, and none of this model's."""
    attention = random_maps(LLA(6, 5), model.config)
    export(model, attention, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.lla.k_up"] = tensors.pop("transformer.core_block.0.attn.lla.k_up")
    save_file(tensors, file)
    with pytest.raises(
        WeightsError,
        match=r"unknown tensors model\.layers\.0\.self_attn\.lla\.k_up; missing transformer\.core_block\.0\.attn",
    ):
        load(tmp_path / "out")


def test_torch_code_is_the_familys(model, tmp_path):
    export(model, random_maps(LLA(6, 5), model.config), tmp_path / "out", torch_code=True)
    auto_map = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_huginn.RavenConfig",
        "AutoModelForCausalLM": "modeling_huginn.RavenLLAForCausalLM",
    }
    code = {path.name for path in (tmp_path / "out").glob("*.py")}
    assert not [name for name in code if name.endswith("ouro.py")]
    assert code >= {f"{part}_huginn.py" for part in ("configuration", "modeling", "cache", "state")}
    with pytest.raises(ExportError, match="not Evicted; export without it"):
        export(model, random_maps(Evicted(FullCache(), 9, first=2), model.config), tmp_path / "no", torch_code=True)
