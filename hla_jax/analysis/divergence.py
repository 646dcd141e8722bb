"""Where the latent errs: attention through HLA's maps against the exact one, by distance to the attended token (HLA,
Appendix D), and when queries are moved to distances that training may not have shown (Appendix F).

Both attentions of a layer and loop start from the exact model's hidden states, so what is measured is the error of one
attention step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm.auto import tqdm

from hla_jax.attention.capture import attention_inputs
from hla_jax.attention.full import rotate_qk
from hla_jax.attention.hla import HLA
from hla_jax.attention.parallel import grouped_scores
from hla_jax.attention.scheme import Attention, Maps
from hla_jax.config import ModelConfig
from hla_jax.models.layers import accumulation_dtype, project
from hla_jax.models.stages import LayerInputs, Params

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

RANGES = (0, 1, 32, 128, 512, 1024)
"""First distance of each range: six, as in the paper, which names 1-31, 32-127 and those from 1,024."""

# Below this |log ratio|, a term of equation 8 is computed by its series.
_SMALL = 0.05


class ByDistance(NamedTuple):
    """Sums over the attended tokens of each range of distance, averaged over queries, heads and sequences.

    Attributes:
      starts: first distance of each range; the last one is open.
      attention: of the exact model; sums to 1 over the ranges.
      kl: terms of equation 8 in nats; sums to KL(exact || HLA) over the ranges.
    """

    starts: tuple[int, ...]
    attention: Float[np.ndarray, "L T R"]
    kl: Float[np.ndarray, "L T R"]

    @property
    def names(self) -> list[str]:
        """Of the ranges."""
        stops = [*(start - 1 for start in self.starts[1:]), None]
        spans = zip(self.starts, stops, strict=True)
        return [f"{a}" if a == b else f"{a:,} and more" if b is None else f"{a:,}-{b:,}" for a, b in spans]

    @property
    def per_attention(self) -> Float[np.ndarray, "T R"]:
        """KL in nats per unit of exact attention, of every loop."""
        held = self.attention.mean(axis=0)
        return self.kl.mean(axis=0) / np.where(held > 0, held, 1)


def by_distance(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    sequences: Int[np.ndarray, "N S"],
    *,
    queries: int | None = 32,
    starts: Sequence[int] = RANGES,
) -> ByDistance:
    """Splits attention and its divergence by distance, one sequence at a time.

    Args:
      params: the parameter tree.
      config: sizes.
      attention: HLA and its maps; the paper takes a model without a window.
      sequences: token ids without padding.
      queries: evenly spaced positions in each sequence, the last among them; None for all.
      starts: first distance of each range, from 0 upwards; ranges beyond the sequences are left out.

    Raises:
      TypeError: another scheme.
      ValueError: `starts` do not begin with 0 or do not grow.
    """
    scheme = _checked(attention)
    if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"ranges must start at 0 and grow, found {list(starts)}")
    sequences = np.asarray(sequences)
    length = sequences.shape[1]
    starts = tuple(start for start in starts if start < length)
    count = min(queries or length, length)
    index = np.arange(1, count + 1) * length // count - 1
    kept = np.zeros((2, config.num_layers, config.num_loops, len(starts)))
    for row in tqdm(sequences, desc="divergence by distance", unit="sequence"):
        found = _one_sequence(params, config, scheme, attention.params, row[None], index, starts)
        kept += np.asarray(found, np.float64) / len(sequences)
    return ByDistance(starts, kept[0], kept[1])


def by_shift(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    sequences: Int[np.ndarray, "N S"],
    shifts: Sequence[int],
    *,
    queries: int,
    gap: int,
) -> Float[np.ndarray, "D L T"]:
    """KL(exact || HLA) in nats when the last queries of every sequence are moved `shifts` positions later: distances
    grow, and no query, key or latent changes but for its rotation (HLA, Appendix F).

    Both attentions are over the tokens at least `gap` places before the query, and sum to 1 over them; the average is
    over queries, heads and sequences. The paper has 256 queries of 2,048 tokens and a gap of 128.

    Args:
      params: the parameter tree.
      config: sizes.
      attention: HLA and its maps.
      sequences: token ids without padding.
      shifts: positions; 0 leaves the queries where they are.
      queries: how many, at the end of each sequence.
      gap: nearest token that counts; beyond HLA's window, which would be exact.

    Raises:
      TypeError: another scheme.
      ValueError: `gap` is within the window, or leaves some query nothing to read.
    """
    scheme = _checked(attention)
    sequences = np.asarray(sequences)
    length = sequences.shape[1]
    if not scheme.window < gap <= length - queries:
        expected = f"beyond the window of {scheme.window} and up to {length - queries}, the first query"
        raise ValueError(f"gap must be {expected}; found {gap}")
    index, moves = np.arange(length - queries, length), np.asarray(shifts, np.int32)
    kept = np.zeros((len(moves), config.num_layers, config.num_loops))
    for row in tqdm(sequences, desc="divergence of shifted queries", unit="sequence"):
        found = _moved(params, config, scheme, attention.params, row[None], index, moves, gap)
        kept += np.asarray(found, np.float64) / len(sequences)
    return kept


def _checked(attention: Attention) -> HLA:
    if not isinstance(attention.scheme, HLA):
        raise TypeError(f"the divergence of attention is defined for HLA, found {type(attention.scheme).__name__}")
    return attention.scheme


def terms(log_exact: Float[Array, "..."], log_other: Float[Array, "..."]) -> Float[Array, "..."]:
    """a log(a/b) - a + b of every entry (equation 8), never negative, from logarithms of a and b."""
    ratio = log_other - log_exact
    a, b = jnp.exp(log_exact), jnp.exp(log_other)
    # The sum of three would cancel where a and b are close.
    near = a * ratio**2 * (1 / 2 + ratio / 6 + ratio**2 / 24 + ratio**3 / 120)
    far = b - a - a * ratio
    # Numbers too small for their type are flushed to 0, and with them a bound.
    return jnp.maximum(jnp.where(jnp.abs(ratio) < _SMALL, near, far), 0)


@functools.partial(jax.jit, static_argnames=("config", "scheme", "starts"))
def _one_sequence(
    params: Params,
    config: ModelConfig,
    scheme: HLA,
    maps: Maps,
    tokens: Int[Array, "1 S"],
    index: Int[Array, " Q"],
    starts: tuple[int, ...],
) -> tuple[Float[Array, "L T R"], Float[Array, "L T R"]]:
    """Attention and divergence of one sequence, averaged over queries and heads."""
    positions = jnp.arange(tokens.shape[1])[None]
    distance = index[:, None] - positions
    of_range = jax.nn.one_hot(jnp.searchsorted(jnp.asarray(starts), distance, side="right") - 1, len(starts))

    def split(exact: Array, latent: Array) -> tuple[Array, Array]:
        read = jnp.where(distance <= scheme.window, exact, latent)
        log_exact, log_read = (_log_attention(scores, distance >= 0) for scores in (exact, read))
        divergence = jnp.where(distance >= 0, terms(log_exact, log_read), 0)
        summed = lambda x: jnp.einsum("bhqs,qsr->r", x, of_range.astype(x.dtype)) / x[..., 0].size
        return summed(jnp.exp(log_exact)), summed(divergence)

    h = attention_inputs(params, config, tokens, positions)
    return _each_layer(params, config, scheme, maps, h, index, index[None], split)


@functools.partial(jax.jit, static_argnames=("config", "scheme", "gap"))
def _moved(
    params: Params,
    config: ModelConfig,
    scheme: HLA,
    maps: Maps,
    tokens: Int[Array, "1 S"],
    index: Int[Array, " Q"],
    shifts: Int[Array, " D"],
    gap: int,
) -> Float[Array, "D L T"]:
    """Divergence of one sequence at every shift of its queries, averaged over queries and heads."""
    positions = jnp.arange(tokens.shape[1])[None]
    far = index[:, None] - positions >= gap

    def apart(exact: Array, latent: Array) -> Array:
        log_exact, log_read = (_log_attention(scores, far) for scores in (exact, latent))
        return jnp.mean(jnp.sum(jnp.where(far, terms(log_exact, log_read), 0), axis=-1))

    h = attention_inputs(params, config, tokens, positions)
    at = lambda shift: _each_layer(params, config, scheme, maps, h, index, index[None] + shift, apart)
    return jax.lax.map(at, shifts)


def _log_attention(scores: Float[Array, "B H Q S"], visible: Bool[Array, "Q S"]) -> Float[Array, "B H Q S"]:
    return jax.nn.log_softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)


def _each_layer(
    params: Params,
    config: ModelConfig,
    scheme: HLA,
    maps: Maps,
    h: Float[Array, "T L B S d"],
    index: Int[Array, " Q"],
    at: Int[Array, "1 Q"],
    compare: Callable[[Float[Array, "B H Q S"], Float[Array, "B H Q S"]], Any],
) -> Any:
    """`compare(exact, latent)` of the scores of the queries `index`, rotated at positions `at`, for every layer and
    loop: whatever it returns, [L, T, ...]. Keys and latents stay at their places.
    """
    positions = jnp.arange(h.shape[3])[None]
    wide = accumulation_dtype(h.dtype)

    def scores(inputs: LayerInputs, queries: LayerInputs, query: Array, latent_k: Array) -> Any:
        q, _ = rotate_qk(config, queries, at)
        _, k = rotate_qk(config, inputs, positions)
        scale = config.head_dim**-0.5
        return compare(scale * grouped_scores(q, k), scale * grouped_scores(query, latent_k[:, :, None]))

    def one_layer(xs: tuple[Array, Params, Array]) -> Any:
        # The model's own precision would show as divergence.
        layer, p, h = jax.tree.map(lambda x: x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x, xs)
        inputs = lambda h, loop: LayerInputs(h, *project(p, config, h), loop, layer)
        loop_1 = jnp.zeros((), jnp.int32)
        first, queries = inputs(h[0], loop_1), inputs(h[0][:, index], loop_1)
        latent_k, _ = scheme.write_first(config, maps, first, positions)
        one = scores(first, queries, scheme.query_first(config, maps, queries, at), latent_k)

        rest = jnp.arange(1, config.num_loops), h[1:]
        written = jax.lax.map(lambda xs: scheme.write_rest(maps, inputs(xs[1], xs[0]))[0], rest)
        main = scheme.rotate_main(config, jnp.sum(written, axis=0)[:, :, None], positions)[:, :, 0]

        def one_loop(xs: tuple[Array, Array]) -> Any:
            loop, h = xs
            queries = inputs(h[:, index], loop)
            return scores(inputs(h, loop), queries, scheme.query_rest(config, maps, queries, at), main)

        others = jax.lax.map(one_loop, rest)
        return jax.tree.map(lambda one, others: jnp.concatenate([one[None], others]), one, others)

    layers = jnp.arange(config.num_layers), params["layers"], jnp.moveaxis(h, 1, 0)
    return jax.lax.map(one_layer, layers)
