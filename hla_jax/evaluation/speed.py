"""Decoding speed of several caches side by side: what one step costs at a given context length.

Caches are not filled by a prompt: the time of a step depends on how many tokens are stored, not on what they hold.
Rounds go through all schemes in turn, so that a machine that slows down slows all of them; ratios are taken within one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from hla_jax.attention.outer import whole
from hla_jax.attention.scheme import Attention
from hla_jax.evaluation.schemes import FULL, Schemes, distinct
from hla_jax.generation import decode
from hla_jax.generation.sampling import Sampling, request_keys
from hla_jax.model import Model

_PAGE = 512
"""Kernels read a cache in blocks that divide its capacity; this suits all of them."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median over rounds, and the quartiles."""

    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """Speed at one context length.

    Attributes:
      context: tokens stored before the first measured step.
      batch: sequences decoded together.
      tokens_per_second: scheme -> new tokens a second, summed over the batch; median over rounds.
      ratio: scheme -> its speed over the full cache's in the same round; empty without a full cache.
    """

    context: int
    batch: int
    tokens_per_second: dict[str, float]
    ratio: dict[str, Ratio]


def decode_speed(
    model: Model,
    schemes: Schemes,
    contexts: Sequence[int],
    *,
    batch: int = 1,
    new_tokens: int = 16,
    rounds: int = 5,
    kernels: bool = False,
) -> list[Speed]:
    """Greedy decoding of `new_tokens` tokens in one dispatch, for every distinct scheme at every context length.

    Compilation is not counted. All schemes' caches at one context length are held together. A scheme that does not fit
    the device's memory is left out at that context, and said so.

    Args:
      model: the model.
      schemes: name -> scheme and maps. Ratios are over the one of them that is called `FULL`.
      contexts: tokens stored before decoding starts.
      batch: sequences.
      new_tokens: tokens timed at once.
      rounds: repetitions.
      kernels: whether decoding goes through kernels, which read no more than what is stored: then all contexts share a
        cache of the longest one's size, and compile once.
    """
    schemes = distinct(schemes)
    speeds: list[Speed] = []
    runs: dict[str, _Run] = {}
    with tqdm(total=len(contexts) * rounds * len(schemes), desc="decoding speed", unit="run") as bar:
        for context in contexts:
            if not (runs and kernels):
                runs.clear()
                capacity = _whole_pages(max(contexts) + new_tokens) if kernels else context + new_tokens
                runs |= _runs(model, schemes, capacity, batch, new_tokens)
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(rounds):
                for name, run in runs.items():
                    seconds[name].append(run.seconds(context))
                    bar.update()
            speeds.append(_summary(context, batch, new_tokens, seconds))
    return speeds


def throughput(
    model: Model,
    attention: Attention,
    context: int,
    batches: Sequence[int],
    *,
    new_tokens: int = 16,
    rounds: int = 3,
    kernels: bool = False,
) -> list[Speed]:
    """Speed of one scheme, as `FULL`, at one context length with more and more sequences, as long as memory holds
    them.
    """
    settings: dict[str, Any] = dict(new_tokens=new_tokens, rounds=rounds, kernels=kernels)
    found: list[Speed] = []
    for batch in batches:
        (speed,) = decode_speed(model, {FULL: attention}, [context], batch=batch, **settings)
        if not speed.tokens_per_second:
            break
        found.append(speed)
    return found


def doubling(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest`."""
    return [1 << power for power in range(largest.bit_length()) if 1 << power < largest] + [largest] * (largest > 0)


def median_seconds(call: Callable[[], Any], rounds: int) -> float:
    """Median time of a call, compilation left out."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _whole_pages(tokens: int) -> int:
    return -(-tokens // _PAGE) * _PAGE


def _runs(model: Model, schemes: Schemes, capacity: int, batch: int, new_tokens: int) -> dict[str, _Run]:
    runs = {}
    for name, attention in schemes.items():
        try:
            runs[name] = _Run(model, attention, capacity, batch, new_tokens)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            tqdm.write(f"{name}: {batch} sequences of {capacity:,} tokens do not fit the device's memory")
    return runs


def _summary(context: int, batch: int, new_tokens: int, seconds: dict[str, list[float]]) -> Speed:
    per_second = {name: batch * new_tokens / float(np.median(times)) for name, times in seconds.items()}
    ratios = {name: np.divide(seconds[FULL], times) for name, times in seconds.items()} if FULL in seconds else {}
    quartiles = {name: Ratio(*np.quantile(ratio, (0.5, 0.25, 0.75)).tolist()) for name, ratio in ratios.items()}
    return Speed(context, batch, per_second, quartiles)


class _Run:
    """Decoding `new_tokens` tokens through one cache, again and again."""

    def __init__(self, model: Model, attention: Attention, capacity: int, batch: int, new_tokens: int) -> None:
        self._model, self._attention = model, attention
        self._new_tokens = new_tokens
        dtype = model.params["embed_tokens"].dtype
        self._keys = request_keys(jnp.arange(batch, dtype=jnp.uint32))
        self._limit = jnp.full(batch, jnp.iinfo(jnp.int32).max, jnp.int32)
        cache = whole(model.config, attention.scheme).init_cache(model.config, batch, capacity, dtype)
        zeros = jnp.zeros(batch, jnp.int32)
        self._progress = decode.Progress(cache, zeros, zeros + 1, jnp.zeros(batch, bool))
        self.seconds(capacity - new_tokens)  # compiles

    def seconds(self, context: int) -> float:
        """Time of one dispatch with `context` tokens stored before."""
        progress = self._progress
        cache = dataclasses.replace(progress.cache, lengths=jnp.full_like(progress.made, context))
        progress = dataclasses.replace(progress, cache=cache)
        jax.block_until_ready(progress)
        start = time.perf_counter()
        out, self._progress = decode.advance(
            self._model.params,
            self._model.config,
            self._attention,
            progress,
            Sampling(),
            self._keys,
            jnp.zeros(0, jnp.int32),
            self._limit,
            self._new_tokens,
        )
        jax.block_until_ready(out)
        return time.perf_counter() - start
