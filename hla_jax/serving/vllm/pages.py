"""Sizes of pages: all kinds of cache draw pages of the same bytes from one pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

TOKENS = 16
"""Of the widest kind in a page, by default: what is lost at the end of a sequence stays small."""


class Pages(NamedTuple):
    """How a pool is cut."""

    tokens: dict[str, int]
    """In a page, by kind."""
    numbers: int
    """In a page; a kind whose tokens do not fill it leaves the rest unused."""


def cut(widths: Mapping[str, int], tokens: int = TOKENS) -> Pages:
    """Pages for kinds of cache with so many numbers a token and layer; the widest has `tokens` tokens in a page."""
    numbers = tokens * max(widths.values())
    return Pages({kind: numbers // width for kind, width in widths.items()}, numbers)
