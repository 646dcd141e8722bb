"""The sweeps' part of the page: tables and figures, and the papers' values for Ouro beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dacite
import numpy as np

from hla_jax.analysis import figures
from hla_jax.analysis.figures import Figure, Panel, Points
from hla_jax.analysis.sweeps import RANDOM, RANKS, SVD, WITH, WITHOUT
from hla_jax.evaluation.comparison import Row
from hla_jax.evaluation.comparison_report import quality_figure
from hla_jax.evaluation.estimates import Estimate, Proportion, bootstrap
from hla_jax.evaluation.markdown import table

Result = Mapping[str, Any]
Drawn = dict[str, Figure]
Beside = tuple[str, str, str]

# HLA, Table 6, Ouro-1.4B: rank -> KL of loops 2-4 by key rank, output error by value rank, KL of loop 1 by its rank.
PAPER_RANKS = {
    128: (1.04, 0.42, 1.04),
    256: (0.51, 0.37, 0.44),
    512: (0.29, 0.30, 0.23),
    1024: (0.11, 0.22, 0.08),
    2048: (0.03, 0.16, None),
}
PAPER_WIDTH = 2048
_NAMES = {"rank_k": "key rank", "rank_v": "value rank", "rank_loop1": "loop-1 rank"}


def _later(cell: Result, what: str) -> float:
    """Averaged over loops 2 .. T."""
    return float(np.mean(cell[what][1:]))


# What a rank decides, as the paper's Table 6 has it: of one cell.
_DECIDES: dict[str, tuple[str, Callable[[Result], float]]] = {
    "rank_k": ("KL, loops 2 and later", lambda cell: _later(cell, "kl")),
    "rank_v": ("output error, loops 2 and later", lambda cell: _later(cell, "error")),
    "rank_loop1": ("KL, loop 1", lambda cell: cell["kl"][0]),
}


def _rank_sweep(found: Result) -> tuple[list[str], Drawn]:
    initial = found["initial"]
    ranks = sorted({cell["rank"] for cells in initial.values() for cell in cells})

    def points(name: str, value: Callable[[Result], float]) -> Points:
        values = [value(cell) for cell in initial[name]]
        return Points([cell["rank"] for cell in initial[name]], values, [(one, one) for one in values])

    def decoding(name: str) -> Points:
        values = [cell["decoding_kl"] for cell in initial[name]]
        return Points([cell["rank"] for cell in initial[name]], [one["mean"] for one in values], _spreads(values))

    keys = {_NAMES[name]: points(name, _DECIDES[name][1]) for name in ("rank_k", "rank_loop1")}
    errors = {_NAMES[name]: points(name, _DECIDES["rank_v"][1]) for name in ("rank_k", "rank_v")}
    parts = [
        Panel("attention KL of its loops (nats)", keys, log=True),
        Panel("output error, loops 2 and later", errors, log=True),
        Panel("decoding KL (nats)", {_NAMES[name]: decoding(name) for name in RANKS}, log=True),
    ]
    drawn = {
        "rank_sweep": figures.panels(parts, "rank, the others as they are", styles=list(_NAMES.values()), ticks=ranks),
        "rank_sweep_uptrained": _before_and_after(found["trained"], _sizes),
    }
    rows = []
    for rank in ranks:
        at = {name: next((cell for cell in initial[name] if cell["rank"] == rank), None) for name in RANKS}
        decides = [f"{_DECIDES[name][1](cell):.3f}" if cell else "" for name, cell in at.items()]
        error = f"{_later(at['rank_k'], 'error'):.3f}" if at["rank_k"] else ""
        decoded = [_decoded(cell) if cell else "" for cell in at.values()]
        rows.append((f"{rank:,}", *decides, error, *decoded))
    head = ["rank", *(f"{_NAMES[name]}: {_DECIDES[name][0]}" for name in RANKS)]
    head += [f"{_NAMES['rank_k']}: {_DECIDES['rank_v'][0]}"]
    head += [f"{_NAMES[name]}: decoding KL, top-1" for name in RANKS]
    centre = ", ".join(f"{name} {value}" for name, value in found["scheme"].items())
    lines = [
        "## Ranks",
        "",
        f"HLA at initialisation without a window when one rank varies and the others stay as in {centre}:",
        "attention KL in nats and relative squared error of the attention output on held-out text, averaged over",
        "layers, heads and tokens (HLA paper, Table 6); and decoding the same text, KL to the full cache in nats (±",
        "standard error over sequences) and how often the likeliest token agrees. The output is that of HLA's own",
        "attention (equation 5), so that its error falls with the key rank too.",
        "",
        *table(head, rows),
        "",
        "Before and after a short uptraining:",
        "",
        *_trained_table(found["trained"], _sizes),
    ]
    return lines, drawn


def _window_sweep(found: Result) -> tuple[list[str], Drawn]:
    name = lambda scheme: f"W = {scheme['window']}"
    lines = [
        "## Windows",
        "",
        "HLA with windows of so many exact tokens, before and after a short uptraining; as for the ranks. Bytes are of",
        "16-bit numbers.",
        "",
        *_trained_table(found["trained"], name),
    ]
    return lines, {"window_sweep": _before_and_after(found["trained"], name)}


def _shifted_positions(found: Result) -> tuple[list[str], Drawn]:
    means = {name: [float(np.mean(by_loop)) for by_loop in kl] for name, kl in found["kl"].items()}
    rows = [(name, *(f"{value:.3f}" for value in values)) for name, values in means.items()]
    rows += [
        (f"{name}, loop {loop + 1}", *(f"{by_loop[loop]:.3f}" for by_loop in found["kl"][name]))
        for name in (WITHOUT, WITH)
        for loop in range(len(found["kl"][name][0]))
    ]
    figure = figures.lines(found["by"], means, "shift of the queries (tokens)", "attention KL (nats)", log_y=True)
    lines = [
        "## Shifted positions",
        "",
        f"Attention KL in nats when the last {found['queries']} queries of every held-out row move later, over the",
        f"tokens at least {found['gap']} places before them; averages over layers, loops, heads and queries. The",
        "training of the uptrained maps was continued twice: with and without shifted positions.",
        "",
        *table(["shift (tokens)", *(f"{shift:,}" for shift in found["by"])], rows),
    ]
    return lines, {"shifted_positions": figure}


def _initialisation(found: Result) -> tuple[list[str], Drawn]:
    curves = found["curves"]
    steps = curves[SVD]["steps"]
    series = {name: curve["kl"] for name, curve in curves.items()}
    figure = figures.lines(steps, series, "step of distillation", "held-out KL (nats)", log_y=True)
    picked = sorted({0, len(steps) // 4, len(steps) // 2, len(steps) - 1})
    rows = [(name, *(f"{kl[number]:.3f}" for number in picked)) for name, kl in series.items()]
    lines = [
        "## Initialisation",
        "",
        f"LLA at {found['ratio']:.3g}x ({_sizes_of(found['scheme'])}): KL of the next-token distributions in nats on",
        "held-out text when every token reads the past through the cache, over the steps of one distillation from",
        "closed-form and from random maps.",
        "",
        *table(["start", *(f"step {steps[number]}" for number in picked)], rows),
    ]
    return lines, {"initialisation": figure}


def _passkey(found: Result) -> tuple[list[str], Drawn]:
    count = found["questions"]
    answers = {name: [Proportion(one, count) for one in right] for name, right in found["right"].items()}
    figure = figures.lines(
        found["contexts"],
        {name: [100 * one.rate for one in by_context] for name, by_context in answers.items()},
        "context (tokens)",
        f"right answers, {found['kind']} (%)",
        intervals={
            name: [(100 * one.interval[0], 100 * one.interval[1]) for one in by_context]
            for name, by_context in answers.items()
        },
        log_x=True,
        ylim=(0, 104),
    )
    rows = [
        (name, f"{found['ratio'][name]:.3g}x", *(_percent(one) for one in by_context))
        for name, by_context in answers.items()
    ]
    lines = [
        "## Passkey",
        "",
        f"Right answers in percent to {count} questions a context ({found['kind']}), decoded greedily through each",
        "cache, with 95% intervals (Wilson); LLA is distilled, HLA uptrained. The context of recall are the tokens",
        "between what is asked for and the question, that of passkey the whole prompt.",
        "",
        *table(["cache", "fewer bytes", *(f"{context:,} tokens" for context in found["contexts"])], rows),
    ]
    return lines, {"passkey": figure}


def _quality(found: Result) -> tuple[list[str], Drawn]:
    rows = _comparison_rows(found)
    cells = [
        (
            row.name,
            f"{row.measured.bytes.ratio:.2f}x",
            f"{bootstrap(row.measured.held_out_kl).mean:.4f}",
            f"{bootstrap(row.measured.decoding_kl).mean:.4f}",
            f"{100 * float(np.mean(row.measured.all_right or row.measured.top1)):.1f}",
        )
        for row in rows
    ]
    right = "right answers (%)" if rows[0].measured.right else "top-1 (%)"
    lines = [
        "## Quality against bytes",
        "",
        f"From the comparison `{found['command']}`: its report has intervals, and what each column is.",
        "",
        *table(["cell", "fewer bytes", "held-out KL (nats)", "decoding KL (nats)", right], cells),
    ]
    return lines, {"quality": quality_figure(rows)}


SECTIONS: dict[str, Callable[[Result], tuple[list[str], Drawn]]] = {
    "rank_sweep": _rank_sweep,
    "window_sweep": _window_sweep,
    "shifted_positions": _shifted_positions,
    "initialisation": _initialisation,
    "passkey": _passkey,
    "quality": _quality,
}


def beside(results: Mapping[str, Result]) -> list[Beside]:
    """What was measured, the papers' values for Ouro, and those found here."""
    rows: list[Beside] = []
    if found := results.get("rank_sweep"):
        width = found["width"]
        for number, name in enumerate(RANKS):
            papers = [(rank, values[number]) for rank, values in PAPER_RANKS.items() if values[number] is not None]
            paper = ", ".join(f"{value:.2f} at 1/{PAPER_WIDTH // rank}" for rank, value in papers)
            here = ", ".join(
                f"{_DECIDES[name][1](cell):.2f} at 1/{width / cell['rank']:.3g}" for cell in found["initial"][name]
            )
            rows.append((f"{_DECIDES[name][0]}, by the {_NAMES[name]} over the width", f"{paper} (HLA)", here))
        smallest, *_, windowed = found["trained"]
        rows.append(
            (
                "short uptraining, the smallest ranks against the last ones",
                "MATH500 51.4 at 256/256/256, 70.6 at 512/512/512 with W = 32 (HLA)",
                f"decoding KL {smallest['after']['decoding_kl']['mean']:.3f} at {_sizes(smallest['scheme'])}, "
                f"{windowed['after']['decoding_kl']['mean']:.3f} at {_sizes(windowed['scheme'])}",
            )
        )
    if found := results.get("window_sweep"):
        here = ", ".join(
            f"W = {cell['scheme']['window']}: {cell['after']['decoding_kl']['mean']:.3f}" for cell in found["trained"]
        )
        paper = "MATH500 66.0 at W = 0, 74.1 at 128; RULER 16K 57.6, 69.1 (HLA, uptrained)"
        rows.append(("what the window brings", paper, f"decoding KL {here} (uptrained)"))
    if found := results.get("shifted_positions"):
        kl = {name: [float(np.mean(by_loop)) for by_loop in found["kl"][name]] for name in (WITHOUT, WITH)}
        here = "; ".join(f"{name} {kl[name][0]:.2f} to {max(kl[name][1:]):.2f}" for name in kl)
        paper = "without 0.022 to 0.098 at 4K; with 0.022 to 0.026 (HLA)"
        rows.append(("attention KL when queries move later", paper, f"{here} (largest of any shift)"))
    if found := results.get("initialisation"):
        ends = {name: curve["kl"][-1] for name, curve in found["curves"].items()}
        steps = found["curves"][SVD]["steps"][-1]
        here = f"{ends[SVD]:.3f} from SVD, {ends[RANDOM]:.3f} from random maps, {steps} steps"
        paper = "0.105 from SVD, 0.771 from random maps, 300 steps (LLA)"
        rows.append((f"held-out KL of LLA at {found['ratio']:.3g}x", paper, here))
    if found := results.get("passkey"):
        reach = "; ".join(f"{name} {_reach(found, name)}" for name in found["right"])
        paper = "to 64K at 5.33x, 16K at 10.7x, 8K at 14.2x (LLA, passkey)"
        rows.append(("contexts with at least 90% right answers", paper, f"{reach} ({found['kind']})"))
    return rows


