"""Tasks through caches: prompts, seeds, resuming item by item, statistics against counts by hand, and the report."""

import dataclasses
import json

import numpy as np
import pytest

import hla_jax
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.evaluation import loglikelihood, run_tasks
from hla_jax.evaluation.estimates import Estimate, Interval, bootstrap_ratio
from hla_jax.evaluation.fidelity import AttentionDivergence, Decoding, Fidelity, PositionRange
from hla_jax.evaluation.memory import Memory
from hla_jax.evaluation.run_tasks import Running, answer, answers_file, prompt_tokens, read_lines
from hla_jax.evaluation.schemes import FULL
from hla_jax.evaluation.task import Item, Settings, Task, TaskError, choose
from hla_jax.evaluation.task_report import Evaluation, write_report
from hla_jax.evaluation.task_summary import summarise
from hla_jax.model import NANO, Model
from hla_jax.tokenizer import load_tokenizer
from tiny import random_hla, tiny_config, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = tiny_config(vocab_size=1024)
RUNNING = Running(slots=4, batch_size=2)
GREEDY, SAMPLED = Settings(), Settings(max_new_tokens=8, samples=2, temperature=1.0)


@dataclasses.dataclass(frozen=True)
class Letters(Task):
    """Right if the answer has an "e"; unanswered without any letter."""

    name: str = "letters"
    settings: Settings = SAMPLED
    count: int = 3

    def items(self, tokenizer):
        return [Item(f"q{n}", prompt=f"def f{n}(", group="ab"[n % 2]) for n in range(self.count)]

    def score(self, item, text):
        return {"correct": float("e" in text), "answered": any(c.isalpha() for c in text), "extracted": text[:1]}


@dataclasses.dataclass(frozen=True)
class Choices(Task):
    name: str = "choices"
    settings: Settings = GREEDY

    def items(self, tokenizer):
        contexts = ("import", "return")
        return [
            Item(str(n), choices=((context, " os"), (context, " self.x")), answer=n)
            for n, context in enumerate(contexts)
        ]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, tiny_params(CONFIG), path=NANO)


@pytest.mark.long
def test_answers_are_written_as_they_come_and_resumed(model, tmp_path, monkeypatch):
    """A run that stops keeps what it wrote; the next asks the rest; and the answers are those of one run."""
    schemes = {FULL: Attention(FullCache()), "HLA": random_hla(CONFIG, 3)}
    whole = answer(model, schemes, Letters(), tmp_path / "whole", RUNNING)
    assert [(line["id"], line["sample"]) for line in whole["HLA"]] == [(f"q{n}", m) for n in range(3) for m in range(2)]
    assert len({line["text"] for line in whole[FULL]}) > 3
    for line in whole[FULL]:
        prompt = model.tokenizer.encode(f"def f{line['id'][1]}(")
        assert line["prompt_tokens"] == len(prompt)
        assert line["new_tokens"] <= 8
        assert line["correct"] == float("e" in line["text"])
        assert line["group"] == "ab"[int(line["id"][1]) % 2]
    alone = hla_jax.generate(
        model,
        model.tokenizer.encode("def f1("),
        8,
        schemes[FULL],
        temperature=1.0,
        seed=run_tasks.zlib.crc32(b"0/letters/q1/1"),
    )
    assert whole[FULL][3]["text"] == alone[0].text

    asked = []
    score = Letters.score

    def stops(self, item, text):
        asked.append(item.id)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return score(self, item, text)

    monkeypatch.setattr(Letters, "score", stops)
    with pytest.raises(KeyboardInterrupt):
        answer(model, schemes, Letters(), tmp_path / "cut", RUNNING)
    file = answers_file(tmp_path / "cut", "letters", FULL)
    assert len(read_lines(file)) == 3
    file.write_text(file.read_text() + '{"id": "q')  # the machine went off while it wrote
    assert answer(model, schemes, Letters(), tmp_path / "cut", RUNNING) == whole
    assert len(asked) == 4 + 3 + 6
    # More items and samples are only added.
    more = Letters(count=4, settings=dataclasses.replace(Letters().settings, samples=3))
    assert len(answer(model, {FULL: schemes[FULL]}, more, tmp_path / "cut", RUNNING)[FULL]) == 12
    assert len(asked) == 13 + 6


def test_choices_are_scored_by_their_log_likelihood(model, tmp_path):
    lines = answer(model, {FULL: Attention(FullCache())}, Choices(), tmp_path, RUNNING)[FULL]
    for line, item in zip(lines, Choices().items(None), strict=True):
        pairs = [loglikelihood.encode_pair(model.tokenizer, 0, *choice) for choice in item.choices]
        expected = [one.logprob for one in loglikelihood.score(model, model.attention, pairs, batch_size=2)]
        assert line["logprobs"] == pytest.approx(expected, rel=1e-5)
        assert line["correct"] == float(np.argmax(expected) == item.answer)
    item = Item("x", choices=(("a", " b"), ("a", " longer")), answer=1)
    assert choose(item, [-2.0, -3.0])["correct"] == 0
    assert choose(item, [-2.0, -3.0], by_bytes=True) == {"correct": 1, "answered": True, "extracted": " longer"}


def test_prompts_are_text_or_a_chat():
    tokenizer = load_tokenizer(NANO)
    text = lambda item, **settings: tokenizer.decode(prompt_tokens(tokenizer, item, Settings(**settings)))
    assert text(Item("x", prompt="a = ", prefix="1")) == "a = 1"
    assert text(Item("x", prompt="Hi", prefix="Well"), chat=True).endswith(
        "user\nHi<|im_end|>\n<|im_start|>assistant\nWell"
    )
    turns = ({"role": "system", "content": "S"}, {"role": "user", "content": "Hi"})
    assert text(Item("x", messages=turns)).startswith("<|im_start|>system\nS<|im_end|>")
    tokenizer.chat_template = None
    with pytest.raises(TaskError, match="has no chat template"):
        text(Item("x", prompt="Hi"), chat=True)


