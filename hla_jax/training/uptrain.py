"""Uptraining (HLA, section 4.1): fit the maps of every layer to the exact attention, on the reference's own hidden
states.

One exact pass stores the attention inputs h [T, L, B, S, d] of a micro-batch; each layer is then fitted locally, so no
gradient crosses layers, and the pretrained weights get none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.attention.capture import attention_inputs
from hla_jax.attention.full import rotate_qk
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention
from hla_jax.config import OuroConfig
from hla_jax.data import pipeline
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import Source
from hla_jax.data.positions import ShiftConfig
from hla_jax.kernels.attention_match import Fitted, Fixed
from hla_jax.kernels.attention_match.api import attention_match
from hla_jax.model import Model
from hla_jax.models import ouro
from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.ouro import LayerInputs
from hla_jax.training import loop
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig, adamw
from hla_jax.training.step import Loss, Metrics, TrainState, init, make_step

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Key

Maps = dict[str, Array]
Batch = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class UptrainConfig:
    """Everything that decides the uptrained maps, besides the model.

    Attributes:
      sources: mixture of documents.
      batches: shape of a batch.
      shift: shifted positions of the training sequences; None trains at the real ones.
      optimizer, loop: see there.
      micro_batches: parts of a batch whose hidden states are held one at a time.
      queries: random query positions of each row on which the loss is computed; None for all.
      held_out_batches: batches of held-out data on which the divergence is followed, at real positions.
      seed: of the data's order.
    """

    sources: tuple[Source, ...]
    batches: BatchConfig
    optimizer: OptimizerConfig
    loop: LoopConfig
    shift: ShiftConfig | None = None
    micro_batches: int = 1
    queries: int | None = None
    held_out_batches: int = 2
    seed: int = 0


def uptrain(
    model: Model, attention: Attention, tokenizer: Any, config: UptrainConfig, workdir: pathlib.Path
) -> Attention:
    """Trains the maps of an HLA scheme, from its initialisation or from the newest checkpoint in `workdir`.

    Returns:
      The scheme with the maps after the last step.

    Raises:
      DataError, CheckpointError, TrainingError, Interrupted: see `training.loop.run`.
    """
    scheme = attention.scheme
    if not isinstance(scheme, HLA):
        raise TypeError(f"uptraining fits HLA's maps; found {type(scheme).__name__}")
    follow = jax.jit(functools.partial(divergence, scheme, model.config))
    stream = functools.partial(
        pipeline.batches, config.sources, tokenizer, config.batches, vocab_size=model.config.vocab_size
    )
    held_out = list(itertools.islice(stream(None, held_out=True, seed=config.seed), config.held_out_batches))

    def evaluate(state: TrainState) -> dict[str, float]:
        found = [follow(state.params, model.params, **batch) for batch in held_out]
        means = divergence_metrics(jax.tree.map(lambda *parts: sum(parts) / len(parts), *found), "held_out/")
        return {name: float(value) for name, value in means.items()}

    optimizer = adamw(config.optimizer)
    update = make_step(make_loss(scheme, model.config, config.queries), optimizer, config.micro_batches)
    training = stream(config.shift, seed=config.seed, process=(jax.process_index(), jax.process_count()))
    state = loop.run(
        init(attention.params, optimizer, config.seed),
        lambda state, batch: update(state, batch, model.params),
        training,
        config.loop,
        workdir,
        evaluate,
    )
    return Attention(scheme, state.params)


class Divergence(NamedTuple):
    """Distance of the attention from the exact one, averaged over layers, tokens and heads, for every loop."""

    kl: Float[Array, " T"]
    """KL(exact || HLA) in nats."""
    error: Float[Array, " T"]
    """Relative squared error of the attention output after o_proj."""


def divergence_metrics(found: Divergence, prefix: str = "") -> dict[str, Array]:
    """Names for the metrics file: means over loops, and the KL of every loop, counted from 1."""
    by_loop = {f"{prefix}kl/loop{loop + 1}": kl for loop, kl in enumerate(found.kl)}
    return {f"{prefix}kl": jnp.mean(found.kl), f"{prefix}error": jnp.mean(found.error), **by_loop}


def make_loss(scheme: HLA, config: OuroConfig, queries: int | None = None) -> Loss:
    """Eq. 5 averaged over layers and loops, as a loss of the maps; the constants are the frozen weights.

    The gradient is taken layer by layer together with the value, so that only one layer's intermediates exist at a
    time; the backward pass only scales it. With shifted positions the reference runs at the same shifted positions; the
    window goes by index. Tokens of segment 0 are padding and do not count. With `queries`, the mean is over that many
    random positions of each row.
    """
    fit = functools.partial(layer_divergence, scheme, config)

    @jax.custom_vjp
    def value(maps: Maps, params: ouro.Params, batch: Batch, index: Array) -> tuple[Array, Divergence]:
        return jax.tree.map(_over_layers, _each_layer(fit, config, maps, params, batch, index))

    def value_and_gradient(
        maps: Maps, params: ouro.Params, batch: Batch, index: Array
    ) -> tuple[tuple[Array, Divergence], Maps]:
        found, gradient = _each_layer(jax.value_and_grad(fit, has_aux=True), config, maps, params, batch, index)
        return jax.tree.map(_over_layers, found), jax.tree.map(lambda g: g / config.num_layers, gradient)

    def scale(gradient: Maps, cotangents: tuple[Array, Divergence]) -> tuple[Maps, None, None, None]:
        return jax.tree.map(lambda g: cotangents[0].astype(g.dtype) * g, gradient), None, None, None

    value.defvjp(value_and_gradient, scale)

    def loss(params: Maps, batch: Batch, rng: Array, constants: ouro.Params) -> tuple[Array, tuple[Array, Metrics]]:
        rows, length = batch["tokens"].shape
        index = all_queries(rows, length) if queries is None else random_queries(rng, rows, length, queries)
        found, by_loop = value(params, constants, batch, index)
        count = jnp.sum(jnp.take_along_axis(batch["segments"], index, axis=1) > 0)
        return found, (count.astype(found.dtype), divergence_metrics(by_loop))

    return loss


def all_queries(batch: int, length: int) -> Int[Array, "B S"]:
    """Every position of every row."""
    return jnp.broadcast_to(jnp.arange(length), (batch, length))


def random_queries(rng: Key[Array, ""], batch: int, length: int, count: int) -> Int[Array, "B Q"]:
    """`count` different positions of each row."""
    return jax.lax.top_k(jax.random.uniform(rng, (batch, length)), count)[1]


def divergence(
    scheme: HLA,
    config: OuroConfig,
    maps: Maps,
    params: ouro.Params,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"],
) -> Divergence:
    """The two terms of the loss by loop, over all tokens, averaged over layers."""
    fit = functools.partial(layer_divergence, scheme, config)
    batch = {"tokens": tokens, "positions": positions, "segments": segments}
    return jax.tree.map(_over_layers, _each_layer(fit, config, maps, params, batch, all_queries(*tokens.shape))[1])


def _each_layer(
    fit: Callable[..., Any], config: OuroConfig, maps: Maps, params: ouro.Params, batch: Batch, index: Int[Array, "B Q"]
) -> Any:
    h = attention_inputs(params, config, batch["tokens"], batch["positions"], batch["segments"])
    counted = (jnp.take_along_axis(batch["segments"], index, axis=1) > 0).astype(accumulation_dtype(h.dtype))
    counted = counted / jnp.maximum(jnp.sum(counted), 1)
    one_layer = lambda layer: fit(*layer, batch["positions"], batch["segments"], index, counted)
    return jax.lax.map(one_layer, (maps, params["layers"], jnp.moveaxis(h, 1, 0)))


def _over_layers(x: Float[Array, "L ..."]) -> Float[Array, "..."]:
    return jnp.mean(x, axis=0)


def layer_divergence(
    scheme: HLA,
    config: OuroConfig,
    maps: Maps,
    p: ouro.Params,
    h: Float[Array, "T B S d"],
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"],
    index: Int[Array, "B Q"],
    counted: Float[Array, "B Q"],
) -> tuple[Float[Array, ""], Divergence]:
    """Loss and divergence of one layer, from its attention inputs at every loop.

    The queries are the tokens `index`; `counted` weighs them and sums to 1.
    """
    query_positions = jnp.take_along_axis(positions, index, axis=1)
    # The scheme's functions index maps by layer: give them a stack of one.
    stacked = {name: value[None] for name, value in maps.items()}
    layer_inputs = lambda h, loop: LayerInputs(h, *ouro.project(p, config, h), loop, jnp.zeros((), jnp.int32))
    at_queries = lambda h: jnp.take_along_axis(h, index[:, :, None], axis=1)

    def match(inputs: LayerInputs, queries: LayerInputs, query: Array, latent_k: Array, latent_v: Array, read: Array):
        q, _ = rotate_qk(config, queries, query_positions)
        _, k = rotate_qk(config, inputs, positions)
        fitted = Fitted(query, latent_k, latent_v, read)
        fixed = Fixed(q, k, inputs.v, p["o_proj"], segments)
        return attention_match(fitted, fixed, index, counted, scheme.window)

    def write(total: tuple[Array, Array], loop_h: tuple[Array, Array]):
        parts = scheme.write_rest(stacked, layer_inputs(loop_h[1], loop_h[0]))
        return jax.tree.map(jnp.add, total, parts), None

    def fit_rest(_, loop_h: tuple[Array, Array]):
        loop, h = loop_h
        queries = layer_inputs(at_queries(h), loop)
        query = scheme.query_rest(config, stacked, queries, query_positions)
        return None, match(layer_inputs(h, loop), queries, query, *latent, maps["read_o"][loop - 1])

    loop_1 = jnp.zeros((), jnp.int32)
    first, queries = layer_inputs(h[0], loop_1), layer_inputs(at_queries(h[0]), loop_1)
    query = scheme.query_first(config, stacked, queries, query_positions)
    latent = scheme.write_first(config, stacked, first, positions)
    first_loss, first_match = match(first, queries, query, *latent, maps["read_o1"])

    rest = (jnp.arange(1, config.num_loops), h[1:])
    wide = jnp.promote_types(h.dtype, maps["write_k"].dtype)
    zeros = (jnp.zeros((*h.shape[1:3], scheme.rank_k), wide), jnp.zeros((*h.shape[1:3], scheme.rank_v), wide))
    (latent_k, latent_v), _ = jax.lax.scan(write, zeros, rest)
    latent = scheme.rotate_main(config, latent_k[:, :, None], positions)[:, :, 0], latent_v
    _, (rest_loss, rest_match) = jax.lax.scan(fit_rest, None, rest)

    loss = (first_loss + jnp.sum(rest_loss)) / config.num_loops
    by_loop = jax.tree.map(lambda one, others: jnp.concatenate([one[None], others]), first_match, rest_match)
    return loss, Divergence(by_loop.kl, by_loop.error)
