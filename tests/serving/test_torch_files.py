"""The PyTorch model reads the directories that it should, and names what is wrong with others."""

# ruff: noqa: E402 (the imports below need torch)

import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the PyTorch model needs torch, which hla_jax itself does not")

from safetensors.torch import load_file, save_file

from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention
from hla_jax.model import Model, load
from hla_jax.serving.export import export
from hla_jax.serving.torch.modeling_ouro import OuroForCausalLM, OuroHLAForCausalLM
from serving.torch_cases import PROMPTS, forced, from_directory, golden_directory
from tiny import golden_copy, random_maps, tiny_config, tiny_params

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread", "own_modules")]


@pytest.fixture
def hla_directory(tmp_path):
    return golden_directory("ouro-tiny", "hla", tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c.pop("hla_config"),
            r"model\.safetensors: unknown tensors model\.layers\.0\.self_attn\.hla\.read_o",
        ),
        (lambda c: c.update(lla_config={"rank_k": 3, "rank_v": 3}), "expected one scheme, found hla_config and lla"),
        (lambda c: c.update(hla_config=3), "hla_config must be an object, found 3"),
        (lambda c: c["hla_config"].pop("window"), r"hla_config: missing \['window'\]; its fields are"),
        (lambda c: c["hla_config"].update(gate=1), r"hla_config: unknown \['gate'\]"),
        (lambda c: c["hla_config"].update(window="5"), "hla_config: window must be int, found '5'"),
        (lambda c: c["hla_config"].update(rank_k=20), "rank_k must be a multiple of head_dim 16, found 20"),
        (lambda c: c["hla_config"].update(pair_frequency=[0]), "pair_frequency must be 16 indices of the 8 freq"),
        (
            lambda c: c.update(eviction_config={"budget": 9, "first": 2}),
            "eviction_config is a scheme that only hla_jax runs",
        ),
        (lambda c: c.pop("total_ut_steps"), "missing keys total_ut_steps"),
        (lambda c: c.pop("rope_theta"), r"expected one rope_theta, found \[\]"),
        (lambda c: c.update(rope_scaling={"rope_type": "yarn"}), "rope_scaling must be None"),
    ],
)
def test_a_wrong_config_is_named(hla_directory, change, message):
    path = hla_directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        OuroHLAForCausalLM.from_pretrained(hla_directory)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("model.layers.1.self_attn.hla.read_o1", "missing"),
        ("model.layers.2.mlp.up_proj.weight", "missing"),
        ("model.layers.0.self_attn.hla.read_x", "unknown"),
        ("model.layers.0.self_attn.lla.k_up", "unknown"),
    ],
)
def test_missing_and_unknown_tensors_are_named(hla_directory, name, problem):
    tensors = load_file(hla_directory / "model.safetensors")
    tensors = (
        tensors | {name: torch.zeros(2)} if problem == "unknown" else {k: tensors[k] for k in tensors.keys() - {name}}
    )
    save_file(tensors, hla_directory / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{hla_directory}.*: {problem} tensors {name}"):
        OuroHLAForCausalLM.from_pretrained(hla_directory)


@pytest.fixture
def golden_base(tmp_path):
    return golden_copy("ouro-tiny", tmp_path / "base")


def test_maps_only_directories_find_their_base(golden_base, tmp_path):
    model = load(golden_base, dtype="float32")
    attention = random_maps(HLA(32, 24, 16, 5), model.config)
    export(model, attention, tmp_path / "whole", torch_code=True)
    export(model, attention, tmp_path / "maps", maps_only=True, torch_code=True)
    tokens = torch.tensor([PROMPTS[0]])
    found = from_directory(tmp_path / "maps")
    assert type(found).__name__ == "OuroHLAForCausalLM"
    whole = from_directory(tmp_path / "whole")
    np.testing.assert_allclose(forced(found, tokens, 4), forced(whole, tokens, 4), atol=1e-4)

    stored = load_file(tmp_path / "maps" / "model.safetensors")
    name = "model.layers.1.self_attn.hla.write_k"
    save_file({k: stored[k] for k in stored.keys() - {name}}, tmp_path / "maps" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"maps: model\.safetensors: missing tensors {name}"):
        from_directory(tmp_path / "maps")
    save_file(stored | {name: stored[name][:, 1:].contiguous()}, tmp_path / "maps" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} must be \[3, 32, 64\], found \[3, 31, 64\]"):
        from_directory(tmp_path / "maps")
    save_file(stored, tmp_path / "maps" / "model.safetensors")

    tensors = load_file(golden_base / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, golden_base / "model.safetensors")
    with pytest.raises(ValueError, match=r"another base model .* expected sha256 \w{64}, found \w{64}"):
        from_directory(tmp_path / "maps")
    shutil.rmtree(golden_base)
    with pytest.raises(ValueError, match="base_model not found"):
        from_directory(tmp_path / "maps")


def test_exports_of_several_schemes_under_one_name(golden_base, tmp_path):
    """Transformers takes them for one model: their folder's name and their code are the same."""
    model = load(golden_base, dtype="float32")
    for number, scheme in enumerate((FullCache(), LLA(12, 20), HLA(32, 24, 16, 5), FullCache())):
        directory = tmp_path / str(number) / "export"
        export(model, random_maps(scheme, model.config), directory, torch_code=True)
        found = from_directory(directory)
        kind = {"hla": "OuroHLAForCausalLM", "lla": "OuroLLAForCausalLM"}.get(scheme.interchange, "OuroForCausalLM")
        assert type(found).__name__ == kind
        found.save_pretrained(tmp_path / str(number) / "saved")
        again = from_directory(tmp_path / str(number) / "saved")
        assert type(again).__name__ == kind
        assert again.config.architectures == [kind]
        assert torch.equal(again(torch.tensor(PROMPTS[:1])).logits, found(torch.tensor(PROMPTS[:1])).logits)


def test_a_class_of_another_scheme_is_named(hla_directory):
    config = OuroForCausalLM.config_class.from_pretrained(hla_directory)
    with pytest.raises(ValueError, match=r"scheme FullCache, found a config of HLA: take OuroHLAForCausalLM"):
        OuroForCausalLM(config)


def test_sharded_and_tied_models_load(tmp_path):
    """Files of a sharded export, and a head that is the embedding."""
    config = tiny_config(tie_word_embeddings=True)
    params = tiny_params(config)
    params.pop("lm_head", None)
    export(Model(config, params), Attention(FullCache()), tmp_path / "tied", torch_code=True)
    whole = from_directory(tmp_path / "tied")
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    again = OuroForCausalLM.from_pretrained(tmp_path / "sharded", dtype=torch.float32)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    np.testing.assert_allclose(forced(again, tokens, 3), forced(whole, tokens, 3), atol=1e-4)
