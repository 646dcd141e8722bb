"""The main job: fit a latent cache to a looped model and show what it keeps.

    python -m experiments.uptrain --config=configs/nano_hla.py --workdir=runs/nano_hla

Calibrates, initialises, uptrains, evaluates, exports, reloads the export and checks that it gives the same tokens. The
report is `report.md` in the work directory. A run that was stopped continues with the same command.
"""

from __future__ import annotations

from experiments import launch
from hla_jax.recipes import uptrain


def main() -> None:
    report = uptrain.run(launch.read_config(uptrain.Job), launch.workdir(), launch.title())
    print(f"report: {report}")


if __name__ == "__main__":
    launch.run(main)
