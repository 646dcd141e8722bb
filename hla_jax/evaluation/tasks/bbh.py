"""BIG-Bench Hard: 27 tasks with three worked examples each, from the files of its repository.

The HLA paper used lm-eval's "bbh_cot_fewshot", which reads the hub; these files have the same questions and examples.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hla_jax.evaluation.task import Item, Options, Score, Settings, Task, TaskError
from hla_jax.evaluation.tasks.rows import made_file

_KINDS = (
    *("boolean_expressions", "causal_judgement", "date_understanding", "disambiguation_qa", "dyck_languages"),
    *("formal_fallacies", "geometric_shapes", "hyperbaton", "logical_deduction_five_objects"),
    *("logical_deduction_seven_objects", "logical_deduction_three_objects", "movie_recommendation"),
    *("multistep_arithmetic_two", "navigate", "object_counting", "penguins_in_a_table"),
    *("reasoning_about_colored_objects", "ruin_names", "salient_translation_error_detection", "snarks"),
    *("sports_understanding", "temporal_sequences", "tracking_shuffled_objects_five_objects"),
    *("tracking_shuffled_objects_seven_objects", "tracking_shuffled_objects_three_objects", "web_of_lies"),
    *("word_sorting",),
)
_SETTINGS = Settings(max_new_tokens=1024, stop_strings=("\nQ:", "\n\n"))
_SOURCE = "github.com/suzgunmirac/BIG-Bench-Hard; without it, lm-eval's bbh_cot_fewshot reads the hub"
_ANSWER = re.compile(r"the answer is:? *(.+)", re.IGNORECASE)

NAMES = ("bbh", *(f"bbh_{kind}" for kind in _KINDS))


@dataclasses.dataclass(frozen=True)
class _Part:
    kind: str
    before: str
    """Description and worked examples."""
    examples: Sequence[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Bbh(Task):
    """One kind of question, or all of them."""

    name: str
    settings: Settings
    parts: Sequence[_Part] = dataclasses.field(repr=False)

    def items(self, tokenizer: PreTrainedTokenizerBase) -> list[Item]:
        """Question by question through all kinds, so that the first ones are of every kind."""
        longest = max(len(part.examples) for part in self.parts)
        return [
            Item(
                id=f"{part.kind}/{number}",
                prompt=f"{part.before}\n\nQ: {part.examples[number]['input']}\nA: Let's think step by step.\n",
                answer=part.examples[number]["target"].strip(),
                group=part.kind,
            )
            for number in range(longest)
            for part in self.parts
            if number < len(part.examples)
        ]

    def score(self, item: Item, text: str) -> Score:
        """By what follows the first "the answer is" in its line, without a full stop."""
        match = _ANSWER.search(text)
        found = match.group(1).strip().removesuffix(".").strip() if match else None
        return {"correct": float(found == item.answer), "answered": bool(found), "extracted": found}


def make(name: str, options: Options) -> Task | None:
    """The task of this name; None if it is none of these. Raises `TaskError` without data."""
    if name not in NAMES:
        return None
    kinds = _KINDS if name == "bbh" else (name.removeprefix("bbh_"),)
    return Bbh(name, _SETTINGS, [_read(options, kind) for kind in kinds])


def _read(options: Options, kind: str) -> _Part:
    questions = made_file(options, "bbh", f"bbh/{kind}.json", _SOURCE)
    prompts = made_file(options, "bbh", f"cot-prompts/{kind}.txt", _SOURCE)
    try:
        examples = json.loads(questions.read_text())["examples"]
        if not all({"input", "target"} <= set(example) for example in examples):
            raise KeyError("input or target")
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(f'{questions}: expected {{"examples": [{{"input", "target"}}, ...]}} ({error!r})') from error
    # The first lines warn trainers: a canary, and a rule.
    return _Part(kind, prompts.read_text().split("-----\n", 1)[-1].strip(), examples)
