"""Pretraining a small looped model from scratch on the curriculum of `data.curriculum`.

Ouro's loss is the cross-entropy of the last loop's logits, plus a tenth of each earlier loop's, plus the exit gate's
own. The gate sees detached hidden states and losses: it minimises the expected loss over where it stops, less a reward
for entropy, and so learns when another loop pays. Huginn's is the cross-entropy after a random number of steps.
Matrices are updated by Muon, everything else by Adam.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from hla_jax.attention.full import exact_pass
from hla_jax.config import HuginnConfig, OuroConfig
from hla_jax.data.curriculum import Stage
from hla_jax.models import layers, ouro, weights
from hla_jax.models.huginn import initial_state
from hla_jax.models.stages import Params
from hla_jax.training import step


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that decides the trained weights, besides the corpus.

    Attributes:
      model: sizes.
      stages: the curriculum.
      seed: of the initial weights and the data.
      muon_learning_rate: of the layers' matrices; each stage scales it.
      adam_learning_rate: of embeddings, head, norms and gate; each stage scales it.
      warmup_steps: at the start of training, linear.
      early_loops: weight of each loop's loss but the last's.
      exit_entropy: weight of the exit distribution's entropy in the gate's loss.
      num_steps: of Huginn, the numbers of steps of which every batch draws one; none for the model's own.
      evaluate_every, save_every: steps between two.
    """

    model: OuroConfig | HuginnConfig
    stages: tuple[Stage, ...]
    seed: int = 0
    muon_learning_rate: float = 0.02
    adam_learning_rate: float = 3e-3
    warmup_steps: int = 20
    early_loops: float = 0.1
    exit_entropy: float = 0.1
    num_steps: tuple[int, ...] = ()
    evaluate_every: int = 100
    save_every: int = 50


def init(recipe: Recipe) -> step.TrainState:
    """The state before the first update.

    In Ouro a token's identity must survive 2 L T residual additions: hence large embeddings and small post-norm gains.
    Huginn's core is given it anew at every step.
    """
    of_ouro = {"embedding_std": 1.0, "post_norm_gain": 0.3}
    start: dict[str, Any] = {} if isinstance(recipe.model, HuginnConfig) else of_ouro
    params = weights.init_params(recipe.model, jax.random.key(recipe.seed), **start)
    return step.init(params, optimizer(recipe), recipe.seed)


def make_loss(recipe: Recipe) -> step.Loss:
    """The loss of one batch of `Curriculum.batch`, a mean over the labels' weights."""
    config = recipe.model
    if isinstance(config, HuginnConfig):
        return _after_random_steps(config, recipe.num_steps or (config.num_loops,))

    def loss(
        params: Params, batch: dict[str, Array], rng: Key[Array, ""], constants: None
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], step.Metrics]]:
        read = batch["tokens"], batch["positions"], batch["segments"]
        hidden = exact_pass(params, config, *read, every_loop=True)
        return of_hidden(recipe, params, hidden, batch)

    return loss


def _after_random_steps(config: HuginnConfig, num_steps: Sequence[int]) -> step.Loss:
    def after(
        steps: int, params: Params, batch: dict[str, Array], key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        read = batch["tokens"], batch["positions"], batch["segments"]
        # Every batch starts from states of its own: the model must not come to rely on the one that decoding draws.
        ids = jax.random.randint(key, batch["tokens"].shape, 0, jnp.iinfo(jnp.int32).max)
        initial = initial_state(config, ids, params["embed_tokens"].dtype)
        hidden = exact_pass(params, config.with_steps(steps), *read, initial=initial)
        total = jnp.sum(batch["weights"])
        return jnp.sum(token_errors(params, hidden[None], batch["labels"])[0] * batch["weights"]) / total, total

    def loss(
        params: Params, batch: dict[str, Array], rng: Key[Array, ""], constants: None
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], step.Metrics]]:
        choice, key = jax.random.split(rng)
        drawn = jax.random.randint(choice, (), 0, len(num_steps))
        value, total = jax.lax.switch(
            drawn, [functools.partial(after, steps) for steps in num_steps], params, batch, key
        )
        return value, (total, {"num_steps": jnp.asarray(num_steps)[drawn]})

    return loss


def of_hidden(
    recipe: Recipe, params: Params, hidden: Float[Array, "T B S d"], batch: dict[str, Array]
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], step.Metrics]]:
    """The loss from the hidden states after every loop, however attention made them."""
    errors = token_errors(params, hidden, batch["labels"])
    total = jnp.sum(batch["weights"])

    def mean(x: Float[Array, "*T B S"]) -> Float[Array, " *T"]:
        return jnp.sum(x * batch["weights"], axis=(-2, -1)) / total

    per_loop = mean(errors)
    stops = ouro.exit_probabilities(ouro.gate_logits(params, jax.lax.stop_gradient(hidden)))
    entropy = -jnp.sum(jax.scipy.special.xlogy(stops, stops), axis=0)
    gate = mean(jnp.sum(stops * jax.lax.stop_gradient(errors), axis=0) - recipe.exit_entropy * entropy)
    value = per_loop[-1] + recipe.early_loops * jnp.sum(per_loop[:-1]) + gate
    metrics = {f"cross_entropy/loop{t + 1}": x for t, x in enumerate(per_loop)}
    return value, (total, metrics)


def token_errors(params: Params, hidden: Float[Array, "T B S d"], labels: Int[Array, "B S"]) -> Float[Array, "T B S"]:
    """Cross-entropy of every loop's next-token distribution in nats; logits are held for one loop at a time."""

    @jax.checkpoint
    def one_loop(hidden: Float[Array, "B S d"]) -> Float[Array, "B S"]:
        return optax.softmax_cross_entropy_with_integer_labels(layers.logits(params, hidden), labels)

    return jax.lax.map(one_loop, hidden)


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Clipping, then Muon on the layers' matrices [L, out, in] and Adam on the rest."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)

    def dimensions(path: tuple[jax.tree_util.DictKey, ...], leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
        return matrix if path[-1].key.endswith("proj") else None

    factor = schedule(recipe)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            learning_rate=lambda count: recipe.muon_learning_rate * factor(count),
            adam_learning_rate=lambda count: recipe.adam_learning_rate * factor(count),
            adam_b2=0.95,
            muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(dimensions, params),
        ),
    )


def schedule(recipe: Recipe) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
    """Factor on the learning rates: linear within each stage, after the warm-up."""
    factors, ends = [], [0]
    for stage in recipe.stages:
        factors.append(optax.linear_schedule(*stage.learning_rate, stage.steps))
        ends.append(ends[-1] + stage.steps)
    joined = optax.join_schedules(factors, ends[1:-1])
    return lambda count: jnp.minimum(1.0, (count + 1) / recipe.warmup_steps) * joined(count)