def _reach(found: Result, name: str) -> str:
    """The longest context up to which all have 90% right answers."""
    good = [right >= 0.9 * found["questions"] for right in found["right"][name]]
    reached = good.index(False) if False in good else len(good)
    return f"to {found['contexts'][reached - 1]:,}" if reached else "none"


def _before_and_after(cells: Sequence[Result], name: Callable[[Result], str]) -> Figure:
    series, intervals = {}, {}
    for label, when in (("at initialisation", "before"), ("uptrained", "after")):
        found = [cell[when]["decoding_kl"] for cell in cells]
        series[label], intervals[label] = [one["mean"] for one in found], _spreads(found)
    groups = [name(cell["scheme"]).replace(", ", "\n") for cell in cells]
    return figures.bars(groups, series, "decoding KL (nats)", intervals=intervals, log=True, number="{:.2g}")


def _trained_table(cells: Sequence[Result], name: Callable[[Result], str]) -> list[str]:
    loops = len(cells[0]["before"]["kl"])
    head = ["", "bytes/token", "bytes/sequence", *(f"KL loop {loop + 1}" for loop in range(loops))]
    rows = [
        (
            f"{name(cell['scheme'])}{', uptrained' if when == 'after' else ''}",
            f"{cell['bytes']['per_token']:,}",
            f"{cell['bytes']['per_sequence']:,}",
            *(f"{kl:.3f}" for kl in cell[when]["kl"]),
            f"{_later(cell[when], 'error'):.3f}",
            _decoded(cell[when]),
        )
        for cell in cells
        for when in ("before", "after")
    ]
    return table([*head, "output error", "decoding KL, top-1"], rows)


def _decoded(cell: Result) -> str:
    return f"{Estimate(**cell['decoding_kl']):.3f}, {100 * cell['top1']['mean']:.0f}%"


def _sizes(scheme: Result) -> str:
    return f"{scheme['rank_k']}/{scheme['rank_v']}/{scheme['rank_loop1']}, W = {scheme['window']}"


def _sizes_of(scheme: Result) -> str:
    return f"ranks {scheme['rank_k']} and {scheme['rank_v']}"


def _spreads(found: Sequence[Result]) -> list[tuple[float, float]]:
    """One standard error to both sides; a logarithmic axis has no room for less than nothing."""
    spread = lambda one: one["stderr"] or 0.0
    return [(max(one["mean"] - spread(one), 0.1 * one["mean"]), one["mean"] + spread(one)) for one in found]


def _percent(answers: Proportion) -> str:
    low, high = answers.interval
    return f"{100 * answers.rate:.0f} [{100 * low:.0f}, {100 * high:.0f}]"


def _comparison_rows(found: Result) -> list[Row]:
    exact = dacite.Config(strict=True, cast=[tuple])
    return [dacite.from_dict(Row, row, exact) for row in found["rows"]]
