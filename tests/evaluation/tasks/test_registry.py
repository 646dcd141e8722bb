"""Names, suites, and what a user is told who lacks the data."""

import dataclasses
import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from hla_jax.evaluation import tasks
from hla_jax.evaluation.task import Options, TaskError

# With their parameters filled in.
NAMES = [name.format(length=4096, distance=64) for name in tasks.NAMES if not name.startswith("bbh")]


@pytest.mark.parametrize("name", [*NAMES, "bbh_navigate"])
def test_every_task_has_items_with_ids_of_their_own_that_are_json(name, data, tokenizer):
    task = tasks.make(name, Options(data=data, limit=2, run_code=True))
    items = task.items(tokenizer)
    assert task.name == name
    assert items
    assert len({item.id for item in items}) == len(items)
    assert all((item.prompt or item.messages or item.choices) and item.answer is not None for item in items)
    assert [dataclasses.asdict(item) for item in items] == [dataclasses.asdict(item) for item in task.items(tokenizer)]
    json.dumps([dataclasses.asdict(item) for item in items])


@pytest.mark.parametrize("name", [*NAMES, "bbh_navigate"])
def test_no_text_breaks_a_score(name, data, tokenizer):
    task = tasks.make(name, Options(data=data, limit=1, run_code=True))
    item = task.items(tokenizer)[0]
    for text in ("", " \n", "\x00\ufffd", "\\boxed{" + "(" * 200, "answer is (", "####", "```python\n"):
        score = task.score(item, text)
        assert score["correct"] == 0
        assert score["answered"] is False or text.strip()
        json.dumps(score)


def test_suites_expand_to_names_that_exist_in_order_and_once():
    chosen = tasks.expand(["competition", "gsm8k", "aime_2024", "nano"])
    assert chosen[:4] == ["aime_2024", "aime_2025", "hmmt_2025", "gsm8k"]
    assert len(set(chosen)) == len(chosen) == 4 + 15
    known = [re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(name)) for name in tasks.NAMES]
    for name in tasks.expand(list(tasks.SUITES)):
        assert name.startswith(tasks.LM_EVAL) or any(re.fullmatch(pattern, name) for pattern in known), name


def test_an_unknown_task_names_those_there_are(options):
    with pytest.raises(TaskError, match=r"no task 'math501'; there are math500, .*passkey_\{length\}.* suites .*nano"):
        tasks.make("math501", options)


def test_missing_data_says_what_was_expected_and_how_to_get_it(tmp_path):
    options = Options(data=tmp_path)
    with pytest.raises(
        TaskError, match=r"math500: expected test\*\.jsonl .* found nothing; .*hf download HuggingFaceH4"
    ):
        tasks.make("math500", options)
    with pytest.raises(TaskError, match=r"bbh/navigate.json: not found; it comes from github"):
        tasks.make("bbh_navigate", options)
    with pytest.raises(TaskError, match="needs --data=FOLDER"):
        tasks.make("bbh", Options())
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text("")
    (tmp_path / "gsm8k" / "dev.jsonl").write_text("")
    with pytest.raises(TaskError, match=r"expected test\*\.jsonl or .parquet, found dev.jsonl, train.jsonl"):
        tasks.make("gsm8k_chat", options)


def test_a_copy_of_the_hub_is_read(tmp_path, tokenizer):
    # One folder a configuration, parquet, splits in parts.
    for config, answer in (("main", "1"), ("socratic", "2")):
        (tmp_path / "gsm8k" / config).mkdir(parents=True)
        for part in range(2):
            table = pyarrow.table({"question": [f"{config} {part}?"], "answer": [f"So.\n#### {answer}"]})
            pyarrow.parquet.write_table(table, tmp_path / "gsm8k" / config / f"test-0000{part}-of-00002.parquet")
    items = tasks.make("gsm8k_chat", Options(data=tmp_path)).items(tokenizer)
    assert [item.prompt.split("\n")[0] for item in items] == ["main 0?", "main 1?"]
    assert [item.answer for item in items] == ["1", "1"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"question": "?"}\n', "expected rows with problem, answer"),
        ('{"problem": "?", "an', "cannot be read|is not"),
        ("", "is empty"),
    ],
)
def test_damaged_data_names_its_file(text, found, tmp_path):
    (tmp_path / "aime_2024").mkdir()
    (tmp_path / "aime_2024" / "train.jsonl").write_text(text)
    with pytest.raises(TaskError, match=found) as error:
        tasks.make("aime_2024", Options(data=tmp_path))
    assert "train.jsonl" in str(error.value)


def test_code_is_off_until_it_is_asked_for(options):
    with pytest.raises(TaskError, match="say --run_code to allow it"):
        tasks.make("humaneval", options)
