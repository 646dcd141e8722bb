"""Whether a port of a released model, and the theory on top of it, give the numbers that the papers published.

Everything here is without training: counts, the structure of the cache, and HLA in closed form. Each check takes a
`Subject` and returns measured numbers by name; `verdicts` holds them against `PUBLISHED`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from tqdm.auto import tqdm

from hla_jax.analysis import analyses
from hla_jax.analysis.analyses import AROUND_MEAN, AS_THEY_ARE, Subject
from hla_jax.analysis.bench import resized
from hla_jax.analysis.structure import AXES, PROJECTIONS
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.calibration.calibrate import calibrate
from hla_jax.config import OURO_1P4B, OURO_2P6B, ModelConfig, OuroConfig
from hla_jax.evaluation.cost import map_numbers
from hla_jax.evaluation.fidelity import attention_divergence

Measured = dict[str, float]

# Ranks of the HLA paper's table 6 in sixteenths of one loop's numbers of a token (128 of 2,048, ...).
_SIXTEENTHS = (1, 2, 4, 8, 16)
_WINDOW = 128


@dataclasses.dataclass(frozen=True)
class Published:
    """A published number.

    Attributes:
      value, tolerance: measured ones pass within the tolerance, which allows for other data and for rounding.
      source: where it stands.
      defined: whether the paper's text says what exactly it is; where it does not, ours may be another number, and
        being apart is no failure.
    """

    value: float
    tolerance: float
    source: str
    defined: bool = True


Verdict = Literal["pass", "fail", "differs", "no published value"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One number, held against what was published."""

    check: str
    name: str
    measured: float
    published: Published | None
    verdict: Verdict


