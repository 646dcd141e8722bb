"""The lm-eval adapter: against the model's own functions, through `simple_evaluate`, and local data, all offline."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

import hla_jax
from hla_jax.evaluation.task import TaskError
from hla_jax.generation.sampling import Sampling
from hla_jax.model import NANO, Model
from tiny import random_hla, tiny_config, tiny_params

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from hla_jax.evaluation import lm_eval_tasks
from hla_jax.evaluation.lm_eval import HlaLM

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = tiny_config(vocab_size=1024)
SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, tiny_params(CONFIG), path=NANO)


def ask(lm: HlaLM, kind: str, *arguments: tuple) -> list:
    return getattr(lm, kind)([Instance(kind, {}, args, number) for number, args in enumerate(arguments)])


@pytest.mark.long
def test_generation_is_the_engines(model):
    """Greedy, sampled and stopped; equal whatever the batch size."""
    prompts = ["def add(a, b):", "import os", "x = 1"]
    tokens = [model.tokenizer.encode(prompt) for prompt in prompts]
    whole = hla_jax.generate(model, tokens[0], 12)[0].text
    stop = whole[3:6]
    requests = [
        (prompts[0], {"until": [], "max_gen_toks": 12}),
        (prompts[0], {"until": ["never", stop], "max_gen_toks": 12}),
        (prompts[1], {"until": "", "max_gen_toks": 12, "do_sample": True, "temperature": 0.9, "top_p": 0.9}),
        (prompts[0], {"do_sample": False, "temperature": 0.7}),
        (prompts[2], {"temperature": 0.0}),
    ]
    found = ask(HlaLM(model, batch_size=4, max_gen_toks=5), "generate_until", *requests)
    assert found[0] == whole
    assert found[1] == whole[: whole.index(stop)]
    assert found[2] == hla_jax.generate(model, tokens[1], 12, temperature=0.9, top_p=0.9, seed=2)[0].text
    assert whole.startswith(found[3])
    assert ask(HlaLM(model, batch_size=1, max_gen_toks=5), "generate_until", *requests) == found


def test_requests_say_what_the_task_says(model):
    lm = HlaLM(model, max_length=64, max_gen_toks=5, seed=10)
    text = "x = 1\n" * 40
    request = lm._request(text, {"max_gen_toks": 24, "until": ["\n"]}, 3)
    assert request.prompt == model.tokenizer.encode(text)[-40:]
    assert (request.max_new_tokens, request.stop_strings, request.temperature, request.seed) == (24, ["\n"], 0, 13)
    assert lm._request("x", {"do_sample": True, "top_k": 3}, 0).sampling == Sampling(1.0, 1.0, 3)
    assert lm._request("x", {"max_gen_toks": 999}, 0).max_new_tokens == 63
    assert lm._request("", {}, 0).prompt == [lm.prefix_token]
    with pytest.raises(ValueError, match=r"max_length must be in 2 \.\. 128"):
        HlaLM(model, max_length=129)


def test_rolling_scores_every_token_once(model):
    """In windows: the first begins with the prefix token, another with a token of the one before."""
    text = "import os\nimport sys\nprint(os.name, sys.argv)"
    lm = HlaLM(model, batch_size=2, max_length=16)
    tokens = [lm.prefix_token, *model.tokenizer.encode(text)]
    assert 17 < len(tokens) < 32

    def logprobs(tokens: list[int]) -> np.ndarray:
        logits = np.asarray(hla_jax.forward(model, np.array([[*tokens, *[0] * (32 - len(tokens))]])), np.float64)[0]
        logits = logits[: len(tokens) - 1]
        log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.take_along_axis(log, np.array(tokens[1:])[:, None], axis=1)[:, 0]

    rest = len(tokens) - 17  # tokens that the first window does not score; the second reads 16 before the last
    expected = logprobs(tokens[:17]).sum() + logprobs(tokens[-17:])[-rest:].sum()
    assert ask(lm, "loglikelihood_rolling", (text,)) == [pytest.approx(expected, rel=1e-4)]
    assert expected != pytest.approx(logprobs(tokens).sum(), rel=1e-4)


def test_chat_template(model):
    lm = HlaLM(model)
    turns = [{"role": "user", "content": "Hi"}]
    assert lm.apply_chat_template(turns).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    answered = [*turns, {"role": "assistant", "content": "The answer is"}]
    assert lm.apply_chat_template(answered, add_generation_prompt=False).endswith("assistant\nThe answer is")
    assert "<|im_start|>" in lm.chat_template(True)
    assert lm.chat_template(False) == ""
    assert lm.tokenizer_name.endswith("nano")


@pytest.mark.long
def test_simple_evaluate_on_local_tasks(model, tmp_path):
    """Choices and generation; the accuracies are those of the scores and texts that the model itself gives."""
    rows = [
        {"question": f"{a} + {b} =", "answer": str(a + b), "wrong": str(a + b + 1)} for a, b in ((1, 2), (3, 4), (5, 1))
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    choices = source | {
        "task": "tiny_choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{[answer, wrong]}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    text = source | {
        "task": "tiny_text",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    model = dataclasses.replace(model, attention=random_hla(CONFIG, 3))
    lm = HlaLM(model, batch_size=2)
    found = simple_evaluate(
        lm, tasks=[choices, text], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, num_fewshot=0
    )
    pairs = [(row["question"], f" {row[key]}") for row in rows for key in ("answer", "wrong")]
    scores = [score for score, _ in ask(lm, "loglikelihood", *pairs)]
    right = np.mean([scores[2 * n] >= scores[2 * n + 1] for n in range(3)])
    assert found["results"]["tiny_choices"]["acc,none"] == pytest.approx(right)
    texts = [sample["resps"][0][0] for sample in found["samples"]["tiny_text"]]
    made = hla_jax.generate(model, [model.tokenizer.encode(row["question"]) for row in rows], 4)
    assert texts == [one.text.split("\n")[0] for one in made]


class Told(HlaLM):
    """Answers with given texts, and keeps the prompts."""

    def __init__(self, model: Model, texts: list[str]) -> None:
        super().__init__(model)
        self.texts, self.prompts = texts, []

    def generate_until(self, requests: list[Instance]) -> list[str]:
        self.prompts += [request.args[0] for request in requests]
        return self.texts[: len(requests)]


def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Three data sets with a question or two each, in their own formats."""
    steps = lambda number: f"We count. #### {number}"
    write = lambda name, rows: (
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True),
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows)),
    )
    write("gsm8k/test.jsonl", [{"question": f"What is {n} and 1?", "answer": steps(n + 1)} for n in range(2)])
    write("gsm8k/train.jsonl", [{"question": f"Example {n}?", "answer": steps(n)} for n in range(5)])
    row = {"question_id": 1, "options": ["one", "two"], "answer": "B", "answer_index": 1, "cot_content": ""}
    write(
        "mmlu_pro/sample.jsonl",
        [{**row, "question": f"Which {subject}?", "category": subject} for subject in ("law", "computer science")],
    )
    (tmp_path / "bbh/bbh").mkdir(parents=True)
    example = {"input": "Which statement is sarcastic?", "target": "(B)"}
    (tmp_path / "bbh/bbh/snarks.json").write_text(json.dumps({"canary": "x", "examples": [example]}))
    return tmp_path


