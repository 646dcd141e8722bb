"""GSM8K: five worked examples and the exact number behind "####" (LLA, table 8), or a question in the chat template."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hla_jax.evaluation.task import Item, Options, Score, Settings, Task
from hla_jax.evaluation.tasks.math_problems import Problems
from hla_jax.evaluation.tasks.rows import Dataset, Row

_SHOTS = 5
_COLUMNS = ("question", "answer")
_TEST = Dataset("gsm8k", "openai/gsm8k", _COLUMNS, config="main")
_TRAIN = dataclasses.replace(_TEST, split="train")

_STRICT = re.compile(r"#### *(-?\$?[0-9][0-9.,]*)")
_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*\.?\d*|\.\d+)")

NAMES = ("gsm8k", "gsm8k_chat")


@dataclasses.dataclass(frozen=True)
class Gsm8k(Task):
    """Questions behind worked examples, the first ones of the training set.

    A score is the strict one, of the number behind "####"; "flexible" takes the last number of the answer.
    """

    name: str
    settings: Settings
    rows: Sequence[Row] = dataclasses.field(repr=False)
    examples: Sequence[Row] = dataclasses.field(repr=False)

    def items(self, tokenizer: PreTrainedTokenizerBase) -> list[Item]:
        shots = "".join(f"{_question(row)} {row['answer'].strip()}\n\n" for row in self.examples)
        return [
            Item(id=str(number), prompt=shots + _question(row), answer=gold(row))
            for number, row in enumerate(self.rows)
        ]

    def score(self, item: Item, text: str) -> Score:
        strict, numbers = _STRICT.search(text), _NUMBER.findall(text)
        flexible = bool(numbers) and _plain(numbers[-1]) == _plain(item.answer)
        found = strict.group(1) if strict else None
        right = found is not None and _plain(found) == _plain(item.answer)
        score: Score = {"correct": float(right), "answered": found is not None, "extracted": found}
        return {**score, "flexible": float(flexible)}  # type: ignore[typeddict-unknown-key]


def gold(row: Row) -> str:
    """The number that a worked answer ends in."""
    return str(row["answer"].rsplit("####", 1)[-1].strip())


def make(name: str, options: Options) -> Task | None:
    """The task of this name; None if it is none of these. Raises `TaskError` without data."""
    if name == "gsm8k":
        settings = Settings(max_new_tokens=256, stop_strings=("Question:",))
        return Gsm8k(name, settings, _TEST.rows(options), _TRAIN.rows(options)[:_SHOTS])
    if name == "gsm8k_chat":
        rows = [{"problem": row["question"], "answer": _plain(gold(row))} for row in _TEST.rows(options)]
        return Problems(name, Settings(max_new_tokens=2048, chat=True), rows)
    return None


def _question(row: Row) -> str:
    return f"Question: {row['question'].strip()}\nAnswer:"


def _plain(number: str) -> str:
    """Without dollars, thousands separators and what follows a whole number: 1,000.00 is 1000."""
    plain = number.replace(",", "").replace("$", "").rstrip(".")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain
