"""Export: what is written reads back bit by bit, in the interchange format, with the base that it belongs to."""

import dataclasses
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hla_jax import attention_files
from hla_jax.attention.baselines import HeadLatent, LayerLatent
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.lla import LLA
from hla_jax.attention.low_bit import LowBit
from hla_jax.attention.scheme import Attention
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import OuroConfig
from hla_jax.model import Model, load
from hla_jax.models import weights
from hla_jax.serving.export import ExportError, export
from hla_jax.tensor_files import WeightsError
from tiny import GOLDEN, golden, golden_copy


@pytest.fixture
def base(tmp_path):
    """A copy of a golden checkpoint, with a tokenizer file beside it."""
    directory = golden_copy("ouro-tiny", tmp_path / "base")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (directory / "optimizer.json").write_text("{}")
    return directory


@pytest.fixture
def model(base):
    config = OuroConfig.from_directory(base)
    return Model(config, weights.load_params(base, config), path=base)


@pytest.fixture
def attention():
    example = golden("ouro-tiny", "float32")
    return Attention(example.hla, dict(example.maps))


def read_back(directory):
    """Parameters and attention of an exported directory, in the dtypes they are stored in."""
    model = load(directory, dtype=None)
    return model.params, model.attention


def assert_same_bits(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True), a, b)


@pytest.mark.parametrize("maps_only", [False, True])
def test_exported_model_reads_back(model, attention, tmp_path, maps_only):
    export(model, attention, tmp_path / "out", maps_only)
    params, found = read_back(tmp_path / "out")
    assert_same_bits(model.params, params)
    assert_same_bits(attention.params, found.params)
    assert found.scheme == attention.scheme
    assert OuroConfig.from_directory(tmp_path / "out") == model.config
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
    }


@pytest.mark.parametrize("maps_only", [False, True])
def test_names_and_values_are_those_of_the_golden_interchange_file(model, attention, tmp_path, maps_only):
    export(model, attention, tmp_path / "out", maps_only)
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = {} if maps_only else load_file(GOLDEN / "ouro-tiny" / "model.safetensors")
    maps = load_file(GOLDEN / "ouro-tiny" / "hla_random.safetensors")
    expected |= {name: array.astype(np.float32) for name, array in maps.items()}
    assert written.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(written[name], array, strict=True)


