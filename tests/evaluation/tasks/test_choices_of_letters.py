"""MMLU-Pro and BBH from local files."""

import pytest

from evaluation.tasks import benchmarks
from hla_jax.evaluation import tasks
from hla_jax.evaluation.task import Options, Settings, TaskError
from hla_jax.evaluation.tasks.mmlu_pro import MmluPro


def test_mmlu_pro_shows_examples_of_the_subject_only(options, tokenizer):
    task = tasks.make("mmlu_pro", options)
    (item,) = task.items(tokenizer)
    assert item.prompt.count("Question:") == 6
    assert item.prompt.count("Let's think step by step. Because. The answer is (J).") == 5
    assert "about law." in item.prompt
    assert item.prompt.endswith("J. option 9\nAnswer: Let's think step by step.")
    assert (item.id, item.answer, item.group) == ("7", "J", "law")


def test_mmlu_pro_without_examples_has_a_name_of_its_own(options, tokenizer, tmp_path):
    (item,) = tasks.make("mmlu_pro_zero_shot", options).items(tokenizer)
    assert item.prompt.count("Question:") == 1
    assert "the answer is (X)" in item.prompt
    folder = tmp_path / "mmlu_pro"
    folder.mkdir()
    (folder / "test.jsonl").write_bytes((options.data / "mmlu_pro" / "test.jsonl").read_bytes())
    (folder / "other.jsonl").write_text("")
    with pytest.raises(TaskError, match=r"expected validation\*"):
        tasks.make("mmlu_pro", Options(data=tmp_path))


def test_mmlu_pro_takes_turns_among_subjects(tokenizer):
    rows = [benchmarks.MMLU_PRO[0] | {"question_id": n, "category": subject} for n, subject in enumerate("aaabbc")]
    task = MmluPro("mmlu_pro", Settings(), rows, {})
    assert [item.id for item in task.items(tokenizer)] == ["0", "3", "5", "1", "4", "2"]


@pytest.mark.parametrize(
    ("text", "correct", "answered"),
    [
        (" Because. The answer is (J).", 1, True),
        (" the answer is J", 1, True),
        (" The answer is **J**.", 1, True),
        (" The answer is (A). No, the answer is (J).", 0, True),
        (" The answer is Jupiter.", 0, False),
        (" It must be (J)", 0, False),
        (" The answer is", 0, False),
    ],
)
def test_mmlu_pro_scores(text, correct, answered, options, tokenizer):
    task = tasks.make("mmlu_pro_zero_shot", options)
    score = task.score(task.items(tokenizer)[0], text)
    assert (score["correct"], score["answered"]) == (correct, answered)


def test_bbh_drops_the_canary_and_asks_behind_the_examples(options, tokenizer):
    first, second = tasks.make("bbh_navigate", options).items(tokenizer)
    assert first.prompt == (
        "Say it.\n\nQ: first\nA: Let's think step by step.\nSo the answer is yes.\n\n"
        "Q: navigate 0\nA: Let's think step by step.\n"
    )
    assert (first.id, second.id, first.group) == ("navigate/0", "navigate/1", "navigate")


@pytest.mark.parametrize(
    ("kind", "text", "correct", "answered"),
    [
        ("navigate", "We turn. So the answer is Yes.", 1, True),
        ("navigate", "So the answer is Yes.\nSo the answer is No.", 1, True),
        ("navigate", "So the answer is No.", 0, True),
        ("navigate", "Yes.", 0, False),
        ("navigate", "So the answer is", 0, False),
        ("dyck_languages", "So the answer is ] >.", 1, True),
        ("dyck_languages", "So the answer is ] > )", 0, True),
    ],
)
def test_bbh_scores(kind, text, correct, answered, options, tokenizer):
    task = tasks.make(f"bbh_{kind}", options)
    score = task.score(task.items(tokenizer)[0], text)
    assert (score["correct"], score["answered"]) == (correct, answered)
