"""Two processes: each has its own position in the data; a run that is continued equals one that was not stopped."""

import pathlib
import socket
import subprocess
import sys
import textwrap

SCRIPT = f"""
    import pathlib, sys
    sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
    import jax
    rank, port, workdir = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize("localhost:" + port, 2, rank)
    import numpy as np
    import test_loop as t
    from hla_jax.data.streams import Shard

    def replicated(x):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(replicated(jax.random.key_data(x)))
        return jax.make_array_from_process_local_data(sharding, np.asarray(x), x.shape)

    def step(state, batch):
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        return t.STEP(state, {{k: jax.make_array_from_process_local_data(rows, v) for k, v in batch.items()}})

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    finals = []
    for folder, steps in (("whole", 12), ("parts", 5), ("parts", 12)):
        batches = Shard(t.make_batches(), rank, 2)
        state = jax.tree.map(replicated, t.make_state())
        state = t.run(state, step, batches, t.config(steps=steps), workdir / folder)
        finals.append((np.asarray(state.params["w"].addressable_data(0)).tolist(), batches.get_state()))
    assert finals[0] == finals[2], finals
    assert finals[0][1]["seen"] == 23 + rank, finals
"""


def test_each_process_continues_at_its_own_position(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), str(rank), str(port), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
