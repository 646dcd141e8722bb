"""Prefill and decoding as jitted functions over pytrees: one exact pass over the prompts, then tokens through a cache.

The cache is donated to every step and updated in place. Several tokens are decoded per dispatch, with no host
synchronisation inside. Shapes: B sequences, S padded prompt tokens, C capacity of the cache, V vocabulary, N new
tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.attention.outer import whole
from hla_jax.attention.scheme import Attention, Cache, check_cache, check_maps, run_passes
from hla_jax.config import ModelConfig
from hla_jax.generation.sampling import BatchSampling, Sampling, sample
from hla_jax.models import layers
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Key


# Layers are stacked. By default XLA's GPU backend copies a layer's MLP weights out of the stack before it multiplies by
# them, three times the bytes; products by cuBLAS read them where they lie. Other platforms ignore both.
READ_WEIGHTS_IN_PLACE = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_dynamic_slice_fusion": True}


@functools.partial(jax.jit, static_argnames=("config", "capacity"))
def prefill(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    capacity: int,
) -> tuple[Float[Array, "B V"], Cache]:
    """One exact pass over right-padded prompts. Returns the logits after each prompt's last token, and the filled
    cache.
    """
    hidden, cache = prefill_hidden(params, config, attention, tokens, lengths, capacity)
    return layers.logits(params, last_hidden(hidden, lengths)), cache


def last_hidden(hidden: Float[Array, "B S d"], lengths: Int[Array, " B"]) -> Float[Array, "B d"]:
    """The state of each right-padded prompt's last token."""
    return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]


def prefill_hidden(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    capacity: int,
) -> tuple[Float[Array, "B S d"], Cache]:
    """As `prefill`, but returns the last loop's hidden state of every prompt token."""
    if capacity < tokens.shape[1]:
        raise ValueError(f"the cache holds {capacity} tokens a sequence, the prompts have {tokens.shape[1]}")
    check_maps(attention.scheme, config, attention.params)
    scheme = whole(config, attention.scheme)
    cache = scheme.init_cache(config, tokens.shape[0], capacity, params["embed_tokens"].dtype)
    transform = scheme.prefill(config, attention.params, cache, tokens.shape[1], lengths)
    return run_passes(params, config, tokens, transform)


def step(
    params: Params, config: ModelConfig, attention: Attention, cache: Cache, tokens: Int[Array, " B"]
) -> tuple[Float[Array, "B V"], Cache]:
    """Decodes one token of every sequence through the cache. Returns the logits of the next one."""
    hidden, cache = step_hidden(params, config, attention, cache, tokens)
    return jax.lax.platform_dependent(params, hidden, cuda=_logits_beside_zeros, default=layers.logits), cache


def step_hidden(
    params: Params, config: ModelConfig, attention: Attention, cache: Cache, tokens: Int[Array, " B"]
) -> tuple[Float[Array, "B d"], Cache]:
    """As `step`, but returns the last loop's hidden states."""
    check_maps(attention.scheme, config, attention.params)
    scheme = whole(config, attention.scheme)
    check_cache(scheme, config, cache)
    transform = scheme.decode(config, attention.params, cache, attention.implementation)
    hidden, cache = run_passes(params, config, tokens[:, None], transform)
    return hidden[:, 0], cache


def _logits_beside_zeros(params: Params, hidden: Float[Array, "B d"]) -> Float[Array, "B V"]:
    """cuBLAS multiplies a single row of 16-bit numbers by the head only after all of the head is in float32."""
    rows = jnp.pad(hidden, ((0, max(0, 8 - hidden.shape[0])), (0, 0)))
    return layers.logits(params, rows)[: hidden.shape[0]]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def forced(
    params: Params, config: ModelConfig, attention: Attention, cache: Cache, tokens: Int[Array, "B N"]
) -> tuple[Float[Array, "B N V"], Cache]:
    """Decodes given tokens one by one. Returns the logits after each of them."""

    def one(cache: Cache, token: Array) -> tuple[Cache, Array]:
        logits, cache = step(params, config, attention, cache, token)
        return cache, logits

    cache, logits = jax.lax.scan(one, cache, tokens.T)
    return jnp.moveaxis(logits, 0, 1), cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """Where decoding stands between two dispatches. Finished sequences stay in the batch, empty: they read nothing."""

    cache: Cache
    token: Int[Array, " B"]
    """Sampled last, not yet read by the model."""
    made: Int[Array, " B"]
    """New tokens of each request so far, `token` included."""
    done: Bool[Array, " B"]


