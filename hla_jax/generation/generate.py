"""`generate` and `decode_forced`: decoding for people, on top of the jitted functions of `decode.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.attention.scheme import Attention
from hla_jax.attention.steps import for_steps
from hla_jax.config import HuginnConfig, ModelConfig
from hla_jax.generation import decode
from hla_jax.generation.sampling import Sampling, request_keys
from hla_jax.model import Model, token_batch
from hla_jax.models import layers

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Prompt = str | Sequence[int]

# Prompt lengths and capacities are rounded up, so that few shapes are compiled.
_SMALLEST_BUCKET = 32
_KERNEL_BLOCK = 128  # kernels take whole blocks of a capacity that has more than one


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated for one prompt."""

    tokens: list[int]
    """New tokens, the stop token excluded."""
    finish_reason: str
    """"stop" (a stop token or string came), "length" (max_new_tokens reached) or "cancelled" (by `Engine.cancel`)."""
    text: str | None
    """Decoded tokens, up to a stop string; None where the prompts were token ids and the model has no tokenizer."""


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int,
    attention: Attention | None = None,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | Sequence[int] = 0,
    stop_tokens: Sequence[int] | None = None,
    tokens_per_dispatch: int = 32,
    num_steps: int | None = None,
    prompt_steps: int | None = None,
) -> list[Generation]:
    """Generates a continuation of every prompt through the cache of `attention`.

    Args:
      model: from `load`.
      prompts: one prompt or a list; each a text or its token ids, without padding (see `unpad`).
      max_new_tokens: most new tokens of each prompt.
      attention: scheme and maps; None for the model's own.
      temperature: 0 is greedy.
      top_p: nucleus; 1 is off.
      top_k: None is off.
      seed: of each request, or one number s for requests seeded s, s + 1, ...; a request's tokens depend on its own
        seed only.
      stop_tokens: token ids that end a request; None for the model's own (config, generation config and tokenizer).
      tokens_per_dispatch: tokens decoded between two looks of the host.
      num_steps: of Huginn, steps of the looped core; None for the config's. Maps for another number of them are
        adapted, see `attention.steps`.
      prompt_steps: of Huginn with the full cache, steps of the prompt's tokens, where they are to be others than
        `num_steps`. Later steps then read what these tokens had at their last one.

    Raises:
      SchemeError: the scheme has no rule for this number of steps, or for tokens of different ones.
      ValueError: no prompt, an empty prompt, token ids that are no integers or outside the vocabulary, a prompt that
        leaves no room in `max_position_embeddings`, or a setting out of range.
    """
    attention = attention or model.attention
    single = isinstance(prompts, str) or (
        len(prompts) > 0 and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0
    )
    listed = cast("Sequence[Prompt]", [prompts] if single else prompts)
    ids = [prompt_ids(model, prompt, number) for number, prompt in enumerate(listed)]
    if not ids:
        raise ValueError("no prompts given")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {max_new_tokens}")
    longest = max(map(len, ids))
    if longest + max_new_tokens > model.config.max_position_embeddings:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed max_position_embeddings "
            f"{model.config.max_position_embeddings}"
        )
    if tokens_per_dispatch < 1:
        raise ValueError(f"tokens_per_dispatch must be at least 1, found {tokens_per_dispatch}")
    seeds = [int(seed) + i for i in range(len(ids))] if isinstance(seed, int | np.integer) else [int(s) for s in seed]
    if len(seeds) != len(ids):
        raise ValueError(f"found {len(seeds)} seeds for {len(ids)} prompts")
    if outside := [s for s in seeds if not 0 <= s < 2**32]:
        raise ValueError(f"seeds must be in 0 .. 2^32 - 1, found {outside[0]}")

    of_prompt, config, attention = _with_steps(model.config, attention, num_steps, prompt_steps)
    sampling = Sampling(temperature, top_p, top_k)
    stops = tuple(model.stop_tokens if stop_tokens is None else stop_tokens)
    stop = jnp.asarray(stops, jnp.int32)
    keys = request_keys(jnp.asarray(np.asarray(seeds, np.uint32)))
    tokens, lengths = pad(ids, min(bucket(longest), model.config.max_position_embeddings))
    capacity = max(tokens.shape[1], capacity_bucket(longest + max_new_tokens))
    logits, cache = decode.prefill(model.params, of_prompt, attention, tokens, lengths, capacity)
    progress = decode.start(logits, cache, sampling, keys, stop)
    made = [np.asarray(progress.token)[:, None]]
    limit = jnp.full(len(ids), max_new_tokens, jnp.int32)
    while not bool(jnp.all(progress.done | (progress.made >= limit))):
        out, progress = decode.advance(
            model.params, config, attention, progress, sampling, keys, stop, limit, tokens_per_dispatch
        )
        made.append(np.asarray(out))
    return [_generation(model, [int(t) for t in row if t >= 0], stops) for row in np.concatenate(made, axis=1)]


