"""The engine on eight (virtual) devices: the slots are spread over them, and the tokens are those of one device."""

import pytest

from eight_devices import on_eight_devices

SCRIPT = """
import dataclasses
import jax, numpy as np
from jax.sharding import AxisType, PartitionSpec
import hla_jax
from hla_jax.generation.engine import EngineMemoryError
from hla_jax.models import looped, weights
from tiny import random_hla, tiny_config, tiny_params

config = tiny_config(num_heads=4, num_kv_heads=4)
weights.save_params(tiny_params(config), config, sys.argv[1])
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
pair = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
one, many = hla_jax.load(sys.argv[1], "float32"), hla_jax.load(sys.argv[1], "float32", mesh)
many = dataclasses.replace(many, params=jax.jit(looped.for_decoding)(many.params))
attention = random_hla(config, 3)
rng = np.random.default_rng(0)
LENGTHS = (3, 31, 1, 12, 5, 30, 2, 20, 9, 23, 4, 7, 7, 16, 2, 11, 25, 3, 6)
NEW = (9, 3, 14, 1, 6, 11, 8, 5, 17, 2, 4, 6, 5, 3, 9, 2, 8, 7, 12)
requests = [
    hla_jax.Request(rng.integers(0, 40, n).tolist(), new, temperature=1.0, top_p=0.9, seed=n, stop_tokens=())
    for n, new in zip(LENGTHS, NEW)
]
options = dict(slots=16, capacity=64, tokens_per_dispatch=4)
expected = [made.tokens for made in hla_jax.Engine(one, attention, **options).run(requests)]

engine, found = hla_jax.Engine(many, attention, **options), []
for made in engine.run(requests):
    found.append(made.tokens)
    cache = engine._device.progress.cache
    for name, buffer in cache.buffers.items():
        assert len(buffer.sharding.device_set) == 8, (name, buffer.sharding)
        assert buffer.addressable_shards[0].data.shape[1] == 2, (name, buffer.sharding)
    assert cache.lengths.sharding.spec == PartitionSpec("data"), cache.lengths.sharding
assert found == expected, (found, expected)

# Sixteen slots a device: two prompts are read at once on each, and requests wait for two free slots.
two = hla_jax.load(sys.argv[1], "float32", pair)
found = [made.tokens for made in hla_jax.Engine(two, attention, **options | dict(slots=32)).run(requests * 3)]
assert found == expected * 3, (found, expected)

# Where memory runs out the slots stay a multiple of the devices.
engine._halve(MemoryError())
assert engine.slots == 8
try:
    engine._halve(MemoryError())
except EngineMemoryError:
    pass
else:
    raise AssertionError("four slots on eight devices")
try:
    hla_jax.Engine(many, attention, slots=12)
except ValueError as error:
    assert "slots must be a multiple of the mesh's 8 data groups, found 12" in str(error), error
else:
    raise AssertionError("twelve slots on eight devices")
"""


@pytest.mark.long
def test_slots_are_spread_over_eight_devices(tmp_path):
    on_eight_devices(SCRIPT, tmp_path / "model")
