"""Schemes of any kind at any size on one model: quality against bytes.

    python -m experiments.compare --config=configs/nano_compare.py --workdir=runs/nano_compare
    python -m experiments.compare --config=configs/nano_compare.py --workdir=runs/nano_compare --cells="LLA 4x,HLA.*"

Every cell of the config is calibrated, trained and measured. The report, `report.md` in the work directory, is written
anew after each. A run that was stopped continues with the same command, and cells can be added between runs.
"""

from __future__ import annotations

from absl import flags

from experiments import launch
from hla_jax.recipes import compare

_CELLS = flags.DEFINE_string(
    "cells", None, "Names or regular expressions, separated by commas: only these cells and the full cache."
)


def main() -> None:
    job = launch.read_config(compare.Comparison)
    report = compare.run(job, launch.workdir(), launch.title(), _CELLS.value)
    print(f"report: {report}")


if __name__ == "__main__":
    launch.run(main)
