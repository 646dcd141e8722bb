"""How close decoding through a compressed cache stays to the full cache, and how close its attention.

Decoding is real: the prompt in one exact pass, the rest token by token through each cache, which holds what its own
earlier steps wrote. The tokens are given, so that all schemes are compared on the same text.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm.auto import tqdm

from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention, Cache
from hla_jax.config import ModelConfig
from hla_jax.evaluation import together
from hla_jax.evaluation.estimates import Estimate
from hla_jax.evaluation.schemes import FULL, Schemes
from hla_jax.generation import decode
from hla_jax.model import Model
from hla_jax.models.stages import Params
from hla_jax.training import distill, uptrain

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclasses.dataclass(frozen=True)
class PositionRange:
    """KL and top-1 agreement after the tokens at positions `start` .. `stop` - 1."""

    start: int
    stop: int
    kl: Estimate
    top1: Estimate | None = None


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Next-token distributions of one scheme against the full cache's, over the tokens decoded through the cache.

    Attributes:
      kl: KL(full cache || scheme) in nats.
      top1: fraction of tokens whose most likely successor is the same.
      by_position: both at growing distance from the start, in ranges of 1, 1, 2, 4, ... windows.
    """

    kl: Estimate
    top1: Estimate
    by_position: tuple[PositionRange, ...]


@dataclasses.dataclass(frozen=True)
class AttentionDivergence:
    """Attention against the exact one at every loop, on the reference's hidden states: the terms of uptraining's loss.

    Attributes:
      kl: KL(exact || scheme) in nats, averaged over layers, heads and tokens.
      error: relative squared error of the attention output.
      kl_by_layer: the KL of every layer at every loop.
    """

    kl: tuple[float, ...]
    error: tuple[float, ...]
    kl_by_layer: tuple[tuple[float, ...], ...] = ()

    @property
    def mean_kl(self) -> float:
        """Over loops."""
        return float(np.mean(self.kl))


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """Everything of one scheme.

    Attributes:
      decoding: through the cache, token by token.
      parallel_kl: KL of the next-token distributions when every token reads the past through the cache, in nats.
      output_error: relative squared error of the attention output in that pass, at every loop.
      attention: of HLA; None for another scheme, which has no attention weights of its own to compare.
    """

    decoding: Decoding
    parallel_kl: Estimate
    output_error: tuple[float, ...]
    attention: AttentionDivergence | None


def measure(
    model: Model, schemes: Schemes, sequences: Int[np.ndarray, "N S"], prompt_length: int, *, batch_size: int = 8
) -> dict[str, Fidelity]:
    """The fidelity of every scheme but the full cache; the arguments are those of `decode_by_token`."""
    decoding = compare_decoding(model, schemes, sequences, prompt_length, batch_size=batch_size)
    found = {}
    for name, one in decoding.items():
        attention = schemes[name]
        kl, errors = swapped_divergence(model, attention, sequences)
        weights = attention_divergence(model, attention, sequences) if isinstance(attention.scheme, HLA) else None
        found[name] = Fidelity(one, Estimate.of(kl), tuple(errors.mean(axis=0).tolist()), weights)
    return found


@dataclasses.dataclass(frozen=True)
class ByToken:
    """`Decoding` before averaging: after each decoded token of each sequence."""

    kl: Float[np.ndarray, "N S"]
    same: Float[np.ndarray, "N S"]


def compare_decoding(
    model: Model, schemes: Schemes, sequences: Int[np.ndarray, "N S"], prompt_length: int, *, batch_size: int = 8
) -> dict[str, Decoding]:
    """The averages of `decode_by_token`, for every scheme but the full cache."""
    found = decode_by_token(model, schemes, sequences, prompt_length, batch_size=batch_size)
    window = max(attention.scheme.window_tokens() for attention in schemes.values())
    return {name: _summary(found[name], prompt_length, window) for name in schemes if name != FULL}


def decode_by_token(
    model: Model, schemes: Schemes, sequences: Int[np.ndarray, "N S"], prompt_length: int, *, batch_size: int = 8
) -> dict[str, ByToken]:
    """Decodes held-out sequences through every cache at once.

    Memory: one cache of every scheme and the logits of one token for `batch_size` sequences.

    Args:
      model: the model.
      schemes: name -> scheme and maps, among them the full cache as `FULL`.
      sequences: token ids without padding.
      prompt_length: tokens of the exact pass, which no scheme changes; the others are decoded and counted.
      batch_size: sequences at a time.

    Returns:
      The comparison of every scheme with the full cache.

    Raises:
      ValueError: a `prompt_length` that leaves nothing to decode.
    """
    sequences = np.asarray(sequences)
    length = sequences.shape[1]
    if not 1 <= prompt_length < length:
        raise ValueError(
            f"prompt_length must be in 1 .. {length - 1} for sequences of {length} tokens, found {prompt_length}"
        )
    parts = []
    batches = _batches(sequences, batch_size)
    for rows in tqdm(batches, total=-(-len(sequences) // batch_size), desc="decoding KL", unit="batch"):
        parts.append(jax.device_get(_compare(model.params, model.config, dict(schemes), rows, prompt_length)))
    by_token: dict[str, tuple[np.ndarray, np.ndarray]] = jax.tree.map(
        lambda *parts: np.concatenate(parts, axis=1)[:, : len(sequences)].T, *parts
    )
    return {name: ByToken(*by_token[name]) for name in schemes}


def swapped_divergence(
    model: Model, attention: Attention, sequences: Int[np.ndarray, "N S"]
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, "N T"]]:
    """Fidelity without a decoder: one parallel pass in which every token reads the past through the cache.

    Returns:
      KL(exact || scheme) of the next-token distributions in nats, and the relative squared error of the attention
      output at every loop, both averaged over the tokens of each sequence.
    """
    found = _swapped(model.params, model.config, attention, jnp.asarray(sequences))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), found)


