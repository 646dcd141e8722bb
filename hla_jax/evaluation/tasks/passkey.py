"""Passkey retrieval: a number hidden in filler that says the same again and again (LLA, section 6 and table 12).

The format is that of Landmark Attention's test (epfml/landmark-attention, llama/run_test.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
from transformers import PreTrainedTokenizerBase

from hla_jax.evaluation.task import Item, Options, Score, Settings, Task, TaskError

_BEFORE = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there."
)
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_QUESTION = "What is the pass key? The pass key is"
_LARGEST_KEY = 50_000
_NEW_TOKENS = 16
# Tokens that a prompt may have more than the one that was measured: filler that is cut within a word.
_SLACK = 8
_COUNT = 50

LENGTHS = (4096, 8192, 16_384, 32_768, 65_536)
NAMES = ("passkey_{length}",)


@dataclasses.dataclass(frozen=True)
class Passkey(Task):
    """`count` prompts that fill `length` tokens together with their answers, the key at a random place."""

    name: str
    settings: Settings
    length: int
    count: int
    seed: int

    def items(self, tokenizer: PreTrainedTokenizerBase) -> list[Item]:
        characters = self._characters(tokenizer)
        items = []
        for number in range(self.count):
            rng = np.random.default_rng([self.seed, self.length, number])
            key = int(rng.integers(1, _LARGEST_KEY + 1))
            at = int(rng.integers(characters + 1))
            depth = at / max(characters, 1)
            items.append(
                Item(
                    id=str(number),
                    prompt=prompt(key, at, characters),
                    answer=key,
                    group=f"depth {min(int(4 * depth), 3) * 25}-{min(int(4 * depth), 3) * 25 + 25}%",
                    metadata={"depth": round(depth, 4)},
                )
            )
        return items

    def score(self, item: Item, text: str) -> Score:
        """By the first whole number."""
        match = re.search(r"\d+", text)
        found = match.group() if match else None
        return {"correct": float(found == str(item.answer)), "answered": match is not None, "extracted": found}

    def _characters(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Characters of filler for which a prompt has as many tokens as it may."""
        room = self.length - self.settings.max_new_tokens - _SLACK
        tokens = lambda count: len(tokenizer.encode(prompt(_LARGEST_KEY, count // 2, count)))
        fits, fails = 0, 16
        if tokens(0) > room:
            raise TaskError(f"{self.name}: the frame alone has {tokens(0)} tokens; take a longer length")
        while tokens(fails) <= room:
            fits, fails = fails, 2 * fails
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if tokens(middle) <= room else (fits, middle)
        return fits


def prompt(key: int, at: int, characters: int) -> str:
    """The text with `key` behind the first `at` of its `characters` of filler."""
    filler = "".join(itertools.repeat(f"{_FILLER} ", characters // len(_FILLER) + 1))
    hidden = f"The pass key is {key}. Remember it. {key} is the pass key."
    return "\n".join((_BEFORE, filler[:at], hidden, filler[: characters - at], _QUESTION))


def make(name: str, options: Options) -> Task | None:
    """The task of this name; None if it is none of these."""
    match = re.fullmatch(r"passkey_(\d+)", name)
    if not match:
        return None
    return Passkey(
        name,
        Settings(max_new_tokens=_NEW_TOKENS),
        int(match.group(1)),
        min(_COUNT, options.limit or _COUNT),
        options.seed,
    )
