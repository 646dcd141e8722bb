"""Choosing the next token from logits: greedy, temperature, top-k and top-p, with a seed of its own for every
request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.attention.scheme import once

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Key


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample every request of a batch. Static under `jax.jit`: one compile per combination.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_p: sample from the smallest set of tokens whose probability reaches this.
      top_k: sample from this many most likely tokens; None for all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # nan is refused, too
            raise ValueError(f"temperature must be at least 0, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], found {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, found {self.top_k}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchSampling:
    """How to sample each request of a batch: arrays, so that one compiled step serves all settings."""

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    """At least the size of the vocabulary where all tokens are allowed."""


def batch_sampling(settings: Sequence[Sampling]) -> BatchSampling:
    """One request's settings after the other."""
    everything = np.iinfo(np.int32).max
    return BatchSampling(
        jnp.asarray([one.temperature for one in settings], float),
        jnp.asarray([one.top_p for one in settings], float),
        jnp.asarray([everything if one.top_k is None else min(one.top_k, everything) for one in settings], jnp.int32),
    )


def request_keys(seeds: Int[Array, " B"]) -> Key[Array, " B"]:
    """One random key per request, from its seed alone: what else is in the batch does not matter."""
    return jax.vmap(jax.random.key)(seeds)


def sample(
    logits: Float[Array, "B V"], sampling: Sampling | BatchSampling, keys: Key[Array, " B"], step: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Next token of every request. `step` counts the request's own new tokens, so a token depends on its request
    only.
    """
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if isinstance(sampling, Sampling) and sampling.temperature == 0:
        return likeliest
    each = _each(sampling, logits.shape[0])
    random = each.temperature > 0

    def draw() -> Array:
        temperature = jnp.where(random, each.temperature, 1.0)[:, None].astype(logits.dtype)
        allowed = filtered(logits / temperature, each)
        drawn = jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in)(keys, step), allowed)
        return jnp.where(random, drawn, likeliest).astype(jnp.int32)

    return jax.lax.cond(jnp.any(random), draw, lambda: likeliest)


def filtered(logits: Float[Array, "B V"], sampling: Sampling | BatchSampling) -> Float[Array, "B V"]:
    """Logits with everything outside top-k, then outside top-p of what is left, set to minus infinity."""
    each, size = _each(sampling, logits.shape[0]), logits.shape[-1]
    top_p = each.top_p[:, None].astype(logits.dtype)

    def keep() -> Array:
        descending = -jnp.sort(-logits, axis=-1)
        least = jnp.take_along_axis(descending, jnp.minimum(each.top_k, size)[:, None] - 1, axis=-1)
        descending = jnp.where(descending < least, -jnp.inf, descending)
        probabilities = jax.nn.softmax(descending, axis=-1)
        # A token stays if those before it have not reached top_p yet; the first always stays.
        kept = (jnp.cumsum(probabilities, axis=-1) - probabilities < top_p) | (top_p >= 1)
        least = jnp.maximum(least, jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True))
        return jnp.where(logits < least, -jnp.inf, logits)

    # Sorting a large vocabulary costs as much as a small layer: only where somebody asks for it.
    return jax.lax.cond(jnp.any((each.top_k < size) | (each.top_p < 1)), keep, lambda: logits)


def _each(sampling: Sampling | BatchSampling, batch: int) -> BatchSampling:
    """Settings request by request. They are no constants to XLA, which would divide by one in another way and round
    otherwise: a request's tokens are the same in either form.
    """
    return once(batch_sampling([sampling] * batch)) if isinstance(sampling, Sampling) else sampling
