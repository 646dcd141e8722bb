"""The main job on the embedded model with few steps, on a mesh: a config for the command, and the same as a `Job`."""

from __future__ import annotations

import dataclasses

import ml_collections

import hla_jax
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import STANDARD_LIBRARY, Source
from hla_jax.data.positions import ShiftConfig
from hla_jax.recipes.uptrain import Calibration, Job
from hla_jax.sharding import MeshConfig
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.uptrain import LongDocuments, UptrainConfig

STEPS = 8
UPTRAIN = UptrainConfig(
    sources=(Source(STANDARD_LIBRARY),),
    batches=BatchConfig(batch_size=8, length=96),
    shift=ShiftConfig(fraction=0.75, max_chunks=4, max_distance=512),
    optimizer=OptimizerConfig(peak_learning_rate=5e-3, total_steps=STEPS, warmup_steps=2),
    loop=LoopConfig(steps=STEPS, log_every=1, evaluate_every=STEPS, save_every=2),
    micro_batches=2,
    held_out_batches=1,
    long=LongDocuments((Source(STANDARD_LIBRARY),), 4, length=192, queries=32, micro_batches=1, held_out=4),
    lanes=4,
)
JOB = Job(
    model=str(hla_jax.NANO),
    dtype="float32",
    scheme=hla_jax.HLA(rank_k=64, rank_v=64, rank_loop1=32, window=32),
    calibration=Calibration(sequences=4, tokens=64),
    uptrain=UPTRAIN,
    evaluation=None,
    check_prompts=1,
    check_tokens=4,
    mesh=MeshConfig(fsdp=2, data=-1),
)


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(dataclasses.asdict(JOB))