def attention_divergence(
    model: Model, attention: Attention, sequences: Int[np.ndarray, "N S"], *, batch_size: int = 4
) -> AttentionDivergence:
    """Attention of HLA maps against the exact one on held-out sequences. Raises `TypeError` for another scheme."""
    if not isinstance(attention.scheme, HLA):
        raise TypeError(f"the attention divergence is defined for HLA, found {type(attention.scheme).__name__}")
    sequences = np.asarray(sequences)
    found, weights = [], []
    for start, rows in zip(itertools.count(0, batch_size), _batches(sequences, batch_size)):
        # Rows that only fill the batch are marked as padding, which does not count.
        counted = np.broadcast_to(start + np.arange(batch_size)[:, None] < len(sequences), rows.shape)
        positions = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
        part = _divergence(
            attention.scheme, model.config, attention.params, model.params, rows, positions, counted.astype(np.int32)
        )
        found.append(jax.device_get(part))
        weights.append(counted.sum())
    kl, error = (np.average(np.asarray(parts, np.float64), axis=0, weights=weights) for parts in zip(*found))
    by_layer = tuple(map(tuple, kl.tolist()))
    return AttentionDivergence(tuple(kl.mean(axis=0).tolist()), tuple(error.mean(axis=0).tolist()), by_layer)


_divergence = jax.jit(uptrain.divergence_by_layer, static_argnums=(0, 1))


@functools.partial(jax.jit, static_argnames=("config", "prompt_length"))
def _compare(
    params: Params,
    config: ModelConfig,
    schemes: dict[str, Attention],
    tokens: Int[Array, "B S"],
    prompt_length: int,
) -> dict[str, tuple[Float[Array, "N B"], Float[Array, "N B"]]]:
    """KL to the full cache and whether the most likely token agrees, after each decoded token."""
    lengths = jnp.full(tokens.shape[0], prompt_length, jnp.int32)
    _, caches = together.prefill_hidden(params, config, schemes, tokens[:, :prompt_length], lengths, tokens.shape[1])

    def one(
        caches: dict[str, Cache], token: Int[Array, " B"]
    ) -> tuple[dict[str, Cache], dict[str, tuple[Array, Array]]]:
        logits, after = {}, {}
        for name, attention in schemes.items():
            logits[name], after[name] = decode.step(params, config, attention, caches[name], token)
        full = jax.nn.log_softmax(logits[FULL])

        def compare(logits: Float[Array, "B V"]) -> tuple[Array, Array]:
            kl = jnp.sum(jnp.exp(full) * (full - jax.nn.log_softmax(logits)), axis=-1)
            return kl, (jnp.argmax(logits, axis=-1) == jnp.argmax(full, axis=-1)).astype(kl.dtype)

        return after, {name: compare(other) for name, other in logits.items()}

    return jax.lax.scan(one, caches, tokens[:, prompt_length:].T)[1]


@functools.partial(jax.jit, static_argnames="config")
def _swapped(
    params: Params, config: ModelConfig, attention: Attention, tokens: Int[Array, "N S"]
) -> tuple[Float[Array, " N"], Float[Array, "N T"]]:
    counted = jnp.ones((1, tokens.shape[1]), bool)
    one = lambda row: distill.divergence(attention.scheme, config, attention.params, params, row[None], counted)
    return jax.lax.map(one, tokens)


def _batches(sequences: Int[np.ndarray, "N S"], size: int) -> Iterator[Int[np.ndarray, "B S"]]:
    """Batches of one shape, so that one program serves all: the last is filled up with copies of the first row."""
    for start in range(0, len(sequences), size):
        rows = sequences[start : start + size]
        yield np.concatenate([rows, np.repeat(sequences[:1], size - len(rows), axis=0)])


def _summary(found: ByToken, prompt_length: int, window: int) -> Decoding:
    kl, same = found.kl, found.same
    stop = prompt_length + kl.shape[1]
    bounds = [0, max(window, 1)]
    while bounds[-1] < stop:
        bounds.append(2 * bounds[-1])
    ranges = [(max(low, prompt_length), min(high, stop)) for low, high in itertools.pairwise(bounds)]
    by_position = []
    for low, high in ranges:
        if low < high:
            part = slice(low - prompt_length, high - prompt_length)
            by_position.append(PositionRange(low, high, _over_sequences(kl[:, part]), _over_sequences(same[:, part])))
    return Decoding(_over_sequences(kl), _over_sequences(same), tuple(by_position))


def _over_sequences(by_token: Float[np.ndarray, "N S"]) -> Estimate:
    return Estimate.of(by_token.astype(np.float64).mean(axis=1))
