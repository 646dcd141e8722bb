"""The report of an evaluation of HLA: `report.md`, `results.json` and the figures beside them."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from hla_jax import tensor_files
from hla_jax.analysis import figures
from hla_jax.evaluation.estimates import Estimate, Proportion
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.memory import Memory
from hla_jax.evaluation.results import Check, Results, checks
from hla_jax.evaluation.schemes import FULL, NAMES
from hla_jax.evaluation.speed import Speed

_HELD_OUT = "held_out/kl"


def write_report(results: Results, directory: pathlib.Path) -> pathlib.Path:
    """Writes `results.json`, the figures and, last, `report.md`, each under a temporary name first.

    Returns:
      The path of `report.md`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sections = [
        _header(results),
        _expectations(results),
        _attention(results, directory),
        _decoding(results, directory),
        _tasks(results, directory),
        _memory(results, directory),
        _speed(results, directory),
        _training(results, directory),
    ]
    with tensor_files.new_file(directory / "results.json") as partial:
        tensor_files.write_json(partial, results.to_json())
    return write_sections(directory / "report.md", sections)


def write_sections(report: pathlib.Path, sections: Iterable[Sequence[str]]) -> pathlib.Path:
    """Writes lines of Markdown, an empty line between sections; empty ones are left out. Returns `report`."""
    text = "\n\n".join("\n".join(section) for section in sections if section) + "\n"
    with tensor_files.new_file(report) as partial:
        partial.write_text(text, encoding="utf-8")
    return report


def _header(results: Results) -> list[str]:
    facts = {
        "command": f"`{results.command}`",
        "date": results.date,
        "model": _pairs(results.model),
        "scheme": f"HLA: {_pairs(results.scheme)}",
        "dtype": results.dtype,
        "device": results.device,
        "evaluation": _pairs(results.settings),
        "versions": _pairs(results.versions),
    }
    return ["# HLA against the full cache", "", *(f"- {name}: {value}" for name, value in facts.items())]


def _expectations(results: Results) -> list[str]:
    return ["## What was expected, and what was found", "", *checks_table(checks(results))]


def checks_table(found: Iterable[Check]) -> list[str]:
    """A Markdown table of expectations, what was measured, and whether they hold."""
    rows = [(check.claim, check.measured, "yes" if check.holds else "**no**") for check in found]
    return table(["expected", "measured", "holds"], rows)


def _attention(results: Results, directory: pathlib.Path) -> list[str]:
    found = results.attention
    loops = [f"loop {loop + 1}" for loop in range(len(next(iter(found.values())).kl))]
    figure = figures.bars(
        loops,
        {name: divergence.kl for name, divergence in found.items()},
        "KL(exact || HLA) of attention (nats)",
        log=True,
        styles=_styles(results),
    )
    figures.save(figure, directory / "attention_kl.png")
    rows = [
        (name, *(f"{kl:.4f}" for kl in (*found[name].kl, found[name].mean_kl)), _mean(found[name].error))
        for name in found
    ]
    return [
        "## Attention",
        "",
        "KL divergence of the attention from the exact one in nats, on held-out sequences and the exact model's",
        "hidden states, averaged over layers, heads and tokens; the last column is the relative squared error of",
        "the attention's output.",
        "",
        *table(["maps", *loops, "mean", "output error"], rows),
        "",
        "![Attention KL per loop](attention_kl.png)",
    ]


def _decoding(results: Results, directory: pathlib.Path) -> list[str]:
    found = results.decoding
    kl = {name: [decoding.kl.mean] for name, decoding in found.items()}
    intervals = {name: [_interval(decoding.kl)] for name, decoding in found.items()}
    figure = figures.bars(
        [""],
        kl,
        "KL(full || scheme), next token (nats)",
        intervals=intervals,
        log=True,
        styles=_styles(results),
        number="{:.3g}",
    )
    figures.save(figure, directory / "decoding_kl.png")
    ranges = [f"{part.start} to {part.stop - 1}" for part in next(iter(found.values())).by_position]
    rows = [
        (name, f"{one.kl:.4f}", f"{one.top1:.3f}", *(f"{part.kl.mean:.4f}" for part in one.by_position))
        for name, one in found.items()
    ]
    return [
        "## Decoding",
        "",
        "Next-token distributions when held-out text is decoded token by token through each cache: KL from the",
        "full cache in nats and how often the most likely token agrees (± standard error over sequences), then the",
        "KL by position.",
        "",
        *table(["cache", "KL", "top-1 agreement", *ranges], rows),
        "",
        "![Decoding KL](decoding_kl.png)",
    ]