def start(
    logits: Float[Array, "B V"],
    cache: Cache,
    sampling: Sampling | BatchSampling,
    keys: Key[Array, " B"],
    stop: Int[Array, "#B E"] | Int[Array, " E"],
    given: Int[Array, "B M"] | None = None,
) -> Progress:
    """Samples every request's first token from the logits of its prompt. The arguments are those of `advance`."""
    made = jnp.zeros_like(cache.lengths)
    token = _or_given(sample(logits, sampling, keys, made), given, made)
    return Progress(cache, token, made + 1, _ends(token, stop))


def _ends(token: Int[Array, " B"], stop: Int[Array, "#B E"] | Int[Array, " E"]) -> Bool[Array, " B"]:
    return jnp.any(token[:, None] == stop, axis=-1)


def _or_given(token: Int[Array, " B"], given: Int[Array, "B M"] | None, made: Int[Array, " B"]) -> Int[Array, " B"]:
    """The request's token number `made` where `given` has it, and else `token`."""
    if given is None:
        return token
    known = jnp.take_along_axis(given, jnp.minimum(made, given.shape[1] - 1)[:, None], axis=1)[:, 0]
    return jnp.where((made < given.shape[1]) & (known >= 0), known, token)


@functools.partial(
    jax.jit,
    static_argnames=("config", "count"),
    donate_argnames="progress",
    compiler_options=READ_WEIGHTS_IN_PLACE,
)
def advance(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    progress: Progress,
    sampling: Sampling | BatchSampling,
    keys: Key[Array, " B"],
    stop: Int[Array, "#B E"] | Int[Array, " E"],
    limit: Int[Array, " B"],
    count: int,
    given: Int[Array, "B M"] | None = None,
    enough: Int[Array, ""] | None = None,
) -> tuple[Int[Array, "B N"], Progress]:
    """Decodes up to `count` more tokens in one dispatch, ending early once every request is done.

    Args:
      params: the parameter tree.
      config: sizes.
      attention: scheme and maps.
      progress: from `start` or the last call.
      sampling: how to choose tokens; `Sampling` is static, `BatchSampling` is not.
      keys: one random key per request.
      stop: token ids that end a request, the same for all or each request's own.
      limit: most new tokens of each request.
      count: tokens per dispatch.
      given: each request's first new tokens where they are known already, -1 after them: these are not sampled.
      enough: end as soon as so many requests are done; None for all of them.

    Returns:
      The new tokens, -1 where a request was done, and the progress.
    """
    batch = progress.token.shape[0]
    most = jnp.asarray(batch) if enough is None else jnp.minimum(enough, batch)

    def going(carry: tuple[Array, Array, Progress]) -> Array:
        index, _, progress = carry
        return (index < count) & (jnp.sum(progress.done | (progress.made >= limit)) < most)

    def one(carry: tuple[Array, Array, Progress]) -> tuple[Array, Array, Progress]:
        index, out, progress = carry
        over = progress.done | (progress.made >= limit)
        logits, cache = step(params, config, attention, progress.cache, progress.token)
        # A finished request must not advance: its position would run past the capacity. Nobody needs what it stored.
        cache = dataclasses.replace(cache, lengths=jnp.where(over, 0, cache.lengths))
        sampled = _or_given(sample(logits, sampling, keys, progress.made), given, progress.made)
        token = jnp.where(over, progress.token, sampled)
        out = out.at[:, index].set(jnp.where(over, -1, token))
        made = progress.made + jnp.where(over, 0, 1)
        return index + 1, out, Progress(cache, token, made, progress.done | (~over & _ends(token, stop)))

    out = jnp.full((batch, count), -1, jnp.int32)
    _, out, progress = jax.lax.while_loop(going, one, (jnp.zeros((), jnp.int32), out, progress))
    return out, progress
