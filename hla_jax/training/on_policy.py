"""On-policy refinement (LLA, section 3): distillation on what the compressed model itself writes.

Each step cuts documents to a prompt, samples their continuations through the compressed cache with the maps of that
moment, and distils on them: the frozen teacher scores every prefix that the student visits. No gradient goes through
sampling, and no continuation is left out for being wrong.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from hla_jax.attention.scheme import Attention
from hla_jax.config import ModelConfig
from hla_jax.generation import decode
from hla_jax.generation.sampling import Sampling, request_keys
from hla_jax.model import Model
from hla_jax.models.stages import Params
from hla_jax.training.distill import Batch, DistillConfig, Maps, train

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class OnPolicyConfig:
    """Everything that decides the refined maps, besides the model.

    Attributes:
      distill: data, optimizer and loop; a row has a prompt and room for its continuation. The held-out KL is on
        continuations of held-out prompts.
      prompt: tokens of a prompt; documents must have more (`distill.batches.min_tokens`).
      temperature, top_p: of the sampling.
    """

    distill: DistillConfig
    prompt: int
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        batches = self.distill.batches
        if not 1 <= self.prompt < batches.length:
            raise ValueError(f"prompt must be in 1 .. {batches.length - 1}, the row less a token; found {self.prompt}")
        if batches.min_tokens < self.prompt:
            raise ValueError(f"batches.min_tokens must be at least the prompt's {self.prompt}: {batches.min_tokens}")


def refine(
    model: Model, attention: Attention, tokenizer: Any, config: OnPolicyConfig, workdir: pathlib.Path
) -> Attention:
    """Trains maps on the model's own continuations, from `attention` or from the newest checkpoint in `workdir`.

    Returns:
      The scheme with the maps whose held-out KL was smallest, the initial ones among them.

    Raises:
      DataError, CheckpointError, TrainingError, Interrupted: see `training.loop.run`.
    """
    stop = jnp.asarray(model.stop_tokens, jnp.int32)
    sampling = Sampling(config.temperature, config.top_p)
    scheme = attention.scheme

    def prepare(maps: Maps, batch: Batch, step: Array) -> Batch:
        return roll_out(model.params, model.config, Attention(scheme, maps), batch, step, config.prompt, sampling, stop)

    return train(model, attention, tokenizer, config.distill, workdir, prepare)


def roll_out(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    batch: Batch,
    step: Int[Array, ""],
    prompt: int,
    sampling: Sampling,
    stop: Int[Array, " E"],
) -> Batch:
    """The rows' first `prompt` tokens, continued to the row's end or a stop token; only what was sampled counts.

    Every row of every step has random numbers of its own.
    """
    rows, length = batch["tokens"].shape
    prompts = batch["tokens"][:, :prompt]
    keys = request_keys(jnp.asarray(step, jnp.uint32) * rows + jnp.arange(rows, dtype=jnp.uint32))
    lengths = jnp.full(rows, prompt, jnp.int32)
    logits, cache = decode.prefill(params, config, attention, prompts, lengths, length)
    progress = decode.start(logits, cache, sampling, keys, stop)
    first = progress.token[:, None]
    limit = jnp.full(rows, length - prompt, jnp.int32)
    rest, _ = decode.advance(params, config, attention, progress, sampling, keys, stop, limit, length - prompt - 1)
    made = jnp.concatenate([first, rest], axis=1)
    # The distribution after the prompt's last token counts first; the last token sampled has no successor.
    counted = jnp.concatenate([jnp.zeros((rows, prompt - 1), bool), made >= 0, jnp.zeros((rows, 1), bool)], axis=1)
    tokens = jnp.concatenate([prompts, jnp.maximum(made, 0)], axis=1)
    return {"tokens": tokens, "segments": counted.astype(jnp.int32)}
