"""One optimizer step, generic over the loss, with accumulation over micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Float, Int32, Key, PyTree

Metrics = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes: with the position of the data, all that resuming needs.

    Attributes:
      step: number of updates done.
      params: the trainable parameters.
      opt_state: optax's.
      rng: never changes; the randomness of an update is `fold_in(rng, step)`.
    """

    step: Int32[Array, ""]
    params: PyTree
    opt_state: PyTree
    rng: Key[Array, ""]


class Loss(Protocol):
    def __call__(
        self, params: PyTree, batch: PyTree, rng: Key[Array, ""], constants: PyTree
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Metrics]]:
        """(loss, (weight, metrics)): the loss and the metrics are means over `weight` things, such as tokens."""
        ...


Step = Callable[..., tuple[TrainState, Metrics]]


def init(params: PyTree, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first update. Copies `params`, because a step overwrites its state in place."""
    params = jax.tree.map(jnp.copy, params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key(seed))


def make_step(loss: Loss, optimizer: optax.GradientTransformation, micro_batches: int = 1) -> Step:
    """A jitted `step(state, batch, constants=None) -> (state, metrics)`.

    Args:
      loss: see `Loss`. `constants` is what it needs besides: frozen weights, which are arguments of the step so that
        they are not compiled into it.
      optimizer: an optax transformation.
      micro_batches: the gradient is summed over this many parts of the batch (arrays [B, ...], B a multiple of it),
        each weighted by its loss's `weight`: the same update as from the whole batch at once, in less memory.

    Returns:
      The step. `metrics` are the loss's, and `loss` and `grad_norm` (before clipping). The old state is donated.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def weighted(params: PyTree, part: PyTree, rng: Key[Array, ""], constants: PyTree) -> PyTree:
        (value, (weight, metrics)), grads = value_and_grad(params, part, rng, constants)
        return weight, jax.tree.map(lambda x: x * weight.astype(x.dtype), (grads, {"loss": value, **metrics}))

    def step(state: TrainState, batch: PyTree, constants: PyTree = None) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(state.rng, state.step)
        if micro_batches == 1:
            weight, sums = weighted(state.params, batch, rng, constants)
        else:
            parts = jax.tree.map(lambda x: _split(x, micro_batches), batch)
            rngs = jax.random.split(rng, micro_batches)
            first = jax.tree.map(lambda x: x[0], (parts, rngs))
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(weighted, state.params, *first, constants)
            )
            (weight, sums), _ = jax.lax.scan(
                lambda total, x: (jax.tree.map(jnp.add, total, weighted(state.params, *x, constants)), None),
                zeros,
                (parts, rngs),
            )
        # A batch of padding only has weight 0 and gradients 0.
        grads, metrics = jax.tree.map(lambda x: x / jnp.maximum(weight, 1e-9).astype(x.dtype), sums)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["grad_norm"] = optax.tree.norm(grads)
        return TrainState(state.step + 1, params, opt_state, state.rng), metrics

    return jax.jit(step, donate_argnums=0)


def _split(x: Array, parts: int) -> Array:
    """[B, ...] -> [parts, B / parts, ...]. Part i takes rows i, i + parts, ...: each device splits its own rows."""
    if x.shape[0] % parts:
        raise ValueError(f"a batch of {x.shape[0]} rows does not split into {parts} micro-batches")
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)
