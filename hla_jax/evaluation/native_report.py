"""The report of HLA from the first step against HLA added afterwards: `report.md`, `results.json` and the figures."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hla_jax import tensor_files
from hla_jax.analysis import figures
from hla_jax.evaluation.estimates import bootstrap
from hla_jax.evaluation.markdown import table, three_digits
from hla_jax.evaluation.report import write_sections

NATIVE, STANDARD, UPTRAINED = "native", "standard", "uptrained"
TEXT = "text"
EXACT, AFTER_PROMPT, FROM_FIRST = "exact attention", "HLA after an exact prompt", "HLA from the first token"

_ARMS = {NATIVE: "HLA from the first step", STANDARD: "exact attention", UPTRAINED: "exact attention, then uptraining"}


def write_report(results: Mapping[str, Any], directory: pathlib.Path) -> pathlib.Path:
    """Writes the files, each under a temporary name first.

    Args:
      results: the `command`, the `job`; by arm the `tokens` read, the `answers` (way of reading -> questions -> scores
        of each row), the agreement of `decoding`, and the lines of the `training` metrics.
      directory: gets the files.

    Returns:
      The path of `report.md`.
    """
    with tensor_files.new_file(directory / "results.json") as partial:
        tensor_files.write_json(partial, results)
    questions = [name for name in results["answers"][NATIVE][EXACT] if not name.startswith(TEXT)]
    followed = [name for name in questions if f"right/{name}" in results["training"][NATIVE][0]]
    for name in followed:
        kind = name.split("/")[0]
        figures.save(_learning(results, f"right/{name}"), directory / f"learning_{kind}.png")
    figures.save(_accuracy(results, questions), directory / "accuracy.png")
    job = results["job"]
    scheme, steps = job["scheme"], sum(stage["steps"] for stage in job["recipe"]["stages"])
    uptraining = job["uptrain"]["total_steps"]
    header = [
        "# HLA from the first step of pretraining",
        "",
        f"- command: `{results['command']}`",
        f"- HLA: rank_k {scheme['rank_k']}, rank_v {scheme['rank_v']}, rank_loop1 {scheme['rank_loop1']}, window "
        f"{scheme['window']}; {job['repetitions']} repetitions of the second pass",
        f"- {_ARMS[NATIVE]}: {steps} steps, {results['tokens'][NATIVE]:,} tokens; no exact prompt",
        f"- {_ARMS[UPTRAINED]}: {steps - uptraining} steps, then {uptraining} steps; together "
        f"{results['tokens'][UPTRAINED]:,} tokens, the same batches in the same order",
    ]
    curves = [f"![Learning, {name}](learning_{name.split('/')[0]}.png)" for name in followed]
    return write_sections(
        directory / "report.md",
        [header, _scores(results), ["![Right answers](accuracy.png)", "", *curves], _passes(results), _full(results)],
    )


def _scores(results: Mapping[str, Any]) -> list[str]:
    rows = []
    names = list(results["answers"][NATIVE][EXACT])
    for arm in (STANDARD, UPTRAINED, NATIVE):
        for way, found in results["answers"][arm].items():
            if arm == UPTRAINED and way == EXACT:
                continue  # the same weights as the standard arm's
            cells = []
            for name in names:
                cells.append(_cell(found[name]["cross_entropy"]))
                if not name.startswith(TEXT):
                    cells.append(_cell(found[name]["right"], 100, 1))
            rows.append((f"{_ARMS[arm]}; read with {way}", *cells))
    head = [
        f"{name}: {what}" for name in names for what in (("loss",) if name.startswith(TEXT) else ("loss", "right (%)"))
    ]
    return [
        "## Loss and accuracy",
        "",
        "Held-out rows: questions by kind and tokens of a row, and text; means with 95% bootstrap intervals over rows.",
        "*Loss* is of the answers' tokens (of all tokens of text), in nats a token; *right* are answers that greedy",
        "decoding would give to the last token. Reading with HLA is token by token through the cache, either after one",
        "exact pass over what stands before the first answer, or from the first token on.",
        "",
        *table(["trained with", *head], rows),
    ]


def _passes(results: Mapping[str, Any]) -> list[str]:
    rows = []
    for arm in (UPTRAINED, NATIVE):
        for name, found in results["decoding"][arm]["passes"].items():
            kl, change = found["kl"], found["cross_entropy_change"]
            rows.append((f"{_ARMS[arm]}; {name}", _pair(kl, 1e4), _pair(change, 1e4)))
    return [
        "## Training passes against sequential decoding",
        "",
        "On held-out text from the first token on: KL from sequential decoding to each training procedure, and what",
        "the procedure adds to decoding's cross-entropy, both in 1e-4 nats, with standard errors over rows.",
        "",
        *table(["", "KL", "cross-entropy"], rows),
    ]


def _full(results: Mapping[str, Any]) -> list[str]:
    rows = []
    for arm in (UPTRAINED, NATIVE):
        found = results["decoding"][arm]["full_cache"]
        rows.append((_ARMS[arm], _pair(found["kl"]), _pair(found["top1"], 100)))
    return [
        "## Decoding against the full cache of the same weights",
        "",
        "On the same text. Only the uptrained maps are fitted to exact attention; the native model never predicts with",
        "it, so for its weights the full cache is no reference, and the numbers say how far apart the two have grown.",
        "",
        *table(["", "KL (nats)", "top-1 agreement (%)"], rows),
    ]


def _learning(results: Mapping[str, Any], metric: str) -> figures.Figure:
    curves = {
        arm: {line["tokens"]: 100 * line[metric] for line in results["training"][arm] if metric in line}
        for arm in (STANDARD, NATIVE)
    }
    # At the steps of the arm that trains to the end; the other has no value where it was not scored.
    x = list(curves[NATIVE])
    series = {_ARMS[arm]: [values.get(tokens, np.nan) for tokens in x] for arm, values in curves.items()}
    millions = [tokens / 1e6 for tokens in x]
    label = f"right answers, {metric.removeprefix('right/')} (%)"
    return figures.lines(millions, series, "tokens (millions)", label, ylim=(0, 103))


def _accuracy(results: Mapping[str, Any], questions: Sequence[str]) -> figures.Figure:
    chosen = ((STANDARD, EXACT), (UPTRAINED, FROM_FIRST), (NATIVE, FROM_FIRST))
    found = {
        _ARMS[arm]: [bootstrap(results["answers"][arm][way][name]["right"]) for name in questions]
        for arm, way in chosen
    }
    return figures.bars(
        list(questions),
        {name: [100 * one.mean for one in of] for name, of in found.items()},
        "answers right to the last token (%)",
        intervals={name: [(100 * one.low, 100 * one.high) for one in of] for name, of in found.items()},
        ylim=(0, 115),
        number="{:.0f}",
        xlabel="questions / tokens of a row",
    )


def _pair(estimate: Mapping[str, Any], scale: float = 1) -> str:
    spread = "" if estimate["stderr"] is None else f" ± {three_digits(scale * estimate['stderr'])}"
    return f"{three_digits(scale * estimate['mean'])}{spread}"


def _cell(values: Sequence[float], scale: float = 1, digits: int = 3) -> str:
    found = bootstrap(scale * np.asarray(values))
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"
