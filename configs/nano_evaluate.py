"""The embedded model's own tasks and the fidelity, through caches without maps and HLA as the main job left it.

    python -m experiments.uptrain --config=configs/nano_hla.py --workdir=runs/nano_hla
    python -m experiments.evaluate --config=configs/nano_evaluate.py --workdir=runs/nano_evaluate

`--scheme="single-loop sharing,final-loop reuse"` does without the first command.
"""

from __future__ import annotations

import dataclasses

import ml_collections

import hla_jax
from hla_jax.attention import registry
from hla_jax.evaluation.run_tasks import Running
from hla_jax.evaluation.schemes import HLA_UPTRAINED, REUSE, SHARED
from hla_jax.recipes.evaluate import Candidate, EvaluationJob


def get_config() -> ml_collections.ConfigDict:
    job = EvaluationJob(
        model=str(hla_jax.NANO),
        candidates=(
            Candidate(HLA_UPTRAINED, maps="runs/nano_hla/export"),
            Candidate(SHARED, scheme=registry.to_entries(hla_jax.SharedLoop(32))),
            Candidate(REUSE, scheme=registry.to_entries(hla_jax.SharedLoop(0))),
        ),
        tasks=("recall_64", "recall_256", "recall_512", "tracking_64", "chain_64", "fidelity"),
        dtype="float32",
        running=Running(slots=16),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(job))