def _tasks(results: Results, directory: pathlib.Path) -> list[str]:
    schemes = list(dict.fromkeys(score.scheme for score in results.tasks))
    tasks = list(dict.fromkeys(score.task for score in results.tasks))
    if not tasks:
        return []

    def pooled(scheme: str, task: str) -> Proportion:
        scores = (score.answers for score in results.tasks if (score.scheme, score.task) == (scheme, task))
        return sum(scores, Proportion(0, 0))

    columns = {name: [*(pooled(name, task) for task in tasks), results.overall(name)] for name in schemes}
    figure = figures.bars(
        [*tasks, "all"],
        {name: [100 * answers.rate for answers in column] for name, column in columns.items()},
        "right answers (%)",
        intervals={name: [_percent(answers.interval) for answers in column] for name, column in columns.items()},
        ylim=(0, 112),
        styles=_styles(results),
        number="{:.0f}",
    )
    figures.save(figure, directory / "accuracy.png")
    head = ["task", "distance", *schemes]
    by_setting: dict[tuple[str, int], dict[str, str]] = {}
    for score in results.tasks:
        paired = "" if score.scheme == FULL else f" −{score.lost} +{score.gained}"
        by_setting.setdefault((score.task, score.distance), {})[score.scheme] = _answers(score.answers) + paired
    rows = [(task, str(distance), *(cells[name] for name in schemes)) for (task, distance), cells in by_setting.items()]
    totals = [("all", "", *(_answers(results.overall(name)) for name in schemes))]
    kept = [("kept", "", *(f"{100 * results.retained(name):.1f}%" for name in schemes))]
    return [
        "## Accuracy",
        "",
        "Right answers in percent, decoded greedily, with 95% intervals (Wilson). `−a +b`: of the same questions,",
        "`a` that the full cache answers and this cache does not, and `b` the other way round. The distance is in",
        "tokens, from what the answer needs to the answer. `kept` is the number of right answers over the full",
        "cache's.",
        "",
        *table(head, [*rows, *totals, *kept]),
        "",
        "![Accuracy by task](accuracy.png)",
        *(line for task in tasks for line in _by_distance(results, task, schemes, directory)),
    ]


def _by_distance(results: Results, task: str, schemes: Sequence[str], directory: pathlib.Path) -> list[str]:
    """A figure of one task's accuracy against the distance, where it was asked at several."""
    found = {name: [score for score in results.tasks if (score.scheme, score.task) == (name, task)] for name in schemes}
    found = {name: sorted(scores, key=lambda score: score.distance) for name, scores in found.items()}
    distances = [score.distance for score in found[schemes[0]]]
    if len(set(distances)) < 2:
        return []
    figure = figures.lines(
        distances,
        {name: [100 * score.answers.rate for score in scores] for name, scores in found.items()},
        "distance (tokens)",
        f"right answers, {task} (%)",
        intervals={name: [_percent(score.answers.interval) for score in scores] for name, scores in found.items()},
        log_x=True,
        ylim=(0, 104),
        styles=_styles(results),
    )
    figures.save(figure, directory / f"{task}_by_distance.png")
    return ["", f"![{task} by distance]({task}_by_distance.png)"]


def _memory(results: Results, directory: pathlib.Path) -> list[str]:
    found = results.memory
    contexts = list(next(iter(found.values())).at)
    figure = figures.lines(
        contexts,
        {name: [memory.at[context] / 2**20 for context in contexts] for name, memory in found.items()},
        "context (tokens)",
        "cache of one sequence (MiB)",
        log_x=True,
        log_y=True,
        styles=_styles(results),
    )
    figures.save(figure, directory / "bytes.png")
    return [
        "## Memory",
        "",
        f"Bytes of the cache in {results.dtype}, and how many times fewer than the full cache's; by context length",
        "in MiB of one sequence, the window counted.",
        "",
        *memory_table(found),
        "",
        "![Bytes by context](bytes.png)",
    ]


