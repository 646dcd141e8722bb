"""A small data folder in the layout that tasks read, written by us."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

MATH = [
    {"problem": "What is half of one?", "answer": "\\frac{1}{2}", "unique_id": "test/a.json", "level": 1},
    {
        "problem": "Which point?",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "unique_id": "test/b.json",
        "level": 5,
    },
]
GSM8K = [{"question": "How many?", "answer": "It is 2 * 4 = <<2*4=8>>8.\n#### 8"}]
GSM8K_TRAIN = [{"question": f"Question {number}?", "answer": f"Easy.\n#### {number}"} for number in range(7)]
MMLU_PRO = [
    {
        "question_id": 7,
        "question": "Which?",
        "options": [f"option {number}" for number in range(10)],
        "answer": "J",
        "answer_index": 9,
        "cot_content": "",
        "category": "law",
    }
]
MMLU_PRO_EXAMPLES = [
    {**MMLU_PRO[0], "question_id": number, "question": f"Example {number}?", "category": subject, "cot_content": cot}
    for number, (subject, cot) in enumerate(
        [("law", "A: Let's think step by step. Because. The answer is (J).")] * 6 + [("math", "A: ...")]
    )
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'def double(x):\n    """Twice x."""\n',
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "double",
    }
]
MBPP = [
    {
        "task_id": number,
        "text": f"Write f{number}.",
        "code": f"def f{number}():\r\n  return {number}",
        "test_list": tests,
    }
    for number, tests in ((number, [f"assert f{number}() == {number}"] * 3) for number in (1, 2, 3, 4, 11, 510, 511))
]
SQUAD = [
    {
        "title": title,
        "context": f"{title} paragraph {paragraph}. " + "It says much. " * 5,
        "question": f"What about {title} {paragraph}?",
        "answers": {"text": [] if paragraph == 3 else [f"Paragraph {paragraph}", "unlikely words"]},
    }
    for title in ("Apples", "Bees", "Clouds", "Doors")
    for paragraph in range(4)
]
HOTPOT = [
    {
        "question": f"Who was {number}?",
        "answer": f"Person {number}",
        "context": {
            "title": [f"Title {number}.{place}" for place in range(10)],
            "sentences": [["One. ", f"Sentence {number}.{place}."] for place in range(10)],
        },
    }
    for number in range(4)
]
BBH_PROMPT = (
    "BENCHMARK DATA, canary GUID 1\n-----\nSay it.\n\nQ: first\nA: Let's think step by step.\nSo the answer is yes."
)


def write(folder: pathlib.Path) -> pathlib.Path:
    """All of it; returns the folder."""
    files: dict[str, Sequence[dict[str, Any]]] = {
        "math500/math500.jsonl": MATH,
        "aime_2024/train.jsonl": [{"problem": "Count.", "answer": 33}],
        "aime_2025/data/test-00000.jsonl": [{"problem": "Count.", "answer": "70"}],
        "hmmt_2025/train.jsonl": [{"problem": "Find.", "answer": "1-\\frac{2}{\\pi}"}],
        "gsm8k/main/test.jsonl": GSM8K,
        "gsm8k/main/train.jsonl": GSM8K_TRAIN,
        "gsm8k/socratic/test.jsonl": [{"question": "Not this one", "answer": "#### 1"}],
        "mmlu_pro/test.jsonl": MMLU_PRO,
        "mmlu_pro/validation.jsonl": MMLU_PRO_EXAMPLES,
        "humaneval/test.jsonl": HUMANEVAL,
        "mbpp/mbpp.jsonl": MBPP,
        "squad/validation.jsonl": SQUAD,
        "hotpotqa/validation.jsonl": HOTPOT,
    }
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, target in (("navigate", "Yes"), ("dyck_languages", "] >")):
        for name in ("bbh", "cot-prompts"):
            (folder / "bbh" / name).mkdir(parents=True, exist_ok=True)
        questions = {"canary": "x", "examples": [{"input": f"{kind} {n}", "target": target} for n in range(2)]}
        (folder / "bbh" / "bbh" / f"{kind}.json").write_text(json.dumps(questions))
        (folder / "bbh" / "cot-prompts" / f"{kind}.txt").write_text(BBH_PROMPT)
    return folder
