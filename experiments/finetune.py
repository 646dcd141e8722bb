"""Fine-tunes a model on conversations, with the full cache and through HLA's two passes.

    python -m experiments.finetune --config=configs/nano_finetune.py --workdir=runs/nano_finetune

Leaves `report.md`, `results.json` and figures in the work directory, and a folder for each cache with its checkpoints,
metrics and `export/`. A run that was stopped continues with the same command.
"""

from __future__ import annotations

from experiments import launch
from hla_jax.recipes import finetune


def main() -> None:
    print(f"report: {finetune.run(launch.read_config(finetune.Job), launch.workdir(), launch.title())}")


if __name__ == "__main__":
    launch.run(main)
