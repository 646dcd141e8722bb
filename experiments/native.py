"""Pretrains a small looped model with HLA from the first step, and one with exact attention that is uptrained.

    python -m experiments.native --config=configs/nano_native.py --workdir=runs/nano_native

Leaves `report.md`, `results.json` and figures in the work directory, and an export of each arm. A run that was stopped
continues with the same command.
"""

from __future__ import annotations

from experiments import launch
from hla_jax.recipes import native


def main() -> None:
    print(f"report: {native.run(launch.read_config(native.Job), launch.workdir(), launch.title())}")


if __name__ == "__main__":
    launch.run(main)
