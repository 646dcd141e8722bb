"""Compression of the looped layers' cache up to 128 times on the embedded small Huginn of 12 steps.

python -m experiments.compare --config=configs/nano_huginn_compare.py --workdir=runs/nano_huginn_compare
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import ml_collections

import hla_jax
from configs._cells import sized, split
from configs.nano_compare import SOURCES, distillation
from hla_jax.attention.baselines import HeadLatent
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import ModelConfig
from hla_jax.data.packing import BatchConfig
from hla_jax.evaluation import orderings as curves
from hla_jax.evaluation.evaluate import EvaluationConfig
from hla_jax.evaluation.schemes import FULL, HLA_INITIAL, REUSE, SHARED
from hla_jax.recipes.compare import Cell, Comparison
from hla_jax.recipes.uptrain import Calibration
from hla_jax.training.loop import LoopConfig
from hla_jax.training.on_policy import OnPolicyConfig
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.uptrain import UptrainConfig

DISTILL_STEPS, UPTRAIN_STEPS = 60, 100


def cells(config: ModelConfig, main: int, window: int) -> Iterator[Cell]:
    """Cells of a model of many loops; `main` is the largest rank of HLA's main latent, `window` its exact tokens."""
    size = config.head_dim
    trajectory = config.num_loops * config.head_dim
    numbers = 2 * config.num_kv_heads * trajectory  # of one token and layer in the full cache
    yield Cell.of(FULL, FULL, FullCache())
    for ratio in (8, 16, 32, 64, 128):
        lla = LLA(*split(2 * trajectory / ratio))
        yield sized(curves.LLA_INITIAL, ratio, lla)
        yield sized(curves.LLA, ratio, lla, "distill")
    half = max(size, main // 2 // size * size)
    for keys, values in ((main, main), (half, half), (half, half // 4)):
        hla = HLA(keys, values, rank_loop1=half, window=window)
        fewer = numbers / (keys + values + 2 * half)
        yield sized(HLA_INITIAL, fewer, hla)
        yield sized(curves.HLA, fewer, hla, "uptrain")
    for ratio in (32, 128):
        yield sized(curves.LLA_2D, ratio, LLA(*split(numbers / ratio), fold_heads=True), "distill")
    yield sized(curves.HEADS, 8, HeadLatent(*split(numbers / config.num_loops / 8)), "distill")
    yield sized(SHARED, config.num_loops, SharedLoop(window))
    yield sized(REUSE, config.num_loops, SharedLoop(0))


def get_config() -> ml_collections.ConfigDict:
    model = hla_jax.NANO.with_name("nano_huginn")
    comparison = Comparison(
        model=str(model),
        dtype="float32",
        cells=tuple(cells(ModelConfig.from_directory(model), main=64, window=16)),
        calibration=Calibration(sequences=32, tokens=256),
        distill=distillation(DISTILL_STEPS, 1e-3, min_tokens=64),
        uptrain=UptrainConfig(
            sources=SOURCES,
            batches=BatchConfig(batch_size=4, length=256),
            optimizer=OptimizerConfig(peak_learning_rate=5e-3, total_steps=UPTRAIN_STEPS, warmup_steps=10),
            loop=LoopConfig(UPTRAIN_STEPS, log_every=20, evaluate_every=50, save_every=50),
            queries=128,
        ),
        on_policy=OnPolicyConfig(distillation(DISTILL_STEPS, 5e-4, min_tokens=128), prompt=128),
        evaluation=EvaluationConfig(
            sequences=16,
            tokens=256,
            prompt=192,
            batch_size=16,
            tasks=("recall",),
            lengths=((192, 64),),
            examples=48,
            contexts=(),
        ),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(comparison))
