"""Accuracy on the synthetic tasks, decoded greedily through each cache and paired with the full cache's answers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm.auto import tqdm

from hla_jax.attention.scheme import Attention, Cache
from hla_jax.config import ModelConfig
from hla_jax.data import synthetic
from hla_jax.evaluation import together
from hla_jax.evaluation.estimates import Proportion
from hla_jax.evaluation.schemes import FULL, Schemes
from hla_jax.evaluation.synthetic_tasks import Setting, answer_length
from hla_jax.generation import decode
from hla_jax.generation.generate import pad
from hla_jax.generation.sampling import Sampling, request_keys
from hla_jax.model import Model
from hla_jax.models import layers
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# Prompts and caches are padded to multiples of this, so that settings of one length share their compiled programs.
_PADDING = 64
_TOKENS_PER_DISPATCH = 8


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """One scheme on one task at one distance.

    Attributes:
      scheme, task: names.
      distance: tokens from what the answer needs to the answer.
      answers: right ones.
      lost: questions that the full cache answers and this scheme does not.
      gained: the other way round.
    """

    scheme: str
    task: str
    distance: int
    answers: Proportion
    lost: int
    gained: int


@dataclasses.dataclass(frozen=True)
class Answers:
    """One scheme's answers to the questions of one setting.

    Attributes:
      right: whether the result is the right one.
      given: whether there is a result: a line that ends, within the new tokens allowed, and ends in a number.
    """

    right: Bool[np.ndarray, " N"]
    given: Bool[np.ndarray, " N"]


def score_tasks(
    model: Model,
    schemes: Schemes,
    settings: Sequence[Setting],
    filler: synthetic.Filler,
    *,
    examples: int = 64,
    seed: int = 0,
) -> list[TaskScore]:
    """As `ask`, with the full cache as `FULL` among the schemes: counts of right answers, paired with its."""
    scores = []
    for setting, answers in ask(model, schemes, settings, filler, examples=examples, seed=seed).items():
        scores += [_score(name, setting, answers[name].right, answers[FULL].right) for name in schemes]
    return scores


def ask(
    model: Model,
    schemes: Schemes,
    settings: Sequence[Setting],
    filler: synthetic.Filler,
    *,
    examples: int = 64,
    seed: int = 0,
    room: int = 0,
) -> dict[Setting, dict[str, Answers]]:
    """Asks every scheme the same `examples` questions of every setting, all questions of one setting in one batch.

    The prompts are read in one exact pass that fills all caches; each scheme then generates from its own.

    Args:
      model: with a tokenizer.
      schemes: name -> scheme and maps.
      settings: tasks, lengths and distances.
      filler: lines of text between the definitions.
      examples: questions of each setting.
      seed: of the questions.
      room: new tokens allowed beyond those of the setting's longest right answer.
    """
    questions = {setting: setting.examples(examples, filler, seed) for setting in settings}
    new_tokens = {setting: room + answer_length(asked, model.tokenizer.encode) for setting, asked in questions.items()}
    answers: dict[Setting, dict[str, Answers]] = {}
    with tqdm(total=len(questions) * len(schemes), desc="tasks", unit="run") as bar:
        for setting, asked in questions.items():
            bar.set_postfix_str(setting.name)
            prompts = [example.prompt for example in asked]
            space = setting.length, max(new_tokens.values())
            answers[setting] = {}
            for name, completions in complete(model, schemes, prompts, new_tokens[setting], space):
                right = np.array([synthetic.score(example, text) for example, text in zip(asked, completions)])
                given = np.array([synthetic.is_answer(text) for text in completions])
                answers[setting][name] = Answers(right, given)
                bar.update()
    return answers


def complete(
    model: Model, schemes: Schemes, prompts: Sequence[str], new_tokens: int, space: tuple[int, int] = (0, 0)
) -> Iterator[tuple[str, list[str]]]:
    """Yields (name, greedy continuations up to and with the first line break) for one scheme after the other.

    Args:
      model: with a tokenizer.
      schemes: name -> scheme and maps.
      prompts: read in one batch.
      new_tokens: most new tokens.
      space: tokens of the longest prompt and new tokens to make room for, where more than these need: calls with the
        same space share their compiled programs.
    """
    ids = [model.tokenizer.encode(prompt) for prompt in prompts]
    tokens, lengths = pad(ids, _padded(max(space[0], *map(len, ids))))
    capacity = tokens.shape[1] + _padded(max(space[1], new_tokens))
    logits, caches = _prefill(model.params, model.config, dict(schemes), tokens, lengths, capacity)
    stop = jnp.asarray(sorted({*model.stop_tokens, *_line_breaks(model)}), jnp.int32)
    for name in schemes:
        # Taken out of the dict: decoding overwrites the cache in place, and its memory is free afterwards.
        made = _greedy(model, schemes[name], logits[name], caches.pop(name), stop, new_tokens)
        yield name, [str(model.tokenizer.decode(row[row >= 0])) for row in made]


def _greedy(
    model: Model,
    attention: Attention,
    logits: Float[Array, "B V"],
    cache: Cache,
    stop: Int[Array, " E"],
    new_tokens: int,
) -> Int[np.ndarray, "B N"]:
    """New tokens, the stop token included, -1 after it."""
    keys = request_keys(jnp.arange(logits.shape[0], dtype=jnp.uint32))
    limit = jnp.full(logits.shape[0], new_tokens, jnp.int32)
    progress = decode.start(logits, cache, Sampling(), keys, stop)
    made = [np.asarray(progress.token)[:, None]]
    while not bool(jnp.all(progress.done | (progress.made >= limit))):
        out, progress = decode.advance(
            model.params, model.config, attention, progress, Sampling(), keys, stop, limit, _TOKENS_PER_DISPATCH
        )
        made.append(np.asarray(out))
    return np.concatenate(made, axis=1)


@functools.partial(jax.jit, static_argnames=("config", "capacity"))
def _prefill(
    params: Params,
    config: ModelConfig,
    schemes: dict[str, Attention],
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    capacity: int,
) -> tuple[dict[str, Float[Array, "B V"]], dict[str, Cache]]:
    hidden, caches = together.prefill_hidden(params, config, schemes, tokens, lengths, capacity)
    logits = {name: layers.logits(params, decode.last_hidden(states, lengths)) for name, states in hidden.items()}
    return logits, caches


def _score(name: str, setting: Setting, right: np.ndarray, full: np.ndarray) -> TaskScore:
    return TaskScore(
        name,
        setting.task.kind,
        setting.distance,
        Proportion(int(right.sum()), right.size),
        lost=int((full & ~right).sum()),
        gained=int((right & ~full).sum()),
    )


def _line_breaks(model: Model) -> list[int]:
    """Tokens that hold a line break."""
    texts = model.tokenizer.batch_decode([[token] for token in range(len(model.tokenizer))])
    return [token for token, text in enumerate(texts) if "\n" in text]


def _padded(tokens: int) -> int:
    return -(-tokens // _PADDING) * _PADDING
