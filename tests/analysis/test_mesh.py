"""On eight (virtual) devices that share the rows, the streamed moments are those of one device, in an eighth of its
memory; and neither grows with the number of rows.
"""

import pytest

from eight_devices import on_eight_devices

SCRIPT = """
import jax, numpy as np
import hla_jax
from hla_jax import sharding
from hla_jax.analysis import structure
from hla_jax.calibration import moments
from hla_jax.calibration.moments import Sequences
from hla_jax.models import weights
from tiny import tiny_config, tiny_params, tiny_tokens

config, length = tiny_config(), 64
weights.save_params(tiny_params(config), config, sys.argv[1])
mesh = sharding.make_mesh(data=2, fsdp=4)
one, many = hla_jax.load(sys.argv[1], "float32"), hla_jax.load(sys.argv[1], "float32", mesh)

calls, add = [], moments._add

def noting(params, config, tokens, lengths, layers, together, measures, sums, operands):
    args = params, config, tokens, lengths, layers, together, measures, sums, operands
    if not calls or calls[-1][1].shape != tokens.shape:
        held = add.lower(*args).compile().memory_analysis().temp_size_in_bytes
    else:
        held = calls[-1][0]
    calls.append((held, tokens, sum(x.nbytes for x in sums)))
    return add(*args)

moments._add = noting

def measured(model, rows, device_rows):
    moments.CAPTURE_BYTES = device_rows * config.num_loops * config.num_layers * length * config.hidden_size * 4
    calls.clear()
    tokens = np.asarray(tiny_tokens(config, rows, length))
    sequences = Sequences(tokens, np.where(np.arange(rows) % 3, length, length - 5).astype(np.int32))
    (products,) = moments.measure(model.params, config, sequences, [structure._Products(config)],
                                  [np.ones((config.num_layers, config.num_loops, config.hidden_size), np.float32)])
    state = {(held, total) for held, _, total in calls}
    assert len(state) == 1, state
    return products, *state.pop(), [tokens for _, tokens, _ in calls]

alone, held_alone, state, batches = measured(one, 20, 16)
shared, held_each, same, spread = measured(many, 20, 2)
np.testing.assert_allclose(shared, alone, rtol=1e-4, atol=1e-3)
assert [len(tokens) for tokens in batches] == [len(tokens) for tokens in spread] == [16, 16]
for tokens in spread:
    assert [shard.data.shape[0] for shard in tokens.addressable_shards] == [2] * 8

# The state is the sums, and a pass over five times the rows holds no more of anything.
joint = config.num_loops * config.hidden_size
assert state == same == 4 * config.num_layers * joint**2
assert measured(many, 100, 2)[1:3] == (held_each, state)
assert held_each < held_alone / 2, (held_each, held_alone)
print(held_alone, held_each, state)
"""


@pytest.mark.long
def test_eight_devices_share_the_rows(tmp_path):
    on_eight_devices(SCRIPT, tmp_path / "model")
