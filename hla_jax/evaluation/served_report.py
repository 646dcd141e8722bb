"""The report of `recipes.serve_capacity`: `serve_capacity.md`, its JSON and its figure."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hla_jax import tensor_files
from hla_jax.analysis import figures
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.report import write_sections
from hla_jax.evaluation.schemes import FULL

Found = Mapping[str, Mapping[str, dict[str, Any]]]
"""cache -> cell -> what `evaluation.served` returned; see `recipes.serve_capacity.cells`."""
Curves = dict[str, list[float]]


def write_report(
    found: Found,
    contexts: Sequence[int],
    requests: tuple[int, int, int],
    ratio: Callable[[str, int], float],
    facts: Mapping[str, Any],
    workdir: pathlib.Path,
) -> pathlib.Path:
    """Writes what was found, each file under a temporary name first.

    Args:
      found: of every cache, the full one first.
      contexts: tokens of a sequence.
      requests: of the batch: how many, prompt tokens, new tokens.
      ratio: (cache, context) -> the full cache's bytes of a sequence over this one's.
      facts: lines of the header, by name.

    Returns:
      The path of `serve_capacity.md`.
    """
    names = list(found)

    def each(kind: str, value: Callable[[dict[str, Any]], float]) -> Curves:
        return {name: [value(found[name][f"{kind} {context}"]) for context in contexts] for name in names}

    held = each("capacity", lambda cell: cell["sequences"])
    latency = each("latency", lambda cell: 1e3 * _median(cell))
    rates = each("throughput", lambda cell: cell.get("batch", 0) / _median(cell))
    ideal = {
        name: [ratio(name, found[name][f"capacity {context}"]["context"]) for context in contexts] for name in names
    }

    def rows(values: Curves, number: str, note: Callable[[str, int], str]) -> list[tuple[str, ...]]:
        def text(name: str, at: int) -> str:
            over = "" if name == FULL else f"{values[name][at] / values[FULL][at]:.2f}x"
            notes = ", ".join(filter(None, [over, note(name, at)]))
            return number.format(values[name][at]) + (f" ({notes})" if notes else "")

        return [(f"{context:,}", *(text(name, at) for name in names)) for at, context in enumerate(contexts)]

    def batch(name: str, at: int) -> str:
        return f"{found[name][f'throughput {contexts[at]}'].get('batch', 0)} sequences"

    head = ["context", *names]
    sections = [
        ["# vLLM with each cache", "", *(f"- {name}: {value}" for name, value in facts.items())],
        [
            "## Sequences that run at once",
            "",
            "One more comes with each step, as long as the others have become, until not all run. In brackets: over",
            "the full cache's, and what the bytes of a sequence would give.",
            "",
            *table(head, rows(held, "{:,}", lambda name, at: "" if name == FULL else f"ideal {ideal[name][at]:.2f}x")),
        ],
        [
            "## Milliseconds a token, one sequence",
            "",
            "Median of a decoding step of the engine. In brackets: over the full cache's.",
            "",
            *table(head, rows(latency, "{:,.1f}", lambda name, at: "")),
        ],
        [
            "## Tokens a second, as many sequences as fit",
            "",
            "In brackets: over the full cache's, and how many sequences.",
            "",
            *table(head, rows(rates, "{:,.0f}", batch)),
        ],
        _completion(found, *requests),
        ["![Sequences, latency and throughput](serve_capacity.png)"],
    ]
    plots = (("sequences at once", held), ("ms a token, one sequence", latency), ("tokens/s, pool full", rates))
    parts = [
        figures.Panel(
            label, {name: figures.Points(contexts, y, [(v, v) for v in y]) for name, y in curves.items()}, log=True
        )
        for label, curves in plots
    ]
    figures.save(
        figures.panels(parts, "context (tokens)", styles=names, ticks=contexts), workdir / "serve_capacity.png"
    )
    with tensor_files.new_file(workdir / "serve_capacity.json") as partial:
        tensor_files.write_json(partial, {"facts": dict(facts), "cells": found})
    return write_sections(workdir / "serve_capacity.md", sections)


def _completion(found: Found, requests: int, prompt: int, new: int) -> list[str]:
    cells = {name: cells["completion"] for name, cells in found.items()}
    rows = [
        (
            name,
            f"{one['seconds']:,.1f}",
            f"{one['new_tokens'] / one['seconds']:,.0f}",
            f"{cells[FULL]['seconds'] / one['seconds']:.2f}x",
            f"{one['most_running']} / {one['mean_running']:.1f}",
            f"{one['preemptions']}",
        )
        for name, one in cells.items()
    ]
    return [
        "## A batch to its end",
        "",
        f"{requests} requests of {prompt:,} + {new:,} tokens, all at once. A preempted request starts again.",
        "",
        *table(["cache", "seconds", "tokens/s", "ratio", "running: most / mean", "preemptions"], rows),
    ]


def _median(cell: dict[str, Any]) -> float:
    return statistics.median(cell["seconds"]) if cell else float("nan")
