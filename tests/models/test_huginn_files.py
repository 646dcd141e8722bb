"""Huginn's files: what is read is written again, name by name and bit by bit, and each fault is one clear error."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hla_jax.config import HuginnConfig, ModelConfig
from hla_jax.models import weights
from hla_jax.tensor_files import WeightsError
from tiny import GOLDEN, golden_copy

HUGINN = GOLDEN / "huginn-tiny"


@pytest.fixture
def checkpoint(tmp_path):
    """A directory to damage."""
    return golden_copy("huginn-tiny", tmp_path / "model")


def read(directory, dtype=None):
    return weights.load_params(directory, ModelConfig.from_directory(directory), dtype)


def rewrite(directory, **changes):
    """Changed or added tensors, their names with "__" for "."; None takes one away."""
    tensors = load_file(directory / "model.safetensors")
    tensors |= {name.replace("__", "."): array for name, array in changes.items()}
    save_file({name: array for name, array in tensors.items() if array is not None}, directory / "model.safetensors")


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True, err_msg=name)


def test_a_published_checkpoint_is_written_as_it_was(tmp_path):
    """Joined projections, the biases of queries and keys, gate and up: names, shapes and values are the file's."""
    config = ModelConfig.from_directory(HUGINN)
    weights.save_params(read(HUGINN), config, tmp_path / "saved")
    assert_same_tensors(load_file(tmp_path / "saved" / "model.safetensors"), load_file(HUGINN / "model.safetensors"))
    assert ModelConfig.from_directory(tmp_path / "saved") == config
    weights.save_params(read(HUGINN), config, tmp_path / "sharded", 100_000)
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 1
    written = {name: array for shard in shards for name, array in load_file(shard).items()}
    assert_same_tensors(written, load_file(HUGINN / "model.safetensors"))


def test_the_config_is_the_published_ones(tmp_path):
    """What this package writes, public code reads: each of its keys has the published file's value."""
    published = json.loads((HUGINN / "config.json").read_text())
    ours = HuginnConfig.from_directory(HUGINN).to_dict("float32")
    assert ours.keys() - published.keys() == {"bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype"}
    for key in ours.keys() & published.keys():
        assert ours[key] == published[key], key


def test_rotary_pairs_are_put_in_this_packages_order():
    """Coordinates (2f, 2f + 1) of a head in the file are (f, f + dh/2) here; values stay as they are."""
    config = ModelConfig.from_directory(HUGINN)
    stored, params = load_file(HUGINN / "model.safetensors"), read(HUGINN)["layers"]
    joined = stored["transformer.core_block.1.attn.Wqkv.weight"].reshape(3, config.num_heads, config.head_dim, -1)
    bias = stored["transformer.core_block.1.attn.qk_bias"][:, 0]
    assert np.abs(bias).max() > 0
    half = config.head_dim // 2
    for index, name in enumerate("qk"):
        rows = np.asarray(params[f"{name}_proj"][1]).reshape(config.num_heads, config.head_dim, -1)
        np.testing.assert_array_equal(rows[:, :half], joined[index][:, 0::2])
        np.testing.assert_array_equal(rows[:, half:], joined[index][:, 1::2])
        biases = np.asarray(params[f"{name}_bias"][1]).reshape(config.num_heads, -1)
        np.testing.assert_array_equal(biases[:, :half], bias[index][:, 0::2])
    np.testing.assert_array_equal(
        np.asarray(params["v_proj"][1]).reshape(joined[2].shape),
        joined[2],
    )


def test_a_tied_head_and_buffers_are_no_parameters(checkpoint):
    """As published: the head beside the embeddings, and the rotary table."""
    head = load_file(checkpoint / "model.safetensors")["transformer.wte.weight"]
    before = read(checkpoint)
    rewrite(checkpoint, lm_head__weight=head, freqs_cis=np.zeros((1, 8, 1, 6, 2), np.float32))
    jax.tree.map(np.testing.assert_array_equal, read(checkpoint), before)
    rewrite(checkpoint, lm_head__weight=head + 1)
    with pytest.raises(WeightsError, match=r"says tie_embeddings: .* identical to transformer\.wte\.weight"):
        read(checkpoint)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("core_block__1__attn__Wqkv__weight", (120, 60), r"implies shape \[180, 60\], found \[120, 60\]"),
        ("prelude__0__attn__qk_bias", (2, 5, 12), r"implies shape \[2, 1, 5, 12\], found \[2, 5, 12\]"),
        ("coda__0__mlp__fc__weight", (100, 60), r"implies shape \[200, 60\], found \[100, 60\]"),
        ("adapter__weight", (60, 60), r"implies shape \[60, 120\], found \[60, 60\]"),
        ("core_block__0__attn__qk_bias", None, r"missing tensors transformer\.core_block\.0\.attn\.qk_bias"),
        ("core_block__2__norm_1__weight", (60,), r"unknown tensors transformer\.core_block\.2\.norm_1\.weight"),
        ("core_block__0__attn__q_proj__weight", (60, 60), r"unknown tensors .*attn\.q_proj\.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(checkpoint, name, shape, message):
    rewrite(checkpoint, **{f"transformer__{name}": None if shape is None else np.zeros(shape, np.float32)})
    with pytest.raises(WeightsError, match=rf"model.*{message}") as error:
        read(checkpoint)
    assert "\n" not in str(error.value)


def test_a_truncated_file_is_named(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        read(checkpoint)
