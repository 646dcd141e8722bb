"""What a decoding step reads, counted by hand at the papers' sizes, and what memory holds."""

import jax.numpy as jnp
import pytest

import hla_jax
from hla_jax.config import OURO_1P4B
from hla_jax.evaluation import cost

HLA = hla_jax.HLA(rank_k=512, rank_v=512, rank_loop1=256, window=128)
LAYERS, LOOPS, D, F = 24, 4, 2048, 5632
LAYER = 4 * D * D + 3 * D * F + 4 * D
HEAD = 49152 * D
CACHE = {
    "full": (hla_jax.FullCache(), 2 * LOOPS * D),
    # Three loops read the main latent.
    "hla": (HLA, 3 * 1024 + 512),
    "reuse": (hla_jax.SharedLoop(0), LOOPS * 2 * D),
    # Two passes of four loops read all latents.
    "lla": (hla_jax.LLA(rank_k=96, rank_v=160), 8 * 16 * (96 + 160)),
    "rebuilt": (hla_jax.LLA(rank_k=96, rank_v=160, full_memory=True), 2 * LOOPS * D),
    "absorbed": (hla_jax.LLA(rank_k=512, rank_v=512, fold_heads=True, rank_rope=64), 8 * (576 + 512)),
    "head": (hla_jax.HeadLatent(rank_k=96, rank_v=160), LOOPS * 256),
    "adjacent": (hla_jax.LayerLatent(rank_k=32, rank_v=64, layers=2), LOOPS * 16 * 96),
}


@pytest.mark.parametrize("name", CACHE)
def test_bytes_of_a_step(name):
    scheme, per_token = CACHE[name]
    found = cost.step_traffic(OURO_1P4B, scheme, 1000, 3, jnp.bfloat16)
    window = 3 * 2 * LOOPS * D * 128 * LAYERS if name == "hla" else 0
    assert found.cache == 2 * (3 * 1000 * LAYERS * per_token + window)
    passes = 2 if name in ("lla", "absorbed") else 1
    assert found.weights == 2 * (passes * LOOPS * LAYERS * LAYER + HEAD)


def test_all_maps_are_read_once_a_pass():
    found = cost.step_traffic(OURO_1P4B, HLA, 0, 1, jnp.bfloat16)
    writers = 3 * (512 + 512) * D + 2 * 256 * D
    readers = 3 * (512 + 512) * D + 2 * 256 * D
    assert found.maps == 2 * LAYERS * (writers + readers)


def test_capacity_is_what_is_left_beside_the_model():
    full = hla_jax.FullCache()
    one = full.cache_bytes(OURO_1P4B, 1024, jnp.bfloat16)
    model = 2 * 1_434_652_673
    assert cost.capacity(OURO_1P4B, full, 1024, model + 5 * one, jnp.bfloat16) == 5
    assert cost.capacity(OURO_1P4B, full, 1024, model + 5 * one - 1, jnp.bfloat16) == 4
    assert cost.capacity(OURO_1P4B, full, 1024, model // 2, jnp.bfloat16) == 0


def test_a_copy_is_timed():
    assert cost.copy_bandwidth(1 << 20, rounds=2) > 0
