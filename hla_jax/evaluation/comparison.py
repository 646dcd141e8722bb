"""Schemes of any kind at any size against the full cache: what is measured of each, and what a comparison keeps of it.

Numbers are kept by sequence and by question, so that intervals and paired differences can be drawn from them later.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.config import ModelConfig
from hla_jax.data import synthetic
from hla_jax.evaluation.accuracy import ask
from hla_jax.evaluation.evaluate import EvaluationConfig, task_settings
from hla_jax.evaluation.fidelity import decode_by_token, swapped_divergence
from hla_jax.evaluation.schemes import FULL
from hla_jax.evaluation.speed import decode_speed
from hla_jax.model import Model

if TYPE_CHECKING:
    from jaxtyping import Int

# New tokens beyond those of the longest right answer, before a generation counts as one without an answer.
_ROOM = 16


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Cache of one scheme with numbers of 16 bits, whatever it ran with: low-bit caches are compared with those. Of the
    looped layers, as the papers count; layers outside of the loops have theirs besides (`evaluation.memory`).

    Attributes:
      per_token: that each token adds.
      per_sequence: that a sequence takes at any length.
      ratio: the full cache's bytes per token over this one's; of a cache that stops growing, over all its bytes at
        `context` tokens.
      ratio_at_context: over all its bytes at `context` tokens.
      context: tokens of the longest question, or else of the decoded text.
    """

    per_token: int
    per_sequence: int
    ratio: float
    ratio_at_context: float
    context: int


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One scheme with its maps against the full cache.

    Attributes:
      bytes: of its cache.
      held_out_kl: of the logits in nats, when every token reads the past through the cache in one parallel pass; by
        sequence.
      output_error: relative squared error of the attention output in the same pass, by loop.
      decoding_kl, top1: decoding the same text token by token; by sequence.
      right, given: task -> whether the answer is right, and whether there is one; by question.
      speed: context length -> decoded tokens a second over the full cache's, side by side.
    """

    bytes: Bytes
    held_out_kl: tuple[float, ...]
    output_error: tuple[float, ...]
    decoding_kl: tuple[float, ...]
    top1: tuple[float, ...]
    right: dict[str, tuple[bool, ...]]
    given: dict[str, tuple[bool, ...]]
    speed: dict[str, float]

    @property
    def all_right(self) -> tuple[bool, ...]:
        """Over the questions of all tasks."""
        return sum(self.right.values(), ())

    @property
    def all_given(self) -> tuple[bool, ...]:
        """Over the questions of all tasks."""
        return sum(self.given.values(), ())


@dataclasses.dataclass(frozen=True)
class Row:
    """A scheme of a comparison.

    Attributes:
      name: its own.
      curve: the name it shares with the same scheme at other sizes.
      scheme: its registry entries.
      training: of its maps.
      measured: see there.
    """

    name: str
    curve: str
    scheme: dict[str, Any]
    training: str
    measured: Measurement


def measure(
    model: Model,
    name: str,
    attention: Attention,
    text: Int[np.ndarray, "N S"],
    filler: synthetic.Filler,
    config: EvaluationConfig,
) -> Measurement:
    """Measures one scheme; the full cache itself under the name `FULL`.

    Args:
      model: the exact model, with a tokenizer.
      name: of the scheme.
      attention: scheme and maps.
      text: held-out rows, `config.sequences` of `config.tokens` tokens.
      filler: lines of text between the definitions of the tasks.
      config: sizes.
    """
    schemes = {FULL: Attention(FullCache()), name: attention}
    settings = task_settings(config)
    context = max((setting.length for setting in settings), default=config.tokens)
    kl, error = swapped_divergence(model, attention, text)
    decoded = decode_by_token(model, schemes, text, config.prompt, batch_size=config.batch_size)[name]
    asked = ask(model, {name: attention}, settings, filler, examples=config.examples, seed=config.seed, room=_ROOM)
    right: dict[str, tuple[bool, ...]] = dict.fromkeys(config.tasks, ())
    given = dict(right)
    for setting, answers in asked.items():
        right[setting.task.kind] += tuple(answers[name].right.tolist())
        given[setting.task.kind] += tuple(answers[name].given.tolist())
    speeds = decode_speed(
        model,
        schemes,
        config.contexts,
        batch=config.speed_batch,
        new_tokens=config.speed_tokens,
        rounds=config.speed_rounds,
    )
    return Measurement(
        bytes=bytes_of(model.config, attention.scheme, context),
        held_out_kl=tuple(kl.tolist()),
        output_error=tuple(error.mean(axis=0).tolist()),
        decoding_kl=tuple(decoded.kl.mean(axis=1, dtype=np.float64).tolist()),
        top1=tuple(decoded.same.mean(axis=1, dtype=np.float64).tolist()),
        right=right,
        given=given,
        speed={str(speed.context): speed.ratio[name].median for speed in speeds},
    )


def bytes_of(config: ModelConfig, scheme: Scheme, context: int) -> Bytes:
    """Bytes of one scheme's cache, see `Bytes`."""
    at = lambda scheme, tokens: scheme.cache_bytes(config, tokens, jnp.dtype(jnp.bfloat16))
    per_sequence, total = at(scheme, 0), at(scheme, context)
    per_token, full = at(scheme, 1) - per_sequence, at(FullCache(), context)
    grows = total > at(scheme, context - 1)
    return Bytes(per_token, per_sequence, full / (context * per_token if grows else total), full / total, context)
