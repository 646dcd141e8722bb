"""Measures the peak memory and the time of loading a checkpoint, in a process of its own, or in several that share it.

    python -m experiments.measure_load --directory=runs/ouro-1p4b
    python -m experiments.measure_load --directory=runs/ouro-1p4b --processes=4             # fsdp=4
    python -m experiments.measure_load --directory=runs/ouro-1p4b --processes=4 --tensor=2  # fsdp=2, tensor=2

Prints one JSON object for each process. `peak_bytes` is the process's peak resident set (VmHWM), interpreter and
libraries included; `ratio` is that over the bytes of the weights held. `grown_ratio` leaves out what was resident
before: the peak's growth over the bytes held, which for several processes are the parts of this process's devices.
"""

from __future__ import annotations

import json
import time

import jax
from absl import app, flags

from experiments.processes import in_fresh_process, in_fresh_processes, memory
from hla_jax.config import ModelConfig
from hla_jax.models import weights
from hla_jax.sharding import MeshConfig


def measure(directory: str, dtype: str | None = None) -> dict[str, float]:
    """Loads a checkpoint in a fresh process. Raises what loading raises."""
    return in_fresh_process(_load, directory, dtype)


def measure_shared(
    directory: str, processes: int, mesh: MeshConfig, dtype: str | None = None, devices: int = 1
) -> list[dict[str, float]]:
    """Loads a checkpoint in several fresh processes of this machine, on a mesh over the `devices` CPU devices of each.

    Raises what loading raises, and `ConfigError` where the mesh does not fit.
    """
    return in_fresh_processes(processes, _load, directory, dtype, mesh, devices=devices)


def _load(directory: str, dtype: str | None, sizes: MeshConfig | None = None) -> dict[str, float]:
    mesh = sizes.make() if sizes else None
    jax.devices()  # the backend's own memory belongs to the start
    before = memory("VmRSS")
    start = time.perf_counter()
    params = weights.load_params(directory, ModelConfig.from_directory(directory), dtype, mesh)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    held = sum(_held(leaf) for leaf in jax.tree.leaves(params))
    peak = memory("VmHWM")
    return {
        "weights_bytes": held,
        "before_bytes": before,
        "peak_bytes": peak,
        "ratio": round(peak / held, 4),
        "grown_ratio": round((peak - before) / held, 4),
        "seconds": round(seconds, 2),
    }


def _held(leaf: jax.Array) -> int:
    """Bytes of an array on this process's devices, where devices that hold the same part count once."""
    return sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())


def main(argv: list[str]) -> None:
    options = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if options.processes == 1:
        found = [measure(options.directory, options.dtype)]
    else:
        mesh = MeshConfig(fsdp=-1, tensor=options.tensor)
        found = measure_shared(options.directory, options.processes, mesh, options.dtype)
    for row in found:
        print(json.dumps(row))


if __name__ == "__main__":
    flags.DEFINE_string("directory", None, "Checkpoint to load.", required=True)
    flags.DEFINE_string("dtype", None, "Dtype to load into; by default the one stored.")
    flags.DEFINE_integer("processes", 1, "Processes of this machine that share the weights.", lower_bound=1)
    flags.DEFINE_integer("tensor", 1, "Of these processes, how many share the heads; fsdp has the rest.", lower_bound=1)
    app.run(main)
