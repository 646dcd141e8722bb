"""Fine-tuning through a latent cache in parallel: two passes over a sequence, and more (HLA, section 4.2, appendix E).

Loop 2 of a token reads main latents that earlier tokens complete only after their last loop, so decoding goes token by
token. Training goes in passes over all tokens instead. Pass one attends exactly and writes the main latents. Pass two
follows the decoding rule: tokens of the prompt attend exactly; those of the response read exact keys and values in the
window and loop-1 latents, both of this pass, and beyond the window the main latents of the pass before. The loss is
computed on pass two, and gradients flow through both.

Pass two is what decoding computes for the first W+1 tokens of a response. A repetition, one more pass under the
decoding rule that writes the main latents anew, makes the next W+1 exact, so ceil(m / (W+1)) passes under the rule
reproduce a response of m tokens. Repetitions have no gradient of their own: their latents keep that of pass one.

Shapes: B rows, S tokens, L layers, d hidden size; ranks rk, rv of the main latent. A row holds one or more segments,
one behind the other, which do not see each other; segment 0 is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from hla_jax.attention.full import FullCache, exact_outer, exact_pass, exact_stages
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Maps, Scheme
from hla_jax.config import ModelConfig
from hla_jax.models import layers, looped
from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.stages import Attend, LayerInputs, Params, Stage
from hla_jax.training.step import Loss, Metrics

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Main = tuple[Array, Array]
"""Main latents of all tokens and layers, key part [L, B, S, rk] and value part [L, B, S, rv]."""

# Tokens whose logits exist at once.
_LOGITS_BLOCK = 256


def make_loss(scheme: Scheme, config: ModelConfig, repetitions: int = 0) -> Loss:
    """Cross-entropy in nats of the next token, averaged over the tokens of responses: a loss of {"base": parameters of
    the model, "maps": maps of the scheme}, all of which train. There are no constants.

    A batch has `tokens`, `segments` (0 for padding) and `response` (whether a token belongs to a response), all [B, S].
    Every response token is predicted but the first one of a segment that has no prompt. Metrics: `accuracy`, how often
    the most likely token is right.

    Args:
      scheme: HLA for the two passes, or the full cache for one exact pass: standard fine-tuning.
      config: sizes of the model.
      repetitions: further passes under the decoding rule.

    Raises:
      SchemeError: the scheme does not fit the model.
      TypeError: another scheme.
      ValueError: `repetitions` is negative, or not 0 for the full cache.
    """
    scheme.check(config)
    _check_repetitions(repetitions)
    if isinstance(scheme, FullCache) and repetitions:
        raise ValueError(f"the full cache is trained in one exact pass, without repetitions; found {repetitions}")
    if not isinstance(scheme, HLA | FullCache):
        raise TypeError(f"two-pass training is defined for HLA and the full cache, found {type(scheme).__name__}")

    def loss(
        params: dict[str, Any], batch: dict[str, Array], rng: Array, constants: None
    ) -> tuple[Array, tuple[Array, Metrics]]:
        base, tokens, segments = params["base"], batch["tokens"], batch["segments"]
        response = batch["response"].astype(bool)
        if isinstance(scheme, HLA):
            hidden = two_pass_hidden(
                base, params["maps"], scheme, config, tokens, response, segments, repetitions=repetitions
            )
        else:
            hidden = exact_hidden(base, config, tokens, segments)
        errors, right = next_token_errors(base, hidden, tokens)
        counted = predicted(response, segments).astype(errors.dtype)
        weight = jnp.sum(counted)
        mean = lambda x: jnp.sum(x * counted) / jnp.maximum(weight, 1)
        return mean(errors), (weight, {"accuracy": mean(right)})

    return loss


def two_pass_hidden(
    params: Params,
    maps: Maps,
    scheme: HLA,
    config: ModelConfig,
    tokens: Int[Array, "B S"],
    response: Bool[Array, "B S"],
    segments: Int[Array, "B S"] | None = None,
    *,
    repetitions: int = 0,
    every_loop: bool = False,
) -> Float[Array, "... B S d"]:
    """Normed hidden states of the last pass under the decoding rule. Gradients reach `params` and `maps` through it and
    through the exact pass.

    Args:
      params: the parameter tree.
      maps: of the scheme, stacked over layers.
      scheme: sizes of HLA.
      config: sizes of the model.
      tokens: token ids.
      response: the tokens that decoding reads one by one; the others attend exactly. In a row of several turns a later
        prompt attends exactly to what the response before it computed under the decoding rule.
      segments: only tokens of the same segment see each other; tokens of one lie side by side. None: rows are whole.
      repetitions: passes under the decoding rule between the exact pass and the last one.
      every_loop: the states after every loop, [T, B, S, d], instead of the last one.

    Raises:
      ValueError: shapes disagree, or `repetitions` is negative.
    """
    _check_repetitions(repetitions)
    for name, array in (("response", response), ("segments", segments)):
        if array is not None and array.shape != tokens.shape:
            raise ValueError(f"{name} must have the shape of tokens, {tokens.shape}; found {array.shape}")
    positions, prompt = segment_positions(tokens, segments), ~response.astype(bool)

    def under_rule(maps: Maps, main: Main) -> list[Stage]:
        return scheme.reading(config, maps, main, positions, segments, prompt)

    first_stages = exact_stages(config, positions, segments)
    outer = exact_outer(config, positions, segments)
    first = write_main(params, maps, scheme, config, tokens, positions, first_stages, outer)
    held_params, held_maps, start = jax.lax.stop_gradient((params, maps, first))

    def repeat(_: Array, main: Main) -> Main:
        stages = under_rule(held_maps, main)
        return write_main(held_params, held_maps, scheme, config, tokens, positions, stages, outer)

    last = jax.lax.fori_loop(0, repetitions, repeat, start)
    main = jax.tree.map(with_gradient_of, last, first)
    last_stages = under_rule(maps, main)
    return looped.run(params, config, tokens, last_stages, None, outer, every_loop=every_loop, remat=True)[0]


def write_main(
    params: Params,
    maps: Maps,
    scheme: HLA,
    config: ModelConfig,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "#B S"],
    stages: Sequence[Stage],
    outer: Attend | None,
) -> Main:
    """The main latents that a pass writes (Eq. 2), as a cache stores them: summed over the loops in float32, the key
    part rotated, in the dtype of the model. `stages` and `outer` are those of the pass: they
    carry nothing.
    """
    first, rest = stages[0].attend, stages[-1].attend

    def attend_first(sums: Main, inputs: LayerInputs) -> tuple[Array, Main]:
        return first(None, inputs)[0], sums

    def attend_rest(sums: Main, inputs: LayerInputs) -> tuple[Array, Main]:
        add = lambda total, part: total.at[inputs.layer].add(part.astype(total.dtype))
        part_k, part_v = scheme.write_rest(maps, inputs)
        return rest(None, inputs)[0], (add(sums[0], part_k), add(sums[1], part_v))

    def attend_outside(sums: Main, inputs: LayerInputs) -> tuple[Array, Main]:
        assert outer is not None
        return outer(None, inputs)[0], sums

    outside = attend_outside if outer else None
    dtype = params["embed_tokens"].dtype
    zeros = lambda rank: jnp.zeros((config.num_layers, *tokens.shape, rank), accumulation_dtype(dtype))
    writing = [Stage(range(1), attend_first), Stage(range(1, config.num_loops), attend_rest)]
    sums = zeros(scheme.rank_k), zeros(scheme.rank_v)
    _, (keys, values) = looped.run(params, config, tokens, writing, sums, outside, remat=True)
    rotated = jax.vmap(lambda layer: scheme.rotate_main(config, layer[:, :, None], positions)[:, :, 0])(keys)
    return rotated.astype(dtype), values.astype(dtype)


def with_gradient_of(value: Array, first: Array) -> Array:
    """`value` to the last bit, with the gradient of `first`: c = c1 + stop_gradient(c_rep - c1), whose sum would round
    in 16 bits.
    """
    return jax.lax.stop_gradient(value) + (first - jax.lax.stop_gradient(first))


def exact_hidden(
    params: Params, config: ModelConfig, tokens: Int[Array, "B S"], segments: Int[Array, "B S"] | None = None
) -> Float[Array, "B S d"]:
    """Normed hidden states of one exact pass: standard fine-tuning, and pass one."""
    return exact_pass(params, config, tokens, segment_positions(tokens, segments), segments, remat=True)


def segment_positions(tokens: Int[Array, "B S"], segments: Int[Array, "B S"] | None) -> Int[Array, "#B S"]:
    """Each token's index in its segment."""
    index = jnp.arange(tokens.shape[1])[None]
    if segments is None:
        return index
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def predicted(response: Bool[Array, "B S"], segments: Int[Array, "B S"] | None = None) -> Bool[Array, "B S"]:
    """Whether the loss counts what a token predicts: its successor is of a response, and of the same segment."""
    follows = jnp.pad(response[:, 1:], ((0, 0), (0, 1)))
    if segments is None:
        return follows
    return follows & (segments > 0) & (segments == jnp.pad(segments[:, 1:], ((0, 0), (0, 1))))


def next_token_errors(
    params: Params, hidden: Float[Array, "B S d"], tokens: Int[Array, "B S"]
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Cross-entropy of each token's successor in nats, and whether it is the most likely one; of the last token of a
    row, nothing that means anything. Logits exist for a block of tokens at a time.
    """

    @jax.checkpoint
    def one(token: tuple[Float[Array, "B d"], Int[Array, " B"]]) -> tuple[Array, Array]:
        logits = layers.logits(params, token[0])
        errors = optax.softmax_cross_entropy_with_integer_labels(logits, token[1])
        return errors, (jnp.argmax(logits, axis=-1) == token[1]).astype(errors.dtype)

    block = max(1, _LOGITS_BLOCK // tokens.shape[0])
    by_token = jnp.moveaxis(hidden, 1, 0), jnp.roll(tokens, -1, axis=1).T
    errors, right = jax.lax.map(one, by_token, batch_size=min(block, tokens.shape[1]))
    return errors.T, right.T


def _check_repetitions(repetitions: int) -> None:
    if repetitions < 0:
        raise ValueError(f"repetitions must be at least 0, found {repetitions}")
