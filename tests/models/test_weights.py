"""The weight table: reading equals the files, writing equals reading, each fault of a checkpoint is one clear error."""

import json
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from hla_jax.config import OURO_1P4B, OURO_2P6B, OuroConfig
from hla_jax.models import weights
from hla_jax.tensor_files import WeightsError
from tiny import GOLDEN, GOLDEN_MODELS, auto_mesh, golden_copy, tiny_config

GQA = GOLDEN / "ouro-tiny-gqa"


def read_files(directory):
    """Every tensor of a directory, by the safetensors library alone."""
    files = sorted(directory.glob("model*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_equal_trees(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True), a, b)


def random_arrays(config, dtype):
    rng = np.random.default_rng(0)
    abstract = weights.abstract_params(config, dtype)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), abstract)


@pytest.fixture
def checkpoint(tmp_path):
    """A directory to damage: a copy of the golden GQA checkpoint, and a way to write other tensors into it."""
    return golden_copy("ouro-tiny-gqa", tmp_path / "model")


def rewrite(directory, change):
    tensors = read_files(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def load(directory, **arguments):
    return weights.load_params(directory, OuroConfig.from_directory(directory), **arguments)


def refused(directory, *parts, **arguments):
    with pytest.raises(WeightsError) as caught:
        load(directory, **arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_loaded_parameters_are_the_files_tensors(name):
    params, tensors = load(GOLDEN / name), read_files(GOLDEN / name)
    layers = params["layers"]
    for layer in range(layers["q_proj"].shape[0]):
        prefix = f"model.layers.{layer}"
        for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert same_bits(np.asarray(layers[leaf][layer]), tensors.pop(f"{prefix}.self_attn.{leaf}.weight"))
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            assert same_bits(np.asarray(layers[leaf][layer]), tensors.pop(f"{prefix}.mlp.{leaf}.weight"))
        for leaf in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"):
            assert same_bits(np.asarray(layers[leaf][layer]), tensors.pop(f"{prefix}.{leaf}.weight"))
    assert same_bits(np.asarray(params["embed_tokens"]), tensors.pop("model.embed_tokens.weight"))
    assert same_bits(np.asarray(params["norm"]), tensors.pop("model.norm.weight"))
    assert same_bits(np.asarray(params["early_exit_gate"]["weight"]), tensors.pop("model.early_exit_gate.weight"))
    assert same_bits(np.asarray(params["early_exit_gate"]["bias"]), tensors.pop("model.early_exit_gate.bias"))
    assert same_bits(np.asarray(params["lm_head"]), tensors.pop("lm_head.weight"))
    assert not tensors


@pytest.mark.parametrize(("config", "count"), [(OURO_1P4B, 1_434_652_673), (OURO_2P6B, 2_667_974_657)])
def test_sizes_of_the_released_models(config, count):
    assert sum(leaf.size for leaf in jax.tree.leaves(weights.abstract_params(config, "bfloat16"))) == count


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_save_after_load_is_bit_identical(name, tmp_path):
    params = load(GOLDEN / name)
    weights.save_params(params, OuroConfig.from_directory(GOLDEN / name), tmp_path / "new")
    before, after = read_files(GOLDEN / name), read_files(tmp_path / "new")
    assert before.keys() == after.keys()
    assert all(same_bits(before[key], after[key]) for key in before)
    assert OuroConfig.from_directory(tmp_path / "new") == OuroConfig.from_directory(GOLDEN / name)


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    shard=st.sampled_from([1, 5_000, 1 << 30]),
    tied=st.booleans(),
    layers=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_round_trip(tmp_path_factory, dtype, shard, tied, layers, kv_heads):
    directory = tmp_path_factory.mktemp("round") / "trip"
    config = tiny_config(num_layers=layers, num_kv_heads=kv_heads, tie_word_embeddings=tied)
    params = random_arrays(config, dtype)
    weights.save_params(params, config, directory, shard)
    assert_equal_trees(params, load(directory))
    sizes = [sum(array.nbytes for array in load_file(file).values()) for file in directory.glob("model*.safetensors")]
    largest = max(array.nbytes for array in read_files(directory).values())
    assert max(sizes) <= max(shard, largest)
    assert (directory / "model.safetensors").exists() == (len(sizes) == 1)
    if len(sizes) > 1:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_conversion_rounds_as_jax_does(tmp_path, stored, wanted):
    config = tiny_config()
    params = random_arrays(config, stored)
    weights.save_params(params, config, tmp_path / "c")
    converted = load(tmp_path / "c", dtype=wanted)
    assert_equal_trees(jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(wanted), params), converted)


def test_float16_that_would_overflow_is_refused(checkpoint):
    rewrite(checkpoint, lambda t: t["model.norm.weight"].__setitem__(0, 1e6))
    refused(checkpoint, "model.safetensors", "model.norm.weight", "does not fit float16", dtype="float16")


@pytest.mark.parametrize("dtype", ["bf16", "int8", "object"])
def test_weights_are_floats(checkpoint, dtype):
    refused(checkpoint, f"dtype must be one of float16, bfloat16, float32, float64, found '{dtype}'", dtype=dtype)


def test_float64_needs_x64(checkpoint):
    refused(checkpoint, "float64 needs jax_enable_x64", dtype="float64")
    with jax.enable_x64(True):
        assert load(checkpoint, dtype="float64")["norm"].dtype == np.float64


def test_arrays_out_of_c_order_are_written_right(tmp_path):
    config = tiny_config()
    params = random_arrays(config, "float32")
    turned = jax.tree.map(np.asfortranarray, params)
    weights.save_params(turned, config, tmp_path / "c")
    assert_equal_trees(params, load(tmp_path / "c"))


def test_saving_another_tree_is_refused(tmp_path):
    config = tiny_config()
    params = random_arrays(config, "float32")
    with pytest.raises(WeightsError, match=r"lm_head: config implies shape \(40, 24\), found None"):
        weights.save_params({k: v for k, v in params.items() if k != "lm_head"}, config, tmp_path / "c")
    with pytest.raises(WeightsError, match=r"norm: config implies shape \(24,\), found \(25,\)"):
        weights.save_params(params | {"norm": jnp.ones(25)}, config, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_saving_never_overwrites(checkpoint):
    before = read_files(checkpoint)
    config = tiny_config()
    with pytest.raises(FileExistsError, match="not empty"):
        weights.save_params(random_arrays(config, "float32"), config, checkpoint)
    assert all(same_bits(before[key], array) for key, array in read_files(checkpoint).items())


GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
# Planted faults: what is done to the checkpoint, and what the one error must name.
FAULTS = {
    "missing": (lambda t: t.pop(UP), [f"missing tensors {UP}", "27 tensors", "found 26"]),
    "unknown": (
        lambda t: t.update({"model.extra.weight": np.zeros(3, np.float32)}),
        ["model.safetensors", "unknown tensors model.extra.weight", "27 tensors", "found 28"],
    ),
    "another depth": (
        lambda t: t.update({k.replace("layers.1", "layers.2"): t[k] for k in t if "layers.1" in k}),
        ["unknown tensors model.layers.2.", "and 8 more", "27 tensors", "found 38"],
    ),
    "transposed": (lambda t: t.update({GATE: t[GATE].T.copy()}), ["model.safetensors", GATE, "[176, 64]", "[64, 176]"]),
    "integer": (
        lambda t: t.update({"model.norm.weight": np.ones(64, np.int32)}),
        ["model.safetensors", "model.norm.weight", "BF16", "found I32"],
    ),
    "mixed": (lambda t: t.update({UP: t[UP].astype(np.float16)}), [UP, "dtype F32", "found F16", "give a dtype"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_tensors_are_named(checkpoint, fault):
    change, parts = FAULTS[fault]
    rewrite(checkpoint, change)
    refused(checkpoint, *parts)


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod.", "base_model.model."])
def test_prefixed_names_get_one_error(checkpoint, prefix):
    def change(tensors):
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    rewrite(checkpoint, change)
    refused(checkpoint, "model.safetensors", f"carry the prefix {prefix!r}", f"found {prefix}")


@pytest.mark.parametrize(
    ("change_name", "message"),
    [
        (lambda name: name.replace("mlp.", "mlp._fsdp_wrapped_module."), "carry the prefix '_fsdp_wrapped_module.'"),
        (lambda name: name.removeprefix("model."), "lack the prefix 'model.'"),
    ],
)
def test_other_renamings_get_one_error(checkpoint, change_name, message):
    def change(tensors):
        for name in list(tensors):
            tensors[change_name(name)] = tensors.pop(name)

    rewrite(checkpoint, change)
    refused(checkpoint, message)


def test_config_and_weights_that_contradict(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    refused(checkpoint, "model.safetensors", "config.json implies shape [320, 32], found [320, 64]")


def test_tied_head_may_be_absent_or_identical(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    refused(checkpoint, "tie_word_embeddings", "lm_head.weight", "found a different one")
    rewrite(checkpoint, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert "lm_head" not in load(checkpoint)
    rewrite(checkpoint, lambda t: t.pop("lm_head.weight"))
    assert "lm_head" not in load(checkpoint)


def test_missing_head_of_an_untied_model(checkpoint):
    rewrite(checkpoint, lambda t: t.pop("lm_head.weight"))
    refused(checkpoint, "missing tensors lm_head.weight")


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_initialisation_has_the_moments_asked_for(std):
    config = tiny_config(vocab_size=500, hidden_size=64, num_heads=8, intermediate_size=200)
    params = weights.init_params(config, jax.random.key(0), embedding_std=std, post_norm_gain=0.3)
    assert np.std(params["embed_tokens"]) == pytest.approx(std, rel=0.02)
    assert np.std(params["layers"]["down_proj"]) == pytest.approx(200**-0.5, rel=0.02)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        np.testing.assert_array_equal(params["layers"][norm], 1)
        np.testing.assert_array_equal(params["layers"][f"{norm}_2"], np.float32(0.3))
    np.testing.assert_array_equal(params["early_exit_gate"]["bias"], 0)
    assert not np.array_equal(params["layers"]["gate_proj"], params["layers"]["up_proj"])
    params = weights.init_params(config, jax.random.key(0), matrix_std=0.5)
    assert np.std(params["lm_head"]) == pytest.approx(0.5, rel=0.02)


def test_trees_have_one_structure():
    config = tiny_config()
    params = weights.init_params(config, jax.random.key(0), "bfloat16")
    assert jax.eval_shape(lambda: params) == weights.abstract_params(config, "bfloat16")
    axes = traverse_util.flatten_dict(weights.logical_axes(config))
    assert {path: len(names) for path, names in axes.items()} == {
        path: leaf.ndim for path, leaf in traverse_util.flatten_dict(params).items()
    }


def test_shardings_never_split_a_head():
    specs = jax.tree.map(lambda s: s.spec, weights.shardings(tiny_config(), auto_mesh(2, 4, axes=["data", "tensor"])))
    layers = specs["layers"]
    assert layers["q_proj"] == PartitionSpec(None, "tensor", None)  # 4 heads over 4
    assert layers["k_proj"] == PartitionSpec(None, None, None)  # 2 key-value heads cannot be
    assert layers["down_proj"] == PartitionSpec(None, None, "tensor")
    assert specs["embed_tokens"] == PartitionSpec("tensor", None)
    assert specs["norm"] == PartitionSpec(None)
    rules = {"embed": "data", "mlp": "tensor"}
    specs = weights.shardings(tiny_config(), auto_mesh(2, axes=["data"]), rules)
    assert specs["layers"]["gate_proj"].spec == PartitionSpec(None, None, "data")


_ON_A_MESH = """
import sys
import jax, numpy as np
from hla_jax.config import OuroConfig
from hla_jax.models import weights
directory = sys.argv[1]
config = OuroConfig.from_directory(directory)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
whole = weights.load_params(directory, config)
spread = weights.load_params(directory, config, mesh=mesh)
jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), whole, spread)
wanted = weights.shardings(config, mesh)
assert jax.tree.all(jax.tree.map(lambda a, s: a.sharding == s, spread, wanted))
q = spread["layers"]["q_proj"]
assert len(q.addressable_shards) == 8 and q.addressable_shards[0].data.shape == (3, 16, 64), q.sharding
assert spread["layers"]["o_proj"].addressable_shards[0].data.shape == (3, 64, 16)
assert spread["embed_tokens"].addressable_shards[0].data.shape == (80, 64)
stages = jax.make_mesh((3,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
by_layer = weights.load_params(directory, config, mesh=stages, rules={"layers": "stage"})
jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), whole, by_layer)
assert by_layer["layers"]["q_proj"].addressable_shards[2].data.shape == (1, 64, 64)
weights.save_params(spread, config, sys.argv[2], 100_000)
print("sharded", jax.device_count())
"""


def test_loads_onto_a_mesh_really_sharded(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    run = subprocess.run(
        [sys.executable, "-c", _ON_A_MESH, str(GOLDEN / "ouro-tiny"), str(tmp_path / "saved")],
        capture_output=True,
        text=True,
    )
    assert run.stdout == "sharded 8\n", run.stderr
    before, after = read_files(GOLDEN / "ouro-tiny"), read_files(tmp_path / "saved")
    assert all(same_bits(before[key], after[key]) for key in before | after)
