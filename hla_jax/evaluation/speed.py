"""Decoding speed of several caches side by side: what one step costs at a given context length.

Caches are not filled by a prompt: the time of a step depends on how many tokens are stored, not on what they hold.
Rounds go through all schemes in turn, so that a machine that slows down slows all of them; ratios are taken within one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from hla_jax.attention.scheme import Attention
from hla_jax.evaluation.schemes import FULL, Schemes, distinct
from hla_jax.generation import decode
from hla_jax.generation.sampling import Sampling, request_keys
from hla_jax.model import Model


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
      ratio: scheme -> its speed over the full cache's in the same round.
    """

    context: int
    batch: int
    tokens_per_second: dict[str, float]
    ratio: dict[str, Ratio]


def decode_speed(
    model: Model, schemes: Schemes, contexts: Sequence[int], *, batch: int = 1, new_tokens: int = 16, rounds: int = 5
) -> list[Speed]:
    """Greedy decoding of `new_tokens` tokens in one dispatch, for every distinct scheme at every context length.

    Compilation is not counted. All schemes' caches at one context length are held together.

    Args:
      model: the model.
      schemes: name -> scheme and maps, among them the full cache as `FULL`.
      contexts: tokens stored before decoding starts.
      batch: sequences.
      new_tokens: tokens timed at once.
      rounds: repetitions.
    """
    schemes = distinct(schemes)
    speeds = []
    with tqdm(total=len(contexts) * rounds * len(schemes), desc="decoding speed", unit="run") as bar:
        for context in contexts:
            runs = {name: _Run(model, attention, context, batch, new_tokens) for name, attention in schemes.items()}
            seconds: dict[str, list[float]] = {name: [] for name in schemes}
            for _ in range(rounds):
                for name, run in runs.items():
                    seconds[name].append(run.seconds())
                    bar.update()
            speeds.append(_summary(context, batch, new_tokens, seconds))
    return speeds


def _summary(context: int, batch: int, new_tokens: int, seconds: dict[str, list[float]]) -> Speed:
    per_second = {name: batch * new_tokens / float(np.median(times)) for name, times in seconds.items()}
    ratios = {name: np.divide(seconds[FULL], times) for name, times in seconds.items()}
    quartiles = {name: Ratio(*np.quantile(ratio, (0.5, 0.25, 0.75)).tolist()) for name, ratio in ratios.items()}
    return Speed(context, batch, per_second, quartiles)


class _Run:
    """Decoding through one cache, again and again from the same context length."""

    def __init__(self, model: Model, attention: Attention, context: int, batch: int, new_tokens: int) -> None:
        self._model, self._attention = model, attention
        self._context, self._new_tokens = context, new_tokens
        dtype = model.params["embed_tokens"].dtype
        self._keys = request_keys(jnp.arange(batch, dtype=jnp.uint32))
        self._limit = jnp.full(batch, jnp.iinfo(jnp.int32).max, jnp.int32)
        cache = attention.scheme.init_cache(model.config, batch, context + new_tokens, dtype)
        zeros = jnp.zeros(batch, jnp.int32)
        self._progress = decode.Progress(cache, zeros, zeros + 1, jnp.zeros(batch, bool))
        self.seconds()  # compiles

    def seconds(self) -> float:
        """Time of one dispatch."""
        progress = self._progress
        cache = dataclasses.replace(progress.cache, lengths=jnp.full_like(progress.made, self._context))
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