def test_config_says_the_scheme(model, attention, tmp_path):
    pairs = tuple(range(8)) * 2
    scheme = dataclasses.replace(attention.scheme, pair_frequency=pairs)
    export(model, dataclasses.replace(attention, scheme=scheme), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "ouro"
    assert config["architectures"] == ["OuroHLAForCausalLM"]
    assert config["hla_config"] == {
        "rank_k": 32,
        "rank_v": 24,
        "rank_loop1": 16,
        "window": 5,
        "pair_frequency": list(pairs),
    }
    assert "base_model" not in config
    assert read_back(tmp_path / "out")[1].scheme == scheme


def test_own_attention_is_the_default(model, attention, tmp_path):
    export(dataclasses.replace(model, attention=attention), None, tmp_path / "out")
    assert read_back(tmp_path / "out")[1].scheme == attention.scheme


def test_full_cache_writes_the_plain_model(model, tmp_path):
    export(model, Attention(FullCache()), tmp_path / "out")
    assert attention_files.read_attention(tmp_path / "out") == {}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["OuroForCausalLM"]
    with pytest.raises(ExportError, match="maps_only needs a scheme with maps"):
        export(model, Attention(FullCache()), tmp_path / "maps", maps_only=True)


@pytest.mark.parametrize(
    "scheme",
    [
        SharedLoop(4),
        LLA(12, 20, first_pass="exact"),
        LLA(9, 9, True, rank_rope=4),
        HeadLatent(5, 7),
        LayerLatent(5, 7, 3),
        LowBit(2),
        Evicted(LLA(12, 20), 64),
        Evicted(FullCache(), 9, first=2),
    ],
)
def test_every_scheme_comes_back(model, tmp_path, scheme):
    draw = lambda shape: jnp.asarray(
        np.random.default_rng(0).normal(size=(model.config.num_layers, *shape)), jnp.float32
    )
    attention = Attention(scheme, {name: draw(shape) for name, shape in scheme.map_shapes(model.config).items()})
    export(model, attention, tmp_path / "out")
    found = read_back(tmp_path / "out")[1]
    assert found.scheme == scheme
    assert found.params.keys() == attention.params.keys()
    for name, stack in attention.params.items():
        np.testing.assert_array_equal(found.params[name], stack)


def test_maps_that_do_not_fit_the_scheme_are_refused(model, attention, tmp_path):
    wider = dataclasses.replace(attention, scheme=dataclasses.replace(attention.scheme, rank_v=25))
    with pytest.raises(ExportError, match=r"map read_o: .* shape \(3, 3, 4, 25, 16\), found \(3, 3, 4, 24, 16\)"):
        export(model, wider, tmp_path / "out")
    fewer = Attention(attention.scheme, {name: stack for name, stack in attention.params.items() if name != "write_k"})
    with pytest.raises(ExportError, match=r"map write_k: .* found None"):
        export(model, fewer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fingerprint_is_the_documented_one(base):
    """Computed from the definition, by another reader."""
    text = ""
    for name, array in sorted(load_file(base / "model.safetensors").items()):
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        text += f'["{name}","F32",{list(array.shape)},"{digest}"]\n'.replace(", ", ",")
    assert attention_files.fingerprint(base) == hashlib.sha256(text.encode()).hexdigest()


def test_fingerprint_ignores_files_and_maps(model, base, attention, tmp_path):
    weights.save_params(model.params, model.config, tmp_path / "sharded", 100_000)
    export(model, attention, tmp_path / "merged")
    assert (
        attention_files.fingerprint(base)
        == attention_files.fingerprint(tmp_path / "sharded")
        == attention_files.fingerprint(tmp_path / "merged")
    )


def test_maps_only_names_its_base(model, base, attention, tmp_path):
    export(model, attention, tmp_path / "local", maps_only=True)
    export(model, attention, tmp_path / "hub", maps_only=True, base_id="someone/ouro-tiny")
    entries = [json.loads((tmp_path / name / "config.json").read_text())["base_model"] for name in ("local", "hub")]
    checksum = attention_files.fingerprint(base)
    assert entries == [{"path": str(base), "sha256": checksum}, {"id": "someone/ouro-tiny", "sha256": checksum}]


def test_another_base_is_refused(model, base, attention, tmp_path):
    export(model, attention, tmp_path / "out", maps_only=True)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(WeightsError, match=r"another base model .* expected sha256 \w{64}, found \w{64}"):
        load(tmp_path / "out")
    shutil.rmtree(base)
    with pytest.raises(WeightsError, match="base_model not found"):
        load(tmp_path / "out")


def test_maps_refitted_on_a_maps_only_model_keep_the_first_base(model, base, attention, tmp_path):
    export(model, attention, tmp_path / "first", maps_only=True)
    export(dataclasses.replace(model, path=tmp_path / "first"), attention, tmp_path / "second", maps_only=True)
    assert attention_files.base_directory(tmp_path / "second") == base


def test_maps_only_in_another_dtype_keeps_the_base(model, base, attention, tmp_path):
    half = dataclasses.replace(model, params=weights.load_params(base, model.config, "bfloat16"))
    export(half, attention, tmp_path / "out", maps_only=True)
    assert attention_files.base_directory(tmp_path / "out") == base


def test_maps_only_would_lose_changed_weights(model, attention, tmp_path):
    tuned = dataclasses.replace(model, params=model.params | {"norm": model.params["norm"] * 1.5})
    with pytest.raises(ExportError, match=r"tensor model\.norm\.weight is not that of .*base"):
        export(tuned, attention, tmp_path / "out", maps_only=True)
    export(tuned, attention, tmp_path / "out")
    assert_same_bits(tuned.params, read_back(tmp_path / "out")[0])


def test_maps_only_needs_a_base(model, attention, tmp_path):
    with pytest.raises(ExportError, match="made in memory"):
        export(dataclasses.replace(model, path=None), attention, tmp_path / "out", maps_only=True)
    export(dataclasses.replace(model, path=None), attention, tmp_path / "out")


def test_overwrites_earlier_exports_only(model, base, attention, tmp_path):
    out = tmp_path / "out"
    export(model, attention, out)
    with pytest.raises(FileExistsError, match="not empty"):
        export(model, attention, out)
    (out / "stale").touch()
    export(model, attention, out, maps_only=True, overwrite=True)
    assert not (out / "stale").exists()
    assert_same_bits(attention.params, read_back(out)[1].params)
    before = (base / "model.safetensors").read_bytes()
    for maps_only, message in ((False, "replaces earlier exports only"), (True, "cannot replace the base")):
        with pytest.raises(ExportError, match=message):
            export(model, attention, base, maps_only, overwrite=True)
    assert (base / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lla_config": {}}, "expected one scheme, found hla_config, lla_config"),
        ({"hla_config": 3}, "hla_config must be an object, found 3"),
        ({"base_model": {"path": "somewhere"}}, "base_model must have id or path, and sha256"),
        ({"base_model": "somewhere"}, "base_model must have id or path, and sha256"),
    ],
)
def test_contradicting_config_is_named(model, attention, tmp_path, change, message):
    export(model, attention, tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(WeightsError, match=rf"config\.json: {message}"):
        read_back(tmp_path / "out")


def test_maps_without_an_entry_are_named(model, attention, tmp_path):
    export(model, attention, tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    raw = json.loads(config.read_text())
    del raw["hla_config"]
    config.write_text(json.dumps(raw))
    with pytest.raises(WeightsError, match=r"has the map model\.layers\.0\.self_attn\.hla\.read_o, but config\.json"):
        attention_files.read_attention(tmp_path / "out")


def test_maps_of_another_scheme_or_depth_are_named(model, attention, tmp_path):
    export(model, attention, tmp_path / "out")
    shapes = attention.scheme.map_shapes(model.config)
    with pytest.raises(WeightsError, match="unknown tensors"):
        attention_files.load_maps(tmp_path / "out", model.config, "lla", shapes)
    with pytest.raises(WeightsError, match=r"missing tensors model\.layers\.3"):
        attention_files.load_maps(tmp_path / "out", dataclasses.replace(model.config, num_layers=4), "hla", shapes)
    with pytest.raises(WeightsError, match=r"hla\.read_o: config\.json implies shape \[1\], found \[3, 4, 24, 16\]"):
        attention_files.load_maps(tmp_path / "out", model.config, "hla", shapes | {"read_o": (1,)})


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "owner/repository"])
def test_neither_directory_nor_hub_id(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match=f"{name}: no such directory"):
        attention_files.local_directory(name)


def test_torch_code_is_placed_on_request(model, attention, tmp_path):
    export(model, attention, tmp_path / "plain")
    assert not list((tmp_path / "plain").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    export(model, attention, tmp_path / "out", torch_code=True)
    code = {path.name for path in (tmp_path / "out").glob("*.py")}
    shared = {f"looped_{part}.py" for part in ("cache", "files", "latent_cache", "model", "schemes")}
    assert code == shared | {"configuration_ouro.py", "modeling_ouro.py"}
    auto_map = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_ouro.OuroConfig",
        "AutoModelForCausalLM": "modeling_ouro.OuroHLAForCausalLM",
    }
    assert_same_bits(attention.params, read_back(tmp_path / "out")[1].params)
    for scheme in (SharedLoop(4), Evicted(FullCache(), 9, first=2)):
        with pytest.raises(ExportError, match=f"not {type(scheme).__name__}; export without it"):
            export(model, Attention(scheme), tmp_path / "other", torch_code=True)
