"""Accuracy on the synthetic tasks, by kind and by how far back the answer lies.

A completion is right when its final result is: for a derivation the last value, whatever the steps look like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hla_jax.attention.full import exact_pass
from hla_jax.config import ModelConfig
from hla_jax.data import synthetic
from hla_jax.data.packing import Tokenize
from hla_jax.models import layers
from hla_jax.models.stages import Params

Complete = Callable[[list[str]], Sequence[str]]
"""Prompts -> greedy continuations, at least up to the first newline."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Questions of one kind, `length` tokens with the answer; what it needs ends `distance` tokens before it begins."""

    task: synthetic.Task
    length: int
    distance: int

    @property
    def name(self) -> str:
        return f"{self.task.kind}/{self.distance}"

    def examples(self, count: int, filler: synthetic.Filler, seed: int) -> list[synthetic.Example]:
        """`count` questions, each from its own generator: a longer list starts with the shorter one."""
        return [
            self.task.sample(np.random.default_rng([seed, index]), self.length, filler, distance=self.distance)
            for index in range(count)
        ]


SETTINGS = tuple(
    Setting(task, length, distance)
    for task in (synthetic.Recall(), synthetic.Tracking(), synthetic.Chain())
    for length, distance in ((192, 64), (512, 256), (1024, 768))
)


def accuracy(complete: Complete, examples: Sequence[synthetic.Example]) -> float:
    """Fraction of the examples whose completion gives the right result."""
    completions = complete([example.prompt for example in examples])
    return sum(map(synthetic.score, examples, completions)) / len(examples)


def answer_length(examples: Sequence[synthetic.Example], tokenize: Tokenize) -> int:
    """Tokens that the longest answer needs, its newline included: `max_new_tokens` for these examples."""
    return max(len(tokenize(example.answer + "\n")) for example in examples)


def exact_match(
    params: Params,
    config: ModelConfig,
    examples: Sequence[synthetic.Example],
    tokenize: Tokenize,
    batch_size: int = 16,
) -> float:
    """Fraction of the examples whose whole answer, steps and newline, greedy decoding with the full cache would give.

    Greedy decoding gives an answer exactly if each of its tokens is the most likely one after the true ones before it,
    so one parallel pass over prompt and answer tells: cheap enough to follow training with.
    """
    rows = [(tokenize(example.prompt), tokenize(example.answer + "\n")) for example in examples]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    asked = np.zeros((len(rows), width), bool)
    for row, (prompt, answer) in enumerate(rows):
        tokens[row, : len(prompt) + len(answer)] = [*prompt, *answer]
        asked[row, len(prompt) : len(prompt) + len(answer)] = True
    right = 0
    for start in range(0, len(rows), batch_size):
        part = slice(start, start + batch_size)
        predicted = _predict(params, config, tokens[part])
        right += int(np.all((predicted[:, :-1] == tokens[part, 1:]) | ~asked[part, 1:], axis=1).sum())
    return right / len(rows)


def text_loss(params: Params, config: ModelConfig, tokens: np.ndarray) -> float:
    """Mean cross-entropy in nats per token of rows of real text [B, S], from the second token on."""
    return float(_text_loss(params, config, tokens))


@jax.jit(static_argnames="config")
def _predict(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    hidden = exact_pass(params, config, tokens)
    return jnp.argmax(layers.logits(params, hidden), axis=-1)


@jax.jit(static_argnames="config")
def _text_loss(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    hidden = exact_pass(params, config, tokens)
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(layers.logits(params, hidden[:, :-1]), tokens[:, 1:])
    )
