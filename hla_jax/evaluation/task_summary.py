"""What lines of answers say: accuracy with its interval, and how it compares with the full cache's, item by item."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hla_jax.evaluation.estimates import Interval, bootstrap, bootstrap_ratio
from hla_jax.evaluation.run_tasks import Line
from hla_jax.evaluation.schemes import FULL

if TYPE_CHECKING:
    from jaxtyping import Float

_SHORTEST = 64
"""New tokens of the first range of lengths; each next one ends at twice as many."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Accuracy of some of the answers."""

    accuracy: float
    answers: int


@dataclasses.dataclass(frozen=True)
class Paired:
    """A scheme against the full cache, item by item; intervals from a bootstrap over items.

    Attributes:
      difference: of the accuracies.
      retained: accuracy over the full cache's; None where that answered nothing right.
      lost: items with fewer right samples than the full cache has.
      gained: items with more.
    """

    difference: Interval
    retained: Interval | None
    lost: int
    gained: int


@dataclasses.dataclass(frozen=True)
class Result:
    """One scheme on one task.

    Attributes:
      accuracy: mean over items of the mean over their samples, with an interval from a bootstrap over items.
      items, samples: how many, and of each.
      any_right: fraction of items with a right sample; None for one sample.
      no_answer: fraction of answers in which no answer was found.
      cut: fraction of answers that reached the limit of new tokens; None for choices.
      new_tokens: mean; None for choices.
      groups: accuracy by `Item.group`.
      lengths: accuracy by the answer's own new tokens, "64-127" -> part.
      paired: None for the full cache itself, or without it.
    """

    accuracy: Interval
    items: int
    samples: int
    any_right: float | None
    no_answer: float
    cut: float | None
    new_tokens: float | None
    groups: dict[str, Part]
    lengths: dict[str, Part]
    paired: Paired | None


def summarise(lines: Mapping[str, Sequence[Line]], full: str = FULL) -> dict[str, Result]:
    """Every scheme's result on one task, from the lines of `run_tasks.answer`.

    Raises `ValueError` where a scheme answered other items than `full`.
    """
    if full in lines:
        asked = [(line["id"], line["sample"]) for line in lines[full]]
        for name, found in lines.items():
            if [(line["id"], line["sample"]) for line in found] != asked:
                raise ValueError(f"{name} answered other items than {full}; compare the same ones")
    by_item = {name: _by_item(found) for name, found in lines.items()}
    return {
        name: _result(found, by_item[name], None if name == full else by_item.get(full))
        for name, found in lines.items()
    }


def _by_item(lines: Sequence[Line]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for line in lines:
        found.setdefault(line["id"], []).append(float(line["correct"]))
    return found


def _result(
    lines: Sequence[Line], by_item: Mapping[str, list[float]], full: Mapping[str, list[float]] | None
) -> Result:
    means = _means(by_item)
    samples = max(map(len, by_item.values()))
    generated = [line for line in lines if "new_tokens" in line]
    return Result(
        accuracy=bootstrap(means),
        items=len(by_item),
        samples=samples,
        any_right=None if samples == 1 else float(np.mean([max(one) >= 1 for one in by_item.values()])),
        no_answer=float(np.mean([not line.get("answered", True) for line in lines])),
        cut=float(np.mean([line["finish_reason"] == "length" for line in generated])) if generated else None,
        new_tokens=float(np.mean([line["new_tokens"] for line in generated])) if generated else None,
        groups=_parts([line for line in lines if line["group"]], lambda line: line["group"]),
        lengths=_parts(sorted(generated, key=lambda line: line["new_tokens"]), _length),
        paired=None if full is None else _paired(means, _means(full)),
    )


def _means(by_item: Mapping[str, list[float]]) -> Float[np.ndarray, " N"]:
    return np.array([np.mean(one) for one in by_item.values()])


def _paired(mine: Float[np.ndarray, " N"], full: Float[np.ndarray, " N"]) -> Paired:
    return Paired(
        bootstrap(mine - full),
        bootstrap_ratio(mine, full) if full.any() else None,
        int(np.sum(mine < full)),
        int(np.sum(mine > full)),
    )


def _parts(lines: Sequence[Line], part_of: Callable[[Line], str]) -> dict[str, Part]:
    """Accuracy of each part's lines, in the order in which the parts come."""
    found: dict[str, list[float]] = {}
    for line in lines:
        found.setdefault(part_of(line), []).append(float(line["correct"]))
    return {name: Part(float(np.mean(values)), len(values)) for name, values in found.items()}


def _length(line: Line) -> str:
    stop = _SHORTEST
    while line["new_tokens"] >= stop:
        stop *= 2
    return f"{0 if stop == _SHORTEST else stop // 2}-{stop - 1}"
