"""From names of data in a config to batches: sources, mixed by weight, tokenized, packed, with shifted positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hla_jax.data import mds, sources, standard_library, synthetic
from hla_jax.data.packing import Batch, BatchConfig, Batches, tokenize_with
from hla_jax.data.positions import ShiftConfig, ShiftedPositions
from hla_jax.data.streams import DataError, Indexed, Mixture, Shard, Shuffled, Stream
from hla_jax.tokenizer import tokenizer_of

STANDARD_LIBRARY, SYNTHETIC = "standard_library", "synthetic"

_TASKS: tuple[synthetic.Task, ...] = (synthetic.Recall(), synthetic.Tracking(), synthetic.Chain())
# Rows that are shuffled together.
_SHUFFLE_BLOCK, _SHUFFLE_BLOCK_LONG = 1024, 64


@dataclasses.dataclass(frozen=True)
class Source:
    """One source of documents in a mixture.

    Attributes:
      path: a file, a folder, a hub data set ("owner/name"), "standard_library" (Python's own source) or "synthetic"
        (tasks).
      weight: share of the documents.
      name, split: configuration and split of a hub data set.
      column: holds the text, or the messages.
      render: "text", "chat" (messages by the tokenizer's template) or "verified" (OpenR1-Math's verified solutions).
      tokens: range of the lengths of synthetic documents.
      held_out: first rows of a data set or file that are never trained on.
      ids_of: the tokenizer (directory or hub id) whose ids MDS shards hold, as ProLong's do; `name` is their folder.
    """

    path: str
    weight: float = 1.0
    name: str | None = None
    split: str = "train"
    column: str = "text"
    render: str = "text"
    tokens: tuple[int, int] = (64, 512)
    held_out: int = 1000
    ids_of: str | None = None


def documents(mixture: tuple[Source, ...], tokenizer: Any, held_out: bool, seed: int) -> Stream[str]:
    """An endless stream of documents from the sources in proportion to their weights. Raises `DataError` for what
    cannot be read.

    Training and held-out documents are disjoint: other files of the standard library, other rows of a data set (the
    first `held_out`), other random numbers of the tasks.
    """
    if not mixture:
        raise DataError("a mixture needs at least one source")
    opened = [_open(source, tokenizer, held_out, seed + number) for number, source in enumerate(mixture)]
    return Mixture(opened, [source.weight for source in mixture], seed)


def batches(
    mixture: tuple[Source, ...],
    tokenizer: Any,
    config: BatchConfig,
    shift: ShiftConfig | None,
    vocab_size: int,
    *,
    held_out: bool = False,
    seed: int = 0,
    process: tuple[int, int] = (0, 1),
) -> Stream[Batch]:
    """An endless stream of packed batches; `process` is (index, count) of the processes that share the documents."""
    mine = Shard(documents(mixture, tokenizer, held_out, seed), *process)
    packed: Stream[Batch] = Batches(mine, tokenize_with(tokenizer), config, vocab_size)
    return packed if shift is None else ShiftedPositions(packed, shift, seed + process[0])


def sequences(
    mixture: tuple[Source, ...], tokenizer: Any, count: int, length: int, *, held_out: bool, seed: int
) -> np.ndarray:
    """`count` rows of exactly `length` tokens [count, length], documents joined end to end: for calibration and
    fidelity.
    """
    stream, tokenize = documents(mixture, tokenizer, held_out, seed), tokenize_with(tokenizer)
    rows: list[np.ndarray] = []
    while len(rows) < count:
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += tokenize(next(stream))
        rows.append(np.asarray(tokens[:length], np.int32))
    return np.stack(rows)


def task_filler(tokenizer: Any, held_out: bool) -> synthetic.Filler:
    """Lines of the standard library to hide the tasks' definitions between."""
    texts = standard_library.documents("held_out" if held_out else "train")
    count = lambda lines: [len(ids) for ids in tokenizer(lines, add_special_tokens=False)["input_ids"]]
    return synthetic.Filler(texts, count)


def _open(source: Source, tokenizer: Any, held_out: bool, seed: int) -> Stream[str]:
    if source.path == STANDARD_LIBRARY:
        texts = list(standard_library.passages("held_out" if held_out else "train"))
        return Indexed(texts.__getitem__, len(texts), seed)
    if source.path == SYNTHETIC:
        return Indexed(_TaskDocuments(tokenizer, source.tokens, held_out, seed))
    part: dict[str, Any] = {"take": source.held_out} if held_out else {"skip": source.held_out}
    if source.ids_of is not None:
        made_by = tokenizer_of(source.ids_of)
        return Shuffled(mds.open_token_documents(source.path, source.name, made_by, **part), _SHUFFLE_BLOCK_LONG, seed)
    renders: dict[str, sources.Render] = {
        "text": sources.Text(source.column),
        "chat": sources.Chat(tokenizer, source.column),
        "verified": sources.VerifiedSolutions(tokenizer),
    }
    if source.render not in renders:
        raise DataError(f"render must be {', '.join(renders)}; found {source.render!r}")
    opened = sources.open_documents(source.path, renders[source.render], name=source.name, split=source.split, **part)
    return Shuffled(opened, _SHUFFLE_BLOCK, seed)


class _TaskDocuments:
    """Document number i: a question of some kind at some length with all its answers, from a generator of its own."""

    def __init__(self, tokenizer: Any, tokens: tuple[int, int], held_out: bool, seed: int):
        self._filler = task_filler(tokenizer, held_out)
        self._tokens, self._stream = tokens, (seed, int(held_out))

    def __call__(self, index: int) -> str:
        rng = np.random.default_rng([*self._stream, index])
        shortest, longest = self._tokens
        length = int(shortest * (longest / shortest) ** rng.random())
        task = _TASKS[rng.integers(len(_TASKS))]
        return task.sample(rng, length, self._filler, questions=len(synthetic.WORDS)).document
