"""The tasks by name: one file a family, and suites of several tasks under one name.

    tasks.make("math500", Options(data=pathlib.Path("benchmarks")))

A local data folder has one folder a data set, with jsonl or parquet files named after their splits, at any depth; a
copy of the hub's, `hf download openai/gsm8k --repo-type dataset --local-dir benchmarks/gsm8k`, is one. They are
math500, aime_2024, aime_2025, hmmt_2025, gsm8k (test and train), mmlu_pro (test and validation), squad, hotpotqa,
humaneval and mbpp; bbh is its repository. What is missing is said with the command that gets it.

Tasks that lm-eval has and that need nothing of ours are not repeated here; a suite names them "lm_eval:...".
"""

from __future__ import annotations

from collections.abc import Sequence

from hla_jax.evaluation.task import Options, Task, TaskError
from hla_jax.evaluation.tasks import (
    bbh,
    code,
    gsm8k,
    math_problems,
    mmlu_pro,
    passkey,
    ruler_qa,
    synthetic_questions,
)

_FAMILIES = (math_problems, gsm8k, mmlu_pro, bbh, passkey, ruler_qa, code, synthetic_questions)

NAMES: tuple[str, ...] = tuple(name for family in _FAMILIES for name in family.NAMES)
"""All names; a family with a parameter is written "passkey_{length}"."""

LM_EVAL = "lm_eval:"
"""Begins the name of a task that lm-eval has."""

_COMMONSENSE = (
    *("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "sciq", "social_iqa", "winogrande"),
    *("mmlu", "truthfulqa_mc2"),
)
_RULER = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multiquery", "niah_multivalue", "ruler_vt", "ruler_cwe", "ruler_fwe"),
)


def _ruler(length: int, questions: str) -> tuple[str, ...]:
    """Eleven tasks as lm-eval has them, and the two of questions, whose names end in `questions`."""
    asked = (f"ruler_qa_{source}_{length}{questions}" for source in ("squad", "hotpot"))
    return (*(f"{LM_EVAL}{name}@{length}" for name in _RULER), *asked)


SUITES: dict[str, tuple[str, ...]] = {
    "commonsense": tuple(f"{LM_EVAL}{name}" for name in _COMMONSENSE),
    "competition": ("aime_2024", "aime_2025", "hmmt_2025"),
    "code": ("humaneval", "mbpp"),
    "passkey": tuple(f"passkey_{length}" for length in passkey.LENGTHS),
    **{f"ruler_{length}": _ruler(length, "_chat") for length in ruler_qa.LENGTHS},
    **{f"ruler_original_{length}": _ruler(length, "") for length in ruler_qa.LENGTHS},
    "nano": tuple(
        f"{kind}_{distance}" for kind in ("recall", "tracking", "chain") for distance in synthetic_questions.DISTANCES
    ),
}
"""Names of several tasks together.

"ruler_{length}" is an entry of the HLA paper's table 1, "ruler_original_{length}" one of all its other tables.
"commonsense" is LLA's suite of commonsense and knowledge by log-likelihood, without examples (its table 11); which
tasks it has is not in the text of the paper that was at hand: these are the usual ones.
"""


def expand(names: Sequence[str]) -> list[str]:
    """The names with suites replaced by their tasks, in order, each once."""
    return list(dict.fromkeys(task for name in names for task in SUITES.get(name, (name,))))


def make(name: str, options: Options) -> Task:
    """The task of this name, its data read.

    Raises:
      TaskError: no such task, its data is missing or damaged, or it would run code and may not.
    """
    for family in _FAMILIES:
        task = family.make(name, options)
        if task is not None:
            return task
    known = ", ".join((*(name for name in NAMES if not name.startswith("bbh_")), "bbh_{kind}"))
    raise TaskError(f"no task {name!r}; there are {known}; suites {', '.join(SUITES)}; and lm-eval's ({LM_EVAL}NAME)")
