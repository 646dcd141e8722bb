"""The cells of a comparison: every scheme at the compression ratios that it reaches, for a model of any size.

Latents give values more ranks than keys, 3 : 5, as the LLA paper's 96 and 160 of 512 at 4x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from hla_jax.attention.baselines import HeadLatent, LayerLatent
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.low_bit import LowBit
from hla_jax.attention.scheme import Scheme
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import ModelConfig
from hla_jax.evaluation import orderings as curves
from hla_jax.evaluation.schemes import FULL, REUSE, SHARED
from hla_jax.recipes.compare import RANDOM, Cell

RATIOS = (4 / 3, 2, 8 / 3, 4, 16 / 3, 32 / 3, 64 / 3)


def cells(config: ModelConfig, window: int, budget: int, on_policy: Sequence[float]) -> Iterator[Cell]:
    """Cells of a model; some start from maps of those above them.

    Args:
      config: of the model.
      window: exact tokens of HLA and of single-loop sharing.
      budget: tokens that eviction keeps.
      on_policy: ratios of LLA that are refined further, some of `RATIOS`.
    """
    loops, heads = config.num_loops, config.num_kv_heads
    numbers = 2 * loops * heads * config.head_dim  # of one token and layer in the full cache
    lla = {ratio: LLA(*split(numbers / heads / ratio)) for ratio in RATIOS}

    yield Cell.of(FULL, FULL, FullCache())
    for ratio in RATIOS:
        yield sized(curves.LLA, ratio, lla[ratio], "distill")
    for ratio in (2, 4, 32 / 3):
        yield sized(curves.HEADS, ratio, HeadLatent(*split(numbers / loops / ratio)), "distill")
    for ratio in (2, 4):
        ranks = split(2 * numbers / (loops * heads) / ratio)
        yield sized(curves.LAYERS, ratio, LayerLatent(*ranks, layers=2), "distill")
    for bits in (8, 4, 2):
        yield Cell.of(f"{bits} bits", curves.LOW_BIT, LowBit(bits))
    yield sized(SHARED, loops, SharedLoop(window))
    yield sized(REUSE, loops, SharedLoop(0))
    for ratio in (16 / 3, 32 / 3):
        rank = round(numbers / 3 / ratio)
        yield sized(curves.HLA, ratio, HLA(rank, rank, rank // 2, window), "uptrain")
    for ratio in (4, 32 / 3, 64 / 3):
        yield sized(curves.LLA_2D, ratio, LLA(*split(numbers / ratio), fold_heads=True), "distill")

    half = round(numbers / heads / 4 / 2)
    yield sized(curves.LLA_EQUAL, 4, LLA(half, half), "distill")
    yield sized(curves.LLA_INITIAL, 4, lla[4])
    yield sized(curves.LLA_RANDOM, 4, lla[4], "distill", RANDOM)
    yield sized(curves.LLA_LOGITS, 4, lla[4], "distill", output_weight=0.0)
    rope = config.head_dim // 2
    absorbed = LLA(*split(numbers / heads / 4 - rope), rank_rope=rope)
    yield sized(curves.LLA_ABSORBED, 4, absorbed, "distill")
    yield sized(curves.LLA_ADAPTED, 4, dataclasses.replace(absorbed, query_adapter=True), "distill")
    yield Cell.of("eviction", curves.EVICTION, Evicted(FullCache(), budget))
    yield Cell.of("LLA 4x and eviction", curves.LLA_EVICTION, Evicted(lla[4], budget), start="LLA 4x")
    for ratio in on_policy:
        yield sized(curves.LLA_ON_POLICY, ratio, lla[ratio], "on_policy", f"{curves.LLA} {ratio:.3g}x")


def sized(
    curve: str,
    ratio: float,
    scheme: Scheme,
    training: str = "none",
    start: str | None = None,
    output_weight: float | None = None,
) -> Cell:
    """A cell that is named after its ratio."""
    return Cell.of(f"{curve} {ratio:.3g}x", curve, scheme, training, start, output_weight)


def split(ranks: float) -> tuple[int, int]:
    """Ranks of keys and values that add up to `ranks`."""
    keys = int(3 * ranks / 8)
    return keys, round(ranks) - keys
