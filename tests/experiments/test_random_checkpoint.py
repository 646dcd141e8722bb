"""The random checkpoint is an ordinary one, and loading one holds no second copy of the weights."""

import json

import jax
import numpy as np
import pytest

from experiments.measure_load import measure
from experiments.random_checkpoint import write_checkpoint
from hla_jax.config import OuroConfig
from hla_jax.models import weights
from tiny import tiny_config


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


def test_peak_memory_of_loading(tmp_path):
    config = tiny_config(hidden_size=512, intermediate_size=2048, num_layers=16, head_dim=128, num_kv_heads=4)
    write_checkpoint(config, tmp_path / "a")
    found = measure(str(tmp_path / "a"))
    assert found["weights_bytes"] > 130e6
    assert found["peak_bytes"] - found["before_bytes"] <= 1.15 * found["weights_bytes"]
