"""Tokenizer and chat template of a checkpoint, through transformers.

Ouro's revisions disagree about special tokens: configs name `<|endoftext|>` (0) as begin and end, tokenizers and the
ChatML format end a turn with `<|im_end|>` (2), and a padding token may be missing everywhere. Generation therefore
stops at whatever any of them calls an end, and padding is token 0 where nothing else is named.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import huggingface_hub
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hla_jax.config import ModelConfig, read_json, token_ids

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with the default system message of Ouro's releases, for checkpoints that bring no template of their own."""

_FILE = "tokenizer.json"
_HUB_FILES = [_FILE, "tokenizer_config.json", "special_tokens_map.json"]
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")


class TokenizerError(ValueError):
    """A checkpoint has no tokenizer, or one that does not fit its model."""


def has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint brings a tokenizer."""
    return (pathlib.Path(directory) / _FILE).is_file()


def load_tokenizer(
    directory: str | os.PathLike[str] | None, config: ModelConfig | None = None
) -> PreTrainedTokenizerBase:
    """Reads the tokenizer of a checkpoint. Code in the checkpoint is never run.

    The result has a padding token (0 if the checkpoint names none) and, if it knows ChatML's turn tokens but no
    template, `CHATML_TEMPLATE`. A template of the checkpoint, such as the Thinking variants' with `<think>`, is kept.

    Args:
      directory: of the checkpoint; None for a model that was made in memory.
      config: if given, every token must have an embedding.

    Raises:
      TokenizerError: there is no tokenizer.json, it is damaged, or it has more tokens than the model.
    """
    if directory is None:
        raise TokenizerError("this model was made in memory and has no tokenizer; pass token ids")
    if not has_tokenizer(directory):
        raise TokenizerError(f"{directory}: expected {_FILE}, found none; pass token ids, or add the tokenizer's files")
    file = pathlib.Path(directory) / _FILE
    read_json(file)
    try:
        # Not AutoTokenizer: for a model_type that transformers does not know, it asks to run the checkpoint's code.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for malformed content
        raise TokenizerError(f"{file}: not a tokenizer that transformers can read ({error})") from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if config is not None and largest >= config.vocab_size:
        raise TokenizerError(f"{file}: has ids up to {largest}, but config.json has vocab_size {config.vocab_size}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    if tokenizer.chat_template is None and all(token in tokenizer.get_vocab() for token in TURN_TOKENS):
        tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


def tokenizer_of(path_or_hub_id: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or of a hub repository "owner/name", of which only its files are fetched.

    Raises:
      TokenizerError: as `load_tokenizer`, or the hub does not give it.
    """
    directory = pathlib.Path(path_or_hub_id)
    if not directory.is_dir():
        try:
            directory = pathlib.Path(huggingface_hub.snapshot_download(path_or_hub_id, allow_patterns=_HUB_FILES))
        except Exception as error:  # of the hub, http, the network
            raise TokenizerError(f"{path_or_hub_id}: no such directory, and as a hub id: {error}") from error
    return load_tokenizer(directory)


def stop_tokens(config: ModelConfig, directory: str | os.PathLike[str] | None) -> tuple[int, ...]:
    """Token ids that end a generation, sorted: the ends that config, generation_config.json and tokenizer name.

    A tokenizer with a ChatML template also ends at `<|im_end|>`, the end of a turn.
    """
    stops = set(config.eos_token_ids)
    if directory is not None:
        generation = pathlib.Path(directory) / "generation_config.json"
        if generation.exists():
            stops.update(token_ids(read_json(generation), "eos_token_id", str(generation)))
        if has_tokenizer(directory):
            tokenizer = load_tokenizer(directory)
            stops.update([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
            if "<|im_end|>" in str(tokenizer.chat_template):
                stops.add(tokenizer.get_vocab()["<|im_end|>"])
    return tuple(sorted(stops))


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation `[{"role": ..., "content": ...}, ...]`, up to where the assistant's answer begins."""
    return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))
