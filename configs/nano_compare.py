"""Every cache scheme at matched bytes on the embedded model: quality against compression, and the papers' orderings.

    python -m experiments.compare --config=configs/nano_compare.py --workdir=runs/nano_compare

38 minutes on two CPU cores for all cells; `--cells="LLA 4x,HLA.*"` runs some of them. Expect a held-out KL of 0.045
nats from LLA at 4x and 0.047 from HLA at 10.7x, with 90% and 94% right answers where the full cache has 92%, and 23%
from final-loop reuse: `docs/nano_compare/report.md` has all of it.
"""

from __future__ import annotations

import dataclasses

import ml_collections

import hla_jax
from configs._cells import cells
from hla_jax.config import ModelConfig
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import STANDARD_LIBRARY, SYNTHETIC, Source
from hla_jax.evaluation.evaluate import EvaluationConfig
from hla_jax.recipes.compare import Comparison
from hla_jax.recipes.uptrain import Calibration
from hla_jax.training.distill import DistillConfig
from hla_jax.training.loop import LoopConfig
from hla_jax.training.on_policy import OnPolicyConfig
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.uptrain import UptrainConfig

DISTILL_STEPS, UPTRAIN_STEPS, ON_POLICY_STEPS = 40, 160, 30
SOURCES = (Source(SYNTHETIC, 3.0, tokens=(128, 512)), Source(STANDARD_LIBRARY, 1.0))


def distillation(steps: int, learning_rate: float, min_tokens: int) -> DistillConfig:
    return DistillConfig(
        sources=SOURCES,
        batches=BatchConfig(batch_size=4, length=256, min_tokens=min_tokens, pack=False),
        optimizer=OptimizerConfig(learning_rate, total_steps=steps, warmup_steps=steps // 10),
        loop=LoopConfig(steps, log_every=10, evaluate_every=steps, save_every=20, best_metric="held_out/kl"),
        held_out_batches=2,
    )


def get_config() -> ml_collections.ConfigDict:
    comparison = Comparison(
        model=str(hla_jax.NANO),
        dtype="float32",
        cells=tuple(cells(ModelConfig.from_directory(hla_jax.NANO), window=32, budget=192, on_policy=(32 / 3,))),
        calibration=Calibration(sequences=32, tokens=256),
        distill=distillation(DISTILL_STEPS, 1e-3, min_tokens=64),
        uptrain=UptrainConfig(
            sources=SOURCES,
            batches=BatchConfig(batch_size=2, length=512),
            optimizer=OptimizerConfig(peak_learning_rate=5e-3, total_steps=UPTRAIN_STEPS, warmup_steps=20),
            loop=LoopConfig(UPTRAIN_STEPS, log_every=20, evaluate_every=80, save_every=80),
            queries=128,
        ),
        on_policy=OnPolicyConfig(distillation(ON_POLICY_STEPS, 5e-4, min_tokens=128), prompt=128),
        evaluation=EvaluationConfig(
            sequences=16,
            tokens=256,
            prompt=224,
            batch_size=16,
            lengths=((320, 224),),
            examples=16,
            contexts=(1024,),
            speed_tokens=8,
            speed_rounds=3,
        ),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(comparison))
