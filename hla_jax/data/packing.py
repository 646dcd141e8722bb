"""Documents -> tokens -> batches of a fixed shape.

A batch is a dict of three int32 arrays [B, S]: `tokens`; `segments`, 0 for padding and 1, 2, ... for the documents of a
row; `positions`, each token's index in its document. Attention sees equal segments only, and the loss counts the tokens
with `segments > 0`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hla_jax.data.streams import DataError, State, Stream

if TYPE_CHECKING:
    pass

Batch = dict[str, np.ndarray]
Tokenize = Callable[[str], Sequence[int]]

_GIVE_UP_AFTER = 10_000  # documents: a stream that repeats for ever without one long enough must not hang


def tokenize_with(tokenizer: Any) -> Tokenize:
    """Text -> token ids by a transformers tokenizer, nothing added but an end-of-sequence token where there is none."""
    eos = tokenizer.eos_token_id

    def tokenize(text: str) -> Sequence[int]:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # longer than the model is fine
        return ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos]

    return tokenize


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """Shape of the batches and lengths of the sequences.

    Attributes:
      batch_size: rows B per batch; of each process where several read without `Lanes`.
      length: tokens S per row. A longer document is cut into windows of S tokens.
      min_tokens: sequences (documents, and last windows of documents) with fewer tokens are dropped.
      max_tokens: documents are truncated to this many tokens; None keeps them whole.
      pack: several sequences per row; otherwise one sequence per row, padded.
    """

    batch_size: int
    length: int
    min_tokens: int = 1
    max_tokens: int | None = None
    pack: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.length < 1:
            raise DataError(f"batch_size and length must be positive; got {self.batch_size} and {self.length}")
        longest = self.length if self.max_tokens is None else min(self.length, self.max_tokens)
        if not 1 <= self.min_tokens <= longest:
            raise DataError(f"min_tokens must lie in 1 .. {longest} (length and max_tokens); got {self.min_tokens}")


class Parts(Stream[dict[str, Batch]]):
    """Batches of several parts, each from a stream of its own: short rows and long documents."""

    def __init__(self, parts: Mapping[str, Stream[Batch]]):
        self._parts = parts

    def __next__(self) -> dict[str, Batch]:
        return {name: next(part) for name, part in self._parts.items()}

    def get_state(self) -> State:
        return {name: part.get_state() for name, part in self._parts.items()}

    def set_state(self, state: State) -> None:
        for name, part in self._parts.items():
            part.set_state(state[name])


class Lanes(Stream[Any]):
    """The rows of a batch from readers of their own, one below the other: all of them, or those of one process.

    What lane number n of `count` reads depends on these two only, so any number of processes that divides the lanes
    makes the same batches. A position may be of more lanes than a process has: each lane takes its own.

    Args:
      build: (number, count) -> the stream of a lane, with its share of the rows.
      count: lanes of a batch.
      process: (index, count) of the processes that share the lanes.
    """

    def __init__(self, build: Callable[[int, int], Stream[Any]], count: int, process: tuple[int, int] = (0, 1)):
        index, processes = process
        if count % processes:
            raise DataError(f"lanes must be a multiple of the {processes} processes that read; found {count}")
        each = count // processes
        self._lanes = {number: build(number, count) for number in range(index * each, (index + 1) * each)}

    def __next__(self) -> Any:
        return jax.tree.map(lambda *rows: np.concatenate(rows), *[next(lane) for lane in self._lanes.values()])

    def get_state(self) -> State:
        return {"lanes": {str(number): lane.get_state() for number, lane in self._lanes.items()}}

    def set_state(self, state: State) -> None:
        for number, lane in self._lanes.items():
            if str(number) not in state["lanes"]:
                raise DataError(f"the saved position is of lanes {', '.join(state['lanes'])}; this run has {number}")
            lane.set_state(state["lanes"][str(number)])


class Batches(Stream[Batch]):
    """Packs the documents of a stream into batches, first fit: a sequence goes into the first row with room for it, and
    when no row has room the batch is done and the sequence opens the next one.

    At the end of a finite stream the last batch is padded with empty rows.

    Args:
      documents: texts.
      tokenize: text -> token ids.
      config: shapes and lengths.
      vocab_size: of the model; if given, a token id outside it raises `DataError` (another model's tokenizer).
    """

    def __init__(self, documents: Stream[str], tokenize: Tokenize, config: BatchConfig, vocab_size: int | None = None):
        self._documents, self._tokenize, self._config, self._vocab_size = documents, tokenize, config, vocab_size
        self._document_state = documents.get_state()  # the position before the document whose windows are being placed
        self._window = 0  # the next window of that document
        self._windows: list[np.ndarray] | None = None

    def __next__(self) -> Batch:
        config = self._config
        batch = {
            name: np.zeros((config.batch_size, config.length), np.int32) for name in ("tokens", "segments", "positions")
        }
        used = np.zeros(config.batch_size, np.int64)
        while (window := self._peek()) is not None:
            fits = used + len(window) <= config.length if config.pack else used == 0
            if not fits.any():
                break
            row = int(np.argmax(fits))
            where = slice(used[row], used[row] + len(window))
            batch["tokens"][row, where] = window
            batch["segments"][row, where] = batch["segments"][row].max() + 1
            batch["positions"][row, where] = np.arange(len(window))
            used[row] += len(window)
            self._window += 1
        if not used.any():
            raise StopIteration
        return batch

    def _peek(self) -> np.ndarray | None:
        """The next sequence to place, without taking it; None at the end of the documents."""
        too_short = 0
        while self._windows is None or self._window >= len(self._windows):
            if self._windows is not None:
                too_short = 0 if self._windows else too_short + 1
                if too_short == _GIVE_UP_AFTER:
                    raise DataError(
                        f"{too_short} documents in a row have less than min_tokens={self._config.min_tokens}"
                    )
                self._document_state, self._window = self._documents.get_state(), 0
            try:
                self._windows = self._cut(next(self._documents))
            except StopIteration:
                self._windows = None
                return None
        return self._windows[self._window]

    def _cut(self, document: str) -> list[np.ndarray]:
        tokens = np.asarray(self._tokenize(document)[: self._config.max_tokens], np.int32)
        if self._vocab_size is not None and tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise DataError(
                f"the tokenizer gives token ids from {tokens.min()} to {tokens.max()}, "
                f"but the model's vocabulary has {self._vocab_size}"
            )
        windows = [tokens[i : i + self._config.length] for i in range(0, len(tokens), self._config.length)]
        return [window for window in windows if len(window) >= self._config.min_tokens]

    def get_state(self) -> State:
        return {"documents": self._document_state, "window": self._window}

    def set_state(self, state: State) -> None:
        self._document_state, self._window, self._windows = state["documents"], state["window"], None
        self._documents.set_state(self._document_state)
