"""Conversations to fine-tune on: messages -> tokens and which of them the assistant wrote -> packed batches.

A batch is a dict of three int32 arrays [B, S], as the loss of two passes takes it: `tokens`; `segments`, 0 for padding
and 1, 2, ... for the conversations of a row, which do not see each other; `response`, 1 for the assistant's tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jinja2
import numpy as np

from hla_jax.data import pipeline, sources, synthetic
from hla_jax.data.streams import DataError, Indexed, Mixture, Shuffled, State, Stream
from hla_jax.tokenizer import CHATML_TEMPLATE, TURN_TOKENS

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

Batch = dict[str, np.ndarray]
Conversation = list[dict[str, str]]
"""Messages {"role": ..., "content": ...}, in order."""

_TASKS: dict[str, synthetic.Task] = {
    task.kind: task
    for task in (synthetic.Reverse(), synthetic.Copy(), synthetic.Recall(), synthetic.Tracking(), synthetic.Chain())
}
_SHUFFLE_BLOCK = 1024
# Conversations in a row without one that fits: a stream that repeats for ever must not hang.
_GIVE_UP_AFTER = 10_000


@dataclasses.dataclass(frozen=True)
class ChatSource:
    """One source of conversations in a mixture.

    Attributes:
      path: a json, jsonl or parquet file, a folder of them, a hub data set ("owner/name"), or "synthetic" (tasks).
      weight: share of the conversations.
      name, split: configuration and split of a hub data set.
      kind: "messages" (a column of [{role, content}, ...]), "pairs" (a column of prompts and one of responses) or
        "verified" (OpenR1-Math's problem with its first verified solution).
      messages, prompt, response: names of these columns.
      tasks: of "synthetic".
      tokens: range of the lengths of the synthetic tasks, without the template.
      held_out: first rows of a data set that are never trained on.
    """

    path: str
    weight: float = 1.0
    name: str | None = None
    split: str = "train"
    kind: Literal["messages", "pairs", "verified"] = "messages"
    messages: str = "messages"
    prompt: str = "prompt"
    response: str = "response"
    tasks: tuple[str, ...] = ("recall",)
    tokens: tuple[int, int] = (32, 128)
    held_out: int = 1000

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.tasks) - set(_TASKS)):
            raise ValueError(f"tasks must be of {', '.join(_TASKS)}; found {', '.join(unknown)}")


@dataclasses.dataclass(frozen=True)
class ChatBatches:
    """Shape of the batches.

    Attributes:
      tokens: of a batch, padding included, over all processes; a multiple of every length.
      lengths: tokens that a row may have, ascending. A batch has rows of one length: each conversation goes into rows
        of the smallest length that it fits, several to a row.
      too_long: what becomes of a conversation that is longer than the longest row: "drop", or "cut" to the row's end.
      block: conversations that are packed together; those of a length that do not fill a batch move up a length, and
        the last batch of a block is filled up with padding.
    """

    tokens: int
    lengths: tuple[int, ...]
    too_long: Literal["drop", "cut"] = "drop"
    block: int = 1024

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 2:
            raise ValueError(f"lengths must ascend, from at least 2 tokens on; found {self.lengths}")
        if wrong := [length for length in self.lengths if self.tokens % length or self.tokens < length]:
            raise ValueError(f"tokens must be a multiple of every length; {self.tokens} is none of {wrong[0]}")
        if self.block < 1:
            raise ValueError(f"block must be at least 1, found {self.block}")


@dataclasses.dataclass(frozen=True)
class Example:
    """A conversation as tokens.

    Attributes:
      tokens: ids.
      response: whether the assistant wrote them: its text and the token that ends its turn.
    """

    tokens: Int[np.ndarray, " S"]
    response: Bool[np.ndarray, " S"]


@dataclasses.dataclass(frozen=True)
class Messages:
    """A column of messages [{role, content}, ...], one of them the assistant's."""

    column: str = "messages"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, row: Mapping[str, Any]) -> Conversation:
        messages = row[self.column]
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{self.column!r}: expected a list of {{role, content}}, found {_short(messages)}")
        for number, message in enumerate(messages, start=1):
            where = f"{self.column!r}, message {number}"
            if not isinstance(message, dict):
                raise DataError(f"{where}: expected {{role, content}}, found {_short(message)}")
            for key in ("role", "content"):
                _check_text(f"{where}, {key!r}", message.get(key))
        conversation = [{"role": message["role"], "content": message["content"]} for message in messages]
        if all(message["role"] != "assistant" for message in conversation):
            roles = ", ".join(message["role"] for message in conversation)
            raise DataError(f"{self.column!r}: expected a message of the role 'assistant', found {roles}")
        return conversation


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A column of prompts and one of responses."""

    prompt: str = "prompt"
    response: str = "response"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.prompt, self.response)

    def __call__(self, row: Mapping[str, Any]) -> Conversation:
        for column in self.columns:
            _check_text(repr(column), row[column])
        return _dialogue((row[self.prompt], row[self.response]))


@dataclasses.dataclass(frozen=True)
class Verified:
    """OpenR1-Math's problems with their first verified solutions; rows without one are skipped."""

    columns = sources.VerifiedSolutions(None).columns

    def __call__(self, row: Mapping[str, Any]) -> Conversation | None:
        return sources.VerifiedSolutions(None).messages(row)


