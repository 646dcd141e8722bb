"""The byte-level BPE of the embedded model: digits, ChatML's special tokens and chosen words are single tokens."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, END_ID = "<|endoftext|>", 0
SPECIAL_TOKENS = (END, "<|im_start|>", "<|im_end|>")

# A word that the corpus must hold so often becomes one token before the ordinary merges are found.
_REPEATS = 100_000


def train(documents: Iterable[str], words: Iterable[str], size: int) -> tokenizers.Tokenizer:
    """Learns a vocabulary of `size` tokens, ids 0 to 2 special. Each of `words` is a token where no space precedes it.

    Raises:
      ValueError: `size` is too small for the words.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = list(words)
    tokenizer.train_from_iterator(_with_words(documents, words), trainer)
    split = [word for word in words if tokenizer.token_to_id(word) is None]
    if split:
        raise ValueError(f"a vocabulary of {size} tokens has no room for {', '.join(split)}")
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, directory: pathlib.Path, chat_template: str, max_length: int) -> None:
    """Writes the tokenizer's files as transformers reads them, with <|endoftext|> as bos, eos and pad."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=chat_template,
        model_max_length=max_length,
    ).save_pretrained(directory)


def _with_words(documents: Iterable[str], words: list[str]) -> Iterator[str]:
    yield from documents
    for word in words:
        yield "\n".join([word] * _REPEATS)