def test_impossible_tasks_are_refused(model, tmp_path):
    ask = lambda task: answer(model, {FULL: Attention(FullCache())}, task, tmp_path, RUNNING)
    with pytest.raises(TaskError, match="letters: has no items"):
        ask(Letters(count=0))
    with pytest.raises(TaskError, match=r"needs 13\d positions, 128 of them for new tokens, and the model has 128"):
        ask(Letters(settings=Settings(max_new_tokens=128)))


def line(number: int, correct: float, sample: int = 0, **more) -> dict:
    more = dict(answered=True, finish_reason="stop", new_tokens=10, group="") | more
    return {"id": str(number), "sample": sample, "correct": correct, **more}


def test_the_summary_counts():
    full = [line(n, 1.0) for n in range(8)] + [line(n, 0.0, answered=False) for n in range(8, 10)]
    other = [line(n, 1.0, new_tokens=70, group="x") for n in range(6)]
    other += [line(n, 0.0, finish_reason="length", new_tokens=200, group="y") for n in range(6, 9)] + [line(9, 1.0)]
    found = summarise({FULL: full, "other": other})
    assert found[FULL].paired is None
    assert (found[FULL].accuracy.mean, found[FULL].no_answer, found[FULL].cut) == (0.8, 0.2, 0)
    one = found["other"]
    assert one.accuracy.mean == pytest.approx(0.7)
    assert (one.paired.lost, one.paired.gained) == (2, 1)
    assert one.paired.difference.mean == pytest.approx(-0.1)
    assert one.paired.retained.mean == pytest.approx(0.875)
    assert one.paired.retained.low < 0.875 < one.paired.retained.high
    assert (one.cut, one.new_tokens) == (0.3, pytest.approx(103))
    assert {name: (part.accuracy, part.answers) for name, part in one.groups.items()} == {"x": (1, 6), "y": (0, 3)}
    assert {name: (part.accuracy, part.answers) for name, part in one.lengths.items()} == {
        "0-63": (1, 1),
        "64-127": (1, 6),
        "128-255": (0, 3),
    }
    with pytest.raises(ValueError, match="other answered other items than full cache"):
        summarise({FULL: full, "other": other[1:]})


def test_samples_of_an_item_are_one_unit():
    """The interval is that of the items' means: twice as many samples that agree do not narrow it."""
    once = summarise({FULL: [line(n, n % 2) for n in range(20)]})[FULL]
    twice = summarise({FULL: [line(n, n % 2, sample) for n in range(20) for sample in range(2)]})[FULL]
    assert once.accuracy == twice.accuracy
    assert (once.any_right, twice.any_right, twice.samples) == (None, 0.5, 2)
    nothing = summarise({FULL: [line(0, 0.0)], "other": [line(0, 1.0)]})["other"]
    assert nothing.paired.retained is None


def test_the_bootstrap_of_a_ratio_resamples_pairs():
    rng = np.random.default_rng(0)
    others = rng.random(400) + 0.5
    found = bootstrap_ratio(0.9 * others, others)
    assert (found.mean, found.low, found.high) == pytest.approx((0.9, 0.9, 0.9))
    noise = bootstrap_ratio(others + rng.normal(0, 0.3, 400), others)
    spread = 0.3 / others.mean() / 400**0.5
    assert noise.high - noise.low == pytest.approx(2 * 1.96 * spread, rel=0.2)


def test_the_report_has_every_number_and_marks_what_is_kept(tmp_path):
    lines = {
        FULL: [line(n, 1.0, group="ab"[n % 2]) for n in range(100)],
        "near": [line(n, float(n < 98)) for n in range(100)],
        "far": [line(n, float(n < 92), new_tokens=n) for n in range(100)],
        "lost": [line(n, float(n < 50), answered=n < 60) for n in range(100)],
    }
    memory = {name: Memory(1000 // (n + 1), 0, {4096: 1}, n + 1.0, {4096: 1.0}) for n, name in enumerate(lines)}
    kl = Estimate(0.125, 0.01, 4)
    close = Fidelity(
        Decoding(kl, Estimate(0.75, None, 1), (PositionRange(8, 16, kl, Estimate(0.5, None, 1)),)),
        Estimate(0.25, None, 1),
        (0.1, 0.2),
        AttentionDivergence((0.3, 0.4), (0.1, 0.1), ((0.31, 0.41), (0.29, 0.39))),
    )
    found = Evaluation({"model": "nano"}, memory, {"task": summarise(lines)}, {"near": close})
    report = write_report(found, tmp_path).read_text()
    assert "| full cache | 1,000 | 1.0x | 100.0 |" in report
    assert "| near | 500 | 2.0x | 98.0 🟩 |" in report
    assert "| far | 333 | 3.0x | 92.0 🟨 |" in report
    assert "| lost | 250 | 4.0x | 50.0 |" in report
    assert "−50 +0" in report
    assert "| near | 0.1250 ± 0.0100 | 0.750 | 0.1250 / 0.500 |" in report
    assert "| layer 2 | 0.2900 | 0.3900 |" in report
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["tasks"]["task"]["far"]["accuracy"]["mean"] == 0.92
    assert Interval(**written["tasks"]["task"]["far"]["paired"]["retained"]).mean == pytest.approx(0.92)
    assert (tmp_path / "accuracy.png").stat().st_size > 5000
