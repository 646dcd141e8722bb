"""HLA on Huginn-3.5B of 32 steps: the recipe of `ouro_1p4b_hla`, in one phase, since the model reads 4,096 tokens.

    python -m experiments.uptrain --config=configs/huginn_3p5b_hla.py --workdir=runs/huginn_3p5b_hla

Needs the hub (tomg-group-umd/huginn-0125, as safetensors, and the data of `ouro_1p4b_hla`) and accelerators: a row of
2,048 tokens has 2.6 GiB of hidden states in the core (32 steps, 4 layers). Not yet run, and no paper has it; the ranks
are a quarter of the width as for Ouro, at 84 times fewer numbers a token in the core.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from configs.ouro_1p4b_hla import UPTRAIN
from hla_jax.attention.hla import HLA
from hla_jax.data.positions import ShiftConfig
from hla_jax.evaluation.evaluate import EvaluationConfig
from hla_jax.recipes.uptrain import Calibration, Job
from hla_jax.sharding import MeshConfig


def get_config() -> ml_collections.ConfigDict:
    job = Job(
        model="tomg-group-umd/huginn-0125",
        dtype="bfloat16",
        scheme=HLA(rank_k=1344, rank_v=1344, rank_loop1=672, window=128),
        calibration=Calibration(sequences=128, tokens=2048),
        uptrain=dataclasses.replace(
            UPTRAIN, shift=ShiftConfig(fraction=0.75, max_chunks=4, max_distance=4096), micro_batches=64, long=None
        ),
        evaluation=EvaluationConfig(
            sequences=32, tokens=2048, prompt=512, batch_size=4, tasks=(), contexts=(1024, 4096), speed_tokens=64
        ),
        mesh=MeshConfig(fsdp=-1),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(job))
