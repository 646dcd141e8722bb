"""Programs and commands that two processes of this machine run together, each with its own virtual CPU devices."""

import os
import pathlib
import socket
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent


def start(command: list[str], devices: int, logs: pathlib.Path, **environment: str) -> list[subprocess.Popen]:
    """Starts `python COMMAND` twice, as SLURM would: JAX finds the other one by itself. Output goes to LOGS/RANK."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    logs.mkdir(parents=True)
    processes = []
    for rank in range(2):
        slurm = {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "JAX_COORDINATOR_PORT": str(port),
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        }
        with (logs / str(rank)).open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | slurm | environment,
                    cwd=TESTS.parent,
                )
            )
    return processes


def finish(processes: list[subprocess.Popen], logs: pathlib.Path, timeout: float = 1200) -> list[str]:
    """Waits for both, and returns what each wrote. None of them outlives a failure."""
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(logs / str(rank)).read_text() for rank in range(2)]
