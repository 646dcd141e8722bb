"""The embedded model, trained from scratch on two CPU cores.

    python -m experiments.pretrain --config=configs/nano_pretrain.py --workdir=runs/nano_pretrain

About an hour and a half on two free cores (measured: two hours with other work beside it). Expect recall of 1.00, 1.00
and 0.91 at 64, 256 and 768 tokens back, tracking 1.00, 1.00 and 0.84, chains 0.98, 0.84 and 0.70, and text at 2.93 nats
a token: what `hla_jax/assets/nano` holds.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from hla_jax.config import OuroConfig
from hla_jax.data.curriculum import Stage
from hla_jax.training.pretrain import Recipe


def get_config() -> ml_collections.ConfigDict:
    model = OuroConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_loops=4,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_ids=(0,),
        pad_token_id=0,
    )
    # Without a learned lookup nothing longer is learned: the first stage ends when recall at 64 tokens is above 0.9.
    bare = {"copy": 0.05, "recall": 0.7, "tracking": 0.08, "chain": 0.1, "text": 0.07}
    early = {"copy": 0.02, "recall": 0.5, "tracking": 0.2, "chain": 0.18, "text": 0.1}
    middle = {"recall": 0.4, "tracking": 0.22, "chain": 0.25, "text": 0.13}
    steps = {"recall": 0.2, "tracking": 0.2, "chain": 0.5, "text": 0.1}
    late = {"recall": 0.3, "tracking": 0.2, "chain": 0.3, "text": 0.2}
    stages = (
        Stage(800, rows=48, length=64, mixture=bare, filler=0.1, longest_bare=64, whole=0.4),
        Stage(80, rows=24, length=128, mixture=early, filler=0.6, longest_bare=128, whole=0.5),
        Stage(200, rows=12, length=256, mixture=middle, filler=0.8, whole=0.6, learning_rate=(0.8, 0.8)),
        Stage(200, rows=6, length=512, mixture=middle, filler=0.85, whole=0.6, learning_rate=(0.6, 0.45)),
        # Sums are learned last and need many short chains.
        Stage(170, rows=12, length=256, mixture=steps, filler=0.5, longest_bare=128, learning_rate=(0.5, 0.15)),
        Stage(150, rows=4, length=1024, mixture=late, filler=0.9, whole=0.7, learning_rate=(0.2, 0.05)),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(Recipe(model, stages)))
