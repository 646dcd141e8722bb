"""The caches that every evaluation of HLA puts side by side, under the names that its tables and figures use."""

from __future__ import annotations

from collections.abc import Mapping

from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.attention.shared import SharedLoop

FULL = "full cache"
HLA_INITIAL = "HLA at initialisation"
HLA_UPTRAINED = "HLA uptrained"
SHARED = "single-loop sharing"
REUSE = "final-loop reuse"

NAMES = (FULL, HLA_UPTRAINED, HLA_INITIAL, SHARED, REUSE)
"""In the order of tables and colours."""

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


def distinct(schemes: Schemes) -> dict[str, Attention]:
    """The first of each scheme: bytes and time depend on its sizes, not on its maps."""
    first: dict[Scheme, str] = {}
    for name, attention in schemes.items():
        first.setdefault(attention.scheme, name)
    return {name: schemes[name] for name in first.values()}
