"""Bytes of Huginn's caches at its real size: the looped layers' by scheme, and beside them the outer ones'."""

import jax.numpy as jnp
import pytest

from hla_jax.attention.baselines import HeadLatent, LayerLatent
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.low_bit import LowBit
from hla_jax.attention.outer import whole
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import HUGINN_3P5B
from tiny import tiny_huginn

LOOPS, LAYERS, HEADS, SIZE, OUTER = 32, 4, 55, 96, 4
WIDTH = HEADS * SIZE

# Bytes of a token in the four looped layers in bf16, from the formulas of docs/schemes.md.
SCHEMES = {
    "full": (FullCache(), 2 * LAYERS * 2 * LOOPS * WIDTH),
    "full, more steps": (FullCache(64), 2 * LAYERS * 2 * 64 * WIDTH),
    "reuse": (SharedLoop(0), 2 * LAYERS * 2 * WIDTH),
    "16 slots": (SharedLoop(0, 16), 2 * LAYERS * 2 * 16 * WIDTH),
    "hla": (HLA(480, 512, 192, 0), 2 * LAYERS * (480 + 512 + 2 * 192)),
    "lla": (LLA(96, 160), 2 * LAYERS * HEADS * (96 + 160)),
    "lla-2d": (LLA(480, 800, fold_heads=True), 2 * LAYERS * (480 + 800)),
    "absorbed": (LLA(480, 800, fold_heads=True, rank_rope=96), 2 * LAYERS * (480 + 800 + 96)),
    "exact first pass": (LLA(96, 160, first_pass="exact"), 2 * LAYERS * (HEADS * (96 + 160) + 2 * LOOPS * WIDTH)),
    "heads": (HeadLatent(96, 160), 2 * LAYERS * LOOPS * (96 + 160)),
    "layers": (LayerLatent(24, 40, layers=2), 2 * LAYERS * LOOPS * HEADS * (24 + 40) // 2),
    "4 bits": (LowBit(4), LAYERS * (2 * LOOPS * WIDTH // 2 + 4 * LOOPS * HEADS)),
}
WINDOW = 2 * LAYERS * 2 * LOOPS * WIDTH * 128


@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_of_huginn_3p5b(name):
    scheme, per_token = SCHEMES[name]
    outer = 2 * OUTER * 2 * WIDTH
    scheme.check(HUGINN_3P5B)
    for tokens in (1, 4096):
        assert scheme.cache_bytes(HUGINN_3P5B, tokens, jnp.bfloat16) == tokens * per_token
        everything = whole(HUGINN_3P5B, scheme).cache_bytes(HUGINN_3P5B, tokens, jnp.bfloat16)
        assert everything == tokens * (per_token + outer)
    evicted = whole(HUGINN_3P5B, Evicted(scheme, 1024))
    assert evicted.cache_bytes(HUGINN_3P5B, 4096, jnp.bfloat16) == 1024 * (per_token + outer)


def test_a_window_is_of_every_step_and_of_the_looped_layers_only():
    for scheme, per_token in ((SharedLoop(128), 2 * WIDTH), (HLA(480, 512, 192, 128), 480 + 512 + 2 * 192)):
        found = whole(HUGINN_3P5B, scheme).cache_bytes(HUGINN_3P5B, 1000, jnp.bfloat16)
        assert found == 1000 * 2 * (LAYERS * per_token + OUTER * 2 * WIDTH) + WINDOW
    assert WINDOW / 2**20 == 330


def test_bytes_are_what_is_allocated():
    config = tiny_huginn()
    for scheme in (FullCache(), FullCache(6), SharedLoop(2, 3), HLA(16, 5, 8, 3), LLA(9, 14), Evicted(LowBit(4), 5)):
        buffers = whole(config, scheme).init_cache(config, 3, 6, jnp.float32).buffers.values()
        assert sum(x.nbytes for x in buffers) == 3 * whole(config, scheme).cache_bytes(config, 6, jnp.float32)