def ranks(config: ModelConfig, window: int) -> HLA:
    """The paper's ranks (512, 512 and 256 where one loop has 2,048 numbers) in proportion to the model."""
    return HLA(_rank(config, 4), _numbers(config) // 4, _rank(config, 2), window)


# The checks.


def sizes(subject: Subject) -> Measured:
    """Parameters of the model and of HLA's maps, and bytes of the caches in 16 bits."""
    config = subject.model.config
    scheme = ranks(config, _WINDOW)
    kib = lambda scheme, tokens: scheme.cache_bytes(config, tokens, np.dtype(np.float16)) / 1024
    token = lambda scheme: kib(scheme, 1) - kib(scheme, 0)
    return {
        "parameters of the model": float(sum(leaf.size for leaf in jax.tree.leaves(subject.model.params))),
        "parameters of HLA's maps": float(map_numbers(config, scheme)),
        "full cache, KiB a token": token(FullCache()),
        "HLA, KiB a token": token(scheme),
        "HLA's window, MiB a sequence": kib(scheme, 0) / 1024,
    }


def effective_rank(subject: Subject) -> Measured:
    """Of single tokens' keys and values along loops, heads and layers, by both ways to take them."""
    found = analyses.effective_rank(subject)
    measured: Measured = {}
    for axis in AXES:
        for kind in PROJECTIONS:
            for way in (AS_THEY_ARE, AROUND_MEAN):
                rank = np.mean(found[axis][kind][way]["effective_rank"])
                measured[f"effective rank of {kind} along {axis}, {way}"] = float(rank)
    for kind in PROJECTIONS:
        for way in (AS_THEY_ARE, AROUND_MEAN):
            energy = np.mean(found["loops"][kind][way]["energy"], axis=0)[0]
            measured[f"leading direction's energy of {kind} along loops, {way}"] = float(energy)
    return measured


def cache_structure(subject: Subject) -> Measured:
    """HLA's table 3, averaged over layers, and the share of the variance that LLA reports along loops."""
    loops = subject.model.config.num_loops
    measured: Measured = {}
    r2, kept, shares = analyses.ridge(subject), analyses.projection(subject), analyses.variance(subject)
    quarter = kept["ranks"].index(kept["dimensions"] // 4)
    for kind in PROJECTIONS:
        for loop, value in enumerate(np.mean(r2[kind], axis=0)):
            measured[f"R2 of {kind} of loop {loop + 1} from the last hidden state"] = float(value)
        alone = np.mean([[layer["alone"][loop][quarter] for loop in subject.later_loops] for layer in kept[kind]])
        together = np.mean([layer["together"][quarter] for layer in kept[kind]])
        measured[f"variance of {kind} kept at rank {kept['dimensions'] // 4}, one loop"] = float(alone)
        measured[f"variance of {kind} kept at rank {kept['dimensions'] // 4}, loops 2-{loops}"] = float(together)
        measured[f"share of the variance of {kind} along loops"] = float(
            np.mean([layer["loop"] + layer["both"] for layer in shares[kind]])
        )
    return measured


def errors_by_rank(subject: Subject) -> Measured:
    """HLA's table 6: closed-form maps without a window, one rank varied at a time."""
    config = subject.model.config
    numbers, centre = _numbers(config), ranks(config, window=0)
    sixteenths = lambda most: sorted({_rank(config, n) for n in _SIXTEENTHS if n <= most})
    cells = [(f"KL of loops 2-{config.num_loops}, key rank {rank}", {"rank_k": rank}) for rank in sixteenths(16)]
    cells += [(f"output error, value rank {numbers * n // 16}", {"rank_v": numbers * n // 16}) for n in _SIXTEENTHS]
    cells += [(f"KL of loop 1, loop-1 rank {rank}", {"rank_loop1": rank}) for rank in sixteenths(8)]
    largest = HLA(_rank(config, 16), numbers, _rank(config, 8), window=0)
    fitted = calibrate(subject.model, largest, subject.rows)
    measured: Measured = {}
    for name, change in tqdm(cells, desc="errors by rank", unit="size"):
        part = resized(fitted, dataclasses.replace(centre, **change), config)
        # Zeros behind the maps, so that one program serves all sizes.
        found = attention_divergence(subject.model, resized(part, largest, config), subject.held_out_rows)
        later, first = np.mean(found.kl[1:]), found.kl[0]
        of_rank: dict[str, Any] = {"rank_k": later, "rank_v": np.mean(found.error[1:]), "rank_loop1": first}
        measured[name] = float(of_rank[next(iter(change))])
    return measured


def initial_divergence(subject: Subject) -> Measured:
    """KL of HLA's attention at initialisation, with its window, over all loops and layers (HLA, section 5.3)."""
    fitted = calibrate(subject.model, ranks(subject.model.config, _WINDOW), subject.rows)
    found = attention_divergence(subject.model, fitted, subject.held_out_rows)
    return {f"KL of HLA's attention at initialisation, window {_WINDOW}": found.mean_kl}


CHECKS: dict[str, Callable[[Subject], Measured]] = {
    "sizes": sizes,
    "effective_rank": effective_rank,
    "cache_structure": cache_structure,
    "errors_by_rank": errors_by_rank,
    "initial_divergence": initial_divergence,
}
WITHOUT_DATA = {"sizes"}
"""Checks that look at the model alone."""


# What was published.


def released(config: OuroConfig, name: str) -> str | None:
    """Which released model this is by its sizes, and a Thinking variant by its name; None for another."""
    shapes = lambda config: dataclasses.replace(
        config, early_exit_threshold=1.0, bos_token_id=None, eos_token_ids=(), pad_token_id=None
    )
    for size, known in (("Ouro-1.4B", OURO_1P4B), ("Ouro-2.6B", OURO_2P6B)):
        if shapes(config) == shapes(known):
            return f"{size}-Thinking" if "thinking" in name.lower() else size
    return None


def _published_sizes(parameters: int, maps: float, layers: int) -> dict[str, Published]:
    return {
        "parameters of the model": Published(parameters, 0, "the released shapes"),
        "parameters of HLA's maps": Published(maps, 5e6, "HLA, section 4.1"),
        "full cache, KiB a token": Published(32 * layers, 0, "HLA, section 5.1"),
        "HLA, KiB a token": Published(3 * layers, 0, "HLA, section 5.1"),
        "HLA's window, MiB a sequence": Published(4 * layers, 0, "HLA, section 5.1"),
    }


def _published_structure() -> dict[str, Published]:
    """LLA's section 4, for Ouro-1.4B and Ouro-2.6B-Thinking; its text, as it was at hand, defines none of them."""
    source = "LLA, section 4"
    rows = {
        f"effective rank of {kind} along loops, {way}": Published(0.62, 0.03, source, defined=False)
        for kind in PROJECTIONS
        for way in (AS_THEY_ARE, AROUND_MEAN)
    }
    rows |= {
        f"leading direction's energy of {kind} along loops, {way}": Published(0.60, 0.05, source, defined=False)
        for kind in PROJECTIONS
        for way in (AS_THEY_ARE, AROUND_MEAN)
    }
    along = lambda value: Published(value, 0.02, source, defined=False)
    return rows | {
        "share of the variance of keys along loops": along(0.06),
        "share of the variance of values along loops": along(0.17),
    }


def _published_tables() -> dict[str, Published]:
    """Tables 3 and 6 of the HLA paper, which are of Ouro-1.4B."""
    rows: dict[str, Published] = {}
    for kind, values in (("keys", (0.66, 0.80, 0.93, 1.00)), ("values", (0.55, 0.71, 0.89, 1.00))):
        for loop, value in enumerate(values, start=1):
            name = f"R2 of {kind} of loop {loop} from the last hidden state"
            rows[name] = Published(value, 0.03, "HLA, table 3")
    for kind, alone, together in (("keys", 0.80, 0.79), ("values", 0.93, 0.89)):
        rows[f"variance of {kind} kept at rank 512, one loop"] = Published(alone, 0.02, "HLA, table 3")
        rows[f"variance of {kind} kept at rank 512, loops 2-4"] = Published(together, 0.02, "HLA, table 3")
    columns: dict[str, tuple[tuple[int, float], ...]] = {
        "KL of loops 2-4, key rank": ((128, 1.04), (256, 0.51), (512, 0.29), (1024, 0.11), (2048, 0.03)),
        "output error, value rank": ((128, 0.42), (256, 0.37), (512, 0.30), (1024, 0.22), (2048, 0.16)),
        "KL of loop 1, loop-1 rank": ((128, 1.04), (256, 0.44), (512, 0.23), (1024, 0.08)),
    }
    for column, cells in columns.items():
        for rank, value in cells:
            rows[f"{column} {rank}"] = Published(value, max(0.02, 0.15 * value), "HLA, table 6")
    return rows


def _published_initial(value: float) -> dict[str, Published]:
    return {f"KL of HLA's attention at initialisation, window {_WINDOW}": Published(value, 0.02, "HLA, section 5.3")}


_SIZES_1P4B = _published_sizes(1_434_652_673, 0.35e9, 24)
_SIZES_2P6B = _published_sizes(2_667_974_657, 0.70e9, 48)
PUBLISHED: dict[str, dict[str, Published]] = {
    "Ouro-1.4B": _SIZES_1P4B | _published_structure() | _published_tables() | _published_initial(0.13),
    "Ouro-1.4B-Thinking": _SIZES_1P4B,
    "Ouro-2.6B": _SIZES_2P6B | _published_initial(0.11),
    "Ouro-2.6B-Thinking": _SIZES_2P6B | _published_structure(),
}


def verdicts(found: Mapping[str, Measured], published: Mapping[str, Published]) -> list[Row]:
    """Every measured number with its verdict. NaN never passes."""
    return [
        Row(check, name, value, published.get(name), _verdict(value, published.get(name)))
        for check, measured in found.items()
        for name, value in measured.items()
    ]


def _verdict(value: float, published: Published | None) -> Verdict:
    if published is None:
        return "no published value"
    # A value at the very edge of its tolerance is inside, whatever the last bit of the difference.
    edge = 1e-9 * max(1.0, abs(published.value)) if published.tolerance else 0.0
    if not math.isnan(value) and abs(value - published.value) <= published.tolerance + edge:
        return "pass"
    return "fail" if published.defined else "differs"


def _numbers(config: ModelConfig) -> int:
    """Numbers in one loop's keys of a token and layer."""
    return config.num_kv_heads * config.head_dim


def _rank(config: ModelConfig, sixteenths: int) -> int:
    """A rank of keys in whole heads."""
    return max(_numbers(config) * sixteenths // 16 // config.head_dim, 1) * config.head_dim
