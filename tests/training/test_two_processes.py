"""Two processes share a run: one is killed, both are started again on another mesh, and one device finishes it alone;
or one is told to stop, and both do.

Whatever runs it, the updates are those of a run that was not stopped, on the same rows.
"""

import json
import pathlib
import re
import shutil
import signal
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax import sharding
from hla_jax.data.packing import Lanes
from hla_jax.data.streams import Indexed, Shard
from hla_jax.training import loop
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig, adamw
from hla_jax.training.step import init, init_on, make_step
from two_processes import finish, start

OPTIMIZER = adamw(OptimizerConfig(peak_learning_rate=0.05, total_steps=12))


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


def train(mesh, workdir: pathlib.Path, before_step=lambda number: None, steps: int = 12):
    params = {"w": jnp.full((4,), 2.0)}
    state, shardings = init(params, OPTIMIZER, 0), None
    if mesh is not None:
        placed = {"w": sharding.named(("embed",), (4,), mesh)}
        state, shardings = init_on(mesh, params, placed, OPTIMIZER, 0)
    update = make_step(quadratic, OPTIMIZER, shardings=shardings)
    numbers = iter(range(int(state.step), steps))

    def step(state, batch):
        before_step(next(numbers))
        return update(state, sharding.put_rows(batch, mesh))

    rows = Lanes(lane, 4, sharding.reader(mesh))
    config = LoopConfig(steps=steps, log_every=1, save_every=5, keep=9)
    state = loop.run(state, step, rows, config, workdir)
    return state, rows.get_state()


JOINED = f"""
    import os, pathlib, signal, sys, time
    sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
    import jax
    jax.distributed.initialize()
    import test_two_processes as t

    rank, devices, workdir = jax.process_index(), jax.local_device_count(), pathlib.Path(sys.argv[1])
    first, *others = jax.devices()
    ring = [first, *others[devices - 1 :], *others[: devices - 1]]  # as TPU chips lie along an axis
    mesh = t.sharding.MeshConfig(data=devices, fsdp=2).make(ring)
    assert devices == 1 or t.sharding.rows_of_processes(mesh) == dict(enumerate([(0, 3), (1, 2)]))
    assert t.sharding.reader(mesh) == (rank, 2)
"""

KILLED = f"""{JOINED}
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

TOLD = f"""{JOINED}
    number_told, signal_told, rank_told = map(int, sys.argv[2:])

    def tell(number):
        if number == number_told and rank == rank_told:
            os.kill(os.getpid(), signal_told)

    def slowly(number):
        tell(number)
        time.sleep(0.2 if signal_told else 0)  # a notice takes a second or two

    t.train(mesh, workdir / "first", tell, steps=80)
    t.train(mesh, workdir / "second", slowly, steps=70)
"""


def losses(workdir: pathlib.Path) -> dict[int, float]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def assert_same_losses(found: pathlib.Path, expected: pathlib.Path, steps: int) -> None:
    one, other = losses(found), losses(expected)
    assert sorted(one) == sorted(other) == list(range(1, steps + 1))
    np.testing.assert_allclose([one[n] for n in one], [other[n] for n in one], rtol=1e-5)


@pytest.mark.long
def test_a_run_survives_and_moves(tmp_path):
    command = ["-c", textwrap.dedent(KILLED), str(tmp_path)]
    first, second = start(command, 1, tmp_path / "log1")
    assert second.wait(timeout=300) == -signal.SIGKILL, (tmp_path / "log1" / "1").read_text()
    first.kill()  # it waits for the other one, as a launcher would find it
    first.wait()
    saved = tmp_path / "parts" / "checkpoints"
    assert [path.name for path in saved.iterdir() if path.name.isdigit()] == ["5"]
    shutil.copytree(tmp_path / "parts", tmp_path / "alone")

    again = start(command, 2, tmp_path / "log2")
    outputs = finish(again, tmp_path / "log2")
    assert [process.returncode for process in again] == [0, 0], "\n".join(outputs)
    state, position = train(None, tmp_path / "alone")
    for name in ("parts", "alone"):
        assert_same_losses(tmp_path / name, tmp_path / "whole", 12)
    assert {lane["seen"] for lane in position["lanes"].values()} == {45, 46, 47, 48}, "no row twice, none left out"
    assert int(state.step) == 12


@pytest.mark.long
def test_one_process_is_told_to_stop_and_both_do(tmp_path):
    """SIGTERM in the last step of a run stops the next one; SIGINT in the middle of a run stops that one. Both save the
    same step and leave; the same command does the rest.
    """

    def run(name: str, number: int, told: int, rank: int) -> list[str]:
        logs = tmp_path / name
        command = ["-c", textwrap.dedent(TOLD), str(tmp_path), str(number), str(told), str(rank)]
        processes = start(command, 1, logs)
        outputs = finish(processes, logs)
        code = 128 + signal.SIGTERM if told else 0
        assert [process.returncode for process in processes] == [code, code], "\n".join(outputs)
        return outputs

    stopped = []
    for name, number, told, rank in (("log1", 79, signal.SIGTERM, 1), ("log2", 30, signal.SIGINT, 0)):
        outputs = run(name, number, told, rank)
        steps = [re.findall(r"stopped by SIGTERM after step (\d+); saved", output) for output in outputs]
        assert steps[0] == steps[1], "\n".join(outputs)
        (step,) = map(int, steps[0])
        assert (tmp_path / "second" / "checkpoints" / str(step)).is_dir()
        stopped.append(step)
    assert 1 <= stopped[0] < 30 < stopped[1] < 70
    run("log3", 0, 0, 0)
    for name, steps in (("first", 80), ("second", 70)):
        train(None, tmp_path / "alone" / name, steps=steps)
        assert_same_losses(tmp_path / name, tmp_path / "alone" / name, steps)
