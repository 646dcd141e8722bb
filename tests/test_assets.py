"""The embedded models are what their documents say, and competent where a cache is tested."""

import json

import jax.numpy as jnp
import pytest

import hla_jax
from hla_jax.data import standard_library, synthetic
from hla_jax.evaluation import synthetic_tasks


@pytest.fixture(scope="module")
def model():
    return hla_jax.load(hla_jax.NANO, dtype="float32")


@pytest.fixture(scope="module")
def tokenize(model):
    return lambda text: model.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def filler(tokenize):
    documents = list(standard_library.documents("held_out"))[:8]
    return synthetic.Filler(documents, lambda lines: [len(tokenize(line)) for line in lines])


def test_it_is_small():
    assert sum(file.stat().st_size for file in hla_jax.NANO.iterdir()) <= 12 * 2**20


def test_hla_at_the_papers_ratio_fits(model):
    scheme = hla_jax.HLA(rank_k=64, rank_v=64, rank_loop1=32, window=32)
    scheme.check(model.config)
    full = 2 * model.config.num_loops * model.config.num_kv_heads * model.config.head_dim
    assert full / (64 + 64 + 2 * 32) == pytest.approx(32 / 3)


def test_words_and_digits_are_single_tokens(tokenize):
    for word in (*synthetic.WORDS, *"0123456789"):
        assert len(tokenize(word)) == 1
    parts = ("amber", "4", "7", "2", "\n", "?", "amber")
    assert tokenize("".join(parts)) == [token for part in parts for token in tokenize(part)]


def test_special_tokens(model):
    assert model.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert model.stop_tokens == (0, 2)
    assert model.tokenizer.decode(model.tokenizer.encode("def f(x):\n    return 'é'")) == "def f(x):\n    return 'é'"


@pytest.mark.parametrize(
    "setting", synthetic_tasks.SETTINGS[::3] + synthetic_tasks.SETTINGS[1:2], ids=lambda setting: setting.name
)
def test_it_is_as_good_as_its_scores_say(model, setting, filler, tokenize):
    scores = json.loads((hla_jax.NANO / "scores.json").read_text())
    found = synthetic_tasks.exact_match(model.params, model.config, setting.examples(32, filler, seed=5), tokenize)
    assert found >= scores[setting.name] - 0.15
    assert scores[setting.name] >= (0.95 if setting.task.kind == "recall" else 0.9)


def test_generation_answers(model, filler):
    """Through the cache, a question is answered as the parallel pass says."""
    examples = synthetic_tasks.SETTINGS[0].examples(8, filler, seed=6)
    complete = lambda prompts: [
        made.text for made in hla_jax.generate(model, prompts, 8, stop_tokens=(0, *model.tokenizer.encode("\n")))
    ]
    assert synthetic_tasks.accuracy(complete, examples) >= 0.75


def test_text_loss_is_that_of_a_language_model(model, tokenize):
    text = next(standard_library.documents("held_out"))
    loss = synthetic_tasks.text_loss(model.params, model.config, jnp.asarray(tokenize(text)[:512])[None])
    assert loss < 4.5


def test_the_one_of_many_loops_is_as_good_as_its_scores_say(filler, tokenize):
    directory = hla_jax.NANO.with_name("nano_huginn")
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 4 * 2**20
    scores = json.loads((directory / "scores.json").read_text())
    model = hla_jax.load(directory, dtype="float32")
    assert model.config.num_loops == 12
    examples = synthetic_tasks.SETTINGS[0].examples(32, filler, seed=5)
    found = synthetic_tasks.exact_match(model.params, model.config, examples, tokenize)
    assert found >= scores["recall/64"] - 0.1
    assert scores["recall/64"] >= 0.95
