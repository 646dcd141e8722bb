"""What an evaluation asks: items with their right answers, how to answer them, and how an answer is scored.

A `Task` knows nothing of models and caches. `run_tasks` asks its items through every cache and keeps one line an item.
"""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from transformers import PreTrainedTokenizerBase


class Message(TypedDict):
    """One turn of a chat; the role is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Item:
    """One question. It has `choices`, or else `prompt` or `messages`.

    Attributes:
      id: unique in its task and the same in every run, whatever was asked before it: answers are resumed by it.
      prompt: text to continue; with `Settings.chat` it is sent as one user's turn.
      messages: a chat, in the model's template, always.
      prefix: how the answer begins: text behind the prompt, or behind the template's start of the assistant's turn. It
        is no part of the text that is scored.
      choices: (context, continuation) pairs; the one whose continuation has the highest log-likelihood is the answer.
        A continuation brings its own space, and is scored as what the pair's text has more tokens than its context.
      answer: what `Task.score` compares with; of choices, the index of the right one.
      group: part of the table that it belongs to besides its task's whole (a subject, a length); "" for none.
      metadata: whatever else is worth a place in its line; JSON.
    """

    id: str
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    prefix: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    answer: Any = None
    group: str = ""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a task's items are answered; not used for choices.

    Attributes:
      max_new_tokens: of each sample; one that reaches it counts as cut.
      samples: of each item, with seeds of their own.
      temperature, top_p, top_k: as for `generate`.
      stop_strings: texts that end an answer; the text that is scored ends before the first of them.
      chat: `Item.prompt` is sent as a user's turn.
    """

    max_new_tokens: int = 256
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_strings: tuple[str, ...] = ()
    chat: bool = False


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user of a task may say about it.

    Attributes:
      data: a folder of data files; None for the hub.
      limit: most items, the first ones; None for all.
      run_code: whether answers that are programs may be run.
      seed: of made items.
    """

    data: pathlib.Path | None = None
    limit: int | None = None
    run_code: bool = False
    seed: int = 0


class TaskError(ValueError):
    """A task cannot be asked as it was wanted: no such task, its data is missing or damaged, code may not be run."""


class Score(TypedDict, total=False):
    """What is known of one answer. All of it is written to the item's line; more keys may be added, JSON."""

    correct: float  # required: 0 .. 1
    answered: bool  # required: whether an answer was found in the text
    extracted: str | None  # that answer


class Task(abc.ABC):
    """Items and how they are scored. Implementations are frozen dataclasses with the fields `name` and `settings`.

    `settings` are the original ones; the runner replaces fields that the user gives.
    """

    name: str
    settings: Settings

    @abc.abstractmethod
    def items(self, tokenizer: PreTrainedTokenizerBase) -> Sequence[Item]:
        """All items, in a fixed order. Tasks of given lengths measure with the tokenizer. Raises `TaskError`."""

    def score(self, item: Item, text: str) -> Score:
        """Scores one generated answer: pure, quick, never raises for any text. Not for choices."""
        raise NotImplementedError

    def score_choices(self, item: Item, logprobs: Sequence[float]) -> Score:
        """Scores log-likelihoods (natural logarithm, summed over tokens) of the choices."""
        return choose(item, logprobs)


def choose(item: Item, logprobs: Sequence[float], by_bytes: bool = False) -> Score:
    """The likeliest choice; `by_bytes` divides by the bytes of the continuation ("acc_norm" of lm-eval)."""
    sizes = [len(continuation.encode()) if by_bytes else 1 for _, continuation in item.choices]
    best = int(np.argmax(np.asarray(logprobs, np.float64) / sizes))
    return {"correct": float(best == item.answer), "answered": True, "extracted": item.choices[best][1]}
