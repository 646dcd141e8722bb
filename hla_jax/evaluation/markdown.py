"""Tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; every column but the first is aligned to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def three_digits(value: float) -> str:
    """Three digits, and no exponent for what is large."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
