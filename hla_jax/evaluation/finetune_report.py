"""The report of fine-tuning with several caches: `report.md`, `results.json` and the figures beside them."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hla_jax import tensor_files
from hla_jax.analysis import figures
from hla_jax.evaluation.estimates import Interval, bootstrap
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.report import write_sections
from hla_jax.evaluation.schemes import FULL

_HELD_OUT = "held_out/loss"


def write_report(results: Mapping[str, Any], directory: pathlib.Path) -> pathlib.Path:
    """Writes the files, each under a temporary name first.

    Args:
      results: the `command`, the `job`, and for each of the `caches` its counts, scores by conversation before and
        after, and the lines of its metrics.
      directory: gets the files.

    Returns:
      The path of `report.md`.
    """
    caches, config = results["caches"], results["job"]["finetune"]
    with tensor_files.new_file(directory / "results.json") as partial:
        tensor_files.write_json(partial, {**results, "summary": summary(caches)})
    first = next(iter(caches.values()))
    steps = [line["step"] for line in first["training"] if _HELD_OUT in line]
    losses = {name: [line[_HELD_OUT] for line in one["training"] if _HELD_OUT in line] for name, one in caches.items()}
    figure = figures.lines(steps, losses, "step", "held-out loss (nats a response token)", log_y=True)
    figures.save(figure, directory / "held_out_loss.png")
    right = {name: [bootstrap(one[when]["right"]) for when in ("before", "after")] for name, one in caches.items()}
    figure = figures.bars(
        ["before", "after"],
        {name: [100 * one.mean for one in pair] for name, pair in right.items()},
        "answers right to the last token (%)",
        intervals={name: [(100 * one.low, 100 * one.high) for one in pair] for name, pair in right.items()},
        ylim=(0, 115),
        number="{:.0f}",
    )
    figures.save(figure, directory / "accuracy.png")
    count = len(first["after"]["right"])
    rank = config["lora"]["rank"]
    trains = f"low-rank updates of rank {rank}" if rank else "all weights"
    header = [
        "# Fine-tuning with each cache",
        "",
        f"- command: `{results['command']}`",
        f"- trained: {trains}, and HLA's maps; {config['loop']['steps']} steps of "
        f"{config['batches']['tokens']:,} tokens; {config['repetitions']} repetitions of the second pass",
        *(f"- {name}: {_counts(one['counts'])}" for name, one in caches.items()),
    ]
    text = [
        f"{count} held-out conversations, the same for all; means with 95% bootstrap intervals over conversations.",
        "*Loss* is the cross-entropy of the responses as training computes it (two passes for HLA, one exact pass for",
        "the full cache), *decoded* the same token by token through the cache; both in nats a token. *Right* answers",
        "are those that greedy decoding through the cache gives to the last token.",
    ]
    return write_sections(
        directory / "report.md",
        [
            header,
            [*text, "", *_table(caches)],
            _differences(caches),
            ["![Held-out loss](held_out_loss.png)", "", "![Right answers](accuracy.png)"],
        ],
    )


def summary(caches: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Interval | dict[str, float]]]]:
    """Cache -> before or after -> score -> mean and interval."""
    interval = lambda values: vars(bootstrap(values))
    return {
        name: {when: {score: interval(of) for score, of in one[when].items()} for when in ("before", "after")}
        for name, one in caches.items()
    }


def _table(caches: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            f"{name}, {when}",
            *(_cell(one[when][score]) for score in ("loss", "decoded_loss")),
            _cell(one[when]["right"], 100, 1),
        )
        for name, one in caches.items()
        for when in ("before", "after")
    ]
    return table(["", "loss", "decoded", "right (%)"], rows)


def _differences(caches: Mapping[str, Any]) -> list[str]:
    """Of every other cache to the full one, conversation by conversation, after fine-tuning."""
    if FULL not in caches:
        return []
    full = caches[FULL]["after"]
    rows = []
    for name, one in caches.items():
        if name != FULL:
            change = {score: np.subtract(one["after"][score], full[score]) for score in full}
            rows.append(
                (name, _cell(change["loss"]), _cell(change["decoded_loss"]), _cell(100 * change["right"], 1, 1))
            )
    if not rows:
        return []
    return [
        "After fine-tuning, less the full cache, conversation by conversation:",
        "",
        *table(["", "loss", "decoded", "right (points)"], rows),
    ]


def _cell(values: Sequence[float] | np.ndarray, scale: float = 1, digits: int = 3) -> str:
    found = bootstrap(scale * np.asarray(values))
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def _counts(counts: Mapping[str, int]) -> str:
    return f"{counts['conversations']:,} conversations read, {counts['dropped']:,} dropped, {counts['cut']:,} cut"
