"""The page's part on the number of loops: tables and a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hla_jax.analysis import figures
from hla_jax.analysis.figures import Figure, Panel, Points
from hla_jax.evaluation.estimates import Estimate
from hla_jax.evaluation.markdown import table

Result = Mapping[str, Any]


def steps_section(found: Result) -> tuple[list[str], dict[str, Figure]]:
    """HLA's decoding by rank and LLA's by compression, a curve for each number of steps."""
    name = lambda steps: f"{steps} loops"

    def points(cells: Sequence[Result], x: str) -> Points:
        at = [cell["scheme"]["rank_k"] if x == "rank" else cell["ratio"] for cell in cells]
        kl = [cell["decoding_kl"] for cell in cells]
        spread = [one["stderr"] or 0.0 for one in kl]
        means = [one["mean"] for one in kl]
        return Points(
            at, means, [(max(mean - by, 0.1 * mean), mean + by) for mean, by in zip(means, spread, strict=True)]
        )

    styles = [name(steps) for steps in found["hla"]]
    ranks = sorted({cell["scheme"]["rank_k"] for cells in found["hla"].values() for cell in cells})
    ratios = sorted({round(cell["ratio"]) for cells in found["lla"].values() for cell in cells})
    hla = Panel("HLA, decoding KL (nats)", {name(n): points(c, "rank") for n, c in found["hla"].items()}, log=True)
    lla = Panel("LLA, decoding KL (nats)", {name(n): points(c, "ratio") for n, c in found["lla"].items()}, log=True)
    drawn = {
        "steps_hla": figures.panels(
            [hla], "rank of the main latent's keys and of its values", styles=styles, ticks=ranks
        ),
        "steps_lla": figures.panels([lla], "compression of the looped layers' cache", styles=styles, ticks=ratios),
    }

    def cell(one: Result) -> str:
        return f"{Estimate(**one['decoding_kl']):.3f}, {100 * one['top1']['mean']:.0f}%"

    with_ratio = lambda one: f"{cell(one)} [{one['ratio']:.3g}x]"
    by_rank = [{one["scheme"]["rank_k"]: one for one in cells} for cells in found["hla"].values()]
    by_ratio = [{round(one["ratio"]): one for one in cells} for cells in found["lla"].values()]
    hla_rows = [(str(rank), *(with_ratio(at[rank]) for at in by_rank)) for rank in ranks]
    lla_rows = [(f"{ratio}x", *(cell(at[ratio]) if ratio in at else "" for at in by_ratio)) for ratio in ratios]
    lines = [
        "## The number of loops",
        "",
        "One model run with several numbers of loops; HLA (without a window) and LLA fitted to each in closed form.",
        "KL of decoding to the full cache at the same number of loops, in nats (± standard error over sequences), and",
        "how often the likeliest token agrees. HLA by the rank of the main latent, which all loops but the first read;",
        "in brackets how many times smaller the cache of the looped layers is.",
        "",
        *table(["rank", *styles], hla_rows),
        "",
        "LLA by compression:",
        "",
        *table(["compression", *styles], lla_rows),
        *_adapted(found["adapted"], cell),
    ]
    return lines, drawn


def _adapted(found: Result, cell: Callable[[Result], str]) -> list[str]:
    if not found:
        return []
    schemes = {
        "hla": lambda at: f"HLA, ranks {at['rank_k']}, {at['rank_v']} and {at['rank_loop1']}",
        "lla": lambda at: f"LLA, ranks {at['rank_k']} and {at['rank_v']}",
    }
    both = ("fitted", "adapted")
    first = next(iter(found.values()))
    names = [f"{say(first[name]['scheme'])}: {one}" for name, say in schemes.items() for one in both]
    rows = [(steps, *(cell(at[name][one]) for name in schemes for one in both)) for steps, at in found.items()]
    return [
        "",
        "Maps fitted to so many loops, and maps fitted to the model's own number of them and adapted by the rule of",
        "`attention.steps.for_steps`:",
        "",
        *table(["loops", *names], rows),
    ]