def _with_steps(
    config: ModelConfig, attention: Attention, num_steps: int | None, prompt_steps: int | None
) -> tuple[ModelConfig, ModelConfig, Attention]:
    """The configs that prompts and new tokens run with, and the attention for both. Arguments as of `generate`."""
    if num_steps is None and prompt_steps is None:
        return config, config, attention
    if not isinstance(config, HuginnConfig):
        raise ValueError("num_steps and prompt_steps are options of Huginn")
    running = config if num_steps is None else config.with_steps(num_steps)
    of_prompt = running if prompt_steps is None else config.with_steps(prompt_steps)
    if of_prompt == running:
        return running, running, for_steps(attention, config, running.num_loops)
    scheme = attention.scheme.with_loops(max(of_prompt.num_loops, running.num_loops))
    return of_prompt, running, dataclasses.replace(attention, scheme=scheme)


def decode_forced(
    model: Model, tokens: Int[Array, "B S"], prompt_length: int, attention: Attention | None = None
) -> Float[Array, "B S V"]:
    """Logits after every token: the first `prompt_length` in one exact pass, the rest one by one through the cache.

    This is what decoding computes, with the tokens given instead of sampled. Raises `ValueError` for an impossible
    `prompt_length`.
    """
    tokens = token_batch(model, tokens)
    if not 1 <= prompt_length <= tokens.shape[1]:
        raise ValueError(f"prompt_length must be in 1 .. {tokens.shape[1]}, found {prompt_length}")
    return _decode_forced(model.params, model.config, attention or model.attention, tokens, prompt_length)


@jax.jit(static_argnames=("config", "prompt_length"))
def _decode_forced(params, config, attention, tokens, prompt_length):
    prompt = tokens[:, :prompt_length]
    lengths = jnp.full(tokens.shape[0], prompt_length, jnp.int32)
    hidden, cache = decode.prefill_hidden(params, config, attention, prompt, lengths, tokens.shape[1])
    after_prompt = layers.logits(params, hidden)
    after_rest, _ = decode.forced(params, config, attention, cache, tokens[:, prompt_length:])
    return jnp.concatenate([after_prompt, after_rest], axis=1)


def pad(ids: Sequence[Sequence[int]], width: int) -> tuple[Int[Array, "B S"], Int[Array, " B"]]:
    """Token lists as one right-padded array and their lengths. The padding's value is never read."""
    tokens = np.zeros((len(ids), width), np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, : len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.asarray([len(prompt) for prompt in ids], jnp.int32)


def unpad(tokens: Int[np.ndarray, "B S"], mask: Int[np.ndarray, "B S"]) -> list[list[int]]:
    """Token lists of a padded batch, whichever side the padding is on, for `generate`."""
    return [row[keep.astype(bool)].tolist() for row, keep in zip(np.asarray(tokens), np.asarray(mask), strict=True)]


def prompt_ids(model: Model, prompt: Prompt, number: int) -> list[int]:
    """Token ids of a prompt. Raises `ValueError`, with the prompt's number, if they are none or impossible."""
    ids = np.asarray(model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    if ids.size == 0:
        raise ValueError(f"prompt {number} is empty")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"prompt {number} must be a text or a list of token ids, found {ids.dtype}{list(ids.shape)}")
    outside = ids[(ids < 0) | (ids >= model.config.vocab_size)]
    if outside.size:
        raise ValueError(f"prompt {number} has token id {outside[0]}, the vocabulary has {model.config.vocab_size}")
    return ids.tolist()


def bucket(tokens: int) -> int:
    """Rounds up to an eighth of the next power of two: at most a quarter too much, and four sizes per doubling."""
    step = max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length() >> 3)
    return -(-tokens // step) * step


def capacity_bucket(tokens: int) -> int:
    """As `bucket`, in whole blocks of 128 beyond the first; those beyond 2,048 are multiples of 512."""
    rounded = bucket(tokens)
    return rounded if rounded <= _KERNEL_BLOCK else -(-rounded // _KERNEL_BLOCK) * _KERNEL_BLOCK


def _generation(model: Model, tokens: list[int], stop: Sequence[int]) -> Generation:
    reason = "stop" if tokens[-1] in stop else "length"
    tokens = tokens[:-1] if reason == "stop" else tokens
    return Generation(tokens, reason, str(model.tokenizer.decode(tokens)) if model.has_tokenizer else None)
