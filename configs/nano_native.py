"""HLA from the first step of pretraining, against HLA added by uptraining, at equal tokens.

    python -m experiments.native --config=configs/nano_native.py --workdir=runs/nano_native

Half an hour of processor time for both arms (measured; 55 minutes on two cores shared by a dozen processes), and five
minutes of scoring. Expect both arms to learn to recall within 1 million tokens, at 128 tokens 99% right answers through
HLA in either, and text at 2.53 nats a token for HLA from the first step against 2.59 for uptraining: docs/nano_native.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from hla_jax.attention.hla import HLA
from hla_jax.config import OuroConfig
from hla_jax.data.curriculum import Stage
from hla_jax.recipes.native import Job
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.pretrain import Recipe


def get_config() -> ml_collections.ConfigDict:
    model = OuroConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_loops=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_ids=(0,),
        pad_token_id=0,
    )
    mixture = {"copy": 0.1, "recall": 0.8, "text": 0.1}
    stages = (
        Stage(450, rows=48, length=64, mixture=mixture, filler=0.0, longest_bare=64, whole=0.4),
        Stage(
            160, rows=24, length=128, mixture=mixture, filler=0.0, longest_bare=128, whole=0.6, learning_rate=(1.0, 0.1)
        ),
    )
    job = Job(
        recipe=Recipe(model, stages, evaluate_every=50, save_every=50),
        scheme=HLA(rank_k=32, rank_v=32, rank_loop1=32, window=16),
        repetitions=0,
        uptrain=OptimizerConfig(peak_learning_rate=5e-3, total_steps=80, warmup_steps=10),
        calibration_batches=4,
        tasks=("recall",),
        lengths=(64, 128),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(job))
