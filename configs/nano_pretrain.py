"""The embedded model, trained from scratch on two CPU cores."""

from __future__ import annotations

from hla_jax.config import OuroConfig
from hla_jax.data.curriculum import Stage
from hla_jax.training.pretrain import Recipe


def get_config() -> Recipe:
    model = OuroConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_loops=4,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_ids=(0,),
        pad_token_id=0,
    )
    return Recipe(
        model,
        (
            Stage(
                200,
                32,
                64,
                {"copy": 0.15, "recall": 0.4, "tracking": 0.15, "chain": 0.2, "text": 0.1},
                filler=0.15,
                longest_bare=64,
            ),
        ),
    )
