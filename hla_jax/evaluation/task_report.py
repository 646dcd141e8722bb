"""The tables of an evaluation as the papers have them: `report.md`, `results.json` and a figure."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from hla_jax import tensor_files
from hla_jax.analysis import figures
from hla_jax.evaluation.estimates import Interval
from hla_jax.evaluation.fidelity import Fidelity
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.memory import Memory
from hla_jax.evaluation.report import write_sections
from hla_jax.evaluation.task_summary import Part, Result

_BANDS = ((0.97, "🟩"), (0.90, "🟨"))
"""Fraction of the full cache's accuracy that is kept, at least, and its mark (HLA, table 1)."""
_MOST_GROUPS = 40
_COLUMNS = ("accuracy", "kept", "difference", "items", "any right", "no answer", "at the limit", "new tokens")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was found.

    Attributes:
      facts: model, command, date and so on, as text.
      memory: scheme -> bytes, in the order of the tables.
      tasks: task -> scheme -> result.
      fidelity: scheme -> fidelity, where it was measured.
    """

    facts: Mapping[str, str]
    memory: Mapping[str, Memory]
    tasks: Mapping[str, Mapping[str, Result]]
    fidelity: Mapping[str, Fidelity]

    def to_json(self) -> dict[str, Any]:
        """The tree as nested objects."""
        return dataclasses.asdict(self)


def write_report(found: Evaluation, directory: pathlib.Path) -> pathlib.Path:
    """Writes `results.json`, the figure and, last, `report.md`, whose path is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    sections = [
        ["# Evaluation", "", *(f"- {name}: {value}" for name, value in found.facts.items())],
        _accuracy(found, directory),
        *(_task(name, results) for name, results in found.tasks.items()),
        _fidelity(found.fidelity),
    ]
    with tensor_files.new_file(directory / "results.json") as partial:
        tensor_files.write_json(partial, found.to_json())
    return write_sections(directory / "report.md", sections)


def _accuracy(found: Evaluation, directory: pathlib.Path) -> list[str]:
    """One row a scheme, one column a task."""
    if not found.tasks:
        return []
    names = list(found.memory)
    figure = figures.bars(
        list(found.tasks),
        {name: [100 * results[name].accuracy.mean for results in found.tasks.values()] for name in names},
        "accuracy (%)",
        intervals={name: [_percent(results[name].accuracy) for results in found.tasks.values()] for name in names},
        ylim=(0, 112),
        styles=names,
        number="{:.0f}",
    )
    figures.save(figure, directory / "accuracy.png")
    rows = [
        (
            name,
            f"{found.memory[name].per_token:,}",
            f"{found.memory[name].ratio:.1f}x",
            *(_cell(results[name]) for results in found.tasks.values()),
        )
        for name in names
    ]
    return [
        "## Accuracy",
        "",
        "In percent. Marks say what is kept of the full cache's accuracy: 🟩 at least 97%, 🟨 90 to 97%. Bytes are per",
        "token, without the window.",
        "",
        *table(["cache", "bytes per token", "fewer", *found.tasks], rows),
        "",
        "![Accuracy](accuracy.png)",
    ]


def _cell(result: Result) -> str:
    kept = result.paired and result.paired.retained
    mark = next((mark for least, mark in _BANDS if kept and kept.mean >= least), "")
    return f"{100 * result.accuracy.mean:.1f} {mark}".rstrip()


def _task(name: str, results: Mapping[str, Result]) -> list[str]:
    first = next(iter(results.values()))
    samples = f", {first.samples} samples of each" if first.samples > 1 else ""
    lines = [
        f"## {name}",
        "",
        f"{first.items:,} items{samples}; 95% intervals from a bootstrap over items, paired with the full cache's.",
        "`−a +b`: items of which fewer and more samples are right than with the full cache.",
        "",
        *_with_values(("cache", *_COLUMNS), [(scheme, *_columns(result)) for scheme, result in results.items()]),
    ]
    groups = {scheme: result.groups for scheme, result in results.items()}
    lengths = {scheme: result.lengths for scheme, result in results.items() if len(result.lengths) > 1}
    if 1 < len(first.groups) <= _MOST_GROUPS:
        lines += ["", "By part (answers in brackets):", "", *_parts(groups)]
    if lengths:
        lines += ["", "By the answer's length in tokens (answers in brackets):", "", *_parts(lengths)]
    return lines


