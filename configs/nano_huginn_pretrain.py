"""A small Huginn, trained from scratch on two CPU cores with 4, 8 or 12 steps a batch.

python -m experiments.pretrain --config=configs/nano_huginn_pretrain.py --workdir=runs/nano_huginn_pretrain
"""

from __future__ import annotations

import dataclasses

import ml_collections

from hla_jax.config import HuginnConfig
from hla_jax.data.curriculum import Stage
from hla_jax.training.pretrain import Recipe


def get_config() -> ml_collections.ConfigDict:
    model = HuginnConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_layers=2,
        num_loops=12,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        rope_theta=50_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        num_prelude=1,
        num_coda=1,
        bos_token_id=0,
        eos_token_ids=(0,),
        pad_token_id=0,
    )
    bare = {"copy": 0.05, "recall": 0.75, "tracking": 0.05, "text": 0.15}
    longer = {"recall": 0.6, "tracking": 0.2, "text": 0.2}
    stages = (
        Stage(450, rows=48, length=64, mixture=bare, filler=0.1, longest_bare=64, whole=0.4),
        Stage(60, rows=24, length=128, mixture=longer, filler=0.6, longest_bare=128, whole=0.5),
        Stage(120, rows=12, length=256, mixture=longer, filler=0.8, whole=0.6, learning_rate=(0.7, 0.05)),
    )
    recipe = Recipe(model, stages, num_steps=(4, 8, 12), evaluate_every=315)
    return ml_collections.ConfigDict(dataclasses.asdict(recipe))
