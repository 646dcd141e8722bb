"""Sweeps of ranks, window, shifted positions, initialisation and passkey on Ouro-1.4B, with the papers' settings.

    python -m experiments.analyze --what=all --model=ByteDance/Ouro-1.4B --config=configs/ouro_1p4b_sweeps.py \
        --data=HuggingFaceFW/fineweb-edu --sequences=128 --held_out=64 --tokens=2048 \
        --workdir=runs/analysis_1p4b

HLA's sizes and trainings are those of arXiv:2610.07940, Tables 4, 6 and 7 and Appendix F; LLA's of arXiv:2607.15456,
section 6, Table 12 and the 300 steps of its ablations. Needs the hub and an accelerator with 80 GB; not yet run on one,
so its time is not known. The papers' values stand in `docs/analysis/results.md`.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from configs._cells import split
from configs.ouro_1p4b_compare import distillation
from configs.ouro_1p4b_hla import UPTRAIN
from hla_jax.analysis.bench import Passkey, ShiftSweep, StepSweep, Sweeps
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.data.positions import ShiftConfig
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig

TRAJECTORY = 512  # numbers of a head's keys over the loops
CONTINUED = 100


def get_config() -> ml_collections.ConfigDict:
    # The paper's Table 7 is without shifted positions.
    uptrain = dataclasses.replace(UPTRAIN, shift=None)
    continued = dataclasses.replace(
        uptrain,
        optimizer=OptimizerConfig(3e-4, total_steps=CONTINUED, warmup_steps=10),
        loop=LoopConfig(CONTINUED, log_every=10, evaluate_every=50, save_every=50),
    )
    distill = distillation(300, 3e-4, min_tokens=64)
    sweeps = Sweeps(
        # The window of the paper's Appendices F and G; its final 128 is among the windows.
        scheme=HLA(rank_k=512, rank_v=512, rank_loop1=256, window=32),
        rank_k=(128, 256, 512, 1024, 2048),
        rank_v=(128, 256, 512, 1024, 2048),
        rank_loop1=(128, 256, 512, 1024),
        trained=(
            HLA(256, 256, 256, 0),
            HLA(512, 512, 512, 0),
            HLA(1024, 512, 256, 0),
            HLA(1024, 1024, 256, 0),
            HLA(512, 512, 512, 32),
        ),
        windows=(0, 32, 128),
        rows=64,
        prompt=1280,
        batch_size=4,
        uptrain=uptrain,
        shifted=ShiftSweep(
            by=(0, 1024, 2048, 4096, 8192, 14_336),
            queries=256,
            gap=128,
            uptrain=continued,
            shift=ShiftConfig(fraction=0.75, max_chunks=4, max_distance=16_384),
        ),
        lla=LLA(*split(TRAJECTORY / 2)),
        distill=dataclasses.replace(
            distill, loop=dataclasses.replace(distill.loop, evaluate_every=25, save_every=50, keep=1)
        ),
        passkey=Passkey(
            kind="passkey",
            schemes=tuple(LLA(*split(2 * TRAJECTORY / ratio)) for ratio in (2, 4, 16 / 3, 32 / 3, 14.2, 64 / 3)),
            contexts=(4096, 8192, 16_384, 32_768, 65_536),
            questions=50,
            batch_size=1,
        ),
        steps=StepSweep(numbers=(2, 3, 4), ranks=(256, 512, 1024, 2048), rank_loop1=2048, ratios=(2, 4, 8)),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(sweeps))
