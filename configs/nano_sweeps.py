"""Sweeps of ranks, window, shifted positions, initialisation and passkey on the embedded model, for the analyses.

    python -m experiments.analyze --what=rank_sweep,window_sweep --config=configs/nano_sweeps.py --workdir=runs/analysis

It is the default of `experiments.analyze`. All sizes are the papers' for Ouro-1.4B (`configs/ouro_1p4b_sweeps.py`) in
proportion to the model's, and trainings are short: `docs/analysis/results.md` has times and values.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from configs._cells import split
from hla_jax.analysis.bench import Passkey, ShiftSweep, StepSweep, Sweeps
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import STANDARD_LIBRARY, SYNTHETIC, Source
from hla_jax.data.positions import ShiftConfig
from hla_jax.training.distill import DistillConfig
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.uptrain import UptrainConfig

SOURCES = (Source(SYNTHETIC, 3.0, tokens=(128, 512)), Source(STANDARD_LIBRARY, 1.0))
TRAJECTORY = 128  # numbers of a head's keys over the loops
STEPS, CONTINUED, DISTILL = 40, 40, 40


def uptraining(steps: int, learning_rate: float) -> UptrainConfig:
    return UptrainConfig(
        sources=SOURCES,
        batches=BatchConfig(batch_size=1, length=512),
        optimizer=OptimizerConfig(learning_rate, total_steps=steps, warmup_steps=steps // 10),
        loop=LoopConfig(steps, log_every=10, evaluate_every=steps, save_every=20, keep=1),
        queries=128,
        held_out_batches=1,
    )


def get_config() -> ml_collections.ConfigDict:
    sweeps = Sweeps(
        scheme=HLA(rank_k=64, rank_v=64, rank_loop1=32, window=32),
        rank_k=(32, 64, 128, 256),
        rank_v=(32, 64, 128, 256),
        rank_loop1=(32, 64, 128),
        trained=(HLA(32, 32, 32, 0), HLA(128, 128, 32, 0), HLA(64, 64, 64, 32)),
        windows=(0, 32, 128),
        rows=4,
        prompt=448,
        batch_size=4,
        uptrain=uptraining(STEPS, 5e-3),
        shifted=ShiftSweep(
            by=(0, 256, 512, 1024, 1536),
            queries=64,
            gap=128,
            uptrain=uptraining(CONTINUED, 1.5e-3),
            shift=ShiftConfig(fraction=0.75, max_chunks=4, max_distance=2048),
        ),
        lla=LLA(*split(TRAJECTORY / 2)),
        distill=DistillConfig(
            sources=SOURCES,
            batches=BatchConfig(batch_size=2, length=256, min_tokens=64, pack=False),
            optimizer=OptimizerConfig(2e-3, total_steps=DISTILL, warmup_steps=DISTILL // 10),
            loop=LoopConfig(DISTILL, log_every=10, evaluate_every=5, save_every=20, best_metric="held_out/kl"),
            held_out_batches=2,
        ),
        passkey=Passkey(
            kind="recall",
            schemes=tuple(LLA(*split(2 * TRAJECTORY / ratio)) for ratio in (4, 32 / 3, 64 / 3)),
            contexts=(64, 256, 768),
            questions=16,
            batch_size=16,
        ),
        steps=StepSweep(numbers=(2, 3, 4), ranks=(32, 64, 128, 256), rank_loop1=256, ratios=(2, 4, 8)),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(sweeps))
