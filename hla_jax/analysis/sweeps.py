"""What ranks, window, shifted positions and the start of training do to a latent cache, before and after a short
training: one function a question, each a few cells of the `Bench`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from hla_jax.analysis import analyses
from hla_jax.analysis.bench import Bench, Result
from hla_jax.analysis.divergence import by_shift
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Scheme
from hla_jax.evaluation.comparison import bytes_of
from hla_jax.evaluation.schemes import FULL

RANKS = ("rank_k", "rank_v", "rank_loop1")
BEFORE, WITHOUT, WITH = "before both", "without shifted positions", "with shifted positions"
SVD, RANDOM = "SVD", "random maps"


def rank_sweep(bench: Bench) -> Result:
    """One rank at a time, without a window, at initialisation (HLA, Table 6); and some sizes before and after
    uptraining (Table 7).
    """
    sizes = bench.sweeps
    centre = dataclasses.replace(sizes.scheme, window=0)
    varied = {name: [dataclasses.replace(centre, **{name: rank}) for rank in getattr(sizes, name)] for name in RANKS}
    cells = [scheme for schemes in varied.values() for scheme in schemes]
    found = dict(zip(cells, _measured(bench, "ranks at initialisation", cells, False), strict=True))
    return {
        "scheme": centre.to_config(),
        "width": bench.subject.model.config.num_kv_heads * bench.subject.model.config.head_dim,
        "initial": {
            name: [{"rank": getattr(scheme, name)} | found[scheme] for scheme in schemes]
            for name, schemes in varied.items()
        },
        "trained": _before_and_after(bench, "ranks", sizes.trained),
    }


def window_sweep(bench: Bench) -> Result:
    """The window before and after uptraining (HLA, Table 4 and Appendix G)."""
    schemes = [dataclasses.replace(bench.sweeps.scheme, window=window) for window in bench.sweeps.windows]
    return {"trained": _before_and_after(bench, "windows", schemes)}


def divergence_uptrained(bench: Bench) -> Result:
    """`analyses.divergence` of uptrained maps without a window, as the paper has it (HLA, Figure 4)."""
    scheme = dataclasses.replace(bench.sweeps.scheme, window=0)
    return analyses.divergence(dataclasses.replace(bench.subject, make_attention=lambda: bench.uptrained(scheme)))


def shifted_positions(bench: Bench) -> Result:
    """The divergence of queries that are moved later, for uptrained maps and after two continuations of their training
    that differ in shifted positions alone (HLA, Figure 5a); by shift and loop, averaged over layers.
    """
    sweep, subject = bench.sweeps.shifted, bench.subject
    trained = {
        BEFORE: lambda: bench.uptrained(bench.sweeps.scheme),
        WITHOUT: lambda: bench.continued(shifted=False),
        WITH: lambda: bench.continued(shifted=True),
    }

    def measure(name: str) -> Result:
        model, sizes = subject.model, {"queries": sweep.queries, "gap": sweep.gap}
        kl = by_shift(model.params, model.config, trained[name](), subject.held_out_rows, sweep.by, **sizes)
        return {"kl": kl.mean(axis=1).tolist()}

    cells = tqdm(trained, desc="shifted positions", unit="cell")
    kl = {name: bench.kept(f"shifted {name}", lambda: measure(name))["kl"] for name in cells}  # noqa: B023
    sizes = {"by": sweep.by, "queries": sweep.queries, "gap": sweep.gap}
    return {"scheme": bench.sweeps.scheme.to_config(), **sizes, "kl": kl}


def initialisation(bench: Bench) -> Result:
    """Held-out KL over the steps of distillation, from closed-form and from random maps (LLA, section 3 and Figure
    12).
    """
    scheme = bench.sweeps.lla
    curves = {}
    for name, random in tqdm(((SVD, False), (RANDOM, True)), desc="initialisation", unit="cell"):
        bench.distilled(scheme, random)
        curves[name] = bench.held_out_curve(scheme, random)
    return {"scheme": scheme.to_config(), "ratio": _ratio(bench, scheme), "curves": curves}


def passkey(bench: Bench) -> Result:
    """Questions answered rightly through each cache, by context and compression (LLA, section 6 and Table 12), in the
    order of the compression.
    """
    sweep = bench.sweeps.passkey
    schemes = sorted([FullCache(), bench.sweeps.scheme, *sweep.schemes], key=lambda scheme: _ratio(bench, scheme))
    ratios: dict[str, float] = {}
    right: dict[str, list[int]] = {}
    for scheme in tqdm(schemes, desc=sweep.kind, unit="cache"):
        ratio = _ratio(bench, scheme)
        name = FULL if scheme == FullCache() else f"{type(scheme).__name__} {ratio:.3g}x"
        fitted = functools.cache(functools.partial(bench.fitted, scheme))
        ask = lambda context: {"right": bench.ask(fitted(), context)}  # noqa: B023
        cells = [bench.kept(f"{sweep.kind}_{context} {name}", lambda: ask(context)) for context in sweep.contexts]  # noqa: B023
        ratios[name], right[name] = ratio, [cell["right"] for cell in cells]
    sizes = {"kind": sweep.kind, "contexts": sweep.contexts, "questions": sweep.questions}
    return {**sizes, "ratio": ratios, "right": right}


def quality(bench: Bench) -> Result:
    """The cells of a comparison that `experiments.compare` measured: quality against bytes."""
    return bench.comparison()


SWEEPS: dict[str, Callable[[Bench], Result]] = {
    "rank_sweep": rank_sweep,
    "window_sweep": window_sweep,
    "divergence_uptrained": divergence_uptrained,
    "shifted_positions": shifted_positions,
    "initialisation": initialisation,
    "passkey": passkey,
    "quality": quality,
}


def _measured(bench: Bench, what: str, schemes: Sequence[HLA], trained: bool) -> list[Result]:
    cells = tqdm(schemes, desc=f"{what}{', uptrained' if trained else ''}", unit="cell")
    return [bench.measured(scheme, trained) for scheme in cells]


def _before_and_after(bench: Bench, what: str, schemes: Sequence[HLA]) -> list[Result]:
    before, after = (_measured(bench, what, schemes, trained) for trained in (False, True))
    return [
        {"scheme": scheme.to_config(), "bytes": _bytes(bench, scheme), "before": one, "after": other}
        for scheme, one, other in zip(schemes, before, after, strict=True)
    ]


def _bytes(bench: Bench, scheme: Scheme) -> dict[str, Any]:
    """Of the cache in 16 bits."""
    found = bytes_of(bench.subject.model.config, scheme, bench.subject.held_out_rows.shape[1])
    return {"per_token": found.per_token, "per_sequence": found.per_sequence, "ratio": found.ratio}


def _ratio(bench: Bench, scheme: Scheme) -> float:
    return float(np.round(_bytes(bench, scheme)["ratio"], 3))