def _columns(result: Result) -> tuple[str, ...]:
    paired = result.paired
    return (
        f"{100 * result.accuracy.mean:.1f} {_between(result.accuracy)}",
        "" if paired is None or paired.retained is None else f"{_number(paired.retained)} {_between(paired.retained)}",
        "" if paired is None else f"{100 * paired.difference.mean:+.1f} {_between(paired.difference)}",
        "" if paired is None else f"−{paired.lost} +{paired.gained}",
        "" if result.any_right is None else f"{100 * result.any_right:.1f}",
        f"{100 * result.no_answer:.1f}",
        "" if result.cut is None else f"{100 * result.cut:.1f}",
        "" if result.new_tokens is None else f"{result.new_tokens:,.0f}",
    )


def _with_values(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table without the columns that have nothing in any row."""
    kept = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return table([head[column] for column in kept], [[row[column] for column in kept] for row in rows])


def _parts(found: Mapping[str, Mapping[str, Part]]) -> list[str]:
    """One row a part, one column a scheme."""
    parts = sorted({part for one in found.values() for part in one}, key=_order)
    cell = lambda part: "" if part is None else f"{100 * part.accuracy:.1f} ({part.answers})"
    return table(["", *found], [(part, *(cell(one.get(part)) for one in found.values())) for part in parts])


def _order(part: str) -> tuple[int, str]:
    """Numbers by size, and then words."""
    begin = part.split("-")[0]
    return (int(begin), part) if begin.isdigit() else (10**12, part)


def _fidelity(found: Mapping[str, Fidelity]) -> list[str]:
    if not found:
        return []
    ranges = [f"{part.start} to {part.stop - 1}" for part in next(iter(found.values())).decoding.by_position]
    loops = [f"loop {loop + 1}" for loop in range(len(next(iter(found.values())).output_error))]
    decoding = lambda one: [f"{part.kl.mean:.4f} / {part.top1.mean:.3f}" for part in one.decoding.by_position]
    weights = {name: one.attention for name, one in found.items() if one.attention is not None}
    lines = [
        "## Fidelity",
        "",
        "Held-out text decoded token by token through each cache: KL from the full cache's next-token distribution in",
        "nats, and how often the likeliest token is the same (± standard error over sequences); then both by position.",
        "",
        *table(
            ["cache", "KL", "top-1", *ranges],
            [
                (name, f"{one.decoding.kl:.4f}", f"{one.decoding.top1:.3f}", *decoding(one))
                for name, one in found.items()
            ],
        ),
        "",
        "One parallel pass in which every token reads the past through the cache: KL, and the relative squared error",
        "of the attention's output at every loop.",
        "",
        *table(
            ["cache", "KL", *loops],
            [(name, f"{one.parallel_kl:.4f}", *(f"{x:.4f}" for x in one.output_error)) for name, one in found.items()],
        ),
    ]
    for name, one in weights.items():
        rows = [(f"layer {layer + 1}", *(f"{kl:.4f}" for kl in row)) for layer, row in enumerate(one.kl_by_layer)]
        rows.append(("mean", *(f"{kl:.4f}" for kl in one.kl)))
        lines += ["", f"{name}: KL of the attention from the exact one, in nats.", "", *table(["", *loops], rows)]
    return lines


def _percent(interval: Interval) -> tuple[float, float]:
    return 100 * interval.low, 100 * interval.high


def _between(interval: Interval) -> str:
    low, high = _percent(interval)
    return f"[{low:.1f}, {high:.1f}]"


def _number(interval: Interval) -> str:
    return f"{100 * interval.mean:.1f}%"
