"""The random checkpoint is an ordinary one, and loading one holds no second copy of the weights."""

import json
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments.measure_load import measure, measure_shared
from experiments.random_checkpoint import SIZES, write_checkpoint
from hla_jax.config import ModelConfig, OuroConfig
from hla_jax.models import weights
from hla_jax.sharding import MeshConfig
from tiny import GOLDEN, tiny_config


def test_random_checkpoint_loads(tmp_path):
    config = tiny_config(hidden_size=64)
    write_checkpoint(config, tmp_path / "a", shard_bytes=20_000)
    assert len(json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())["weight_map"]) == 27
    assert OuroConfig.from_directory(tmp_path / "a") == config
    params = weights.load_params(tmp_path / "a", config)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert np.std(params["layers"]["q_proj"].astype("float32")) == pytest.approx(64**-0.5, rel=0.05)
    assert not np.array_equal(params["layers"]["q_proj"][0], params["layers"]["q_proj"][1])
    np.testing.assert_array_equal(params["norm"], 1)


def test_a_random_huginn_has_the_names_of_the_published_one(tmp_path):
    golden = GOLDEN / "huginn-tiny"
    config = ModelConfig.from_directory(golden)
    write_checkpoint(config, tmp_path / "a")
    found, published = (load_file(path / "model.safetensors") for path in (tmp_path / "a", golden))
    assert {name: array.shape for name, array in found.items()} == {
        name: array.shape for name, array in published.items()
    }
    params = weights.load_params(tmp_path / "a", config)
    assert np.std(params["layers"]["k_proj"].astype("float32")) == pytest.approx(config.state_std, rel=0.05)
    assert not np.array_equal(params["layers"]["q_proj"][0], params["layers"]["k_proj"][0])


def test_the_released_huginn_has_3p5b_parameters():
    assert SIZES["3p5b"].qk_bias
    assert sum(math.prod(row.shape(SIZES["3p5b"])) for row in weights.parameters(SIZES["3p5b"])) == 3_564_976_800


def test_peak_memory_of_loading(tmp_path):
    config = tiny_config(hidden_size=512, intermediate_size=2048, num_layers=16, head_dim=128, num_kv_heads=4)
    write_checkpoint(config, tmp_path / "a")
    found = measure(str(tmp_path / "a"))
    assert found["weights_bytes"] > 130e6
    assert found["peak_bytes"] - found["before_bytes"] <= 1.15 * found["weights_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2}])
def test_peak_memory_of_each_process_that_shares_the_weights(tmp_path, sizes):
    """Two processes of two devices; each holds its devices' parts, and little besides at any time."""
    config = tiny_config(hidden_size=512, intermediate_size=2048, num_layers=40, head_dim=128, num_kv_heads=4)
    write_checkpoint(config, tmp_path / "a")
    whole = sum(np.prod(row.shape(config)) for row in weights.parameters(config)) * 2
    found = measure_shared(str(tmp_path / "a"), 2, MeshConfig(**sizes), devices=2)
    for process in found:
        share = 1 if "data" in sizes else 0.5
        assert process["weights_bytes"] == pytest.approx(share * whole, rel=0.01)
        assert process["peak_bytes"] - process["before_bytes"] <= 1.15 * process["weights_bytes"]
