"""Ouro: a stack of L layers applied T times to every token, and a gate after each loop that may stop (the looped
language model of the Ouro release).

`models.looped` runs it. Shapes: B batch, S tokens, V vocabulary, d hidden size, T loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.config import OuroConfig
from hla_jax.models import layers
from hla_jax.models.stages import Attend, LayerInputs, Params

if TYPE_CHECKING:
    from jaxtyping import Float

# What `looped.run` asks of a family.


def begin(
    params: Params, config: OuroConfig, embedded: Array, state: Any, outer: Attend | None, initial: Array | None
) -> tuple[Array, None, Any]:
    """The loops start from the embeddings."""
    if initial is not None:
        raise ValueError("an initial state is part of Huginn's forward pass; Ouro starts from the embeddings")
    return embedded, None, state


def enter_loop(params: Params, x: Float[Array, "B S d"], given: None) -> Float[Array, "B S d"]:
    """Every loop goes on where the last one ended."""
    return x


def layer(
    p: Params, config: OuroConfig, x: Array, state: Any, attend: Attend, loop: Array, number: Array
) -> tuple[Array, Any]:
    """Norms before and after attention, and before and after the MLP."""
    eps = config.rms_norm_eps
    h = layers.rms_norm(x, p["input_layernorm"], eps)
    heads, state = attend(state, LayerInputs(h, *layers.project(p, config, h), loop, number))
    attended = layers.linear(heads.reshape(*x.shape[:2], -1), p["o_proj"])
    x = x + layers.rms_norm(attended, p["input_layernorm_2"], eps)
    h = layers.rms_norm(x, p["post_attention_layernorm"], eps)
    out = layers.gated_mlp(p, h)
    return x + layers.rms_norm(out, p["post_attention_layernorm_2"], eps), state


def leave_loop(params: Params, config: OuroConfig, x: Float[Array, "B S d"]) -> Float[Array, "B S d"]:
    """The norm whose result feeds the gate, the head and the next loop."""
    return layers.rms_norm(x, params["norm"], config.rms_norm_eps)


def end(
    params: Params, config: OuroConfig, x: Array, state: Any, outer: Attend | None
) -> tuple[Float[Array, "B S d"], Any]:
    """The head reads what the last loop left."""
    return x, state


# Exit modes.


def gate_logits(params: Params, hidden: Float[Array, "... d"]) -> Float[Array, "..."]:
    """Logit of stopping after each loop, in float32."""
    gate = params["early_exit_gate"]
    out = layers.linear(hidden, gate["weight"]) + gate["bias"]
    return out[..., 0].astype(layers.accumulation_dtype(hidden.dtype))


def exit_probabilities(gate: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
    """p_t = lambda_t prod_{j<t} (1 - lambda_j) with lambda = sigmoid(gate); the last loop takes the remainder."""
    stop = jax.nn.sigmoid(gate).at[-1].set(1.0)
    going_on = jnp.cumprod(1.0 - stop, axis=0)
    return stop * jnp.concatenate([jnp.ones_like(gate[:1]), going_on[:-1]])


def exit_logits(
    params: Params,
    hidden: Float[Array, "T B S d"],
    exit_at: int | None = None,
    exit_threshold: float | None = None,
    exit_weighted: bool = False,
) -> Float[Array, "B S V"]:
    """Logits under one of Ouro's exit modes; without any, those of the last loop.

    Args:
      params: the parameter tree.
      hidden: normed states after every loop, from `run(..., every_loop=True)`.
      exit_at: take this loop's logits, counted from 0.
      exit_threshold: take each token's first loop whose cumulative exit probability reaches this. 1.0 means no early
        exit: in 16 bits the cumulative probability can round up to 1 before the last loop.
      exit_weighted: average the logits of all loops by exit probability.

    Raises:
      ValueError: more than one mode, or a loop or threshold out of range.
    """
    loops = hidden.shape[0]
    if (exit_at is not None) + (exit_threshold is not None) + exit_weighted > 1:
        raise ValueError("give one of exit_at, exit_threshold and exit_weighted")
    if exit_at is not None:
        if not 0 <= exit_at < loops:
            raise ValueError(f"exit_at must be in 0 .. {loops - 1} for a model of {loops} loops, found {exit_at}")
        return layers.logits(params, hidden[exit_at])
    if exit_threshold is not None and not 0.0 < exit_threshold <= 1.0:
        raise ValueError(f"exit_threshold must be in (0, 1], found {exit_threshold}")
    if exit_weighted:
        probabilities = exit_probabilities(gate_logits(params, hidden))
        total = jnp.zeros((*hidden.shape[1:3], params["embed_tokens"].shape[0]), probabilities.dtype)
        add = lambda total, loop: (total + loop[0][..., None] * layers.logits(params, loop[1]), None)
        return jax.lax.scan(add, total, (probabilities, hidden))[0]
    if exit_threshold is None or exit_threshold == 1.0:
        return layers.logits(params, hidden[-1])
    reached = jnp.cumsum(exit_probabilities(gate_logits(params, hidden)), axis=0) >= exit_threshold
    first = jnp.argmax(reached.at[-1].set(True), axis=0)
    return layers.logits(params, jnp.take_along_axis(hidden, first[None, :, :, None], axis=0)[0])
