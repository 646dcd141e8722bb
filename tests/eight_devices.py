"""Programs that run on eight virtual devices, each in a process of its own."""

import os
import pathlib
import subprocess
import sys
import textwrap

TESTS = pathlib.Path(__file__).parent
# On two busy cores eight devices can wait for each other longer than the 40 seconds after which XLA gives up.
FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_cpu_collective_call_terminate_timeout_seconds=600")
# As the fixture `quick_compile` does.
QUICK = """
import sys
import jax
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_default_matmul_precision", "highest")
"""


def on_eight_devices(script: str, *arguments: object) -> None:
    """Runs a program with these arguments; raises if it fails."""
    environment = os.environ | {
        "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
    }
    command = [sys.executable, "-c", QUICK + textwrap.dedent(script), *map(str, arguments)]
    subprocess.run(command, check=True, env=environment, timeout=900)
