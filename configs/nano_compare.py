"""Every cache scheme at matched bytes on the embedded model: quality against compression, and the papers' orderings.

    python -m experiments.compare --config=configs/nano_compare.py --workdir=runs/nano_compare

Needs two CPU cores and an estimated 40 minutes for all cells; `--cells="LLA 4x,HLA.*"` runs some of them. Expect
latents over loops (LLA) to diverge least at every ratio that several schemes reach, and final-loop reuse to answer less
than half of what the full cache answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import ml_collections

import hla_jax
from hla_jax.attention.baselines import HeadLatent, LayerLatent
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.low_bit import LowBit
from hla_jax.attention.shared import SharedLoop
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import STANDARD_LIBRARY, SYNTHETIC, Source
from hla_jax.evaluation import orderings as curves
from hla_jax.evaluation.evaluate import EvaluationConfig
from hla_jax.evaluation.schemes import FULL, REUSE, SHARED
from hla_jax.recipes.compare import RANDOM, Cell, Comparison
from hla_jax.recipes.uptrain import Calibration
from hla_jax.training.distill import DistillConfig
from hla_jax.training.loop import LoopConfig
from hla_jax.training.on_policy import OnPolicyConfig
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.uptrain import UptrainConfig

DISTILL_STEPS, UPTRAIN_STEPS, ON_POLICY_STEPS = 80, 160, 40
SOURCES = (Source(SYNTHETIC, 3.0, tokens=(128, 512)), Source(STANDARD_LIBRARY, 1.0))

# Times fewer bytes -> ranks of keys and values. A token's keys and values are 2 T G dh = 2,048 numbers a layer.
LLA_RANKS = {
    "1.33x": (72, 120),
    "2x": (48, 80),
    "2.67x": (36, 60),
    "4x": (24, 40),
    "5.33x": (18, 30),
    "10.67x": (9, 15),
    "21.3x": (4, 8),
}
LLA_2D_RANKS = {"4x": (192, 320), "10.67x": (72, 120), "21.3x": (36, 60)}
HEAD_RANKS = {"2x": (96, 160), "4x": (48, 80), "10.67x": (18, 30)}
LAYER_RANKS = {"2x": (24, 40), "4x": (12, 20)}
HLA_SIZES = {"5.33x": HLA(128, 128, 64, window=32), "10.67x": HLA(64, 64, 32, window=32)}


def cells() -> Iterator[Cell]:
    yield Cell.of(FULL, FULL, FullCache())
    for ratio, ranks in LLA_RANKS.items():
        yield Cell.of(f"LLA {ratio}", curves.LLA, LLA(*ranks), "distill")
    for ratio, ranks in HEAD_RANKS.items():
        yield Cell.of(f"{curves.HEADS} {ratio}", curves.HEADS, HeadLatent(*ranks), "distill")
    for ratio, ranks in LAYER_RANKS.items():
        yield Cell.of(f"{curves.LAYERS} {ratio}", curves.LAYERS, LayerLatent(*ranks, layers=2), "distill")
    for bits in (8, 4, 2):
        yield Cell.of(f"{bits} bits", curves.LOW_BIT, LowBit(bits))
    yield Cell.of(f"{SHARED} 4x", SHARED, SharedLoop(window=32))
    yield Cell.of(f"{REUSE} 4x", REUSE, SharedLoop(window=0))
    for ratio, scheme in HLA_SIZES.items():
        yield Cell.of(f"HLA {ratio}", curves.HLA, scheme, "uptrain")
    for ratio, ranks in LLA_2D_RANKS.items():
        yield Cell.of(f"LLA-2D {ratio}", curves.LLA_2D, LLA(*ranks, fold_heads=True), "distill")
    same = LLA(*LLA_RANKS["4x"])
    yield Cell.of("LLA equal ranks 4x", curves.LLA_EQUAL, LLA(32, 32), "distill")
    yield Cell.of("LLA at initialisation 4x", curves.LLA_INITIAL, same)
    yield Cell.of("LLA from random maps 4x", curves.LLA_RANDOM, same, "distill", RANDOM)
    yield Cell.of("eviction", curves.EVICTION, Evicted(FullCache(), budget=192, first=4))
    yield Cell.of("LLA 4x and eviction", curves.LLA_EVICTION, Evicted(same, budget=192, first=4), start="LLA 4x")
    long = LLA(*LLA_RANKS["10.67x"])
    yield Cell.of("LLA on-policy 10.67x", curves.LLA_ON_POLICY, long, "on_policy", "LLA 10.67x")


def distillation(steps: int, learning_rate: float, **batches: int) -> DistillConfig:
    return DistillConfig(
        sources=SOURCES,
        batches=BatchConfig(batch_size=4, length=256, pack=False, **batches),
        optimizer=OptimizerConfig(learning_rate, total_steps=steps, warmup_steps=steps // 10),
        loop=LoopConfig(steps, log_every=20, evaluate_every=40, save_every=40, best_metric="held_out/kl"),
        held_out_batches=2,
    )


def get_config() -> ml_collections.ConfigDict:
    comparison = Comparison(
        model=str(hla_jax.NANO),
        dtype="float32",
        cells=tuple(cells()),
        calibration=Calibration(sequences=64, tokens=256),
        distill=distillation(DISTILL_STEPS, 3e-3, min_tokens=64),
        uptrain=UptrainConfig(
            sources=SOURCES,
            batches=BatchConfig(batch_size=2, length=512),
            optimizer=OptimizerConfig(peak_learning_rate=5e-3, total_steps=UPTRAIN_STEPS, warmup_steps=20),
            loop=LoopConfig(UPTRAIN_STEPS, log_every=20, evaluate_every=80, save_every=80),
            queries=128,
        ),
        on_policy=OnPolicyConfig(distillation(ON_POLICY_STEPS, 1e-3, min_tokens=128), prompt=128),
        evaluation=EvaluationConfig(
            sequences=16,
            tokens=256,
            prompt=96,
            batch_size=16,
            lengths=((192, 64), (512, 256)),
            examples=32,
            contexts=(1024,),
            speed_tokens=8,
            speed_rounds=3,
        ),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(comparison))
