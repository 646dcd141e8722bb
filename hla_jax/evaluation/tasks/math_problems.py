r"""MATH-500, AIME and HMMT: problems whose solution ends in \boxed{}, several samples of each (HLA, section 5.1).

The HLA paper samples MATH-500 four times with up to 8,192 new tokens and the competitions 16 times. It gives neither
the prompt nor the sampling, nor the competitions' limit: those here are our choice (no context beyond 16K was tested
there, so no longer one is allowed here).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hla_jax.evaluation.task import Item, Options, Score, Settings, Task
from hla_jax.evaluation.tasks.math_answers import grade
from hla_jax.evaluation.tasks.rows import Dataset, Row

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

_SAMPLED = Settings(max_new_tokens=8192, samples=4, temperature=1.0, top_p=0.7, chat=True)
_COMPETITION = dataclasses.replace(_SAMPLED, max_new_tokens=16_384, samples=16)


@dataclasses.dataclass(frozen=True)
class Problems(Task):
    """Problems with a final answer.

    Attributes:
      rows: with the columns `problem` and `answer`.
      key: column that names a problem; its number where there is none.
      groups: column that the table is broken down by.
    """

    name: str
    settings: Settings
    rows: Sequence[Row] = dataclasses.field(repr=False)
    key: str | None = None
    groups: str | None = None

    def items(self, tokenizer: PreTrainedTokenizerBase) -> list[Item]:
        return [
            Item(
                id=str(row[self.key]) if self.key else str(number),
                prompt=f"{row['problem'].strip()}\n\n{INSTRUCTION}",
                answer=str(row["answer"]),
                group=f"{self.groups} {row[self.groups]}" if self.groups else "",
            )
            for number, row in enumerate(self.rows)
        ]

    def score(self, item: Item, text: str) -> Score:
        return grade(item.answer, text)


_MATH500 = Dataset("math500", "HuggingFaceH4/MATH-500", ("problem", "answer", "unique_id", "level"))
_COMPETITIONS = {
    "aime_2024": Dataset("aime_2024", "HuggingFaceH4/aime_2024", ("problem", "answer"), split="train"),
    "aime_2025": Dataset("aime_2025", "math-ai/aime25", ("problem", "answer")),
    "hmmt_2025": Dataset("hmmt_2025", "MathArena/hmmt_feb_2025", ("problem", "answer"), split="train"),
}

NAMES = ("math500", *_COMPETITIONS)


def make(name: str, options: Options) -> Task | None:
    """The task of this name; None if it is none of these. Raises `TaskError` without data."""
    if name == "math500":
        return Problems(name, _SAMPLED, _MATH500.rows(options), key="unique_id", groups="level")
    if name in _COMPETITIONS:
        return Problems(name, _COMPETITION, _COMPETITIONS[name].rows(options))
    return None