def encode(tokenizer: Any, conversation: Conversation, stop: Collection[int]) -> Example:
    """Tokens of a conversation by the tokenizer's chat template, or ChatML where it has none.

    Prompts and responses are tokenized apart, as generation reads the one and writes the other. A response ends with
    the first token that ends a generation, its line break belongs to what follows; what follows the last one is left
    out.

    Args:
      tokenizer: of the model.
      conversation: the messages.
      stop: ids of the tokens that end a generation.

    Raises:
      DataError: the template refuses the messages or renders a turn differently once it is past; or there is no
        template, and the tokenizer lacks ChatML's tokens.
    """
    template = tokenizer.chat_template
    if template is None:
        if missing := [token for token in TURN_TOKENS if token not in tokenizer.get_vocab()]:
            raise DataError(f"the tokenizer has no chat template, and lacks ChatML's {', '.join(missing)}")
        template = CHATML_TEMPLATE

    def render(messages: Conversation, prompt: bool) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=prompt, tokenize=False
            )
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template refuses the messages: {error}") from None

    tokenize = lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids: list[int] = []
    response: list[bool] = []
    rendered, last = "", 0
    for number, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        before, through = render(conversation[:number], True), render(conversation[: number + 1], False)
        if not before.startswith(rendered) or not through.startswith(before):
            raise DataError(
                f"message {number + 1}: the chat template renders what comes before it differently once it is "
                f"answered: expected {_short(before[-40:])} at its start, found {_short(through[len(rendered) :][:80])}"
            )
        prompt, answer = tokenize(before[len(rendered) :]), tokenize(through[len(before) :])
        end = next((index + 1 for index, token in enumerate(answer) if token in stop), len(answer))
        ids += [*prompt, *answer]
        response += [False] * len(prompt) + [True] * end + [False] * (len(answer) - end)
        rendered, last = through, len(ids) - (len(answer) - end)
    return Example(np.asarray(ids[:last], np.int32), np.asarray(response[:last], bool))


def conversations(mixture: Sequence[ChatSource], tokenizer: Any, held_out: bool, seed: int) -> Stream[Conversation]:
    """An endless stream of conversations from the sources in proportion to their weights, training and held-out ones
    disjoint as in `pipeline.documents`. Raises `DataError` for what cannot be read; of a row, it names file, row and
    key.
    """
    if not mixture:
        raise DataError("a mixture needs at least one source")
    opened = [_open(source, tokenizer, held_out, seed + number) for number, source in enumerate(mixture)]
    return Mixture(opened, [source.weight for source in mixture], seed)


