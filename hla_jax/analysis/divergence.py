"""Where the latent errs: attention through HLA's maps against the exact one, by distance to the attended token (HLA,
Appendix D).

Both attentions of a layer and loop start from the exact model's hidden states, so what is measured is the error of one
attention step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

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
from hla_jax.config import OuroConfig
from hla_jax.models import ouro
from hla_jax.models.ouro import LayerInputs

if TYPE_CHECKING:
    from jaxtyping import Float, Int

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
    params: ouro.Params,
    config: OuroConfig,
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
    if not isinstance(attention.scheme, HLA):
        raise TypeError(f"the divergence by distance is defined for HLA, found {type(attention.scheme).__name__}")
    if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"ranges must start at 0 and grow, found {list(starts)}")
    sequences = np.asarray(sequences)
    length = sequences.shape[1]
    starts = tuple(start for start in starts if start < length)
    count = min(queries or length, length)
    index = np.arange(1, count + 1) * length // count - 1
    kept = np.zeros((2, config.num_layers, config.num_loops, len(starts)))
    for row in tqdm(sequences, desc="divergence by distance", unit="sequence"):
        found = _one_sequence(params, config, attention.scheme, attention.params, row[None], index, starts)
        kept += np.asarray(found, np.float64) / len(sequences)
    return ByDistance(starts, kept[0], kept[1])


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
    params: ouro.Params,
    config: OuroConfig,
    scheme: HLA,
    maps: Maps,
    tokens: Int[Array, "1 S"],
    index: Int[Array, " Q"],
    starts: tuple[int, ...],
) -> tuple[Float[Array, "L T R"], Float[Array, "L T R"]]:
    """Attention and divergence of one sequence, averaged over queries and heads."""
    positions = jnp.arange(tokens.shape[1])[None]
    h = attention_inputs(params, config, tokens, positions)
    distance = index[:, None] - positions
    of_range = jax.nn.one_hot(jnp.searchsorted(jnp.asarray(starts), distance, side="right") - 1, len(starts))

    def split(inputs: LayerInputs, queries: LayerInputs, query: Array, latent_k: Array) -> tuple[Array, Array]:
        q, _ = rotate_qk(config, queries, positions[:, index])
        _, k = rotate_qk(config, inputs, positions)
        exact = grouped_scores(q, k)
        read = jnp.where(distance <= scheme.window, exact, grouped_scores(query, latent_k[:, :, None]))
        logs = lambda scores: jax.nn.log_softmax(
            jnp.where(distance >= 0, scores * config.head_dim**-0.5, -jnp.inf), axis=-1
        )
        log_exact, log_read = logs(exact), logs(read)
        divergence = jnp.where(distance >= 0, terms(log_exact, log_read), 0)
        summed = lambda x: jnp.einsum("bhqs,qsr->r", x, of_range.astype(x.dtype)) / x[..., 0].size
        return summed(jnp.exp(log_exact)), summed(divergence)

    def one_layer(xs: tuple[Array, ouro.Params, Array]) -> tuple[Array, Array]:
        layer, p, h = xs
        inputs = lambda h, loop: LayerInputs(h, *ouro.project(p, config, h), loop, layer)
        at = positions[:, index]
        first, queries = inputs(h[0], jnp.zeros((), jnp.int32)), inputs(h[0][:, index], jnp.zeros((), jnp.int32))
        latent_k, _ = scheme.write_first(config, maps, first, positions)
        one = split(first, queries, scheme.query_first(config, maps, queries, at), latent_k)

        rest = jnp.arange(1, config.num_loops), h[1:]
        written = jax.lax.map(lambda xs: scheme.write_rest(maps, inputs(xs[1], xs[0]))[0], rest)
        main = scheme.rotate_main(config, jnp.sum(written, axis=0)[:, :, None], positions)[:, :, 0]

        def one_loop(xs: tuple[Array, Array]) -> tuple[Array, Array]:
            loop, h = xs
            queries = inputs(h[:, index], loop)
            return split(inputs(h, loop), queries, scheme.query_rest(config, maps, queries, at), main)

        others = jax.lax.map(one_loop, rest)
        return jax.tree.map(lambda one, others: jnp.concatenate([one[None], others]), one, others)

    layers = jnp.arange(config.num_layers), params["layers"], jnp.moveaxis(h, 1, 0)
    return jax.lax.map(one_layer, layers)
