"""The HLA paper's table 1 for Ouro-1.4B: HLA at 10.7x, LLA at 4x and single-loop sharing against the full cache.

    python -m experiments.uptrain --config=configs/ouro_1p4b_hla.py --workdir=runs/ouro_1p4b_hla
    python -m experiments.compare --config=configs/ouro_1p4b_compare.py --cells="LLA 4x" \\
        --workdir=runs/ouro_1p4b_compare
    python -m experiments.evaluate --config=configs/ouro_1p4b_evaluate.py --workdir=runs/ouro_1p4b_evaluate

Needs the released weights, the benchmarks from the hub (or `--data`), and an accelerator; not run yet. The paper has
for the full cache, sharing, LLA and HLA: MATH-500 (4 samples of at most 8,192 tokens), MMLU-Pro, BBH, RULER at 4K, 8K
and 16K.
"""

from __future__ import annotations

import dataclasses

import ml_collections

import hla_jax
from hla_jax.attention import registry
from hla_jax.evaluation.run_tasks import Running
from hla_jax.evaluation.schemes import HLA_UPTRAINED, SHARED
from hla_jax.recipes.evaluate import Candidate, EvaluationJob


def get_config() -> ml_collections.ConfigDict:
    job = EvaluationJob(
        model="ByteDance/Ouro-1.4B",
        candidates=(
            Candidate(SHARED, scheme=registry.to_entries(hla_jax.SharedLoop(128))),
            Candidate("LLA 4x", maps="runs/ouro_1p4b_compare/cells/LLA 4x/export"),
            Candidate(HLA_UPTRAINED, maps="runs/ouro_1p4b_hla/export"),
        ),
        tasks=("math500", "mmlu_pro", "lm_eval:bbh_cot_fewshot", "ruler_4096", "ruler_8192", "ruler_16384", "fidelity"),
        running=Running(slots=64, batch_size=16),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(job))
