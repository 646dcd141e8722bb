"""Tasks of given lengths: passkey, RULER's questions, and the embedded model's own."""

import dataclasses

import numpy as np
import pytest

from evaluation.tasks import benchmarks
from hla_jax.data import synthetic
from hla_jax.evaluation import tasks
from hla_jax.evaluation.synthetic_tasks import Setting
from hla_jax.evaluation.task import Options, TaskError
from hla_jax.evaluation.tasks import synthetic_questions
from hla_jax.evaluation.tasks.ruler_qa import squad_questions


def test_a_passkey_prompt_fills_its_length_and_hides_the_key_anywhere(tokenizer):
    task = tasks.make("passkey_1024", Options(seed=3))
    items = task.items(tokenizer)
    lengths = [len(tokenizer.encode(item.prompt)) for item in items]
    assert max(lengths) <= 1024 - task.settings.max_new_tokens
    assert min(lengths) > 1024 - task.settings.max_new_tokens - 32
    depths = np.sort([item.metadata["depth"] for item in items])
    assert depths[0] < 0.1
    assert depths[-1] > 0.9
    assert len({item.answer for item in items}) > 40
    assert {item.group for item in items} == {"depth 0-25%", "depth 25-50%", "depth 50-75%", "depth 75-100%"}
    other = tasks.make("passkey_1024", Options(seed=4)).items(tokenizer)
    assert [item.answer for item in items] != [item.answer for item in other]


def test_the_passkey_prompt_has_the_published_lines(tokenizer):
    (item,) = tasks.make("passkey_512", Options(limit=1)).items(tokenizer)
    first, before, key, after, question = item.prompt.split("\n")
    assert first.startswith("There is an important info hidden inside a lot of irrelevant text. Find it and memorize")
    assert key == f"The pass key is {item.answer}. Remember it. {item.answer} is the pass key."
    assert question == "What is the pass key? The pass key is"
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    assert (filler * 99).startswith(before)
    assert (filler * 99).startswith(after)
    assert 1 <= item.answer <= 50_000


@pytest.mark.parametrize(
    ("text", "correct", "answered"),
    [(" 472.", 1, True), (" 472 and 5", 1, True), (" 47", 0, True), (" 4721", 0, True), (" the grass", 0, False)],
)
def test_passkey_scores(text, correct, answered, tokenizer):
    task = tasks.make("passkey_512", Options(limit=1))
    item = dataclasses.replace(task.items(tokenizer)[0], answer=472)
    score = task.score(item, text)
    assert (score["correct"], score["answered"]) == (correct, answered)


def test_a_passkey_length_without_room_is_refused(tokenizer):
    with pytest.raises(TaskError, match="take a longer length"):
        tasks.make("passkey_64", Options()).items(tokenizer)


@pytest.mark.parametrize("name", ["ruler_qa_squad_1024", "ruler_qa_hotpot_1024"])
def test_ruler_prompts_hold_the_needed_documents_and_as_many_others_as_fit(name, options, tokenizer):
    task = tasks.make(name, options)
    items = task.items(tokenizer)
    rows = benchmarks.HOTPOT if "hotpot" in name else [row for row in benchmarks.SQUAD if row["answers"]["text"]]
    assert len(items) == len(rows)
    order = set()
    for item, row in zip(items, rows):
        assert len(tokenizer.encode(item.prompt.removesuffix(" Answer:"))) + 32 <= task.length
        assert item.prompt.endswith(f"Question: {row['question']} Answer:")
        needed = [row["context"]] if "squad" in name else [f"{title}\nOne. " for title in row["context"]["title"]]
        assert all(document in item.prompt for document in needed)
        assert item.prompt.count("Answer the question based on the given documents.") == 2
        assert item.prompt.count("\n\nDocument ") >= 10
        order.add(item.prompt.index(needed[0]))
    assert len(order) > 1


def test_ruler_in_the_chat_asks_the_same_with_room_to_reason(options, tokenizer):
    plain, chat = (tasks.make(f"ruler_qa_squad_512{end}", options) for end in ("", "_chat"))
    assert plain.items(tokenizer) == chat.items(tokenizer)
    assert (plain.settings.max_new_tokens, plain.settings.chat) == (32, False)
    assert (chat.settings.max_new_tokens, chat.settings.chat) == (2048, True)


def test_ruler_leaves_out_what_does_not_fit(options, tokenizer):
    with pytest.raises(TaskError, match="no question fits 128 tokens"):
        tasks.make("ruler_qa_hotpot_128", options).items(tokenizer)


def test_squad_questions_without_an_answer_are_not_asked():
    questions = squad_questions(benchmarks.SQUAD)
    assert len(questions) == 12
    assert questions[0].own == (benchmarks.SQUAD[0]["context"],)
    assert questions[0].related == tuple(row["context"] for row in benchmarks.SQUAD[1:4])


@pytest.mark.parametrize(
    ("text", "correct", "fraction"),
    [(" PARAGRAPH\t0", 0, 0), (" It says: paragraph 0.", 1, 0.5), (" paragraph 1", 0, 0), ("", 0, 0)],
)
def test_ruler_scores_by_what_occurs_in_the_reply(text, correct, fraction, options, tokenizer):
    task = tasks.make("ruler_qa_squad_512", options)
    score = task.score(task.items(tokenizer)[0], text)
    assert (score["correct"], score["fraction"], score["answered"]) == (correct, fraction, bool(text))


@pytest.mark.parametrize("kind", ["recall", "tracking", "chain"])
def test_synthetic_answers_are_right_and_others_are_not(kind, tokenizer):
    task = tasks.make(f"{kind}_128", Options(limit=4))
    items = task.items(tokenizer)
    assert len(items) == 4
    for item in items:
        assert abs(item.metadata["distance"] - 128) < 24
        right = task.score(item, item.answer)
        assert (right["correct"], right["answered"], right["extracted"]) == (1, True, item.answer)
        wrong = task.score(item, f"{item.answer}7")
        assert (wrong["correct"], wrong["answered"]) == (0, True)
        assert len(tokenizer.encode(f"{item.answer}\n")) <= task.settings.max_new_tokens
    assert task.score(items[0], "=fox=")["answered"] is False
    assert task.score(items[0], "")["answered"] is False


def test_synthetic_questions_are_those_of_the_main_job(tokenizer):
    expected = Setting(synthetic.Recall(), 640, 512).examples(2, synthetic_questions._filler(tokenizer), seed=5)
    found = tasks.make("recall_512", Options(limit=2, seed=5)).items(tokenizer)
    assert [(item.prompt, item.answer) for item in found] == [(one.prompt, one.answer) for one in expected]
