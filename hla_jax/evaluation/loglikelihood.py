"""Log-likelihood of given continuations through any cache.

A latent cache changes what is read of a context, not the exact pass over it, so there are two ways to score:

- "decode": the context in one exact pass, the continuation token by token through the cache, as decoding would. The
  first token of a continuation is scored as the full cache scores it; a continuation of one token wholly so.
- "swapped": one parallel pass in which every token, of the context too, reads the past through the cache. This is the
  decoder-independent score of the commonsense and knowledge suite (LLA, appendices A and G).

With the full cache both are one exact parallel pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from hla_jax.attention.full import FullCache, exact_pass
from hla_jax.attention.outer import whole
from hla_jax.attention.scheme import Attention, Cache, run_passes
from hla_jax.config import ModelConfig
from hla_jax.generation import decode
from hla_jax.generation.generate import bucket, capacity_bucket, pad
from hla_jax.model import Model
from hla_jax.models import layers
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

READS = ("decode", "swapped")
_POSITIONS = 16
"""Whose logits are there at once, of every row of a batch."""


class Pair(NamedTuple):
    """Token ids of a context, at least one, and of what follows it, at least one."""

    context: list[int]
    continuation: list[int]


class Likelihood(NamedTuple):
    """Of a continuation: the sum of its tokens' log-probabilities in nats, and whether greedy decoding gives it."""

    logprob: float
    greedy: bool


def encode_pair(tokenizer: PreTrainedTokenizerBase, empty: int, context: str, continuation: str) -> Pair:
    """Tokens of both together, cut where the context's end: the continuation is what is left, spaces at the context's
    end included. An empty context is the token `empty`.
    """
    kept = context.rstrip()
    continuation, context = context[len(kept) :] + continuation, kept
    if not context:
        return Pair([empty], list(tokenizer.encode(continuation)))
    whole = list(tokenizer.encode(context + continuation))
    # Merged tokens may reach over the cut: the last one is the continuation's in any case.
    at = min(len(tokenizer.encode(context)), len(whole) - 1)
    return Pair(whole[:at], whole[at:])


def cut_left(pair: Pair, longest: int) -> Pair:
    """The pair without the beginning of a context that is too long for a model of `longest` positions; its last token
    is read by nothing and needs none.

    Raises:
      ValueError: the continuation alone is too long.
    """
    room = longest + 1 - len(pair.continuation)
    if room < 1:
        raise ValueError(f"a continuation of {len(pair.continuation)} tokens exceeds the model's {longest} positions")
    return Pair(pair.context[-room:], pair.continuation)


def score(
    model: Model,
    attention: Attention,
    pairs: Sequence[Pair],
    *,
    read: str = "decode",
    batch_size: int = 8,
    progress: bool = True,
) -> list[Likelihood]:
    """Scores pairs of any lengths, those of similar length together, and returns them in the order given.

    Memory: one cache of `batch_size` sequences, and their logits at a few positions.

    Args:
      model: the model.
      attention: scheme and maps.
      pairs: from `encode_pair` and `cut_left`.
      read: one of `READS`; see above.
      batch_size: pairs at a time; the last batch is filled up, so that all share their compiled programs.
      progress: whether to show a bar.

    Raises:
      ValueError: an unknown `read`, or a pair without a context or continuation.
    """
    if read not in READS:
        raise ValueError(f"read must be one of {', '.join(READS)}, found {read!r}")
    if (
        bad := next((number for number, pair in enumerate(pairs) if not pair.context or not pair.continuation), None)
    ) is not None:
        raise ValueError(f"pair {bad} has an empty context or continuation")
    parallel = read == "swapped" or attention.scheme == FullCache()
    found: list[Likelihood | None] = [None] * len(pairs)
    sizes = [(bucket(len(pair.context)), bucket(len(pair.continuation))) for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda n: (sizes[n], len(pairs[n].context)), reverse=True)
    with tqdm(total=len(pairs), desc="log-likelihood", unit="pair", disable=not progress) as bar:
        while order:
            size = sizes[order[0]]
            batch = [n for n in order[:batch_size] if sizes[n] == size]
            order = order[len(batch) :]
            rows = [pairs[n] for n in batch] + [pairs[batch[0]]] * (batch_size - len(batch))
            logprobs, same = _score(model, attention, rows, size, parallel)
            for n, logprob, greedy in zip(batch, logprobs, same):
                found[n] = Likelihood(float(logprob), bool(greedy))
            bar.update(len(batch))
    return [one for one in found if one is not None]


def _score(
    model: Model, attention: Attention, rows: Sequence[Pair], size: tuple[int, int], parallel: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Sums over each row's continuation."""
    context, lengths = pad([row.context for row in rows], size[0])
    continuation, counts = pad([row.continuation for row in rows], size[1])
    if parallel:
        tokens, _ = pad([[*row.context, *row.continuation] for row in rows], sum(size))
        logprobs, same = _in_parallel(model.params, model.config, attention, tokens, lengths, continuation)
    else:
        logprobs, same = _through_cache(model.params, model.config, attention, context, lengths, continuation)
    counted = np.arange(size[1]) < np.asarray(counts)[:, None]
    total = np.sum(np.asarray(logprobs, np.float64), axis=1, where=counted)
    return total, np.all(np.asarray(same), axis=1, where=counted)


@functools.partial(jax.jit, static_argnames="config")
def _in_parallel(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    targets: Int[Array, "B N"],
) -> tuple[Float[Array, "B N"], Bool[Array, "B N"]]:
    """Log-probability of every target, and whether it is the likeliest token; `lengths` are the contexts'."""
    if attention.scheme == FullCache():
        hidden = exact_pass(params, config, tokens)
    else:
        batch, length = tokens.shape
        scheme = whole(config, attention.scheme)
        transform = scheme.swapped(config, attention.params, batch, length, params["embed_tokens"].dtype)
        hidden, _ = run_passes(params, config, tokens, transform)
    at = jnp.minimum(lengths[:, None] - 1 + jnp.arange(targets.shape[1]), tokens.shape[1] - 1)
    before = jnp.take_along_axis(hidden, at[..., None], axis=1)
    one = lambda x: _judge(layers.logits(params, x[0]), x[1])
    found = jax.lax.map(one, (jnp.swapaxes(before, 0, 1), targets.T), batch_size=_POSITIONS)
    return jax.tree.map(jnp.transpose, found)


@functools.partial(jax.jit, static_argnames="config")
def _through_cache(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    context: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    targets: Int[Array, "B N"],
) -> tuple[Float[Array, "B N"], Bool[Array, "B N"]]:
    """As `_in_parallel`, with the contexts in one exact pass and the targets decoded."""
    capacity = capacity_bucket(context.shape[1] + targets.shape[1])
    hidden, cache = decode.prefill_hidden(params, config, attention, context, lengths, capacity)
    first = _judge(layers.logits(params, decode.last_hidden(hidden, lengths)), targets[:, 0])

    def one(cache: Cache, tokens: tuple[Array, Array]) -> tuple[Cache, tuple[Array, Array]]:
        logits, cache = decode.step(params, config, attention, cache, tokens[0])
        return cache, _judge(logits, tokens[1])

    _, rest = jax.lax.scan(one, cache, (targets[:, :-1].T, targets[:, 1:].T))
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]).T, first, rest)


def _judge(logits: Float[Array, "B V"], targets: Int[Array, " B"]) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return logprobs, jnp.argmax(logits, axis=-1) == targets
