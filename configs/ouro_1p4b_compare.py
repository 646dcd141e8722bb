"""Every cache scheme at matched bytes on Ouro-1.4B, with the settings of the LLA paper (arXiv:2607.15456, appendix A)
and, for HLA, of the HLA paper.

    python -m experiments.compare --config=configs/ouro_1p4b_compare.py --workdir=runs/ouro_1p4b_compare

Needs the hub (ByteDance/Ouro-1.4B, open-r1/OpenR1-Math-220k, HuggingFaceFW/fineweb-edu) and an accelerator with 80 GB;
not yet run on one, so its time is not known; `--cells` runs some of the cells. The paper's held-out KL of LLA at 4x
after 300 steps is 0.105 nats, and 0.771 from random maps. Batch and learning rates of distillation are not in the
paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import ml_collections

from configs._cells import cells
from configs.ouro_1p4b_hla import UPTRAIN
from hla_jax.config import OURO_1P4B, OuroConfig
from hla_jax.data.packing import BatchConfig
from hla_jax.evaluation.evaluate import EvaluationConfig
from hla_jax.recipes.compare import Cell, Comparison
from hla_jax.recipes.uptrain import Calibration
from hla_jax.training.distill import DistillConfig
from hla_jax.training.loop import LoopConfig
from hla_jax.training.on_policy import OnPolicyConfig
from hla_jax.training.optimizer import OptimizerConfig

DISTILL_STEPS, ON_POLICY_STEPS = 3000, 300


def get_config() -> ml_collections.ConfigDict:
    return comparison("ByteDance/Ouro-1.4B", ouro_cells(OURO_1P4B))


def ouro_cells(config: OuroConfig) -> Iterator[Cell]:
    """The cells of every Ouro model."""
    return cells(config, window=128, budget=1024, on_policy=(4, 32 / 3))


def comparison(
    model: str, cells: Iterable[Cell], contexts: tuple[int, ...] = (1024, 4096, 16_384)
) -> ml_collections.ConfigDict:
    """The settings of every real model."""
    refined = distillation(ON_POLICY_STEPS, 1e-4, min_tokens=256)
    job = Comparison(
        model=model,
        dtype="bfloat16",
        cells=tuple(cells),
        calibration=Calibration(sequences=255, tokens=1024),
        distill=distillation(DISTILL_STEPS, 3e-4, min_tokens=64),
        uptrain=dataclasses.replace(UPTRAIN, long=None),
        on_policy=OnPolicyConfig(refined, prompt=256),
        evaluation=EvaluationConfig(
            sequences=32,
            tokens=2048,
            prompt=1280,
            batch_size=4,
            tasks=(),
            contexts=contexts,
            speed_tokens=64,
            speed_rounds=3,
        ),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(job))


def distillation(steps: int, learning_rate: float, min_tokens: int) -> DistillConfig:
    return DistillConfig(
        sources=UPTRAIN.sources,
        batches=BatchConfig(batch_size=16, length=1024, min_tokens=min_tokens, pack=False),
        optimizer=OptimizerConfig(learning_rate, total_steps=steps, warmup_steps=steps // 20),
        loop=LoopConfig(steps, log_every=10, evaluate_every=100, save_every=100, best_metric="held_out/kl"),
        micro_batches=16,
    )
