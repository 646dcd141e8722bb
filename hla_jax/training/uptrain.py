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
from jax.sharding import Mesh

from hla_jax import sharding
from hla_jax.attention.capture import attention_inputs
from hla_jax.attention.full import rotate_qk
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention
from hla_jax.config import ModelConfig
from hla_jax.data import pipeline
from hla_jax.data.packing import BatchConfig, Lanes, Parts
from hla_jax.data.pipeline import Source
from hla_jax.data.positions import ShiftConfig
from hla_jax.data.streams import DataError, Stream
from hla_jax.kernels.attention_match import Fitted, Fixed
from hla_jax.kernels.attention_match.api import attention_match
from hla_jax.model import Model
from hla_jax.models import layers
from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.stages import LayerInputs, Params
from hla_jax.training import loop
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig, adamw
from hla_jax.training.step import Loss, Metrics, Part, TrainState, init, init_on, make_step

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Key

Maps = dict[str, Array]
Batch = dict[str, Any]


SHORT, LONG = "short", "long"
"""The parts of a batch, and of the metrics' names."""


@dataclasses.dataclass(frozen=True)
class LongDocuments:
    """Whole windows of long documents beside the short rows.

    Attributes:
      sources: mixture of long documents.
      batch_size: windows in every batch; 0 only follows the divergence on held-out ones.
      length: tokens of a window; what a document has beyond its last whole window is dropped.
      queries: random query positions of each window on which the loss is computed.
      micro_batches: parts of the windows of a batch that are computed one at a time.
      held_out: windows of held-out documents on which the divergence is followed.
    """

    sources: tuple[Source, ...]
    batch_size: int = 8
    length: int = 16_384
    queries: int = 1024
    micro_batches: int = 8
    held_out: int = 4

    def shape(self, rows: int) -> BatchConfig:
        """Of `rows` windows."""
        return BatchConfig(rows, self.length, min_tokens=self.length, pack=False)


