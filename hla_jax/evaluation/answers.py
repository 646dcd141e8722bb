"""Answers under teacher forcing: their cross-entropy, and how many greedy decoding would give to the last token.

Greedy decoding gives an answer exactly if each of its tokens is the most likely one after the true ones before it. So
one pass over questions and answers tells, whether in parallel or token by token through a cache.

Rows are dicts of arrays [N, S] as the two-pass loss takes them: `tokens`, `segments` (1, and 0 for padding on the
right) and `response`; every run of response tokens is an answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.attention.scheme import Attention, Cache
from hla_jax.config import ModelConfig
from hla_jax.generation import decode
from hla_jax.models.stages import Params
from hla_jax.training.two_pass import next_token_errors, predicted

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Rows = dict[str, np.ndarray]
Hidden = Callable[[Array], Array]
"""Tokens [B, S] -> hidden states [B, S, d]."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """Row by row, [N].

    Attributes:
      cross_entropy: of the response tokens, nats a token.
      right: fraction of the row's answers of which every token is the most likely one.
    """

    cross_entropy: Float[np.ndarray, " N"]
    right: Float[np.ndarray, " N"]


def score(rows: Rows, errors: Float[np.ndarray, "N S"], most_likely: Float[np.ndarray, "N S"]) -> Answers:
    """From the errors of each token's successor, as `next_token_errors` gives them."""
    counted = np.asarray(predicted(jnp.asarray(rows["response"], bool), jnp.asarray(rows["segments"])))
    cross_entropy = (errors * counted).sum(1) / np.maximum(counted.sum(1), 1)
    # Numbers the answers of a row: a new one begins where counting does.
    starts = counted & ~np.pad(counted[:, :-1], ((0, 0), (1, 0)))
    number = np.cumsum(starts, axis=1)
    right = np.ones(len(counted))
    for row, (asked, of, ok) in enumerate(zip(counted, number, most_likely > 0)):
        wrong = np.unique(of[asked & ~ok]).size
        right[row] = 1 - wrong / max(of.max(initial=0), 1)
    return Answers(cross_entropy.astype(np.float64), right)


def in_parallel(params: Params, rows: Rows, hidden: Callable[[Rows], Array], batch_size: int = 16) -> Answers:
    """Scores the answers with the hidden states that `hidden` computes of each batch of rows."""
    parts = []
    for part in _batches(rows, batch_size):
        parts.append(jax.device_get(_errors(params, hidden(part), jnp.asarray(part["tokens"]))))
    return _joined(rows, parts)


def decoded(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    rows: Rows,
    prompts: Int[np.ndarray, " N"],
    batch_size: int = 64,
) -> Answers:
    """Scores the answers token by token through a cache, as generation reads it.

    Args:
      params: the parameter tree.
      config: sizes.
      attention: scheme and maps.
      rows: see the module.
      prompts: tokens of each row that are read in one exact pass, at least 1.
      batch_size: rows at a time.
    """
    steps = max(1, int((rows["segments"].sum(1) - prompts).max()))
    parts = []
    for part in _batches(rows | {"prompts": np.asarray(prompts, np.int32)}, batch_size):
        tokens, prompt = jnp.asarray(part["tokens"]), jnp.asarray(part["prompts"])
        parts.append(jax.device_get(_decoded_errors(params, config, attention, tokens, prompt, steps)))
    return _joined(rows, parts)


def decoded_hidden(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    tokens: Int[Array, "B S"],
    prompts: Int[Array, " B"],
    steps: int,
) -> Float[Array, "B S d"]:
    """Hidden states of given tokens: those of each row's prompt by one exact pass, the `steps` after them one by one
    through the cache. What comes later means nothing.
    """
    length = tokens.shape[1]
    hidden, cache = decode.prefill_hidden(params, config, attention, tokens, prompts, length + steps)
    rows, at = jnp.arange(tokens.shape[0])[:, None], prompts[:, None] + jnp.arange(steps)

    def one(cache: Cache, token: Int[Array, " B"]) -> tuple[Cache, Float[Array, "B d"]]:
        hidden, cache = decode.step_hidden(params, config, attention, cache, token)
        return cache, hidden

    after = jax.lax.scan(one, cache, tokens[rows, jnp.minimum(at, length - 1)].T)[1]
    return hidden.at[rows, at].set(jnp.moveaxis(after, 0, 1), mode="drop")


_errors = jax.jit(next_token_errors)


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def _decoded_errors(
    params: Params, config: ModelConfig, attention: Attention, tokens: Array, prompts: Array, steps: int
) -> tuple[Array, Array]:
    return next_token_errors(params, decoded_hidden(params, config, attention, tokens, prompts, steps), tokens)


def _batches(rows: Rows, size: int) -> list[Rows]:
    """Batches of one shape: the last is filled up with copies of the first rows."""
    count = len(rows["tokens"])
    index = [np.arange(start, start + size) % count for start in range(0, count, size)]
    return [{name: array[part] for name, array in rows.items()} for part in index]


def _joined(rows: Rows, parts: list[tuple[np.ndarray, np.ndarray]]) -> Answers:
    count = len(rows["tokens"])
    errors, right = (np.concatenate(arrays)[:count] for arrays in zip(*parts))
    return score(rows, errors, right)
