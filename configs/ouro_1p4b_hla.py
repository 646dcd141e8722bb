"""HLA on Ouro-1.4B with the settings of the HLA paper (arXiv:2610.07940, sections 4.1 and 5.1, Appendix C), first
phase.

    python -m experiments.uptrain --config=configs/ouro_1p4b_hla.py --workdir=runs/ouro_1p4b_hla

Needs the hub (ByteDance/Ouro-1.4B, open-r1/OpenR1-Math-220k, HuggingFaceFW/fineweb-edu) and an accelerator with 80 GB;
not yet run on one, so its time is not known. The paper's attention KL on held-out data falls from 0.13 to 0.006 nats.
To see that nothing is special-cased, take one step on a random checkpoint of the same size, on a CPU:

    python -m experiments.random_checkpoint --size=1p4b --directory=runs/ouro_1p4b
    python -m experiments.uptrain --config=configs/ouro_1p4b_hla.py --workdir=runs/one_step
    --config.model=runs/ouro_1p4b ...
"""

from __future__ import annotations

import dataclasses

import ml_collections

from hla_jax.attention.hla import HLA
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import Source
from hla_jax.data.positions import ShiftConfig
from hla_jax.evaluation.evaluate import EvaluationConfig
from hla_jax.recipes.uptrain import Calibration, Job
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.uptrain import UptrainConfig

STEPS = 1000
UPTRAIN = UptrainConfig(
    sources=(
        Source("open-r1/OpenR1-Math-220k", 3.0, name="default", render="verified"),
        Source("HuggingFaceFW/fineweb-edu", 2.0, name="sample-10BT"),
    ),
    batches=BatchConfig(batch_size=128, length=2048, min_tokens=64, max_tokens=2048, pack=False),
    shift=ShiftConfig(fraction=0.75, max_chunks=4, max_distance=16_384),
    optimizer=OptimizerConfig(peak_learning_rate=1e-3, total_steps=STEPS, warmup_steps=50),
    loop=LoopConfig(steps=STEPS, log_every=10, evaluate_every=50, save_every=100, best_metric="held_out/kl"),
    micro_batches=128,
)


def get_config() -> ml_collections.ConfigDict:
    job = Job(
        model="ByteDance/Ouro-1.4B",
        dtype="bfloat16",
        scheme=HLA(rank_k=512, rank_v=512, rank_loop1=256, window=128),
        calibration=Calibration(sequences=128, tokens=2048),
        uptrain=UPTRAIN,
        evaluation=EvaluationConfig(
            sequences=32,
            tokens=2048,
            prompt=512,
            batch_size=4,
            tasks=(),
            contexts=(1024, 4096, 16_384),
            speed_tokens=64,
        ),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(job))