@dataclasses.dataclass(frozen=True)
class UptrainConfig:
    """Everything that decides the uptrained maps of one phase, besides the model.

    Attributes:
      sources: mixture of documents.
      batches: shape of a batch, over all devices and processes.
      shift: shifted positions of the training sequences; None trains at the real ones.
      optimizer, loop: see there.
      micro_batches: parts of a batch whose hidden states are held one at a time.
      queries: random query positions of each row on which the loss is computed; None for all.
      held_out_batches: batches of held-out data on which the divergence is followed, at real positions.
      long: long documents beside the rows of each batch, followed on held-out data apart.
      lanes: readers of the data that make a batch together; any number of processes that divides them makes the same.
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
    long: LongDocuments | None = None
    lanes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, rows in self.rows().items():
            if rows % self.lanes:
                raise DataError(f"lanes must divide the {rows} {name} rows of a batch; found {self.lanes}")

    def rows(self) -> dict[str, int]:
        """Rows of each part of a training batch."""
        long = {LONG: self.long.batch_size} if self.long and self.long.batch_size else {}
        return {SHORT: self.batches.batch_size} | long


def uptrain(
    model: Model,
    attention: Attention,
    tokenizer: Any,
    config: UptrainConfig,
    workdir: pathlib.Path,
    mesh: Mesh | None = None,
) -> Attention:
    """Trains the maps of an HLA scheme, from its initialisation or from the newest checkpoint in `workdir`.

    Args:
      mesh: devices that share the work, on which the model lies already; None: the default device.

    Returns:
      The scheme with the maps after the last step.

    Raises:
      DataError, CheckpointError, TrainingError, Interrupted: see `training.loop.run`.
      ConfigError: the rows of a micro-batch do not split over the mesh.
    """
    scheme = attention.scheme
    if not isinstance(scheme, HLA):
        raise TypeError(f"uptraining fits HLA's maps; found {type(scheme).__name__}")
    with sharding.use(mesh):
        return _uptrain(model, attention, tokenizer, config, workdir, mesh)


def _uptrain(
    model: Model, attention: Attention, tokenizer: Any, config: UptrainConfig, workdir: pathlib.Path, mesh: Mesh | None
) -> Attention:
    scheme = attention.scheme
    assert isinstance(scheme, HLA)
    losses = parts(scheme, model.config, config, mesh)
    evaluate = _evaluation(model, scheme, tokenizer, config, mesh)
    optimizer = adamw(config.optimizer)
    if mesh is None:
        state, shardings = init(attention.params, optimizer, config.seed), None
    else:
        placed = sharding.maps(scheme.map_shapes(model.config), scheme.map_axes(), model.config.num_layers, mesh)
        state, shardings = init_on(mesh, attention.params, placed, optimizer, config.seed)
    update = make_step(losses, optimizer, shardings=shardings)

    def lane(number: int, count: int) -> Stream[dict[str, Batch]]:
        rows = {SHORT: short_rows, LONG: long_rows}
        return Parts({name: rows[name](config, tokenizer, model.config, (number, count)) for name in losses})

    state = loop.run(
        state,
        lambda state, batch: update(state, sharding.put_rows(batch, mesh), model.params),
        Lanes(lane, config.lanes, sharding.reader(mesh)),
        config.loop,
        workdir,
        evaluate,
    )
    return Attention(scheme, state.params)


def parts(scheme: HLA, model: ModelConfig, config: UptrainConfig, mesh: Mesh | None = None) -> dict[str, Part]:
    """The loss of each part of a batch. Raises `ConfigError` where a micro-batch does not split over the mesh."""
    found = {SHORT: Part(make_loss(scheme, model, config.queries), config.micro_batches)}
    if config.long and config.long.batch_size:
        found[LONG] = Part(make_loss(scheme, model, config.long.queries), config.long.micro_batches)
    for name, part in found.items():
        sharding.check_rows(config.rows()[name], f"{name} rows of a batch", part.micro_batches, mesh)
    return found


def short_rows(config: UptrainConfig, tokenizer: Any, model: ModelConfig, lane: tuple[int, int]) -> Stream[Batch]:
    """Training rows of a lane (number, count)."""
    shape = dataclasses.replace(config.batches, batch_size=config.batches.batch_size // lane[1])
    return pipeline.batches(
        config.sources, tokenizer, shape, config.shift, model.vocab_size, seed=config.seed, process=lane
    )


def long_rows(config: UptrainConfig, tokenizer: Any, model: ModelConfig, lane: tuple[int, int]) -> Stream[Batch]:
    """The same of the long documents."""
    assert config.long is not None
    shape = config.long.shape(config.long.batch_size // lane[1])
    return pipeline.batches(
        config.long.sources, tokenizer, shape, None, model.vocab_size, seed=config.seed, process=lane
    )


def _evaluation(
    model: Model, scheme: HLA, tokenizer: Any, config: UptrainConfig, mesh: Mesh | None
) -> Callable[[TrainState], dict[str, float]]:
    """The divergence on held-out data, at real positions, in batches as small as the training's micro-batches.

    The data is the same for every seed, so that the curves of all phases can be compared.
    """
    held_out = functools.partial(
        pipeline.batches, tokenizer=tokenizer, shift=None, vocab_size=model.config.vocab_size, held_out=True, seed=0
    )
    take = lambda rows, count: [sharding.put_shared(batch, mesh) for batch in itertools.islice(rows, count)]
    shape = dataclasses.replace(config.batches, batch_size=config.batches.batch_size // config.micro_batches)
    rows = held_out(config.sources, config=shape)
    followed: list[tuple[str, int | None, list[Batch]]] = [
        ("held_out/", None, take(rows, config.held_out_batches * config.micro_batches))
    ]
    if config.long:
        together = sharding.row_parts(mesh)
        rows = held_out(config.long.sources, config=config.long.shape(together))
        followed.append(("held_out/long/", config.long.queries, take(rows, -(-config.long.held_out // together))))

    def evaluate(state: TrainState) -> dict[str, float]:
        found: dict[str, float] = {}
        for prefix, queries, batches in followed:
            weights = jnp.stack([jnp.sum(batch["segments"] > 0) for batch in batches])
            maps, params = state.params, model.params
            each = [_follow(scheme, model.config, maps, params, **batch, queries=queries) for batch in batches]
            mean = Divergence(*(jnp.average(jnp.stack(xs), axis=0, weights=weights) for xs in zip(*each)))
            found |= {name: float(value) for name, value in divergence_metrics(mean, prefix).items()}
        return found

    return evaluate


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


def make_loss(scheme: HLA, config: ModelConfig, queries: int | None = None, implementation: str | None = None) -> Loss:
    """Eq. 5 averaged over layers and loops, as a loss of the maps; the constants are the frozen weights.

    The gradient is taken layer by layer together with the value, so that only one layer's intermediates exist at a
    time; the backward pass only scales it. With shifted positions the reference runs at the same shifted positions; the
    window goes by index. Tokens of segment 0 are padding and do not count. With `queries`, the mean is over that many
    random positions of each row. `implementation` is of `attention_match`.
    """
    fit = functools.partial(layer_divergence, scheme, config, implementation=implementation)
    axes = scheme.map_axes()

    def with_gradient(maps: Maps, *operands: Any) -> tuple[tuple[Array, Divergence], Maps]:
        found, gradient = jax.value_and_grad(fit, has_aux=True)(maps, *operands)
        return found, {name: sharding.constrain(g, *axes[name]) for name, g in gradient.items()}

    @jax.custom_vjp
    def value(maps: Maps, params: Params, batch: Batch, index: Array) -> tuple[Array, Divergence]:
        return jax.tree.map(_over_layers, _each_layer(fit, config, maps, params, batch, index))

    def value_and_gradient(
        maps: Maps, params: Params, batch: Batch, index: Array
    ) -> tuple[tuple[Array, Divergence], Maps]:
        found, gradient = _each_layer(with_gradient, config, maps, params, batch, index)
        return jax.tree.map(_over_layers, found), jax.tree.map(lambda g: g / config.num_layers, gradient)

    def scale(gradient: Maps, cotangents: tuple[Array, Divergence]) -> tuple[Maps, None, None, None]:
        return jax.tree.map(lambda g: cotangents[0].astype(g.dtype) * g, gradient), None, None, None

    value.defvjp(value_and_gradient, scale)

    def loss(params: Maps, batch: Batch, rng: Array, constants: Params) -> tuple[Array, tuple[Array, Metrics]]:
        rows, length = batch["tokens"].shape
        index = all_queries(rows, length) if queries is None else random_queries(rng, rows, length, queries)
        found, by_loop = value(params, constants, batch, index)
        count = jnp.sum(jnp.take_along_axis(batch["segments"], index, axis=1) > 0)
        return found, (count.astype(found.dtype), divergence_metrics(by_loop))

    return loss


def all_queries(batch: int, length: int) -> Int[Array, "B S"]:
    """Every position of every row."""
    return jnp.broadcast_to(jnp.arange(length), (batch, length))


def even_queries(batch: int, length: int, count: int) -> Int[Array, "B Q"]:
    """`count` positions of each row, evenly spaced."""
    return jnp.broadcast_to((2 * jnp.arange(count) + 1) * length // (2 * count), (batch, count))


def random_queries(rng: Key[Array, ""], batch: int, length: int, count: int) -> Int[Array, "B Q"]:
    """`count` different positions of each row, ascending."""
    return jnp.sort(jax.lax.top_k(jax.random.uniform(rng, (batch, length)), count)[1], axis=1)


def divergence(
    scheme: HLA,
    config: ModelConfig,
    maps: Maps,
    params: Params,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"],
    queries: int | None = None,
) -> Divergence:
    """The two terms of the loss by loop, averaged over layers, on all tokens or on evenly spaced ones."""
    found = divergence_by_layer(scheme, config, maps, params, tokens, positions, segments, queries)
    return jax.tree.map(_over_layers, found)


def divergence_by_layer(
    scheme: HLA,
    config: ModelConfig,
    maps: Maps,
    params: Params,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"],
    queries: int | None = None,
) -> Divergence:
    """As `divergence`, of every layer: [L, T]."""
    fit = functools.partial(layer_divergence, scheme, config)
    batch = {"tokens": tokens, "positions": positions, "segments": segments}
    rows, length = tokens.shape
    index = all_queries(rows, length) if queries is None else even_queries(rows, length, queries)
    return _each_layer(fit, config, maps, params, batch, index)[1]


# One program for all phases.
_follow = jax.jit(divergence, static_argnames=("scheme", "config", "queries"))


def _each_layer(
    fit: Callable[..., Any], config: ModelConfig, maps: Maps, params: Params, batch: Batch, index: Int[Array, "B Q"]
) -> Any:
    h = attention_inputs(params, config, batch["tokens"], batch["positions"], batch["segments"])
    counted = (jnp.take_along_axis(batch["segments"], index, axis=1) > 0).astype(accumulation_dtype(h.dtype))
    counted = counted / jnp.maximum(jnp.sum(counted), 1)

    def one_layer(xs: tuple[Maps, Params, Array]) -> Any:
        maps, p, layer = xs
        # Taken out by its number: the captured states are too large to be laid out again with the layers first.
        mine = jax.lax.dynamic_index_in_dim(h, layer, axis=1, keepdims=False)
        return fit(maps, p, mine, batch["positions"], batch["segments"], index, counted)

    return jax.lax.map(one_layer, (maps, params["layers"], jnp.arange(config.num_layers)))


def _over_layers(x: Float[Array, "L ..."]) -> Float[Array, "..."]:
    return jnp.mean(x, axis=0)


def layer_divergence(
    scheme: HLA,
    config: ModelConfig,
    maps: Maps,
    p: Params,
    h: Float[Array, "T B S d"],
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"],
    index: Int[Array, "B Q"],
    counted: Float[Array, "B Q"],
    implementation: str | None = None,
) -> tuple[Float[Array, ""], Divergence]:
    """Loss and divergence of one layer, from its attention inputs at every loop.

    The queries are the tokens `index`; `counted` weighs them and sums to 1.
    """
    query_positions = jnp.take_along_axis(positions, index, axis=1)
    # The scheme's functions index maps by layer: give them a stack of one.
    stacked = {name: value[None] for name, value in maps.items()}
    layer_inputs = lambda h, loop: LayerInputs(h, *layers.project(p, config, h), loop, jnp.zeros((), jnp.int32))
    at_queries = lambda h: jnp.take_along_axis(h, index[:, :, None], axis=1)

    def match(inputs: LayerInputs, queries: LayerInputs, query: Array, latent_k: Array, latent_v: Array, read: Array):
        q, _ = rotate_qk(config, queries, query_positions)
        _, k = rotate_qk(config, inputs, positions)
        fitted = Fitted(query, latent_k, latent_v, read)
        fixed = Fixed(q, k, inputs.v, p["o_proj"], segments)
        return attention_match(fitted, fixed, index, counted, scheme.window, implementation)

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
