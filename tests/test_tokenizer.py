"""Tokenizers: which tokens end a generation, padding that never crashes, chat templates, and clear errors."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from hla_jax.tokenizer import TokenizerError, encode_chat, has_tokenizer, load_tokenizer, stop_tokens
from tiny import tiny_config

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER = [{"role": "user", "content": "Hi"}]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture
def make(tmp_path):
    """Writes a byte-level tokenizer without merges, and whatever files are given beside it."""

    def write(special=SPECIAL, **files):
        vocab = {token: number for number, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(special)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


def test_text_comes_back(make):
    tokenizer = load_tokenizer(make())
    text = "def f(x):\n    return 12 + x  # π"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_missing_pad_is_token_zero(make):
    tokenizer = load_tokenizer(make())
    assert tokenizer.pad_token_id == 0
    batch = tokenizer(["a", "abc"], padding=True)
    assert batch["attention_mask"][0].count(0) == 2


def test_named_pad_is_kept(make):
    assert load_tokenizer(make(tokenizer_config={"pad_token": "<|im_end|>"})).pad_token_id == 2


@pytest.mark.parametrize(
    ("config_eos", "generation", "tokenizer_config", "expected"),
    [
        ((0,), None, {"chat_template": "{{ messages }}"}, (0,)),
        ((0,), None, {"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}, (0, 2)),
        ((0,), {"eos_token_id": [0, 1]}, {"eos_token": "<|im_end|>"}, (0, 1, 2)),
        ((), {"eos_token_id": 1}, {"chat_template": "{{ messages }}"}, (1,)),
        ((0,), None, {}, (0, 2)),  # the default template is ChatML, whose turns end with <|im_end|>
    ],
)
def test_stops_at_every_end_that_is_named(make, config_eos, generation, tokenizer_config, expected):
    files = {"tokenizer_config": tokenizer_config} | ({"generation_config": generation} if generation else {})
    assert stop_tokens(tiny_config(eos_token_ids=config_eos), make(**files)) == expected


def test_stops_without_a_tokenizer(tmp_path):
    config = tiny_config(eos_token_ids=(2, 0))
    assert stop_tokens(config, tmp_path) == (0, 2)
    assert stop_tokens(config, None) == (0, 2)


def test_default_template_is_chatml_with_the_releases_system_message(make):
    tokenizer = load_tokenizer(make())
    tokens = encode_chat(tokenizer, USER)
    assert tokenizer.decode(tokens) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokens[0] == 1
    own = [{"role": "system", "content": "Be brief."}, *USER]
    assert tokenizer.decode(encode_chat(tokenizer, own)).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_template_of_the_checkpoint_is_kept(make, where):
    directory = make()
    (directory / where).write_text(json.dumps({"chat_template": THINKING}) if where.endswith("json") else THINKING)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode(encode_chat(tokenizer, USER)) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_no_template_without_turn_tokens(make):
    assert load_tokenizer(make(special=["<|endoftext|>"])).chat_template is None


def test_no_tokenizer_is_a_clear_error(tmp_path):
    assert not has_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"expected tokenizer\.json, found none"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="made in memory"):
        load_tokenizer(None)


def test_malformed_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


def test_tokens_without_an_embedding(make):
    directory = make()
    assert load_tokenizer(directory, tiny_config(vocab_size=259)).pad_token_id == 0
    with pytest.raises(TokenizerError, match=r"has ids up to 258, but config\.json has vocab_size 40"):
        load_tokenizer(directory, tiny_config())


def test_code_in_the_checkpoint_is_not_run(make):
    directory = make(tokenizer_config={"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"})
    (directory / "evil.py").write_text("raise SystemExit('ran')")
    assert load_tokenizer(directory).pad_token_id == 0
