"""Two processes share a run: one is killed, both are started again on another mesh, and one device finishes it alone.

Whatever runs it, the updates are those of a run that was not stopped, on the same rows.
"""

import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np

from hla_jax import sharding
from hla_jax.data.packing import Lanes
from hla_jax.data.streams import Indexed, Shard
from hla_jax.training import loop
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig, adamw
from hla_jax.training.step import init, init_on, make_step

OPTIMIZER = adamw(OptimizerConfig(peak_learning_rate=0.05, total_steps=12))
CONFIG = LoopConfig(steps=12, log_every=1, save_every=5, keep=9)


def quadratic(params, batch, rng, constants):
    """Distance of params to the rows, each row with a weight of its own."""
    errors = jnp.sum((params["w"] - batch["x"]) ** 2, axis=-1)
    weight = jnp.sum(batch["weight"])
    return jnp.sum(batch["weight"] * errors) / weight, (weight, {})


def lane(number: int, count: int) -> Shard:
    """Each lane has its share of one stream: two rows a batch."""

    def rows(index):
        rng = np.random.default_rng([7, index])
        return {"x": rng.normal(size=(2, 4)).astype(np.float32), "weight": rng.random(2).astype(np.float32)}

    return Shard(Indexed(rows), number, count)


def train(mesh, workdir: pathlib.Path, before_step=lambda number: None):
    params = {"w": jnp.full((4,), 2.0)}
    state, shardings = init(params, OPTIMIZER, 0), None
    if mesh is not None:
        placed = {"w": sharding.named(("embed",), (4,), mesh)}
        state, shardings = init_on(mesh, params, placed, OPTIMIZER, 0)
    update = make_step(quadratic, OPTIMIZER, shardings=shardings)
    numbers = iter(range(int(state.step), 99))

    def step(state, batch):
        before_step(next(numbers))
        return update(state, sharding.put_rows(batch, mesh))

    rows = Lanes(lane, 4, sharding.reader(mesh))
    state = loop.run(state, step, rows, CONFIG, workdir)
    return state, rows.get_state()


SCRIPT = f"""
    import os, pathlib, signal, sys, time
    sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
    import jax
    rank, port, devices, workdir = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), pathlib.Path(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize("localhost:" + port, 2, rank)
    import test_two_processes as t

    mesh = t.sharding.make_mesh(data=devices, fsdp=2)
    assert t.sharding.reader(mesh) == (rank, 2)

    def die(number):
        if number == 8:
            while not (workdir / "parts" / "checkpoints" / "5").exists():
                time.sleep(0.02)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    if devices == 1:
        t.train(mesh, workdir / "whole")
        t.train(mesh, workdir / "parts", die)
    state, position = t.train(mesh, workdir / "parts")
    assert state.params["w"].sharding.spec == jax.sharding.PartitionSpec("fsdp")
    assert state.opt_state[1][0].mu["w"].addressable_shards[0].data.shape == (2,)
    assert sorted(position["lanes"]) == [str(2 * rank), str(2 * rank + 1)], position
"""


def start(devices: int, workdir: pathlib.Path) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = textwrap.dedent(SCRIPT)
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(port), str(devices), str(workdir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def losses(workdir: pathlib.Path) -> dict[int, float]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def test_a_run_survives_and_moves(tmp_path):
    first, second = start(1, tmp_path)
    assert second.wait(timeout=300) == -signal.SIGKILL, second.stdout.read()
    first.kill()  # it waits for the other one, as a launcher would find it
    first.wait()
    saved = tmp_path / "parts" / "checkpoints"
    assert [path.name for path in saved.iterdir() if path.name.isdigit()] == ["5"]
    shutil.copytree(tmp_path / "parts", tmp_path / "alone")

    again = start(2, tmp_path)
    outputs = [process.communicate(timeout=300)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], "\n".join(outputs)
    state, position = train(None, tmp_path / "alone")
    expected = losses(tmp_path / "whole")
    assert sorted(expected) == list(range(1, 13))
    for name in ("parts", "alone"):
        found = losses(tmp_path / name)
        assert sorted(found) == list(range(1, 13))
        np.testing.assert_allclose([found[n] for n in found], [expected[n] for n in found], rtol=1e-5)
    assert {lane["seen"] for lane in position["lanes"].values()} == {45, 46, 47, 48}, "no row twice, none left out"
    assert int(state.step) == 12
