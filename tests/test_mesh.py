"""On eight (virtual) devices with the weights spread over them, everything computes what one device computes."""

import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent
SCRIPT = """
import jax, numpy as np
from jax.sharding import AxisType
import hla_jax
from hla_jax.models import weights
from hla_jax.training import uptrain
from tiny import tiny_config, tiny_params, tiny_tokens

config = tiny_config(num_heads=8, num_kv_heads=8)
directory = sys.argv[1]
weights.save_params(tiny_params(config), config, directory)
mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
one, many = hla_jax.load(directory, "float32"), hla_jax.load(directory, "float32", mesh)
assert len(many.params["layers"]["q_proj"].sharding.device_set) == 8
assert many.params["layers"]["q_proj"].addressable_shards[0].data.shape[1] == config.head_dim

tokens = tiny_tokens(config, 2, 20)
scheme = hla_jax.HLA(16, 16, 8, window=3)
batch = {"tokens": tokens, "positions": np.broadcast_to(np.arange(20), (2, 20)), "segments": np.ones((2, 20), np.int32)}

def everything(model):
    attention = hla_jax.calibrate(model, scheme, np.asarray(tokens))
    loss = jax.jit(jax.value_and_grad(uptrain.make_loss(scheme, config), has_aux=True))
    (value, _), gradient = loss(attention.params, batch, None, model.params)
    logits = hla_jax.forward(model, tokens)
    return logits, hla_jax.decode_forced(model, tokens, 6, attention), value, jax.tree.map(np.linalg.norm, gradient)

jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), everything(many), everything(one))
"""


def test_eight_devices_equal_one(tmp_path):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
    }
    script = f"import sys\n{SCRIPT}"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "model")], check=True, env=environment, timeout=300)
