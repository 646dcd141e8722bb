"""Looped models: the same layers applied T times to every token, for every family.

The stack takes attention as an argument (`stages.py`) and knows nothing of caches. Each stage is one `scan` over its
loops around one `scan` over the layers, so compile time does not grow with T or L. What a family is made of (what comes
before the loops, a layer, what comes between and after) is a module of its own with the same functions.

Shapes: B batch, S tokens, V vocabulary, d hidden size, L layers, T loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from hla_jax import sharding
from hla_jax.config import HuginnConfig, ModelConfig, OuroConfig
from hla_jax.models import huginn, layers, ouro, weights
from hla_jax.models.stages import Attend, Params, Stage
from hla_jax.models.tables import STACKS

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_FAMILIES: dict[type[ModelConfig], ModuleType] = {OuroConfig: ouro, HuginnConfig: huginn}


def run(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B S"],
    stages: Sequence[Stage],
    state: Any,
    outer: Attend | None = None,
    *,
    initial: Float[Array, "B S d"] | None = None,
    every_loop: bool = False,
    remat: bool = False,
) -> tuple[Float[Array, "... B S d"], Any]:
    """Runs the whole model up to its head.

    Args:
      params: the parameter tree of `weights`, or what `for_decoding` makes of it.
      config: sizes.
      tokens: token ids.
      stages: attention of the loops, covering 0 .. T-1 in order.
      state: what `attend` carries from layer to layer and loop to loop.
      outer: attention of the layers outside of the loops, for models that have some.
      initial: the state that the loops start from, for models whose loops have one; None goes by the config.
      every_loop: return the state after every loop, [T, B, S, d], instead of what the head reads, [B, S, d]. Layers
        after the loops are then not run.
      remat: a backward pass computes each layer again instead of keeping what it computed.

    Returns:
      Hidden states, and the last state of the attention.
    """
    if [loop for stage in stages for loop in stage.loops] != list(range(config.num_loops)):
        raise ValueError(
            f"stages must cover loops 0 .. {config.num_loops - 1} in order, found {[s.loops for s in stages]}"
        )
    if config.outer_layers and outer is None:
        raise ValueError(f"the model has {config.outer_layers} layers outside of its loops: they need `outer`")
    family = _FAMILIES[type(config)]
    # On a mesh the table is gathered: looked up where it lies, all rows' embeddings would be.
    table = sharding.constrain(params["embed_tokens"], None, None)
    embedded = sharding.constrain(table[tokens], "batch", "tokens", None)
    if initial is None and isinstance(config, HuginnConfig):
        initial = huginn.initial_state(config, tokens, embedded.dtype)
    x, given, state = family.begin(params, config, embedded, state, outer, initial)
    layer_of = jax.checkpoint(family.layer, static_argnums=(1, 4)) if remat else family.layer
    hidden: list[Any] = []
    for stage in stages:

        def one_loop(carry: Any, loop: Array, attend: Attend = stage.attend) -> tuple[Any, Array | None]:
            def one_layer(carry: Any, p: Params) -> tuple[Any, None]:
                x, state, number = carry
                x, state = layer_of(p, config, x, state, attend, loop, number)
                return (x, state, number + 1), None

            x, state = carry
            x = family.enter_loop(params, x, given)
            (x, state, _), _ = jax.lax.scan(one_layer, (x, state, jnp.zeros((), jnp.int32)), params["layers"])
            x = family.leave_loop(params, config, x)
            return (x, state), x if every_loop else None

        (x, state), seen = jax.lax.scan(one_loop, (x, state), jnp.arange(stage.loops.start, stage.loops.stop))
        hidden.append(seen)
    if every_loop:
        return jnp.concatenate(hidden), state
    return family.end(params, config, x, state, outer)


def for_decoding(params: Params) -> Params:
    """The same parameters with one matrix for q, k and v, and one for gate and up: a decoding step has fewer and larger
    products.

    Takes the memory of these matrices a second time until the caller drops `params`. Training, calibration and export
    need parameters as they are stored.
    """

    def joined(stack: Params) -> Params:
        apart = dict(stack)
        join = lambda *names: jnp.concatenate([apart.pop(name) for name in names], axis=1)
        together = {"qkv_proj": join("q_proj", "k_proj", "v_proj"), "gate_up_proj": join("gate_proj", "up_proj")}
        return apart | together

    return params | {name: joined(params[name]) for name in STACKS if name in params}


class LoopedModel(nnx.Module):
    """Flax container of the parameters: `nnx.split` it for optimizers, or take `.params()` for the functions above."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        self.weights = nnx.data(jax.tree.map(nnx.Param, weights.init_params(config, rngs.params(), dtype)))

    def params(self) -> Params:
        """The plain parameter tree."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))["weights"]

    def __call__(
        self, tokens: Int[Array, "B S"], stages: Sequence[Stage], outer: Attend | None = None
    ) -> Float[Array, "B S V"]:
        """Logits, with attention that carries no state (e.g. `attention.full.exact_stages`)."""
        hidden, _ = run(self.params(), self.config, tokens, stages, None, outer)
        return layers.logits(self.params(), hidden)
