"""What Huginn's cache and steps cost: prelude and coda have theirs beside any scheme's."""

import math

import pytest

from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention
from hla_jax.config import HUGINN_3P5B
from hla_jax.evaluation import cost
from hla_jax.evaluation.comparison import bytes_of
from hla_jax.evaluation.memory import cache_memory
from hla_jax.evaluation.schemes import FULL, HLA_PAPER, papers_schemes
from hla_jax.models import tables

SCHEME = HLA(96 * 8, 96 * 8, 96 * 4, 128)
NUMBERS = 2 * 5280  # of keys and values in one layer


def test_bytes_count_the_layers_outside_of_the_loops():
    found = cache_memory(HUGINN_3P5B, {FULL: Attention(FullCache()), "HLA": Attention(SCHEME)}, (4096,), "bfloat16")
    assert found[FULL].per_token == 2 * NUMBERS * (32 * 4 + 4)
    latents = 4 * (2 * 768 + 2 * 384)
    assert found["HLA"].per_token == 2 * (latents + 4 * NUMBERS)
    assert found["HLA"].per_sequence == 2 * 128 * 32 * 4 * NUMBERS
    # A comparison of schemes has what they differ in.
    compared = bytes_of(HUGINN_3P5B, SCHEME, 4096)
    assert (compared.per_token, compared.per_sequence) == (2 * latents, found["HLA"].per_sequence)
    evicted = bytes_of(HUGINN_3P5B, Evicted(FullCache(), 64), 4096)
    assert evicted.ratio == pytest.approx(4096 / 64)


def test_the_papers_sizes_fit_its_odd_number_of_heads():
    schemes = papers_schemes(HUGINN_3P5B)
    for scheme in schemes.values():
        scheme.check(HUGINN_3P5B)
    assert schemes[HLA_PAPER] == HLA(13 * 96, 1320, 6 * 96, 128)


def test_a_step_reads_looped_weights_once_a_loop_and_the_others_once():
    looped, outer, head = cost.weight_numbers(HUGINN_3P5B)
    block = 3 * 5280**2 + 5280**2 + 3 * 5280 * 17920 + 4 * 5280 + 2 * 5280
    assert (looped, outer, head) == (4 * block + 2 * 5280**2, 4 * block, 65536 * 5280)
    everything = sum(math.prod(row.shape(HUGINN_3P5B)) for row in tables.parameters(HUGINN_3P5B))
    assert looped + outer + head + 5280 == everything == 3_564_976_800
    traffic = cost.step_traffic(HUGINN_3P5B, FullCache(), 1000, 2, "bfloat16")
    assert traffic.weights == 2 * (32 * looped + outer + head)
    assert traffic.cache == 2 * 2 * 1000 * NUMBERS * (32 * 4 + 4)
