"""Distillation of a cache scheme's maps (LLA, section 3): the model through the compressed cache follows the exact one.

One exact pass is the teacher: it fills the cache, and its attention outputs are noted. A second pass reads the cache
under the decoding rule and is the student. The loss is the forward KL of the logits and an error of the attention
outputs; gradients reach the maps only, through what both passes write and read.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.attention.outer import whole
from hla_jax.attention.scheme import Attention, Cache, Scheme, Transform
from hla_jax.config import ModelConfig
from hla_jax.data import pipeline
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import Source
from hla_jax.model import Model
from hla_jax.models import layers, looped
from hla_jax.models.layers import accumulation_dtype, linear
from hla_jax.models.stages import Attend, LayerInputs, Params, Stage
from hla_jax.training import loop
from hla_jax.training.checkpoints import Checkpoints
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig, adamw
from hla_jax.training.step import Loss, Metrics, init, make_step

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Maps = dict[str, Array]
Batch = dict[str, Any]

HELD_OUT = "held_out/kl"
# Tokens whose logits exist at once.
_LOGITS_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """Everything that decides the distilled maps, besides the model.

    Attributes:
      sources: mixture of documents.
      batches: shape of a batch; without packing, since a student reads its row as one sequence.
      optimizer, loop: see there; the maps with the smallest held-out KL are kept.
      output_weight: of the attention-output error; 0 leaves it out.
      micro_batches: parts of a batch that are computed one at a time.
      held_out_batches: batches of held-out data on which the KL is followed.
      seed: of the data's order.
    """

    sources: tuple[Source, ...]
    batches: BatchConfig
    optimizer: OptimizerConfig
    loop: LoopConfig
    output_weight: float = 0.5
    micro_batches: int = 1
    held_out_batches: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batches.pack:
            raise ValueError("distillation reads every row as one sequence: batches.pack must be false")
        if self.loop.best_metric != HELD_OUT:
            raise ValueError(f"loop.best_metric must be {HELD_OUT!r}, found {self.loop.best_metric!r}")


def distill(
    model: Model, attention: Attention, tokenizer: Any, config: DistillConfig, workdir: pathlib.Path
) -> Attention:
    """Trains the maps of any scheme, from their initialisation or from the newest checkpoint in `workdir`.

    Returns:
      The scheme with the maps whose held-out KL was smallest, the initial ones among them.

    Raises:
      DataError, CheckpointError, TrainingError, Interrupted: see `training.loop.run`.
    """
    return train(model, attention, tokenizer, config, workdir, lambda maps, batch, step: batch)


def train(
    model: Model,
    attention: Attention,
    tokenizer: Any,
    config: DistillConfig,
    workdir: pathlib.Path,
    prepare: Callable[[Maps, Batch, Array], Batch],
) -> Attention:
    """As `distill`; `prepare(maps, batch, step)` makes of a batch of documents the one to learn from."""
    scheme = attention.scheme
    loss = make_loss(scheme, model.config, config.output_weight)
    stream = functools.partial(
        pipeline.batches, config.sources, tokenizer, config.batches, None, vocab_size=model.config.vocab_size
    )
    held_out = list(itertools.islice(stream(held_out=True, seed=config.seed), config.held_out_batches))
    follow = jax.jit(lambda maps, batch, params: loss(maps, batch, jax.random.key(0), params)[1])

    def evaluate(maps: Maps) -> dict[str, float]:
        prepared = (prepare(maps, batch, jnp.asarray(number)) for number, batch in enumerate(held_out))
        found = [jax.device_get(follow(maps, batch, model.params)) for batch in prepared]
        total = sum(weight for weight, _ in found)
        return {f"held_out/{name}": float(sum(w * m[name] for w, m in found) / total) for name in found[0][1]}

    optimizer = adamw(config.optimizer)
    update = make_step(loss, optimizer, config.micro_batches)
    state = loop.run(
        init(attention.params, optimizer, config.seed),
        # Held-out batches have the first numbers.
        lambda state, batch: update(state, prepare(state.params, batch, len(held_out) + state.step), model.params),
        stream(seed=config.seed, process=(jax.process_index(), jax.process_count())),
        config.loop,
        workdir,
        lambda state: evaluate(state.params),
    )
    checkpoints = Checkpoints(workdir / "checkpoints", config.loop.keep, config.loop.best_metric)
    best, reached = checkpoints.restore_best(state)
    checkpoints.close()
    started = evaluate(attention.params)[HELD_OUT]
    return Attention(scheme, best.params if reached <= started else attention.params)


def make_loss(scheme: Scheme, config: ModelConfig, output_weight: float) -> Loss:
    """KL(teacher || student) of the next-token distributions, in nats, and `output_weight` times the mean over layers
    and loops of |o_student - o|^2 / |o|^2, o after o_proj: a loss of the maps; the constants are the frozen weights.

    Tokens of segment 0 are padding and do not count.
    """

    def loss(params: Maps, batch: Batch, rng: Array, constants: Params) -> tuple[Array, tuple[Array, Metrics]]:
        counted = batch["segments"] > 0
        kl, errors = divergence(scheme, config, params, constants, batch["tokens"], counted)
        by_loop = {f"error/loop{number + 1}": error for number, error in enumerate(errors)}
        error = jnp.mean(errors)
        weight = jnp.sum(counted).astype(kl.dtype)
        return kl + output_weight * error, (weight, {"kl": kl, "error": error, **by_loop})

    return loss


def divergence(
    scheme: Scheme,
    config: ModelConfig,
    maps: Maps,
    params: Params,
    tokens: Int[Array, "B S"],
    counted: Bool[Array, "B S"],
) -> tuple[Float[Array, ""], Float[Array, " T"]]:
    """KL of the logits, and relative squared error of the attention output at every loop, averaged over layers."""
    batch, length = tokens.shape
    dtype = params["embed_tokens"].dtype
    transform = whole(config, scheme).swapped(config, maps, batch, length, dtype)
    weights = counted.astype(accumulation_dtype(dtype))
    weights = weights / jnp.maximum(jnp.sum(weights), 1)
    heads = config.num_heads * config.head_dim
    outputs = jnp.zeros((config.num_loops, config.num_layers, batch, length, heads), dtype)

    def noting(attend: Attend) -> Attend:
        def attend_and_note(state: Any, inputs: LayerInputs) -> tuple[Array, Any]:
            out, inner = attend(state[0], inputs)
            flat = jax.lax.stop_gradient(out).reshape(batch, length, heads)
            return out, (inner, state[1].at[inputs.loop, inputs.layer].set(flat))

        return attend_and_note

    teacher, (state, outputs) = looped.run(params, config, tokens, *_around(transform, noting, outputs))
    student_pass = transform.finish(state)
    assert not isinstance(student_pass, Cache)

    def comparing(attend: Attend) -> Attend:
        def attend_and_compare(state: Any, inputs: LayerInputs) -> tuple[Array, Any]:
            out, inner = attend(state[0], inputs)
            project = lambda heads: linear(heads, params["layers"]["o_proj"][inputs.layer]).astype(weights.dtype)
            exact = project(outputs[inputs.loop, inputs.layer])
            apart = jnp.sum((project(out.reshape(batch, length, heads)) - exact) ** 2, axis=-1)
            error = jnp.sum(weights * apart / jnp.sum(exact**2, axis=-1)) / config.num_layers
            return out, (inner, state[1].at[inputs.loop].add(error))

        return attend_and_compare

    errors = jnp.zeros(config.num_loops, weights.dtype)
    student, (_, errors) = looped.run(params, config, tokens, *_around(student_pass, comparing, errors), remat=True)
    return logits_divergence(params, teacher, student, weights), errors


def logits_divergence(
    params: Params,
    teacher: Float[Array, "B S d"],
    student: Float[Array, "B S d"],
    weights: Float[Array, "B S"],
) -> Float[Array, ""]:
    """KL(teacher || student) of the next-token distributions, weighted over tokens, block by block of tokens."""

    @jax.checkpoint
    def block(total: Array, xs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        exact, other = (jax.nn.log_softmax(layers.logits(params, hidden)) for hidden in xs[:2])
        kl = jnp.sum(jnp.exp(exact) * (exact - other), axis=-1)
        return total + jnp.sum(xs[2] * kl), None

    rows = weights.size
    size = min(_LOGITS_BLOCK, rows)
    count = -(-rows // size)

    def split(x: Float[Array, "B S ..."]) -> Float[Array, "n size ..."]:
        flat = x.reshape(rows, *x.shape[2:])
        return jnp.pad(flat, ((0, count * size - rows),) + ((0, 0),) * (flat.ndim - 1)).reshape(
            count, size, *flat.shape[1:]
        )

    blocks = tuple(map(split, (jax.lax.stop_gradient(teacher), student, weights)))
    return jax.lax.scan(block, jnp.zeros((), weights.dtype), blocks)[0]


def _around(
    transform: Transform, wrap: Callable[[Attend], Attend], beside: Array
) -> tuple[list[Stage], tuple[Any, Array], Attend | None]:
    """Stages, state and outer attention of a transform with `beside` in the state: `wrap` of a loop's attention sees
    it.
    """
    outer = transform.outer

    def attend_outer(state: tuple[Any, Array], inputs: LayerInputs) -> tuple[Array, tuple[Any, Array]]:
        assert outer is not None
        out, inner = outer(state[0], inputs)
        return out, (inner, state[1])

    stages = [stage._replace(attend=wrap(stage.attend)) for stage in transform.stages]
    return stages, (transform.state, beside), attend_outer if outer else None
