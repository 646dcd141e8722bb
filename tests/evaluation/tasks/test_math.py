r"""Answers to mathematics: right in other forms, wrong, missing, cut off."""

import threading

import pytest

from evaluation.tasks import benchmarks
from hla_jax.evaluation import tasks
from hla_jax.evaluation.tasks.math_answers import grade, last_boxed

RIGHT = [
    ("\\frac{1}{2}", "so \\boxed{0.5}"),
    ("\\frac{1}{2}", "The answer is 1/2."),
    ("\\frac{1}{2}", "\\boxed{3}. Wait, no: \\boxed{\\frac12}."),
    ("\\sqrt{2}", "<think>\\boxed{3}</think> \\[ \\boxed{\\sqrt2} \\]"),
    ("p - q", "\\boxed{-q+p}"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3,\\pi/2)}"),
    ("1 \\pm \\sqrt{19}", "\\boxed{1+\\sqrt{19}, 1-\\sqrt{19}}"),
    ("\\text{Evelyn}", "\\boxed{Evelyn}"),
    ("1000", "\\boxed{1,000}"),
    ("33", "\\boxed{033}"),
    ("42", "Therefore, the answer is \\(42\\)."),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}"),
]
WRONG = [
    ("\\frac{1}{2}", "\\boxed{\\frac12}. Wait, no: \\boxed{3}."),
    ("\\sqrt{2}", "<think>\\boxed{\\sqrt2}</think> \\boxed{3}"),
    ("(1,2)", "\\boxed{(2,1)}"),
    ("[1,2)", "\\boxed{(1,2]}"),
    ("-2", "\\boxed{2}"),
    ("6.28", "\\boxed{2\\pi}"),
    ("42", "The answer is 43, not 42."),
]
UNANSWERED = [
    ("5", ""),
    ("5", "We have 5 apples, and then"),
    ("5", "First, \\boxed{"),
    ("\\frac{3}{4}", "So it is \\boxed{\\frac{3}{4}"),
    ("5", "Fill in \\boxed{}."),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_right_in_whatever_form(gold, text):
    assert grade(gold, text)["correct"] == 1


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_wrong(gold, text):
    score = grade(gold, text)
    assert (score["correct"], score["answered"]) == (0, True)


@pytest.mark.parametrize(("gold", "text"), UNANSWERED)
def test_a_number_that_is_not_given_as_the_answer_is_none(gold, text):
    assert grade(gold, text) == {"correct": 0, "answered": False, "extracted": None}


def test_the_last_box_counts_with_its_inner_braces():
    assert last_boxed("\\boxed{1} \\boxed{\\frac{1}{2}} \\boxed{ } \\boxed{3") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{\\{1\\}}") == "\\{1\\}"
    assert last_boxed("\\boxed {1 \\\\} \\fbox{} }{") == "1 \\\\"
    assert last_boxed("\\boxed{5} and \\boxed{6") == "5"
    assert last_boxed("\\boxed{" * 5000) is None


def test_scores_in_another_thread_too():
    # math-verify's time limit is a signal, which other threads may not have.
    found = []
    thread = threading.Thread(target=lambda: found.append(grade("2k+2", "\\boxed{2(k+1)}")))
    thread.start()
    thread.join()
    assert found[0]["correct"] == 1


def test_math500_asks_in_the_chat_with_four_samples(options, tokenizer):
    task = tasks.make("math500", options)
    first, second = task.items(tokenizer)
    assert (first.id, first.group, second.group) == ("test/a.json", "level 1", "level 5")
    assert first.prompt.startswith("What is half of one?\n\n")
    assert "\\boxed{}" in first.prompt
    assert (task.settings.samples, task.settings.max_new_tokens, task.settings.chat) == (4, 8192, True)
    assert task.score(first, "\\boxed{1/2}")["correct"] == 1
    assert task.score(second, "\\boxed{1/2}")["correct"] == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [("aime_2024", "\\boxed{33}"), ("aime_2025", "\\boxed{070}"), ("hmmt_2025", "\\boxed{\\frac{\\pi-2}{\\pi}}")],
)
def test_competitions_have_sixteen_samples(name, text, options, tokenizer):
    task = tasks.make(name, options)
    (item,) = task.items(tokenizer)
    assert task.settings.samples == 16
    assert task.score(item, text)["correct"] == 1
    assert task.score(item, "\\boxed{34}")["correct"] == 0


def test_gsm8k_shows_five_examples_and_takes_the_number_behind_the_marks(options, tokenizer):
    task = tasks.make("gsm8k", options)
    (item,) = task.items(tokenizer)
    assert item.prompt.count("Question: ") == 6
    assert "Question: Question 4?\nAnswer: Easy.\n#### 4\n\nQuestion: How many?\nAnswer:" in item.prompt
    assert item.answer == "8"
    score = lambda text: {key: value for key, value in task.score(item, text).items() if key != "extracted"}
    assert score(" 2*4 is 8.\n#### 8") == {"correct": 1, "answered": True, "flexible": 1}
    assert score(" #### $8.00") == {"correct": 1, "answered": True, "flexible": 1}
    assert score(" #### 80") == {"correct": 0, "answered": True, "flexible": 0}
    assert score(" #### 8\n\nand 9") == {"correct": 1, "answered": True, "flexible": 0}
    assert score(" The answer is 8.") == {"correct": 0, "answered": False, "flexible": 1}
    assert score(" 2*4 is") == {"correct": 0, "answered": False, "flexible": 0}
    item = task.items(tokenizer)[0].__class__(id="1", answer="1,080")
    assert task.score(item, "#### 1080")["correct"] == 1


def test_gsm8k_in_the_chat_wants_a_box(options, tokenizer):
    task = tasks.make("gsm8k_chat", options)
    (item,) = task.items(tokenizer)
    assert task.settings.chat
    assert item.prompt.startswith(benchmarks.GSM8K[0]["question"])
    assert task.score(item, "\\boxed{8}")["correct"] == 1
    assert task.score(item, "so 8")["answered"] is False
