"""How close the parallel passes of fine-tuning come to sequential decoding (HLA, appendix E, table 5).

The responses are given: each is decoded token by token through the cache, and run through each procedure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm.auto import tqdm

from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention, Cache
from hla_jax.config import ModelConfig
from hla_jax.evaluation.estimates import Estimate
from hla_jax.evaluation.markdown import table, three_digits
from hla_jax.generation import decode
from hla_jax.model import Model
from hla_jax.models import layers
from hla_jax.models.stages import Params
from hla_jax.training.two_pass import exact_hidden, next_token_errors, two_pass_hidden

if TYPE_CHECKING:
    from jaxtyping import Float, Int

EXACT = "single exact pass"


@dataclasses.dataclass(frozen=True)
class Agreement:
    """A procedure against sequential decoding, over the tokens of the responses.

    Attributes:
      kl: KL(decoding || procedure) of the next-token distributions, in nats.
      cross_entropy_change: what the procedure adds to decoding's cross-entropy of the next token, in nats.
    """

    kl: Estimate
    cross_entropy_change: Estimate


def procedure(repetitions: int | None) -> str:
    """The paper's name of two passes with so many repetitions; None is the exact pass."""
    if repetitions is None:
        return EXACT
    return "two passes" if repetitions == 0 else f"{repetitions} repetition{'s' if repetitions > 1 else ''}"


def agreement_with_decoding(
    model: Model,
    attention: Attention,
    sequences: Int[np.ndarray, "N S"],
    prompt_length: int,
    repetitions: Sequence[int] = (0, 1, 2),
) -> dict[str, Agreement]:
    """Compares the exact pass and the passes of fine-tuning with decoding, one sequence at a time.

    Args:
      model: the model; its dtype is that of the comparison.
      attention: HLA and its maps.
      sequences: token ids without padding.
      prompt_length: tokens of the prompt; all others are the response.
      repetitions: numbers of repetitions; 0 is the two passes.

    Returns:
      The agreement of every procedure, by its name.

    Raises:
      TypeError: another scheme than HLA.
      ValueError: a `prompt_length` that leaves less than two tokens of a response.
    """
    if not isinstance(attention.scheme, HLA):
        raise TypeError(f"two-pass training is defined for HLA, found {type(attention.scheme).__name__}")
    sequences = np.asarray(sequences, np.int32)
    if not 1 <= prompt_length <= sequences.shape[1] - 2:
        raise ValueError(
            f"prompt_length must be in 1 .. {sequences.shape[1] - 2} for sequences of {sequences.shape[1]} tokens, "
            f"found {prompt_length}"
        )
    numbers = (None, *repetitions)
    found = []
    with jax.default_matmul_precision("highest"):
        for row in tqdm(sequences, desc="passes against decoding", unit="sequence"):
            part = _compare(model.params, model.config, attention, jnp.asarray(row[None]), prompt_length, numbers)
            found.append(jax.device_get(part))
    return {
        procedure(number): Agreement(*(Estimate.of(np.asarray(values, np.float64)) for values in zip(*of_number)))
        for number, of_number in zip(numbers, zip(*found))
    }


def markdown(by_dtype: dict[str, dict[str, Agreement]]) -> str:
    """Table 5: KL in 1e-4 nats, with its standard error over sequences, by procedure and dtype."""
    cell = lambda kl: three_digits(kl.mean * 1e4) + ("" if kl.stderr is None else f" ± {three_digits(kl.stderr * 1e4)}")
    names = list(next(iter(by_dtype.values())))
    rows = [[name, *(cell(of[name].kl) for of in by_dtype.values())] for name in names]
    return "\n".join(table(["KL from decoding, 1e-4 nats", *by_dtype], rows)) + "\n"


@functools.partial(jax.jit, static_argnames=("config", "prompt_length", "repetitions"))
def _compare(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    tokens: Int[Array, "B S"],
    prompt_length: int,
    repetitions: tuple[int | None, ...],
) -> list[tuple[Float[Array, ""], Float[Array, ""]]]:
    """KL and change of the cross-entropy for each number of repetitions, averaged over the response."""
    assert isinstance(attention.scheme, HLA)
    response = jnp.broadcast_to(jnp.arange(tokens.shape[1]) >= prompt_length, tokens.shape)
    expected = _decoded_hidden(params, config, attention, tokens, prompt_length)
    rest = tokens[:, prompt_length:]
    expected_errors, _ = next_token_errors(params, expected, rest)
    results = []
    for number in repetitions:
        if number is None:
            hidden = exact_hidden(params, config, tokens)
        else:
            hidden = two_pass_hidden(
                params, attention.params, attention.scheme, config, tokens, response, repetitions=number
            )
        hidden = hidden[:, prompt_length:]
        errors, _ = next_token_errors(params, hidden, rest)
        # The last token of a row has no successor.
        change = jnp.mean((errors - expected_errors)[:, :-1])
        results.append((jnp.mean(_divergence(params, expected, hidden)), change))
    return results


def _decoded_hidden(
    params: Params, config: ModelConfig, attention: Attention, tokens: Int[Array, "B S"], prompt_length: int
) -> Float[Array, "B m d"]:
    """Hidden states of the response's tokens, decoded one by one through the cache."""
    prompt, length = tokens[:, :prompt_length], tokens.shape[1]
    lengths = jnp.full(tokens.shape[0], prompt_length, jnp.int32)
    _, cache = decode.prefill_hidden(params, config, attention, prompt, lengths, length)

    def one(cache: Cache, token: Int[Array, " B"]) -> tuple[Cache, Float[Array, "B d"]]:
        hidden, cache = decode.step_hidden(params, config, attention, cache, token)
        return cache, hidden

    return jnp.moveaxis(jax.lax.scan(one, cache, tokens[:, prompt_length:].T)[1], 0, 1)


def _divergence(params: Params, expected: Float[Array, "B m d"], found: Float[Array, "B m d"]) -> Float[Array, "m B"]:
    """KL of the next-token distributions, with the logits of one token at a time."""

    def one(token: tuple[Float[Array, "B d"], Float[Array, "B d"]]) -> Float[Array, " B"]:
        log_p, log_q = (jax.nn.log_softmax(layers.logits(params, hidden)) for hidden in token)
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)

    return jax.lax.map(one, (jnp.moveaxis(expected, 1, 0), jnp.moveaxis(found, 1, 0)))
