"""Ouro: a stack of L layers applied T times to every token (the looped language model of the Ouro release).

The stack takes attention as an argument and knows nothing of caches: every layer at every loop calls
`attend(state, inputs)`, which returns the heads' output and the next state. Consecutive loops that attend alike form a
`Stage`; each stage is one `scan` over its loops around one `scan` over the layers, so compile time does not grow with T
or L.

Shapes: B batch, S tokens, V vocabulary, d hidden size, L layers, T loops, H heads, G key-value heads, dh head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from hla_jax import sharding
from hla_jax.config import OuroConfig
from hla_jax.models import layers, weights

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Params = dict[str, Any]


class LayerInputs(NamedTuple):
    """What one layer at one loop hands to its attention. Queries and keys are not rotated yet."""

    h: Float[Array, "B S d"]  # after input_layernorm
    q: Float[Array, "B S H dh"]
    k: Float[Array, "B S G dh"]
    v: Float[Array, "B S G dh"]
    loop: Int[Array, ""]
    layer: Int[Array, ""]


Attend = Callable[[Any, LayerInputs], tuple[Array, Any]]
"""(state, inputs) -> (heads' output [B, S, H, dh], next state)."""


class Stage(NamedTuple):
    """Consecutive loops (counted from 0) that share one attention function."""

    loops: range
    attend: Attend


def run(
    params: Params,
    config: OuroConfig,
    tokens: Int[Array, "B S"],
    stages: Sequence[Stage],
    state: Any,
    every_loop: bool = False,
    remat: bool = False,
) -> tuple[Float[Array, "... B S d"], Any]:
    """Runs all loops.

    Args:
      params: the parameter tree of `weights.OURO`, or what `for_decoding` makes of it.
      config: sizes.
      tokens: token ids.
      stages: attention of the loops, covering 0 .. T-1 in order.
      state: what `attend` carries from layer to layer and loop to loop.
      every_loop: return the state after every loop, [T, B, S, d], instead of the last one, [B, S, d].
      remat: a backward pass computes each layer again instead of keeping what it computed.

    Returns:
      The hidden states after `model.norm` (which feed the gate, the head and the next loop), and the last state.
    """
    if [loop for stage in stages for loop in stage.loops] != list(range(config.num_loops)):
        raise ValueError(
            f"stages must cover loops 0 .. {config.num_loops - 1} in order, found {[s.loops for s in stages]}"
        )
    # On a mesh the table is gathered: looked up where it lies, all rows' embeddings would be.
    table = sharding.constrain(params["embed_tokens"], None, None)
    x = sharding.constrain(table[tokens], "batch", "tokens", None)
    layer_of = jax.checkpoint(_layer, static_argnums=(1, 4)) if remat else _layer
    hidden: list[Any] = []
    for stage in stages:

        def one_loop(carry: Any, loop: Array, attend: Attend = stage.attend) -> tuple[Any, Array | None]:
            def one_layer(carry: Any, p: Params) -> tuple[Any, None]:
                x, state, layer = carry
                x, state = layer_of(p, config, x, state, attend, loop, layer)
                return (x, state, layer + 1), None

            (x, state, _), _ = jax.lax.scan(one_layer, (*carry, jnp.zeros((), jnp.int32)), params["layers"])
            x = layers.rms_norm(x, params["norm"], config.rms_norm_eps)
            return (x, state), x if every_loop else None

        (x, state), seen = jax.lax.scan(one_loop, (x, state), jnp.arange(stage.loops.start, stage.loops.stop))
        hidden.append(seen)
    return (jnp.concatenate(hidden) if every_loop else x), state


def _layer(
    p: Params, config: OuroConfig, x: Array, state: Any, attend: Attend, loop: Array, layer: Array
) -> tuple[Array, Any]:
    eps = config.rms_norm_eps
    h = layers.rms_norm(x, p["input_layernorm"], eps)
    heads, state = attend(state, LayerInputs(h, *project(p, config, h), loop, layer))
    attended = layers.linear(heads.reshape(*x.shape[:2], -1), p["o_proj"])
    x = x + layers.rms_norm(attended, p["input_layernorm_2"], eps)
    h = layers.rms_norm(x, p["post_attention_layernorm"], eps)
    out = layers.gated_mlp(h, lambda h: gate_up(p, h), p["down_proj"])
    return x + layers.rms_norm(out, p["post_attention_layernorm_2"], eps), state


def project(
    p: Params, config: OuroConfig, h: Float[Array, "B S d"]
) -> tuple[Float[Array, "B S H dh"], Float[Array, "B S G dh"], Float[Array, "B S G dh"]]:
    """Queries, keys and values of one layer (`p` without the layer axis), before rotation."""
    if "qkv_proj" in p:
        ends = config.num_heads, config.num_heads + config.num_kv_heads
        joint = layers.linear(h, p["qkv_proj"])
        q, k, v = jnp.split(joint.reshape(*h.shape[:2], -1, config.head_dim), ends, axis=2)
        return q, k, v
    split = lambda name: layers.linear(h, p[name]).reshape(*h.shape[:2], -1, config.head_dim)
    return split("q_proj"), split("k_proj"), split("v_proj")


def gate_up(p: Params, h: Float[Array, "B S d"]) -> tuple[Float[Array, "B S f"], Float[Array, "B S f"]]:
    """Gate, before its nonlinearity, and what it gates, in the MLP of one layer."""
    if "gate_up_proj" in p:
        gate, up = jnp.split(layers.linear(h, p["gate_up_proj"]), 2, axis=-1)
        return gate, up
    return layers.linear(h, p["gate_proj"]), layers.linear(h, p["up_proj"])


def for_decoding(params: Params) -> Params:
    """The same parameters with one matrix for q, k and v, and one for gate and up: a decoding step has fewer and larger
    products.

    Takes the memory of these matrices a second time until the caller drops `params`. Training, calibration and export
    need parameters as they are stored.
    """
    apart = dict(params["layers"])
    join = lambda *names: jnp.concatenate([apart.pop(name) for name in names], axis=1)
    joined = {"qkv_proj": join("q_proj", "k_proj", "v_proj"), "gate_up_proj": join("gate_proj", "up_proj")}
    return params | {"layers": apart | joined}


def logits(params: Params, hidden: Float[Array, "... d"]) -> Float[Array, "... V"]:
    """Next-token logits in float32 (float64 for a float64 model); tied models use the embedding."""
    head = params.get("lm_head", params["embed_tokens"])
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=layers.accumulation_dtype(hidden.dtype))


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
        return logits(params, hidden[exit_at])
    if exit_threshold is not None and not 0.0 < exit_threshold <= 1.0:
        raise ValueError(f"exit_threshold must be in (0, 1], found {exit_threshold}")
    if exit_weighted:
        probabilities = exit_probabilities(gate_logits(params, hidden))
        total = jnp.zeros((*hidden.shape[1:3], params["embed_tokens"].shape[0]), probabilities.dtype)
        add = lambda total, loop: (total + loop[0][..., None] * logits(params, loop[1]), None)
        return jax.lax.scan(add, total, (probabilities, hidden))[0]
    if exit_threshold is None or exit_threshold == 1.0:
        return logits(params, hidden[-1])
    reached = jnp.cumsum(exit_probabilities(gate_logits(params, hidden)), axis=0) >= exit_threshold
    first = jnp.argmax(reached.at[-1].set(True), axis=0)
    return logits(params, jnp.take_along_axis(hidden, first[None, :, :, None], axis=0)[0])


class Ouro(nnx.Module):
    """Flax container of the parameters: `nnx.split` it for optimizers, or take `.params()` for the functions above."""

    def __init__(self, config: OuroConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        self.weights = nnx.data(jax.tree.map(nnx.Param, weights.init_params(config, rngs.params(), dtype)))

    def params(self) -> Params:
        """The plain parameter tree."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))["weights"]

    def __call__(self, tokens: Int[Array, "B S"], stages: Sequence[Stage]) -> Float[Array, "B S V"]:
        """Logits of the last loop, with attention that carries no state (e.g. `attention.full.exact_stages`)."""
        hidden, _ = run(self.params(), self.config, tokens, stages, None)
        return logits(self.params(), hidden)
