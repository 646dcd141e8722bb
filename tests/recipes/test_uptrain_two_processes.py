"""The command of the main job in two processes: one is killed, and the rest is done in turn by two processes on another
mesh and by one device.

Both have the same losses. That these are of a run that never stopped, and what happens to one that is told to stop, is
in training/test_two_processes.py.
"""

import dataclasses
import json
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

import hla_jax
from hla_jax.config import ConfigError
from hla_jax.recipes import uptrain
from recipes.shared_job import JOB, STEPS
from two_processes import TESTS, finish, start

QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def command(workdir: pathlib.Path) -> list[str]:
    config = TESTS / "recipes" / "shared_job.py"
    return ["-m", "experiments.uptrain", "--multihost", f"--config={config}", f"--workdir={workdir}"]


def wait_for(found, processes: list[subprocess.Popen]) -> None:
    while not found():
        assert [process.poll() for process in processes] == [None, None]
        time.sleep(0.01)


def saved(workdir: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit())


def metrics(workdir: pathlib.Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line.pop("step"): {k: v for k, v in line.items() if k != "steps_per_second"} for line in lines}


@pytest.mark.long
def test_the_command_survives_and_moves(tmp_path, quick_compile):
    run = tmp_path / "run"
    first, second = start(command(run), 1, tmp_path / "log1", **QUICK)
    wait_for(lambda: saved(run), [first, second])
    second.kill()
    first.kill()  # it waits for the other one, as a launcher would find it
    first.wait()
    assert second.wait() == -signal.SIGKILL
    at = saved(run)[-1]
    assert 2 <= at < STEPS

    shutil.copytree(run, tmp_path / "alone")

    again = start(command(run), 2, tmp_path / "log2", **QUICK)
    outputs = finish(again, tmp_path / "log2")
    assert [process.returncode for process in again] == [0, 0], "\n".join(outputs)
    assert f"resumed after step {at}" in outputs[0]
    assert "trained; the same command in one process exports and evaluates" in outputs[1]

    export = uptrain.run(dataclasses.replace(JOB, mesh=None), tmp_path / "alone", "a test")
    assert hla_jax.load(export, dtype=None).attention.scheme == JOB.scheme
    found, expected = metrics(run), metrics(tmp_path / "alone")
    assert sorted(found) == sorted(expected) == list(range(STEPS + 1))
    for number, line in expected.items():
        assert found[number] == pytest.approx(line, rel=2e-3), f"step {number}"


def test_several_processes_need_a_mesh(tmp_path, monkeypatch):
    monkeypatch.setattr(uptrain.jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="2 processes need a mesh"):
        uptrain.run(dataclasses.replace(JOB, mesh=None), tmp_path / "run", "a test")