def _open(source: ChatSource, tokenizer: Any, held_out: bool, seed: int) -> Stream[Conversation]:
    if source.path == pipeline.SYNTHETIC:
        return Indexed(_TaskConversations(source, tokenizer, held_out, seed))
    renders: dict[str, sources.Render[Conversation]] = {
        "messages": Messages(source.messages),
        "pairs": Pairs(source.prompt, source.response),
        "verified": Verified(),
    }
    part: dict[str, Any] = {"take": source.held_out} if held_out else {"skip": source.held_out}
    rows = sources.open_rendered(source.path, renders[source.kind], name=source.name, split=source.split, **part)
    return Shuffled(rows, _SHUFFLE_BLOCK, seed)


class _TaskConversations:
    """Conversation number i: the questions of one task as turns, from a generator of its own."""

    def __init__(self, source: ChatSource, tokenizer: Any, held_out: bool, seed: int):
        self._source, self._stream = source, (seed, int(held_out))
        needs_filler = any(task not in {synthetic.Reverse.kind, synthetic.Copy.kind} for task in source.tasks)
        self._filler = pipeline.task_filler(tokenizer, held_out) if needs_filler else None

    def __call__(self, index: int) -> Conversation:
        rng = np.random.default_rng([*self._stream, index])
        shortest, longest = self._source.tokens
        length = int(shortest * (longest / shortest) ** rng.random())
        task = _TASKS[self._source.tasks[rng.integers(len(self._source.tasks))]]
        example = task.sample(rng, length, self._filler)
        turns = _dialogue(*((question, answer.removesuffix("\n")) for question, answer in example.turns))
        # Without the default system message, which is longer than the questions.
        return [{"role": "system", "content": ""}, *turns]


