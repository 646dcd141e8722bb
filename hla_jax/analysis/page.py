"""The page of all analyses that are finished: `results.md`, and the figures beside it."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hla_jax.analysis import figures, sweep_page
from hla_jax.analysis.analyses import AROUND_MEAN, AS_THEY_ARE
from hla_jax.analysis.figures import Figure
from hla_jax.analysis.steps_page import steps_section
from hla_jax.analysis.structure import AXES, PROJECTIONS
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.report import write_sections

Result = Mapping[str, Any]
Drawn = dict[str, Figure]

# HLA, Table 3, Ouro-1.4B.
PAPER_R2 = {"keys": (0.66, 0.80, 0.93, 1.00), "values": (0.55, 0.71, 0.89, 1.00)}
PAPER_KEPT = {"keys": (0.80, 0.79), "values": (0.93, 0.89)}


def write_page(results: Mapping[str, Result], facts: Mapping[str, str], directory: pathlib.Path) -> pathlib.Path:
    """Writes the figures and, last, `results.md`, each under a temporary name first.

    Args:
      results: of the finished analyses, by name, as `analyses.ANALYSES` made them.
      facts: what the page says of the run at its top.
      directory: gets the files.

    Returns:
      The path of `results.md`.
    """
    header = ["# Analyses", "", *(f"- {name}: {value}" for name, value in facts.items())]
    sections = [header, _beside_papers(results)]
    for name in _SECTIONS:
        if name in results:
            lines, drawn = _SECTIONS[name](results[name])
            for file, figure in drawn.items():
                figures.save(figure, directory / f"{file}.png")
                lines += ["", f"![{file.replace('_', ' ')}]({file}.png)"]
            sections.append(lines)
    return write_sections(directory / "results.md", sections)


def _beside_papers(results: Mapping[str, Result]) -> list[str]:
    """One table: what the papers found on Ouro, and what was found here."""
    rows: list[tuple[str, str, str]] = []
    if found := results.get("effective_rank"):
        for axis, paper in zip(AXES, ("0.61-0.63", "nearly full", "nearly full"), strict=True):
            rows.append((f"normalised effective rank along {axis}", f"{paper} (LLA)", _rank(found, axis)))
        leading = [_energies(found, "loops", kind, AS_THEY_ARE)[0] for kind in PROJECTIONS]
        around = [_energies(found, "loops", kind, AROUND_MEAN)[0] for kind in PROJECTIONS]
        text = f"{_both(leading, '{:.0%}')}; around their mean {_both(around, '{:.0%}')}"
        rows.append(("energy of the leading direction along loops", "about 60% (LLA)", text))
    if found := results.get("variance"):
        along = [np.mean([one["loop"] + one["both"] for one in found[kind]]) for kind in PROJECTIONS]
        common = [np.mean([one["loop"] for one in found[kind]]) for kind in PROJECTIONS]
        text = f"{_both(along, '{:.0%}')}; common to all tokens {_both(common, '{:.0%}')}"
        rows.append(("share of the variance on the loop axis", "keys 6%, values 17% (LLA)", text))
    if found := results.get("stabilisation"):
        last = [np.mean(found[kind]["step"], axis=0)[-1] for kind in PROJECTIONS]
        text = f"last change {_both(last, '{:.2f}')} of the last loop's size"
        rows.append(("stabilisation", "changes shrink, values later than keys (LLA)", text))
    if found := results.get("ridge"):
        for kind in PROJECTIONS:
            paper = ", ".join(f"{r2:.2f}" for r2 in PAPER_R2[kind])
            here = ", ".join(f"{r2:.2f}" for r2 in np.mean(found[kind], axis=0))
            rows.append((f"R2 from the last hidden state to {kind} of loops 1, 2, ...", f"{paper} (HLA)", here))
    if found := results.get("projection"):
        for kind in PROJECTIONS:
            one, together = _kept(found, kind)
            paper = "one loop {:.2f}, loops 2-4 {:.2f} (HLA)".format(*PAPER_KEPT[kind])
            here = f"one loop {one[1]:.2f}, loops 2-{len(found[kind][0]['alone'])} {together[1]:.2f}"
            rows.append((f"variance of {kind} kept at a quarter of one loop's rank", paper, here))
    if found := results.get("divergence_uptrained", results.get("divergence")):
        attention, kl = (np.mean(found[name], axis=(0, 1)) for name in ("attention", "kl"))
        starts = np.asarray(found["starts"])
        near = (starts >= 1) & (starts < 128)
        when = "uptrained" if "divergence_uptrained" in results else "closed form"
        held, errs = attention[near].sum(), kl[near].sum() / kl.sum()
        text = f"{held:.1%} of the attention, {errs:.1%} of the divergence ({when})"
        rows.append(("distances 1-127", "26.6% of the attention, 48.7% of the divergence (HLA, uptrained)", text))
        units = ", ".join(f"{name}: {k / a:.3f}" for name, k, a in zip(found["ranges"], kl, attention) if a > 0)
        paper = "1-31: 0.040, 32-127: 0.049, 1,024 and more: 0.009 (HLA, uptrained)"
        rows.append(("divergence per unit of attention (nats)", paper, units))
    rows += sweep_page.beside(results)
    head = ["", "Ouro, in the papers", "here"]
    return ["## Beside the papers", "", *table(head, rows), "", *_LEGEND] if rows else []


_LEGEND = [
    "Two numbers are those of keys and of values. Averages are over layers. The text of the LLA paper that was at hand",
    "does not define its effective rank nor its share of the variance; here they are defined below.",
]


def _effective_rank(found: Result) -> tuple[list[str], Drawn]:
    ways = [(kind, way) for way in (AS_THEY_ARE, AROUND_MEAN) for kind in PROJECTIONS]
    series = {
        _way(kind, way): [float(np.mean(found[axis][kind][way]["effective_rank"])) for axis in AXES]
        for kind, way in ways
    }
    energies = {_way(kind, way): list(100 * _energies(found, "loops", kind, way)) for kind, way in ways}
    directions = [f"direction {number + 1}" for number in range(len(next(iter(energies.values()))))]
    drawn = {
        "effective_rank": figures.bars(AXES, series, "normalised effective rank", ylim=(0, 1.12), number="{:.2f}"),
        "loop_energy": figures.bars(directions, energies, "energy along loops (%)", ylim=(0, 108), number="{:.0f}"),
    }
    rows = [
        (
            f"{kind}, {way}, layer {layer + 1}",
            *(f"{found[axis][kind][way]['effective_rank'][layer]:.3f}" for axis in AXES[:2]),
        )
        for kind, way in ways
        for layer in range(len(found["loops"][kind][way]["effective_rank"]))
    ]
    lines = [
        "## Effective rank and energy",
        "",
        "Of every single token's matrix whose rows are the vectors of all loops (or heads, or layers): exp(entropy of",
        "its squared singular values), over the number of rows; 1 is full. Vectors are taken as they are, or around",
        "their mean over all tokens, as LLA's codec takes them. Keys before rotation.",
        "",
        *table(["", "loops", "heads"], rows),
    ]
    return lines, drawn


def _spectra(found: Result) -> tuple[list[str], Drawn]:
    families = [name for name in found if name != "fractions"]
    curves = lambda what, scale: {
        f"{kind}, {family}": [scale * value for value in found[family][kind][what]]
        for kind in PROJECTIONS
        for family in families
    }
    x = [100 * fraction for fraction in found["fractions"]]
    drawn = {
        "variance_by_rank": figures.lines(
            x, curves("variance", 100), "rank (% of the dimensions)", "variance kept (%)", ylim=(0, 103)
        ),
        "singular_values": figures.lines(
            x,
            curves("singular_values", 1),
            "rank (% of the dimensions)",
            "singular value / largest",
            log_y=True,
            ylim=(1e-3, 1),
        ),
    }
    picked = [number for number, fraction in enumerate(found["fractions"]) if fraction in (0.125, 0.25, 0.5, 0.75)]
    rows = [(name, *(f"{values[number]:.1f}" for number in picked)) for name, values in curves("variance", 100).items()]
    lines = [
        "## Singular spectra",
        "",
        "Of vectors around their mean over all tokens: of one loop (all heads together), of loops 2 to T concatenated,",
        "and of one head's trajectory over all loops, which LLA compresses. Averages over layers, loops and heads, on",
        "the data they are fitted to. Variance kept in percent at a share of the full rank:",
        "",
        *table(["", *(f"{found['fractions'][number]:.1%}" for number in picked)], rows),
    ]
    return lines, drawn


def _stabilisation(found: Result) -> tuple[list[str], Drawn]:
    names = {"to_last": "to the last loop", "step": "from the loop before"}
    loops = len(found["keys"]["to_last"][0])
    series, intervals = {}, {}
    for what, text in names.items():
        for kind in PROJECTIONS:
            values = 100 * np.asarray(found[kind][what])
            values = np.pad(values, ((0, 0), (loops - values.shape[1], 0)), constant_values=np.nan)
            series[f"{kind}, {text}"] = list(values.mean(axis=0))
            intervals[f"{kind}, {text}"] = list(zip(values.min(axis=0), values.max(axis=0)))
    x = list(range(1, loops + 1))
    label = "distance (% of the last loop's size)"
    figure = figures.lines(x, series, "loop", label, intervals=intervals, ylim=(0, 1.08 * _highest(intervals)))
    rows = [
        (
            f"{kind}, layer {layer + 1}",
            *(f"{value:.2f}" for value in found[kind]["step"][layer]),
            *(f"{value:.2f}" for value in found[kind]["to_last"][layer][:-1]),
        )
        for kind in PROJECTIONS
        for layer in range(len(found[kind]["step"]))
    ]
    steps = [f"{loop} to {loop + 1}" for loop in x[:-1]]
    lines = [
        "## Stabilisation",
        "",
        "Root mean square over tokens of the difference between the keys (values) of two loops, over that of the last",
        "loop's keys (values): from loop to loop, then from each loop to the last. In the figure averages over layers,",
        "and the range over them.",
        "",
        *table(["", *steps, *(f"{loop} to last" for loop in x[:-1])], rows),
    ]
    return lines, {"stabilisation": figure}


def _variance(found: Result) -> tuple[list[str], Drawn]:
    parts = {"token": "token", "loop": "loop", "both": "token and loop"}
    series = {
        kind: [100 * float(np.mean([one[part] for one in found[kind]])) for part in parts] for kind in PROJECTIONS
    }
    rows = [
        (
            f"{kind}, layer {layer + 1}",
            *(f"{100 * one[part]:.1f}" for part in parts),
            f"{100 * (one['loop'] + one['both']):.1f}",
        )
        for kind in PROJECTIONS
        for layer, one in enumerate(found[kind])
    ]
    lines = [
        "## Variance over tokens and loops",
        "",
        "Analysis of variance, in percent: what a token keeps in all loops (token), what a loop has in common for all",
        "tokens (loop), and how each token moves in its own way. The loop axis has the last two.",
        "",
        *table(["", *parts.values(), "on the loop axis"], rows),
    ]
    return lines, {"variance": figures.bars(list(parts.values()), series, "share of the variance (%)", number="{:.0f}")}


def _ridge(found: Result) -> tuple[list[str], Drawn]:
    means = {kind: [float(value) for value in np.mean(found[kind], axis=0)] for kind in PROJECTIONS}
    loops = [f"loop {loop + 1}" for loop in range(len(means["keys"]))]
    series: dict[str, Sequence[float]] = {**means}
    if len(loops) == len(PAPER_R2["keys"]):
        series |= {f"{kind}, Ouro-1.4B in the paper": PAPER_R2[kind] for kind in PROJECTIONS}
    # A regression can do worse on other data than their mean does.
    low = min(0.0, *(1.1 * value for values in series.values() for value in values))
    figure = figures.bars(loops, series, "held-out R2 from the last loop", ylim=(low, 1.12), number="{:.2f}")
    rows = [
        (f"{kind}, layer {layer + 1}", *(f"{value:.3f}" for value in values))
        for kind in PROJECTIONS
        for layer, values in enumerate(found[kind])
    ]
    lines = [
        "## Ridge regression from the last loop",
        "",
        "R2 on held-out tokens, from the last loop's attention input to each loop's keys and values of the same layer.",
        "The last loop's own are a linear map of it.",
        "",
        *table(["", *loops], rows),
    ]
    return lines, {"ridge": figure}


def _projection(found: Result) -> tuple[list[str], Drawn]:
    ranks = [f"rank {rank:,}" for rank in found["ranks"]]
    series: dict[str, Sequence[float]] = {}
    for kind in PROJECTIONS:
        one, together = _kept(found, kind)
        series |= {
            f"{kind}, one loop": list(100 * one),
            f"{kind}, loops 2-{len(found[kind][0]['alone'])}": list(100 * together),
        }
    figure = figures.bars(ranks, series, "held-out variance kept (%)", ylim=(0, 112), number="{:.0f}")
    rows = []
    for kind in PROJECTIONS:
        alone = np.mean([one["alone"] for one in found[kind]], axis=0)
        together = np.mean([one["together"] for one in found[kind]], axis=0)
        rows += [(f"{kind}, loop {loop + 1}", *(f"{value:.3f}" for value in line)) for loop, line in enumerate(alone)]
        rows += [(f"{kind}, loops 2-{len(alone)} jointly", *(f"{value:.3f}" for value in together))]
    lines = [
        "## Variance kept by a projection",
        "",
        f"On held-out tokens, by the leading principal directions of one loop ({found['dimensions']:,} dimensions) or",
        "of loops 2 to T concatenated. In the figure, one loop is the average of loops 2 to T, each alone.",
        "",
        *table(["", *ranks], rows),
    ]
    return lines, {"projection": figure}


def _divergence(found: Result, name: str, title: str) -> tuple[list[str], Drawn]:
    attention, kl = (np.mean(found[name], axis=0) for name in ("attention", "kl"))
    ranges, loops = found["ranges"], [f"loop {loop + 1}" for loop in range(len(kl))]
    split = {
        "attention": list(100 * attention.mean(axis=0)),
        "divergence": list(100 * kl.mean(axis=0) / kl.mean(axis=0).sum()),
    }
    per_unit = kl / np.where(attention > 0, attention, 1)
    by_loop = {name: list(values) for name, values in zip(loops, per_unit)}
    drawn = {
        f"{name}_split": figures.bars(ranges, split, "share (%)", number="{:.0f}", xlabel=_DISTANCE),
        f"{name}_per_attention": figures.bars(
            ranges, by_loop, "KL per unit of attention (nats)", log=True, number="{:.2g}", xlabel=_DISTANCE
        ),
    }
    shares = 100 * kl / kl.sum(axis=1, keepdims=True)
    rows = [
        ("attention (%), all loops", *(f"{value:.1f}" for value in split["attention"]), ""),
        ("divergence (%), all loops", *(f"{value:.1f}" for value in split["divergence"]), f"{kl.sum(1).mean():.4f}"),
        *(
            (f"divergence (%), {name}", *(f"{value:.1f}" for value in line), f"{total:.4f}")
            for name, line, total in zip(loops, shares, kl.sum(axis=1))
        ),
        *(
            (f"nats per unit of attention, {name}", *(f"{value:.3f}" for value in line), "")
            for name, line in zip(loops, per_unit)
        ),
    ]
    scheme = ", ".join(f"{name} {value}" for name, value in found["scheme"].items())
    lines = [
        f"## {title}",
        "",
        f"HLA ({scheme}) on the exact model's hidden states:",
        "attention and the nonnegative terms of its KL divergence (equation 8 of the HLA paper) by the distance, in",
        "tokens, to the attended token; averages over layers, heads, queries and held-out sequences. The last column",
        "is the whole KL in nats.",
        "",
        *table(["", *ranges, "KL (nats)"], rows),
    ]
    return lines, drawn


_DISTANCE = "distance to the attended token (tokens)"

_SECTIONS: dict[str, Callable[[Result], tuple[list[str], Drawn]]] = {
    "effective_rank": _effective_rank,
    "spectra": _spectra,
    "stabilisation": _stabilisation,
    "variance": _variance,
    "ridge": _ridge,
    "projection": _projection,
    "divergence": functools.partial(_divergence, name="divergence", title="Where the latent errs"),
    "divergence_uptrained": functools.partial(
        _divergence, name="divergence_uptrained", title="Where the latent errs after a short uptraining"
    ),
    **sweep_page.SECTIONS,
    "steps": steps_section,
}


def _way(kind: str, way: str) -> str:
    return kind if way == AS_THEY_ARE else f"{kind}, {way}"


def _rank(found: Result, axis: str) -> str:
    """Keys and values, taken in both ways."""
    mean = lambda way: [np.mean(found[axis][kind][way]["effective_rank"]) for kind in PROJECTIONS]
    return f"{_both(mean(AS_THEY_ARE), '{:.2f}')}; around their mean {_both(mean(AROUND_MEAN), '{:.2f}')}"


def _energies(found: Result, axis: str, kind: str, way: str) -> np.ndarray:
    """Averaged over layers."""
    return np.mean(found[axis][kind][way]["energy"], axis=0)


def _kept(found: Result, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """By rank: of loops 2 .. T each alone, averaged over them, and of all of them jointly."""
    alone = np.mean([one["alone"] for one in found[kind]], axis=0)
    return alone[min(1, len(alone) - 1) :].mean(axis=0), np.mean([one["together"] for one in found[kind]], axis=0)


def _both(values: Sequence[Any], number: str) -> str:
    return ", ".join(number.format(value) for value in values)


def _highest(intervals: Mapping[str, Sequence[tuple[float, float]]]) -> float:
    return float(np.nanmax([high for pairs in intervals.values() for _, high in pairs]))
