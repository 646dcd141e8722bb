"""Fine-tuning on conversations, with the full cache or through HLA (HLA, section 4.2).

What trains is float32: copies of the base weights or low-rank updates of them, and with HLA its maps. Each step rounds
the base to the dtype it computes in, so an update smaller than the last bit of a 16-bit weight is not lost.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from hla_jax import sharding
from hla_jax.attention.scheme import Attention
from hla_jax.data.supervised import ChatBatches, ChatSource, PackedConversations, conversations
from hla_jax.model import Model
from hla_jax.models import weights
from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.stages import Params
from hla_jax.training import loop, lora, two_pass
from hla_jax.training.loop import LoopConfig
from hla_jax.training.lora import ALL_WEIGHTS, Lora
from hla_jax.training.optimizer import OptimizerConfig, learning_rate
from hla_jax.training.step import Loss, Metrics, TrainState, init, init_on, make_step

Trained = dict[str, Any]
"""{"base": float32 weights} or {"lora": updates}; and {"maps": maps of the scheme}, {} for the full cache."""


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
    """Everything that decides a fine-tuned model, besides the model.

    Attributes:
      sources: mixture of conversations.
      batches: shape of a batch.
      optimizer: of the base weights or their low-rank updates; its clipping is by the norm of all gradients together.
      loop: see there.
      repetitions: of the second pass; the full cache has one pass, whatever this says.
      maps_rate: learning rate of the maps, as a multiple of the base's.
      lora: low-rank updates instead of new base weights; with rank 0 all weights train.
      micro_batches: parts of a batch that are computed one at a time; divides the rows of every length.
      held_out_batches: of held-out conversations, on which the loss is followed, as small as micro-batches.
      seed: of the data's order and the low-rank updates.
    """

    sources: tuple[ChatSource, ...]
    batches: ChatBatches
    optimizer: OptimizerConfig
    loop: LoopConfig
    repetitions: int = 0
    maps_rate: float = 1.0
    lora: Lora = ALL_WEIGHTS
    micro_batches: int = 1
    held_out_batches: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for length in self.batches.lengths:
            rows = self.batches.tokens // length
            if rows % self.micro_batches:
                raise ValueError(f"micro_batches must divide the {rows} rows of {length} tokens: {self.micro_batches}")


@dataclasses.dataclass(frozen=True)
class Finetuned:
    """The model with its new weights, in the dtype it computes in, and the conversations that training read."""

    model: Model
    counts: dict[str, int]


def finetune(
    model: Model, attention: Attention, config: FinetuneConfig, workdir: pathlib.Path, mesh: Mesh | None = None
) -> Finetuned:
    """Trains from `model` and `attention`, or from the newest checkpoint in `workdir`.

    Args:
      model: weights in the dtype to compute in, which training starts from; with a tokenizer.
      attention: HLA and its maps, or the full cache.
      config: see there.
      workdir: gets checkpoints and metrics.
      mesh: devices to spread everything over, as `sharding.RULES` says; `model` and `attention` were loaded onto it.
        What comes back lies there, too.

    Raises:
      ConfigError: a micro-batch does not split over the mesh.
      SchemeError, ValueError: `two_pass.make_loss` refuses the scheme or the repetitions.
      DataError, CheckpointError, TrainingError, Interrupted: see `training.loop.run`.
    """
    for length in config.batches.lengths:
        sharding.check_rows(config.batches.tokens // length, f"rows of {length} tokens", config.micro_batches, mesh)
    with sharding.use(mesh):
        return _finetune(model, attention, config, workdir, mesh)


def _finetune(
    model: Model, attention: Attention, config: FinetuneConfig, workdir: pathlib.Path, mesh: Mesh | None
) -> Finetuned:
    dtype = model.params["embed_tokens"].dtype
    constants = model.params if config.lora.rank else None
    repetitions = config.repetitions if attention.params else 0
    loss = make_loss(two_pass.make_loss(attention.scheme, model.config, repetitions), config.lora, dtype)
    optimizer = make_optimizer(config.optimizer, config.maps_rate)
    initial = start(model, attention, config.lora, config.seed)
    if mesh is None:
        state, shardings = init(initial, optimizer, config.seed), None
    else:
        state, shardings = init_on(mesh, initial, placed(initial, model, attention, mesh), optimizer, config.seed)
    update = make_step(loss, optimizer, config.micro_batches, shardings)
    training = batches(model, config, sharding.reader(mesh))
    # As small as training's micro-batches.
    small = dataclasses.replace(config.batches, tokens=config.batches.tokens // config.micro_batches)
    rows = batches(model, dataclasses.replace(config, batches=small, micro_batches=1), None)
    followed = itertools.islice(rows, config.held_out_batches * config.micro_batches)
    held_out = [sharding.put_shared(batch, mesh) for batch in followed]
    follow = jax.jit(lambda trained, batch, constants: loss(trained, batch, jax.random.key(0), constants))

    def evaluate(state: TrainState) -> dict[str, float]:
        found = [jax.device_get(follow(state.params, batch, constants)) for batch in held_out]
        tokens = [weight for _, (weight, _) in found]
        mean = lambda values: float(np.average(values, weights=tokens))
        accuracy = mean([metrics["accuracy"] for _, (_, metrics) in found])
        return {"held_out/loss": mean([value for value, _ in found]), "held_out/accuracy": accuracy}

    state = loop.run(
        state,
        lambda state, batch: update(state, sharding.put_rows(batch, mesh), constants),
        training,
        config.loop,
        workdir,
        evaluate,
    )
    trained = jax.jit(lambda trained: merged(trained, model.params, config.lora, dtype))(state.params)
    tuned = dataclasses.replace(attention, params=trained["maps"])
    return Finetuned(dataclasses.replace(model, params=trained["base"], attention=tuned), training.counts)


def start(model: Model, attention: Attention, low_rank: Lora, seed: int) -> Trained:
    """What trains, before the first update."""
    wide = lambda tree: jax.tree.map(lambda x: x.astype(accumulation_dtype(x.dtype)), tree)
    maps = wide(dict(attention.params))
    if not low_rank.rank:
        return {"base": wide(model.params), "maps": maps}
    return {"lora": lora.init(low_rank, model.params, jax.random.key(seed)), "maps": maps}


def placed(initial: Trained, model: Model, attention: Attention, mesh: Mesh) -> Trained:
    """Where what trains lies on a mesh: as the base and the maps do; low-rank updates are whole on every device."""
    scheme, config = attention.scheme, model.config
    maps = sharding.maps(scheme.map_shapes(config), scheme.map_axes(), config.num_layers, mesh)
    if "base" in initial:
        return {"base": weights.shardings(config, mesh), "maps": maps}
    return {"lora": jax.tree.map(lambda _: sharding.replicated(mesh), initial["lora"]), "maps": maps}


def merged(trained: Trained, frozen: Params, low_rank: Lora, dtype: jnp.dtype) -> Trained:
    """{"base", "maps"} as a pass computes with them: the base, with its low-rank updates, in `dtype`; maps in float32.

    `frozen` is the base below low-rank updates.
    """
    base = lora.merge(low_rank, frozen, trained["lora"]) if low_rank.rank else trained["base"]
    return {"base": jax.tree.map(lambda x: x.astype(dtype), base), "maps": trained["maps"]}


def make_loss(loss: Loss, low_rank: Lora, dtype: jnp.dtype) -> Loss:
    """A loss of {"base", "maps"} as one of what trains; the constants are the base below low-rank updates, else None.

    The cast is part of the loss, so gradients come back in float32.
    """

    def of_trained(
        params: Trained, batch: dict[str, Array], rng: Array, constants: Params | None
    ) -> tuple[Array, tuple[Array, Metrics]]:
        return loss(merged(params, constants or {}, low_rank, dtype), batch, rng, None)

    return of_trained


def make_optimizer(config: OptimizerConfig, maps_rate: float = 1.0) -> optax.GradientTransformation:
    """AdamW as `optimizer.adamw`, with `maps_rate` times the learning rate for the maps. Clipping comes before the
    groups part.
    """

    def group(peak: float) -> optax.GradientTransformation:
        schedule = learning_rate(dataclasses.replace(config, peak_learning_rate=peak))
        return optax.adamw(schedule, config.beta1, config.beta2, weight_decay=config.weight_decay)

    peak = config.peak_learning_rate
    groups = {"base": group(peak), "maps": group(maps_rate * peak)}

    def labels(trained: Trained) -> dict[str, str]:
        return {name: "maps" if name == "maps" else "base" for name in trained}

    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.partition(groups, labels))


def batches(model: Model, config: FinetuneConfig, reader: tuple[int, int] | None) -> PackedConversations:
    """The batches, of which this process makes the rows of its reader (index, count); None: held-out ones, whole."""
    stream = conversations(config.sources, model.tokenizer, reader is None, config.seed)
    return PackedConversations(
        stream,
        model.tokenizer,
        model.stop_tokens,
        config.batches,
        model.config.vocab_size,
        config.seed,
        reader or (0, 1),
    )