def memory_table(found: Mapping[str, Memory]) -> list[str]:
    """A Markdown table of bytes, and MiB by context length."""
    contexts = list(next(iter(found.values())).at)
    rows = [
        (
            name,
            f"{memory.per_token:,}",
            f"{memory.per_sequence:,}",
            f"{memory.ratio:.1f}x",
            *(f"{memory.at[context] / 2**20:,.2f} ({memory.ratio_at[context]:.1f}x)" for context in contexts),
        )
        for name, memory in found.items()
    ]
    head = ["cache", "bytes per token", "bytes per sequence", "fewer per token"]
    return table([*head, *(f"MiB at {context:,}" for context in contexts)], rows)


def _speed(results: Results, directory: pathlib.Path) -> list[str]:
    if not results.speed:
        return []
    figures.save(speed_figure(results.speed, _styles(results)), directory / "speed.png")
    return [
        "## Speed",
        "",
        *speed_table(results.speed),
        "",
        "![Decoding speed by context](speed.png)",
    ]


def speed_table(speeds: Sequence[Speed]) -> list[str]:
    """A Markdown table: tokens a second, and the ratio to the full cache with its quartiles."""
    names = list(dict.fromkeys(name for speed in speeds for name in speed.tokens_per_second))

    def cell(speed: Speed, name: str) -> str:
        if name not in speed.tokens_per_second:
            return "out of memory"
        ratio = speed.ratio.get(name)
        spread = "" if name == FULL or not ratio else f" ({ratio.median:.2f}x, {ratio.low:.2f} to {ratio.high:.2f})"
        return f"{speed.tokens_per_second[name]:,.1f}{spread}"

    rows = [(f"{speed.context:,}", *(cell(speed, name) for name in names)) for speed in speeds]
    return [
        f"Decoded tokens per second, {speeds[0].batch} sequence(s) at a time, caches side by side in one run. In",
        "brackets the median of the ratio to the full cache in the same round, and its quartiles.",
        "",
        *table(["context", *names], rows),
    ]


def speed_figure(speeds: Sequence[Speed], styles: Sequence[str] | None = None) -> Figure:
    """Speed against context length."""
    names = list(dict.fromkeys(name for speed in speeds for name in speed.tokens_per_second))
    return figures.lines(
        [speed.context for speed in speeds],
        {name: [speed.tokens_per_second.get(name, float("nan")) for speed in speeds] for name in names},
        "context (tokens)",
        "decoding (tokens/s)",
        log_x=True,
        log_y=True,
        styles=styles,
    )


def _training(results: Results, directory: pathlib.Path) -> list[str]:
    losses = [(line["step"], line["loss"]) for line in results.training if "loss" in line]
    followed = [line for line in results.training if _HELD_OUT in line]
    if not losses or not followed:
        return []
    loops = sorted(key for key in followed[0] if key.startswith(f"{_HELD_OUT}/"))
    curves = {key.rsplit("/", 1)[1].replace("loop", "loop "): [line[key] for line in followed] for key in loops}
    held_out = [line["step"] for line in followed], {"mean": [line[_HELD_OUT] for line in followed]} | curves
    steps, values = zip(*losses)
    figures.save(
        figures.training_curves((steps, values), held_out, "held-out attention KL (nats)"), directory / "training.png"
    )
    return ["## Training", "", "![Training curves](training.png)"]


def _styles(results: Results) -> list[str]:
    """The schemes in the order that fixes their colours, the same in every figure."""
    return list(dict.fromkeys([*NAMES, *results.memory, *results.decoding]))


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4f}"


def _interval(estimate: Estimate) -> tuple[float, float]:
    """One standard error to both sides; a logarithmic axis has no room for less than nothing."""
    spread = estimate.stderr or 0.0
    return max(estimate.mean - spread, 0.1 * estimate.mean), estimate.mean + spread


def _answers(answers: Proportion) -> str:
    low, high = _percent(answers.interval)
    return f"{100 * answers.rate:.0f} [{low:.0f}, {high:.0f}]"


def _percent(interval: tuple[float, float]) -> tuple[float, float]:
    return 100 * interval[0], 100 * interval[1]
