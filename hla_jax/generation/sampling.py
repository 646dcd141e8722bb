"""Choosing the next token from logits: greedy, temperature, top-k and top-p, with a seed of its own for every
request.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample. Static under `jax.jit`: one compile per combination.

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


def request_keys(seeds: Int[Array, " B"]) -> Key[Array, " B"]:
    """One random key per request, from its seed alone: what else is in the batch does not matter."""
    return jax.vmap(jax.random.key)(seeds)


def sample(
    logits: Float[Array, "B V"], sampling: Sampling, keys: Key[Array, " B"], step: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Next token of every request. `step` counts the request's own new tokens, so a token depends on its request
    only.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keys = jax.vmap(jax.random.fold_in)(keys, step)
    allowed = filtered(logits / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys, allowed).astype(jnp.int32)


def filtered(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Logits with everything outside top-k, then outside top-p of what is left, set to minus infinity."""
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if sampling.top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        # A token stays if those before it have not reached top_p yet; the first always stays.
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < sampling.top_p
        smallest = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return logits
