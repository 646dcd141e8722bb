"""The caches that every evaluation of HLA puts side by side, under the names that its tables and figures use."""

from __future__ import annotations

from collections.abc import Mapping

from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import ModelConfig

FULL = "full cache"
HLA_INITIAL = "HLA at initialisation"
HLA_UPTRAINED = "HLA uptrained"
SHARED = "single-loop sharing"
REUSE = "final-loop reuse"

NAMES = (FULL, HLA_UPTRAINED, HLA_INITIAL, SHARED, REUSE)
"""In the order of tables and colours."""

HLA_PAPER, LLA_PAPER, LLA_REBUILT, LLA_ABSORBED = "HLA", "LLA", "LLA rebuilt cache", "LLA absorbed"

Schemes = Mapping[str, Attention]
"""Name -> scheme and maps. Where one is measured against the others, it is `FULL`."""


def side_by_side(initial: Attention, uptrained: Attention) -> dict[str, Attention]:
    """HLA before and after uptraining, with the full cache, sharing at the same window, and final-loop reuse."""
    return {
        FULL: Attention(FullCache()),
        HLA_UPTRAINED: uptrained,
        HLA_INITIAL: initial,
        SHARED: Attention(SharedLoop(uptrained.scheme.window_tokens())),
        REUSE: Attention(SharedLoop(0)),
    }


def papers_schemes(config: ModelConfig) -> dict[str, Scheme]:
    """What speed and memory are measured of, at the papers' sizes in proportion to the model's: the full cache, HLA at
    10.7x with a window of 128, and LLA at 4x in its three modes.
    """
    numbers, trajectory = 2 * config.num_kv_heads * config.head_dim, config.num_loops * config.head_dim
    heads = lambda rank: max(rank // config.head_dim, 1) * config.head_dim  # ranks of keys are whole heads
    rank_k, rank_v, rope = 3 * trajectory // 16, 5 * trajectory // 16, min(16, config.head_dim)
    return {
        FULL: FullCache(),
        HLA_PAPER: HLA(heads(numbers // 8), numbers // 8, heads(numbers // 16), window=128),
        LLA_PAPER: LLA(rank_k, rank_v),
        LLA_REBUILT: LLA(rank_k, rank_v, full_memory=True),
        LLA_ABSORBED: LLA(rank_k - rope, rank_v, rank_rope=rope),
    }


def distinct(schemes: Schemes) -> dict[str, Attention]:
    """The first of each scheme: bytes and time depend on its sizes, not on its maps."""
    first: dict[Scheme, str] = {}
    for name, attention in schemes.items():
        first.setdefault(attention.scheme, name)
    return {name: schemes[name] for name in first.values()}
