"""Figures in one style: colours for colour-blind readers too, markers and hatches that survive print in grey.

Every function returns a matplotlib `Figure`; `save` writes it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib import colors, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hla_jax import tensor_files

_RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.88",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.dpi": 160,
}
# Okabe and Ito's palette, in an order in which neighbours also differ in grey.
_COLOURS = ("#000000", "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_LINES = ("-", "-", "--", "-.", ":", "--", "-.")

# After as many curves as there are colours, hollow markers, and then half hollow ones.
_FILLS = ("full", "none", "left")

# So many whole numbers on a linear axis have a tick each.
_FEW = 8

# A logarithmic axis is used where values differ by more than this factor.
_LOG_FROM = 6.0

# And has ticks at powers of ten alone beyond this one.
_POWERS_FROM = 1e4

Series = Mapping[str, Sequence[float]]
Interval = tuple[float, float]


class Points(NamedTuple):
    """A curve with its own x, and the interval of each y."""

    x: Sequence[float]
    y: Sequence[float]
    intervals: Sequence[Interval]


class Panel(NamedTuple):
    """One of several plots over one kind of x: curve -> points; a logarithmic y, or one with limits."""

    ylabel: str
    curves: Mapping[str, Points]
    log: bool = False
    ylim: tuple[float, float] | None = None


def bars(
    groups: Sequence[str],
    series: Series,
    ylabel: str,
    *,
    intervals: Mapping[str, Sequence[Interval]] | None = None,
    log: bool = False,
    ylim: tuple[float, float] | None = None,
    styles: Sequence[str] | None = None,
    number: str = "{:.2g}",
    xlabel: str = "",
) -> Figure:
    """Bars side by side in each group, with their values above them.

    Args:
      groups: labels along the axis.
      series: name -> one value a group.
      ylabel: what is measured, with its unit.
      intervals: name -> (low, high) of each value, drawn as error bars.
      log: a logarithmic axis, where the values differ enough for one.
      ylim: limits of the axis.
      styles: all names that share one order of colours across figures, where a figure shows some of them.
      number: format of the values.
      xlabel: what the groups are, with its unit.
    """
    with matplotlib.rc_context(_RC):
        slots = len(groups) * len(series)
        figure, axes = _axes(max(4.2 if len(series) < 3 else 5.6, 1.2 + 0.42 * slots), 3.2)
        width = 0.84 / len(series)
        for index, (name, values) in enumerate(series.items()):
            style = _index(name, series, styles) % len(_COLOURS)
            x = np.arange(len(groups)) + (index - (len(series) - 1) / 2) * width
            colour = _COLOURS[style]
            axes.bar(
                x,
                values,
                0.9 * width,
                label=name,
                color=colour if style == 0 else _tint(colour),
                edgecolor=colour,
                hatch=_HATCHES[style],
            )
            tops = list(values)
            if intervals:
                low, high = np.transpose(intervals[name])
                # Rounding may leave a value a little outside its own interval.
                spread = np.maximum([np.subtract(values, low), np.subtract(high, values)], 0)
                axes.errorbar(x, values, spread, fmt="none", ecolor="0.35", elinewidth=0.9, capsize=2)
                tops = list(high)
            for place, top, value in zip(x, tops, values):
                axes.annotate(
                    number.format(value),
                    (place, top),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6.5 if len(series) > 3 else 7.5,
                    color="0.2",
                )
        axes.set_xticks(range(len(groups)), groups)
        axes.tick_params(axis="x", length=0)
        axes.grid(False, axis="x")
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        if log and _spread(series.values()) > _LOG_FROM:
            _log_y(axes)
        axes.margins(y=0.12)
        if ylim:
            axes.set_ylim(*ylim)
        if len(series) > 1:
            _legend(figure, axes, series)
    return figure


def lines(
    x: Sequence[float],
    series: Series,
    xlabel: str,
    ylabel: str,
    *,
    intervals: Mapping[str, Sequence[Interval]] | None = None,
    log_x: bool = False,
    log_y: bool = False,
    ylim: tuple[float, float] | None = None,
    styles: Sequence[str] | None = None,
) -> Figure:
    """Lines with markers over shared `x`; arguments are those of `bars`. A logarithmic x has a tick at each value."""
    with matplotlib.rc_context(_RC):
        figure, axes = _axes(5.2, 3.2)
        for name, values in series.items():
            style = _index(name, series, styles)
            (line,) = axes.plot(x, values, label=name, **_line_style(style))
            if intervals:
                axes.fill_between(x, *np.transpose(intervals[name]), color=line.get_color(), alpha=0.13, linewidth=0)
        if log_x:
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(x), [f"{value:,.0f}" for value in x])
            axes.minorticks_off()
        elif len(x) <= _FEW and all(value == int(value) for value in x):
            axes.set_xticks(list(x), [f"{value:,.0f}" for value in x])
        if log_y and _spread(series.values()) > _LOG_FROM:
            _log_y(axes)
        if ylim:
            axes.set_ylim(*ylim)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        _legend(figure, axes, series)
    return figure


def panels(parts: Sequence[Panel], xlabel: str, *, styles: Sequence[str], ticks: Sequence[float]) -> Figure:
    """Plots side by side over one logarithmic x, with one legend beside them.

    Args:
      parts: the plots.
      xlabel: what all have below.
      styles: all names, in the order that fixes their colours.
      ticks: of the x axis.
    """
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(3.6 * len(parts) + 1.8, 3.6), layout="constrained")
        named: dict[str, Any] = {}
        for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            for name, (x, y, intervals) in part.curves.items():
                low, high = np.transpose(intervals)
                spread = np.maximum([np.subtract(y, low), np.subtract(high, y)], 0)
                named[name] = axes.errorbar(x, y, spread, elinewidth=0.8, **_line_style(styles.index(name)))
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            if part.log:
                _log_y(axes)
            if part.ylim:
                axes.set_ylim(*part.ylim)
            axes.set_xlabel(xlabel)
            axes.set_ylabel(part.ylabel)
        order = [name for name in styles if name in named]
        figure.legend([named[name] for name in order], order, loc="outside right upper")
    return figure


def training_curves(
    loss: tuple[Sequence[float], Sequence[float]], held_out: tuple[Sequence[float], Series], ylabel: str
) -> Figure:
    """The training loss (left) and held-out curves (right), each against the step.

    Args:
      loss: steps and values.
      held_out: steps, and name -> values.
      ylabel: of the held-out curves, with its unit.
    """
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(*loss, color=_COLOURS[0], linewidth=1.2)
        left.set_ylabel("training loss")
        for style, (name, values) in enumerate(held_out[1].items()):
            right.plot(held_out[0], values, label=name, markersize=4, **_line_style(style))
        right.set_ylabel(ylabel)
        right.legend()
        for axes, curves in ((left, [loss[1]]), (right, held_out[1].values())):
            if _spread(curves) > _LOG_FROM:
                _log_y(axes)
            axes.set_xlabel("step")
    return figure


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes a PNG under a temporary name and renames it."""
    with tensor_files.new_file(path) as partial:
        figure.savefig(partial, format="png")


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _spread(curves: Iterable[Sequence[float]]) -> float:
    """Largest over smallest value; 1 where a logarithm does not exist."""
    values = np.concatenate([np.asarray(curve, float) for curve in curves])
    return float(values.max() / values.min()) if values.min() > 0 else 1.0


def _log_y(axes: Axes) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 5, 10, ..., or at powers of ten where those were too many."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    many = high / low > _POWERS_FROM
    axes.yaxis.set_major_locator(ticker.LogLocator(numticks=9) if many else ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def _legend(figure: Figure, axes: Axes, names: Iterable[str]) -> None:
    """Above the plot, so that it hides nothing, in up to three columns of names that fit its width."""
    # Inches of a line's sample, and of a letter.
    entry = 0.42 + 0.06 * max(map(len, names))
    columns = int(np.clip(figure.get_figwidth() / entry, 1, 3))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.2)


def _index(name: str, series: Series, styles: Sequence[str] | None) -> int:
    return list(styles if styles is not None else series).index(name)


def _line_style(index: int) -> dict[str, Any]:
    turn, style = divmod(index, len(_COLOURS))
    fill = _FILLS[turn % len(_FILLS)]
    return {"color": _COLOURS[style], "marker": _MARKERS[style], "linestyle": _LINES[style], "fillstyle": fill}


def _tint(colour: str) -> tuple[float, ...]:
    """A lighter fill, on which the hatch shows."""
    rgb = np.asarray(colors.to_rgb(colour))
    return tuple(1 - 0.55 * (1 - rgb))
