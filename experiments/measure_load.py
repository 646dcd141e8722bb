"""Measures the peak memory and the time of loading a checkpoint, in a process of its own.

    python -m experiments.measure_load --directory=runs/ouro-1p4b

Prints one JSON object. `peak_bytes` is the process's peak resident set (VmHWM), interpreter and libraries included;
`ratio` is that over the bytes of the weights held.
"""

from __future__ import annotations

import json
import time

import jax
from absl import app, flags

from experiments.processes import in_fresh_process, memory
from hla_jax.config import OuroConfig
from hla_jax.models import weights


def measure(directory: str, dtype: str | None = None) -> dict[str, float]:
    """Loads a checkpoint in a fresh process. Raises what loading raises."""
    return in_fresh_process(_load, directory, dtype)


def _load(directory: str, dtype: str | None) -> dict[str, float]:
    jax.devices()  # the backend's own memory belongs to the start
    before = memory("VmRSS")
    start = time.perf_counter()
    params = weights.load_params(directory, OuroConfig.from_directory(directory), dtype)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    peak = memory("VmHWM")
    return {
        "weights_bytes": held,
        "before_bytes": before,
        "peak_bytes": peak,
        "ratio": round(peak / held, 4),
        "seconds": round(seconds, 2),
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    print(json.dumps(measure(flags.FLAGS.directory, flags.FLAGS.dtype)))


if __name__ == "__main__":
    flags.DEFINE_string("directory", None, "Checkpoint to load.", required=True)
    flags.DEFINE_string("dtype", None, "Dtype to load into; by default the one stored.")
    app.run(main)
