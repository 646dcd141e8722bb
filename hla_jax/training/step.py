"""One optimizer step, generic over the loss, with accumulation over micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from hla_jax import sharding

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


def init_on(
    mesh: Mesh, params: PyTree, placed: PyTree, optimizer: optax.GradientTransformation, seed: int
) -> tuple[TrainState, TrainState]:
    """`init` on a mesh: the state, and its shardings. The parameters lie as `placed` says, what the optimizer keeps of
    each parameter lies as that one, and the rest is whole on every device.
    """
    start = lambda params: init(params, optimizer, seed)
    shardings = sharding.like(jax.eval_shape(start, params), params, placed, mesh)
    return jax.jit(start, out_shardings=shardings)(sharding.put(params, placed)), shardings


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of every batch that has its own shape and loss. Metrics of all parts but the first are `NAME/METRIC`."""

    loss: Loss
    micro_batches: int = 1


def make_step(
    loss: Loss | Mapping[str, Part],
    optimizer: optax.GradientTransformation,
    micro_batches: int = 1,
    shardings: PyTree = None,
) -> Step:
    """A jitted `step(state, batch, constants=None) -> (state, metrics)`.

    Args:
      loss: see `Loss`. `constants` is what it needs besides: frozen weights, which are arguments of the step so that
        they are not compiled into it. For batches of several parts {name: arrays}, each part's loss.
      optimizer: an optax transformation.
      micro_batches: the gradient is summed over this many parts of the batch (arrays [B, ...], B a multiple of it),
        each weighted by its loss's `weight`: the same update as from the whole batch at once, in less memory.
      shardings: how the state lies on the mesh, `TrainState` of shardings; None: as it came.

    Returns:
      The step. `metrics` are the loss's, and `loss` and `grad_norm` (before clipping). The old state is donated.
    """
    parts = loss if isinstance(loss, Mapping) else {"": Part(loss, micro_batches)}

    def step(state: TrainState, batch: PyTree, constants: PyTree = None) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(state.rng, state.step)
        named = batch if isinstance(loss, Mapping) else {"": batch}
        grads, loss_sum, weight = None, jnp.zeros(()), jnp.zeros(())
        metrics: Metrics = {}
        for number, (name, part) in enumerate(parts.items()):
            mine, (of_part, found) = _sums(part, state.params, named[name], rng, constants)
            grads = of_part if grads is None else jax.tree.map(jnp.add, grads, of_part)
            loss_sum, weight = loss_sum + found["loss"], weight + mine
            metrics |= {f"{name}/{key}" if number else key: _over(x, mine) for key, x in found.items()}
        # A batch of padding only has weight 0 and gradients 0.
        grads = jax.tree.map(lambda x: _over(x, weight), grads)
        metrics["loss"] = _over(loss_sum, weight)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["grad_norm"] = optax.tree.norm(grads)
        return TrainState(state.step + 1, params, opt_state, state.rng), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))


def _over(total: Array, weight: Array) -> Array:
    return total / jnp.maximum(weight, 1e-9).astype(total.dtype)


def _sums(part: Part, params: PyTree, batch: PyTree, rng: Key[Array, ""], constants: PyTree) -> PyTree:
    """Weight of a part of a batch, and gradient and metrics times the weight."""
    value_and_grad = jax.value_and_grad(part.loss, has_aux=True)

    def weighted(rows: PyTree, rng: Key[Array, ""]) -> PyTree:
        (value, (weight, metrics)), grads = value_and_grad(params, rows, rng, constants)
        return weight, jax.tree.map(lambda x: x * weight.astype(x.dtype), (grads, {"loss": value, **metrics}))

    count = part.micro_batches
    if count == 1:
        return weighted(batch, rng)
    rows, rngs = jax.tree.map(lambda x: _split(x, count), batch), jax.random.split(rng, count)
    first = jax.tree.map(lambda x: x[0], (rows, rngs))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(weighted, *first))
    add = lambda total, x: (jax.tree.map(jnp.add, total, weighted(*x)), None)
    return jax.lax.scan(add, zeros, (rows, rngs))[0]


def _split(x: Array, parts: int) -> Array:
    """[B, ...] -> [parts, B / parts, ...]. Part i takes rows i, i + parts, ...: each device splits its own rows."""
    if x.shape[0] % parts:
        raise ValueError(f"a batch of {x.shape[0]} rows does not split into {parts} micro-batches")
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)
