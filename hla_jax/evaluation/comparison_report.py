"""The report of a comparison: `report.md`, `results.json` and the figure beside them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from hla_jax import tensor_files
from hla_jax.analysis import figures
from hla_jax.analysis.figures import Panel, Points
from hla_jax.evaluation.comparison import Measurement, Row
from hla_jax.evaluation.estimates import Interval, bootstrap
from hla_jax.evaluation.orderings import CURVES, orderings
from hla_jax.evaluation.report import checks_table, table, write_sections
from hla_jax.evaluation.schemes import FULL

_TICKS = (1, 2, 4, 8, 16, 32, 64)


def write_report(rows: Sequence[Row], directory: pathlib.Path, title: str) -> pathlib.Path:
    """Writes `results.json`, the figure and, last, `report.md`, each under a temporary name first.

    Args:
      rows: of all schemes measured so far, the full cache first.
      directory: gets the files.
      title: the command.

    Returns:
      The path of `report.md`.
    """
    checks = orderings(rows)
    with tensor_files.new_file(directory / "results.json") as partial:
        tensor_files.write_json(
            partial,
            {
                "command": title,
                "rows": [dataclasses.asdict(row) | {"summary": summary(row, rows[0])} for row in rows],
                "orderings": [dataclasses.asdict(check) for check in checks],
            },
        )
    figures.save(quality_figure(rows), directory / "quality.png")
    return write_sections(
        directory / "report.md",
        [
            ["# Cache schemes compared", "", f"- command: `{title}`"],
            ["## Orderings of the papers", "", *checks_table(checks)] if checks else [],
            ["## Quality against bytes", "", *_legend(rows), "", "![Quality against bytes](quality.png)"],
            _table(rows),
        ],
    )


def summary(row: Row, full: Row) -> dict[str, dict[str, float]]:
    """Means with 95% intervals; `accuracy_difference` is to the full cache, of the same questions."""
    found = row.measured
    values: dict[str, Sequence[float] | np.ndarray] = {
        "held_out_kl": found.held_out_kl,
        "decoding_kl": found.decoding_kl,
        "top1": found.top1,
    }
    if found.all_right:
        values |= {f"accuracy/{task}": right for task, right in found.right.items()}
        values |= {
            "accuracy": found.all_right,
            "accuracy_difference": np.subtract(found.all_right, full.measured.all_right, dtype=float),
            "unanswered": 1 - np.asarray(found.all_given, float),
        }
    return {name: dataclasses.asdict(bootstrap(one)) for name, one in values.items()}


def quality_figure(rows: Sequence[Row]) -> figures.Figure:
    """Held-out KL, and accuracy where tasks were asked (else top-1 agreement), against the compression of the cache."""
    tasks = bool(rows[0].measured.right)
    quality = (lambda found: found.all_right) if tasks else (lambda found: found.top1)
    label = "right answers (%)" if tasks else "top-1 agreement (%)"
    others = [row for row in rows if row.curve != FULL]
    parts = [
        Panel("KL(full || scheme), held-out text (nats)", _curves(others, lambda found: found.held_out_kl), log=True),
        Panel(label, _curves(rows, lambda found: 100 * np.asarray(quality(found), float)), ylim=(0, 104)),
    ]
    styles = list(dict.fromkeys([*CURVES, *(row.curve for row in rows)]))
    largest = max(row.measured.bytes.ratio for row in rows)
    ticks = [tick for tick in _TICKS if tick < 2 * largest]
    return figures.panels(parts, "times fewer bytes than the full cache", styles=styles, ticks=ticks)


def _curves(rows: Sequence[Row], values: Callable[[Measurement], Sequence[float] | np.ndarray]) -> dict[str, Points]:
    """Rows of one curve in the order of their ratios."""
    curves = {}
    for name in dict.fromkeys(row.curve for row in rows):
        mine = sorted((row.measured for row in rows if row.curve == name), key=lambda found: found.bytes.ratio)
        intervals = [bootstrap(values(found)) for found in mine]
        curves[name] = Points(
            [found.bytes.ratio for found in mine],
            [one.mean for one in intervals],
            [(one.low, one.high) for one in intervals],
        )
    return curves


def _legend(rows: Sequence[Row]) -> list[str]:
    sizes = rows[0].measured.bytes
    return [
        "Bytes are those of 16-bit numbers. `fewer` is the full cache's bytes per token over the scheme's; where",
        f"eviction stops the growth, all bytes at {sizes.context:,} tokens count, as in the next column for all.",
        "The held-out KL is that of a parallel pass in which every token reads the past through the cache; decoding KL",
        "and top-1 agreement are of token by token decoding. `no answer` are generations that ran on without one. In",
        "brackets: 95% intervals, bootstrapped over sequences or questions; differences are paired. Decoding speed is",
        "over the full cache's, side by side.",
    ]


def _table(rows: Sequence[Row]) -> list[str]:
    full = rows[0].measured
    tasks, contexts = list(full.right), list(full.speed)
    head = ["cell", "training", "fewer", f"fewer at {full.bytes.context:,}", "bytes/token", "bytes/sequence"]
    head += ["held-out KL", "decoding KL", "top-1 (%)", *(f"{task} (%)" for task in tasks)]
    head += ["all tasks (%)", "to full cache", "no answer (%)"] if tasks else []
    head += [f"tokens/s at {int(context):,}" for context in contexts]

    def cells(row: Row) -> list[str]:
        sizes = row.measured.bytes
        means = {name: Interval(**one) for name, one in summary(row, rows[0]).items()}
        percent = lambda name: _interval(means[name], "{:.1f}", 100)
        accuracy = [*(f"accuracy/{task}" for task in tasks), "accuracy", "accuracy_difference", "unanswered"]
        return [
            row.name,
            row.training,
            f"{sizes.ratio:.2f}x",
            f"{sizes.ratio_at_context:.2f}x",
            f"{sizes.per_token:,}",
            f"{sizes.per_sequence:,}",
            _interval(means["held_out_kl"], "{:.4f}"),
            _interval(means["decoding_kl"], "{:.4f}"),
            percent("top1"),
            *(map(percent, accuracy) if tasks else ()),
            *(f"{row.measured.speed[context]:.2f}x" for context in contexts),
        ]

    return table(head, map(cells, rows))


def _interval(found: Interval, number: str, scale: float = 1) -> str:
    mean, low, high = (number.format(scale * value) for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"