class PackedConversations(Stream[Batch]):
    """Batches of packed conversations, block by block of the stream.

    All processes read all conversations and plan the same batches; each makes its own rows of them.

    Args:
      stream: of conversations.
      tokenizer: of the model.
      stop: ids of the tokens that end a generation.
      config: shapes.
      vocab_size: of the model; a token id outside it raises `DataError`.
      seed: of the order of a block's batches.
      process: (index, count) of the processes that share the rows.
    """

    def __init__(
        self,
        stream: Stream[Conversation],
        tokenizer: Any,
        stop: Collection[int],
        config: ChatBatches,
        vocab_size: int,
        seed: int = 0,
        process: tuple[int, int] = (0, 1),
    ):
        if wrong := [length for length in config.lengths if config.tokens // length % process[1]]:
            rows = config.tokens // wrong[0]
            raise DataError(f"{process[1]} processes cannot share the {rows} rows of {wrong[0]} tokens of a batch")
        self._stream, self._tokenizer, self._stop, self._config = stream, tokenizer, frozenset(stop), config
        self._vocab_size, self._seed, self._process = vocab_size, seed, process
        self._start, self._number, self._taken = stream.get_state(), 0, 0
        self._examples: list[Example] = []
        self._plan: list[tuple[int, list[list[int]]]] | None = None
        self._before = {"conversations": 0, "dropped": 0, "cut": 0}
        self._counts = dict(self._before)

    @property
    def counts(self) -> dict[str, int]:
        """How many conversations were read so far, and of these how many dropped and cut because they are too long."""
        return dict(self._counts)

    def __next__(self) -> Batch:
        if self._plan is None:
            self._read_block()
        elif self._taken == len(self._plan):
            self._start, self._number, self._taken = self._stream.get_state(), self._number + 1, 0
            self._before = dict(self._counts)
            self._read_block()
        assert self._plan is not None
        length, rows = self._plan[self._taken]
        self._taken += 1
        index, count = self._process
        return make_batch(self._examples, rows[index::count], length)

    def _read_block(self) -> None:
        self._examples, self._counts = [], dict(self._before)
        useless = 0
        while len(self._examples) < self._config.block:
            try:
                conversation = next(self._stream)
            except StopIteration:
                break
            self._counts["conversations"] += 1
            example = self._fit(encode(self._tokenizer, conversation, self._stop))
            useless = 0 if example is not None else useless + 1
            if example is not None:
                self._examples.append(example)
            elif useless == _GIVE_UP_AFTER:
                raise DataError(f"{useless} conversations in a row are longer than {self._config.lengths[-1]} tokens")
        if not self._examples:
            raise StopIteration
        rng = np.random.default_rng([self._seed, self._number])
        self._plan = plan([len(example.tokens) for example in self._examples], self._config, rng)

    def _fit(self, example: Example) -> Example | None:
        tokens, longest = example.tokens, self._config.lengths[-1]
        if tokens.size and tokens.max() >= self._vocab_size:
            raise DataError(f"the tokenizer gives id {tokens.max()}, the model's vocabulary has {self._vocab_size}")
        if len(tokens) <= longest:
            return example
        cut = Example(tokens[:longest], example.response[:longest])
        # A prompt that fills the row leaves nothing to learn.
        if self._config.too_long == "drop" or not cut.response.any():
            self._counts["dropped"] += 1
            return None
        self._counts["cut"] += 1
        return cut

    def get_state(self) -> State:
        return {"start": self._start, "number": self._number, "taken": self._taken, "before": dict(self._before)}

    def set_state(self, state: State) -> None:
        self._start, self._number, self._taken = state["start"], state["number"], state["taken"]
        self._before = dict(state["before"])
        self._stream.set_state(self._start)
        self._plan = None
        if self._taken:
            self._read_block()


def plan(sizes: Sequence[int], config: ChatBatches, rng: np.random.Generator) -> list[tuple[int, list[list[int]]]]:
    """Packs examples of these sizes: (length of the rows, examples of each row) for every batch, in random order.

    First fit in decreasing size within each length; then rows meet in random order, so that no batch has only short
    ones. Rows that do not fill a batch are taken apart, and their examples move up to the next length.
    """
    batches: list[tuple[int, list[list[int]]]] = []
    waiting: list[int] = []
    shorter = 0
    for length in config.lengths:
        waiting += [index for index, size in enumerate(sizes) if shorter < size <= length]
        shorter, count = length, config.tokens // length
        fitted = _first_fit(waiting, sizes, length)
        rows = [fitted[index] for index in rng.permutation(len(fitted))]
        last = length == config.lengths[-1]
        full = len(rows) if last else len(rows) // count * count
        waiting = [index for row in rows[full:] for index in row]
        for start in range(0, full, count):
            part = rows[start : min(start + count, full)]
            batches.append((length, part + [[] for _ in range(count - len(part))]))
    return [batches[index] for index in rng.permutation(len(batches))]


def _first_fit(indices: Sequence[int], sizes: Sequence[int], length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(indices, key=lambda index: (-sizes[index], index)):
        row = next((row for row, left in enumerate(room) if left >= sizes[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(index)
        room[row] -= sizes[index]
    return rows


def make_batch(examples: Sequence[Example], rows: Sequence[Sequence[int]], length: int) -> Batch:
    """The arrays of a batch: row by row, the examples side by side."""
    batch = {name: np.zeros((len(rows), length), np.int32) for name in ("tokens", "segments", "response")}
    for row, indices in enumerate(rows):
        used = 0
        for segment, index in enumerate(indices, start=1):
            example = examples[index]
            here = slice(used, used + len(example.tokens))
            batch["tokens"][row, here], batch["segments"][row, here] = example.tokens, segment
            batch["response"][row, here] = example.response
            used += len(example.tokens)
    return batch


def single_rows(
    stream: Stream[Conversation], tokenizer: Any, stop: Collection[int], count: int, longest: int
) -> list[Example]:
    """The next `count` conversations of at most `longest` tokens. Raises `DataError` where there are not so many."""
    encoded = (encode(tokenizer, conversation, stop) for conversation in itertools.islice(stream, _GIVE_UP_AFTER))
    found = list(itertools.islice((one for one in encoded if len(one.tokens) <= longest), count))
    if len(found) < count:
        raise DataError(f"expected {count} held-out conversations of at most {longest} tokens, found {len(found)}")
    return found


def _dialogue(*turns: tuple[str, str]) -> Conversation:
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def _check_text(where: str, value: Any) -> None:
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text, found {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return "nothing" if value is None else text if len(text) <= 80 else f"{text[:77]}..."