@pytest.mark.long
def test_tasks_by_their_names_from_a_folder(model, tmp_path):
    """Prompt, extraction and score of each, with the task files of lm-eval itself."""
    data = folder(tmp_path / "data")
    lm = Told(model, ["It is 1. #### 1", "No number here"])
    found = lm_eval_tasks.ask(lm, "gsm8k", tmp_path / "gsm8k", data=data)
    strict = found["gsm8k exact_match (strict-match)"]
    assert [(line["correct"], line["answered"], line["extracted"]) for line in strict] == [
        (1, True, "1"),
        (0, False, "[invalid]"),
    ]
    assert lm.prompts[0].endswith("Question: What is 0 and 1?\nAnswer:")
    assert lm.prompts[0].count("Question: Example") == 5
    # A second run with the same work directory asks nothing.
    again = Told(model, [])
    assert lm_eval_tasks.ask(again, "gsm8k", tmp_path / "gsm8k", data=data) == found
    assert again.prompts == []

    lm = Told(model, ["the answer is (B).", "the answer is (A)."])
    (lines,) = lm_eval_tasks.ask(lm, "mmlu_pro", tmp_path / "mmlu_pro", data=data).values()
    assert [(line["group"], line["correct"]) for line in lines] == [("computer_science", 1), ("law", 0)]
    assert "Which law?" in lm.prompts[1]

    lm = Told(model, ["So the answer is (B)."])
    (lines,) = lm_eval_tasks.ask(lm, "bbh_cot_fewshot_snarks", tmp_path / "bbh", data=data).values()
    assert [line["correct"] for line in lines] == [1]
    assert lm.prompts[0].count("Q: Which statement is sarcastic?") == 4

    with pytest.raises(TaskError, match="lm-eval's arc_easy is not read from a folder here; those are gsm8k,"):
        lm_eval_tasks.ask(lm, "arc_easy", tmp_path / "arc", data=data)
    with pytest.raises(TaskError, match=r"math500/\*.jsonl: no such file, expected the test split"):
        lm_eval_tasks.ask(lm, "minerva_math500", tmp_path / "math", data=data)


@pytest.mark.long
@pytest.mark.skipif(not SHARED.exists(), reason="the benchmarks' files are not here")
def test_real_files_load():
    manager = lm_eval_tasks.task_files()
    for name, count in (("gsm8k", 1319), ("hendrycks_math500", 500), ("bbh_cot_fewshot_snarks", 178)):
        (task,) = manager.load({"group": "here", "task": lm_eval_tasks.local_tasks(name, SHARED)})["tasks"].values()
        assert len(task.test_docs()) == count
    assert len(lm_eval_tasks.local_tasks("bbh_cot_fewshot", SHARED)) == 27
    assert len(lm_eval_tasks.local_tasks("mmlu_pro", SHARED)) == 14
