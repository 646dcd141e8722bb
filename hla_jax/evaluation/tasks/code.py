"""HumanEval and MBPP: programs that are right if they pass the tests that come with the question.

Tests run in `sandbox`, and only if the user allows it: what is run was written by a model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hla_jax.evaluation.task import Item, Options, Score, Settings, Task, TaskError
from hla_jax.evaluation.tasks import sandbox
from hla_jax.evaluation.tasks.rows import Dataset, Row

_HUMANEVAL = Dataset("humaneval", "openai/openai_humaneval", ("task_id", "prompt", "test", "entry_point"))
_MBPP = Dataset("mbpp", "google-research-datasets/mbpp", ("task_id", "text", "code", "test_list"), config="full")
_MBPP_SHOTS = dataclasses.replace(_MBPP, split="prompt")
# The worked examples of MBPP's authors.
_SHOTS = (2, 3, 4)
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

NAMES = ("humaneval", "mbpp")


@dataclasses.dataclass(frozen=True)
class HumanEval(Task):
    """Functions to complete from their signature and docstring."""

    name: str
    settings: Settings
    rows: Sequence[Row] = dataclasses.field(repr=False)

    def items(self, tokenizer: PreTrainedTokenizerBase) -> list[Item]:
        return [
            Item(
                id=str(row["task_id"]),
                prompt=row["prompt"],
                answer={"before": row["prompt"], "after": f"{row['test']}\ncheck({row['entry_point']})\n"},
            )
            for row in self.rows
        ]

    def score(self, item: Item, text: str) -> Score:
        """Of the text behind the prompt, or of the first fenced block in it. A block may define the function again: the
        prompt alone is a program, and brings the imports.
        """
        written = _program(text)
        return _verdict(written and item.answer["before"] + written, item.answer["after"])


@dataclasses.dataclass(frozen=True)
class Mbpp(Task):
    """Functions to write from a sentence and the tests they have to pass, behind three worked examples."""

    name: str
    settings: Settings
    rows: Sequence[Row] = dataclasses.field(repr=False)
    examples: Sequence[Row] = dataclasses.field(repr=False)

    def items(self, tokenizer: PreTrainedTokenizerBase) -> list[Item]:
        plain = lambda code: code.replace("\r\n", "\n").strip()
        shots = "".join(f"{_mbpp_question(row)}{plain(row['code'])}\n[DONE]\n\n" for row in self.examples)
        return [
            Item(
                id=str(row["task_id"]),
                prompt=shots + _mbpp_question(row),
                answer={"after": "\n".join([row.get("test_setup_code") or "", *row["test_list"]]) + "\n"},
            )
            for row in self.rows
        ]

    def score(self, item: Item, text: str) -> Score:
        return _verdict(_program(text), item.answer["after"])


def make(name: str, options: Options) -> Task | None:
    """The task of this name; None if it is none of these. Raises `TaskError` without data, or if code may not run."""
    if name not in NAMES:
        return None
    if not options.run_code:
        raise TaskError(
            f"{name}: its answers are programs that the model writes, and scoring runs them on this machine, in a "
            f"process with limits but not a container; say --run_code to allow it"
        )
    if name == "humaneval":
        stops = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@")
        return HumanEval(name, Settings(max_new_tokens=1024, stop_strings=stops), _HUMANEVAL.rows(options))
    rows = _MBPP.rows(options)
    shown = [row for row in rows if row["task_id"] in _SHOTS] or _MBPP_SHOTS.rows(options)
    settings = Settings(max_new_tokens=512, stop_strings=("[DONE]",))
    examples = [row for row in shown if row["task_id"] in _SHOTS]
    # One file with all of MBPP has its test set at 11 .. 510.
    return Mbpp(name, settings, [row for row in rows if 11 <= row["task_id"] <= 510], examples)


def _mbpp_question(row: Row) -> str:
    tests = "\n".join(row["test_list"])
    task = f"You are an expert Python programmer, and here is your task: {row['text']}"
    return f"{task} Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"


def _program(text: str) -> str:
    """The first fenced block of an answer, or all of it; empty where there is nothing but space."""
    fenced = _FENCED.search(text)
    program = fenced.group(1) if fenced else text
    return program if program.strip() else ""


def _verdict(program: str, tests: str) -> Score:
    if not program:
        return {"correct": 0.0, "answered": False, "extracted": None}
    result = sandbox.run(f"{program}\n\n{tests}")
    score: Score = {"correct": float(result == "passed"), "answered": True, "extracted": program}
    return {**score, "result": result}  # type: ignore[typeddict-unknown-key]
