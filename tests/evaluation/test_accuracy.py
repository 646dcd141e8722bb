"""Task accuracy: what is generated is what `generate` generates, and the counts are right."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.attention.shared import SharedLoop
from hla_jax.data import synthetic
from hla_jax.evaluation import accuracy
from hla_jax.evaluation.schemes import FULL, REUSE
from hla_jax.evaluation.synthetic_tasks import Setting
from hla_jax.generation.generate import generate
from hla_jax.model import load
from hla_jax.models import weights
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
END = "<|endoftext|>"
LINES = ("def f(x):\n    return x\n", "for i in range(3):\n    print(i)\n")
SCHEMES = {FULL: Attention(FullCache()), REUSE: Attention(SharedLoop(0))}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with a tokenizer of bytes."""
    directory = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({END: 0, **{byte: 1 + index for index, byte in enumerate(alphabet)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = tiny.tiny_config(vocab_size=len(alphabet) + 1, max_position_embeddings=512)
    weights.save_params(tiny.tiny_params(config), config, directory)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END).save_pretrained(directory)
    return load(directory, "float32")


@pytest.mark.long
def test_completions_are_those_of_generate(model):
    prompts = ["amber=47\n?amber=", "plum=8\nfox=plum+5\n?fox="]
    found = dict(accuracy.complete(model, SCHEMES, prompts, 9))
    breaks = [token for token in range(model.config.vocab_size) if "\n" in model.tokenizer.decode([token])]
    for name, attention in SCHEMES.items():
        expected = generate(model, prompts, 9, attention, stop_tokens=[*breaks, *model.stop_tokens])
        assert [text.split("\n")[0] for text in found[name]] == [one.text.split(END)[0] for one in expected]
    assert found[FULL] != found[REUSE]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("472\n", True),
        ("=plum81\nmore", True),
        ("=fox-1:9;fox=plum+5:4;plum8:2\n", True),
        ("=fox-1:9;fox=plum+5:4;fox=plum", False),  # ran on to the limit
        ("\n", False),
        ("=fox\n", False),
        ("472?\n", False),
        ("", False),
    ],
)
def test_what_counts_as_an_answer(completion, answer):
    assert synthetic.is_answer(completion) is answer


def test_missing_answers_are_told_from_wrong_ones(model, monkeypatch):
    setting = Setting(synthetic.Recall(), 64, 16)
    filler = synthetic.Filler(LINES, lambda lines: [len(model.tokenizer.encode(line)) for line in lines])
    asked = setting.examples(3, filler, seed=3)
    longest = max(len(model.tokenizer.encode(example.answer + "\n")) for example in asked)

    def fake(model, schemes, prompts, new_tokens, space):
        assert new_tokens == longest + 5
        yield REUSE, [asked[0].answer + "\n", "9999\n", asked[2].answer + "1" * 9]

    monkeypatch.setattr(accuracy, "complete", fake)
    found = accuracy.ask(model, {REUSE: SCHEMES[REUSE]}, [setting], filler, examples=3, seed=3, room=5)[setting][REUSE]
    assert found.right.tolist() == [True, False, False]
    assert found.given.tolist() == [True, True, False]


def test_answers_are_counted_and_paired(model, monkeypatch):
    settings = [Setting(synthetic.Recall(), 64, 16), Setting(synthetic.Chain(), 64, 32)]
    filler = synthetic.Filler(LINES, lambda lines: [len(model.tokenizer.encode(line)) for line in lines])
    asked = {setting: setting.examples(4, filler, seed=3) for setting in settings}

    def fake(model, schemes, prompts, new_tokens, space):
        """The full cache answers the first three questions, reuse the last two."""
        answers = {example.prompt: example.answer for examples in asked.values() for example in examples}
        assert space[0] == 64
        assert new_tokens <= space[1]
        for name, right in ((FULL, (0, 1, 2)), (REUSE, (2, 3))):
            yield name, [answers[prompt] + "\nmore" if index in right else "no" for index, prompt in enumerate(prompts)]

    monkeypatch.setattr(accuracy, "complete", fake)
    scores = accuracy.score_tasks(model, SCHEMES, settings, filler, examples=4, seed=3)
    assert [(score.scheme, score.task, score.distance) for score in scores] == [
        (FULL, "recall", 16),
        (REUSE, "recall", 16),
        (FULL, "chain", 32),
        (REUSE, "chain", 32),
    ]
    assert [(score.answers.right, score.answers.count, score.lost, score.gained) for score in scores] == [
        (3, 4, 0, 0),
        (2, 4, 2, 1),
    ] * 2
