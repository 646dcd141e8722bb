"""MMLU-Pro: ten options, answered after a chain of thought, with five worked examples of the subject or none.

As lm-eval asks it, whose "mmlu_pro" the HLA paper used; this one reads local files too.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import string
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from hla_jax.evaluation.task import Item, Options, Score, Settings, Task
from hla_jax.evaluation.tasks.rows import Dataset, Row

_SHOTS = 5
_COLUMNS = ("question_id", "question", "options", "answer_index", "category")
_TEST = Dataset("mmlu_pro", "TIGER-Lab/MMLU-Pro", _COLUMNS)
_EXAMPLES = dataclasses.replace(_TEST, columns=(*_COLUMNS, "cot_content"), split="validation")
_SETTINGS = Settings(max_new_tokens=2048, stop_strings=("Question:",))
_STEPS = "Let's think step by step."
_ABOUT = (
    "The following are multiple choice questions (with answers) about {subject}. Think step by step and then finish "
    'your answer with "the answer is (X)" where X is the correct letter choice.\n'
)
_ANSWER = re.compile(r"answer is \**\(?([A-J])\b\)?")

NAMES = ("mmlu_pro", "mmlu_pro_zero_shot")


@dataclasses.dataclass(frozen=True)
class MmluPro(Task):
    """Questions behind the worked examples of their subject.

    Attributes:
      rows: questions.
      examples: subject -> worked ones; without any, every question is asked alone.
    """

    name: str
    settings: Settings
    rows: Sequence[Row] = dataclasses.field(repr=False)
    examples: Mapping[str, Sequence[Row]] = dataclasses.field(repr=False)

    def items(self, tokenizer: PreTrainedTokenizerBase) -> list[Item]:
        """Question by question through all subjects, so that the first ones are of every subject."""
        seen: collections.Counter[str] = collections.Counter()
        turns = []
        for row in self.rows:
            turns.append((seen[row["category"]], row))
            seen[row["category"]] += 1
        return [
            Item(
                id=str(row["question_id"]),
                prompt=self._before(row["category"]) + _question(row),
                answer=string.ascii_uppercase[row["answer_index"]],
                group=row["category"],
            )
            for _, row in sorted(turns, key=lambda turn: turn[0])
        ]

    def score(self, item: Item, text: str) -> Score:
        """By the first "answer is (X)"."""
        match = _ANSWER.search(text)
        found = match.group(1) if match else None
        return {"correct": float(found == item.answer), "answered": found is not None, "extracted": found}

    def _before(self, subject: str) -> str:
        worked = [
            f"{_question(row)} {row['cot_content'].split(_STEPS, 1)[-1].strip()}\n\n"
            for row in self.examples.get(subject, ())
        ]
        return _ABOUT.format(subject=subject) + "".join(worked)


def make(name: str, options: Options) -> Task | None:
    """The task of this name; None if it is none of these. Raises `TaskError` without data."""
    if name not in NAMES:
        return None
    examples: dict[str, list[Row]] = collections.defaultdict(list)
    if name == "mmlu_pro":
        for row in _EXAMPLES.rows(options):
            examples[row["category"]].append(row)
    rows = _TEST.rows(options)
    return MmluPro(name, _SETTINGS, rows, {subject: found[:_SHOTS] for subject, found in examples.items()})


def _question(row: Row) -> str:
    options = "".join(f"{letter}. {text.strip()}\n" for letter, text in zip(string.ascii_uppercase, row["options"]))
    return f"Question:\n{row['question'].strip()}\nOptions:\n{options}Answer: {_STEPS}"
