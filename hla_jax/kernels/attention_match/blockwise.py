"""`attention_match` block of queries by block of queries, with its own backward pass: memory is linear in the tokens.

The result is a sum over queries, so the gradient is a sum too: each block's gradient is taken right after its value,
while its scores exist, and nothing of the size queries x tokens outlives the block. The backward pass only scales the
gradients by the cotangent.

A block reads only the tokens up to its last query, in one of a few lengths: with ascending queries most of the future
is never looked at. Any order gives the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.kernels import implementations
from hla_jax.kernels.attention_match import Fitted, Fixed, reference
from hla_jax.kernels.attention_match.reference import Match

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Scores of one block, in numbers over all sequences and heads: what keeps a GPU busy, and what stays in a CPU's cache.
BLOCK_NUMBERS = 1 << 22
CPU_BLOCK_NUMBERS = 1 << 20
SMALLEST_BLOCK = 16
# Lengths that a block's tokens can have: each is a program of its own, so short documents have but one.
LENGTHS = 8
SMALLEST_LENGTH = 256


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention_match(
    fitted: Fitted, fixed: Fixed, index: Int[Array, "B Q"], counted: Float[Array, "B Q"], window: int
) -> tuple[Float[Array, ""], Match]:
    """The loss KL + error, differentiable in `fitted`, and both terms for the record (`reference.attention_match`)."""
    return _blocks(fitted, fixed, index, counted, window, with_gradient=False)[0]


def _blocks(fitted: Fitted, fixed: Fixed, index: Array, counted: Array, window: int, with_gradient: bool):
    """Loss, both terms and, if asked for, the gradient in `fitted`."""
    batch, queries, heads, _ = fixed.q.shape
    numbers = CPU_BLOCK_NUMBERS if implementations.platform() == "cpu" else BLOCK_NUMBERS
    size = min(queries, SMALLEST_LENGTH, max(SMALLEST_BLOCK, numbers // (batch * heads * fixed.k.shape[1])))
    count = -(-queries // size)

    def split(x: Float[Array, "B Q ..."]) -> Float[Array, "n B q ..."]:
        # Queries of the padding are not counted.
        padded = jnp.pad(x, ((0, 0), (0, count * size - queries)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    lengths = _lengths(fixed.k.shape[1])

    def value(length: int, fitted: Fitted, q: Array, index: Array, counted: Array) -> tuple[Array, Match]:
        k, v, segments = (x[:, :length] for x in (fixed.k, fixed.v, fixed.segments))
        latent = fitted._replace(k=fitted.k[:, :length], v=fitted.v[:, :length])
        exact = fixed._replace(q=q, k=k, v=v, segments=segments)
        match = reference.attention_match(latent, exact, index, counted, window)
        return match.kl + match.error, match

    def up_to_last(function: Callable[..., Any], fitted: Fitted, q: Array, index: Array, counted: Array) -> Any:
        shortest = jnp.searchsorted(jnp.array(lengths), jnp.max(index), side="right")
        of_length = [functools.partial(function, length) for length in lengths]
        return jax.lax.switch(shortest, of_length, fitted, q, index, counted)

    wide = jnp.promote_types(fixed.q.dtype, jnp.float32)
    nothing = jnp.zeros((), wide)
    blocks = tuple(map(split, (fitted.q, fixed.q, index, counted)))
    add = lambda sums, parts: jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, parts)

    if not with_gradient:
        one = lambda sums, xs: (add(sums, up_to_last(value, fitted._replace(q=xs[0]), *xs[1:])), None)
        return jax.lax.scan(one, (nothing, Match(nothing, nothing)), blocks)[0], None

    with_gradients = jax.value_and_grad(value, argnums=1, has_aux=True)

    def block(sums, xs):
        (loss, match), gradient = up_to_last(with_gradients, fitted._replace(q=xs[0]), *xs[1:])
        shared = gradient._replace(q=jnp.zeros(()))
        return add(sums, (loss, match, shared)), gradient.q

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, wide)), fitted._replace(q=nothing))
    (loss, match, shared), latent_q = jax.lax.scan(block, (nothing, Match(nothing, nothing), zeros), blocks)
    latent_q = jnp.moveaxis(latent_q, 0, 1).reshape(batch, count * size, heads, -1)[:, :queries]
    return (loss, match), shared._replace(q=latent_q)


def _lengths(tokens: int) -> tuple[int, ...]:
    """Of the tokens that a block can read, ascending to all of them."""
    count = max(1, min(LENGTHS, tokens // SMALLEST_LENGTH))
    return tuple(-(-tokens * part // count) for part in range(1, count + 1))


def _save(fitted: Fitted, fixed: Fixed, index: Array, counted: Array, window: int):
    # Of a loop that it differentiates, jax computes ahead, for all blocks at once, what does not depend on the loop:
    # the masks. Behind the barrier everything depends on it.
    fitted, fixed, index, counted = jax.lax.optimization_barrier((fitted, fixed, index, counted))
    out, gradient = _blocks(fitted, fixed, index, counted, window, with_gradient=True)
    gradient = jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, fitted)
    return out, gradient


def _backward(window: int, gradient: Fitted, cotangent):
    # The exact attention is the target: it gets no gradient.
    return jax.tree.map(lambda g: (cotangent[0] * g).astype(g.dtype), gradient), None, None, None


attention_match.defvjp(_save, _backward)
