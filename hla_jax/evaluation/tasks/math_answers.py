r"""Whether a solution ends in the right mathematical answer: `math-verify` reads and compares, we say what counts.

An answer is what the solution commits to: the last \boxed{}, or a phrase such as "the answer is ...". A number that
merely occurs in it is none, so a solution that the length limit cuts off is unanswered.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from hla_jax.evaluation.task import Score

# Seconds for reading or comparing an answer: sympy may work on a hostile expression for ever.
_TIMEOUT = 5
# Boxes, escaped characters, and braces.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def grade(gold: str, text: str) -> Score:
    r"""Scores a solution against the right answer, a number or LaTeX without \boxed{} or dollars.

    What stands before "</think>" is not the solution. Equivalent forms are right: 1/2 for 0.5, (1, 2) for (1,2).
    """
    import math_verify  # brings sympy, which takes half a second

    seconds = _seconds()
    solution = text.rsplit("</think>", 1)[-1]
    boxed = last_boxed(solution)
    # math-verify would take a box that is not closed: what the length limit cut off.
    given = solution.split("\\boxed", 1)[0] if boxed is None else f"\\boxed{{{boxed}}}"
    found = math_verify.parse(given, _committed(), parsing_timeout=seconds)
    if boxed is None and not found:
        return {"correct": 0.0, "answered": False, "extracted": None}
    extracted = boxed if boxed is not None else str(found[-1]).rstrip(".")
    right = _same_text(gold, extracted)
    if not right and found:
        expected = math_verify.parse(f"\\boxed{{{gold}}}", _committed(), parsing_timeout=seconds)
        right = math_verify.verify(expected, found, timeout_seconds=seconds)
    return {"correct": float(right), "answered": True, "extracted": extracted}


def last_boxed(text: str) -> str | None:
    r"""What the last complete, non-empty \boxed{} or \fbox{} of a text holds."""
    opened: list[int | None] = []  # where the content of each open brace begins, if it is a box's
    last, begins = None, -1
    for token in _BRACES.finditer(text):
        if token.group() == "}":
            start = opened.pop() if opened else None
            if start is not None and start > begins and (content := text[start : token.start()].strip()):
                last, begins = content, start
        elif token.group().endswith("{") and not token.group().startswith("\\{"):
            opened.append(None if token.group() == "{" else token.end())
    return last


def _committed() -> list[Any]:
    """Expressions that are boxed or introduced as the answer, and no others."""
    import math_verify

    return [
        math_verify.LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0),
        math_verify.ExprExtractionConfig(try_extract_without_anchor=False),
    ]


def _same_text(one: str, other: str) -> bool:
    """Equal but for spaces and size commands: words and notations that are no expressions."""
    plain = lambda text: re.sub(r"\\(?:left|right|!|,|;)|\\text\s*|\\mathrm\s*|[\s{}$]", "", text).rstrip(".").lower()
    return plain(one) == plain(other) != ""


def _seconds() -> int | None:
    """math-verify's time limit is an alarm signal, which only the main thread can have."""
    return _TIMEOUT if threading.current_thread() is threading.main_thread() else None
