"""Continuous batching: requests share the slots of one cache, and a slot that gets free is refilled at once.

This file decides who is in which slot; `slots.py` holds the cache. Prompts are read a few at once (a batch of their
own, their length rounded up) and their caches copied into the slots' rows; then all slots decode together, several
tokens a dispatch, with no host synchronisation inside. What differs between requests (sampling, seed, limit, stop
tokens) is an array over the slots, so decoding compiles once, and reading prompts once a rounded length.

A step costs the same whoever is idle, and reading a prompt alone about as much as a step. So an eighth of the slots is
a batch of prompts, and a dispatch ends early when that many slots are free for requests that wait. Whoever waits
longest comes first, and brings others of the same rounded length along, wherever they wait.

A request's tokens depend on its prompt, settings and seed, not on its slot or on what else is there: a batch of prompts
always has as many rows, some of which may be empty, and the slots stay as many as they are when few requests are left.
They are those of `generate`, up to rounding: another number of slots may add the same numbers in another order, which
can decide between two tokens that are equally likely to the last bits.

A model that was loaded onto a mesh with an axis "data" has its slots spread over it, and every group of devices reads
and decodes for an eighth of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.attention.scheme import Attention
from hla_jax.generation import slots as devices
from hla_jax.generation.generate import Generation, Prompt, bucket, prompt_ids
from hla_jax.generation.sampling import Sampling, batch_sampling, request_keys
from hla_jax.generation.text import TextStream
from hla_jax.model import Model

if TYPE_CHECKING:
    from jaxtyping import Int

_LOG = logging.getLogger(__name__)
_DEFAULT_CAPACITY = 4096
_PROMPT_TOKENS = 1024  # in a batch of several prompts: more gain nothing, and take memory

Stream = Callable[[int, list[int], str], None]
"""(id, new tokens, new text): called after every dispatch that made some. Joined, these are the result's tokens and
text; the text is empty without a tokenizer."""


class QueueFullError(RuntimeError):
    """As many requests wait as the engine was told to hold."""


class EngineMemoryError(RuntimeError):
    """A single slot does not fit the device's memory."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
      prompt: a text or its token ids.
      max_new_tokens: most new tokens.
      temperature: 0 is greedy.
      top_p: nucleus; 1 is off.
      top_k: None is off.
      seed: in 0 .. 2^32 - 1; the same seed gives the same tokens.
      stop_tokens: token ids that end the request; None for the model's own.
      stop_strings: texts that end the request. The result's text ends before the first of them; its tokens end with
        the one that completed it.
      stream: called with what is new.
      finished: called with the id and the result as soon as there is one, which may be long before `run` yields it in
        its order.
    """

    prompt: Prompt
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop_tokens: Sequence[int] | None = None
    stop_strings: Sequence[str] = ()
    stream: Stream | None = None
    finished: Callable[[int, Generation], None] | None = None

    @property
    def sampling(self) -> Sampling:
        """Raises `ValueError` for settings out of range."""
        return Sampling(self.temperature, self.top_p, self.top_k)


_IDLE = Request((), 0)


@dataclasses.dataclass(eq=False)
class _Entry:
    """A request on its way through the engine."""

    id: int
    request: Request
    prompt: list[int]
    width: int
    """The prompt's length, rounded up."""
    stops: tuple[int, ...]
    text: TextStream | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    seen: int = 0
    """Tokens that came since it entered its slot; less than all while they are repeated after a restart."""
    streamed: int = 0
    told: bool = False
    """Whether `Request.finished` was called."""
    result: Generation | None = None


class Engine:
    """Generates for many requests at once. Used from one thread; callbacks may submit and cancel.

    Args:
      model: from `load`. With `models.looped.for_decoding` applied to its parameters, steps are faster.
      attention: scheme and maps; None for the model's own.
      slots: sequences decoded together; halved when memory runs out. On a mesh with an axis "data", a multiple of it.
      capacity: most tokens of a request, prompt and new ones; None for `max_position_embeddings`, at most 4,096.
      tokens_per_dispatch: tokens decoded between two looks of the host: a slot that gets free waits for so many at
        most, and for fewer where an eighth of the slots is free.
      queue: most requests that wait for a slot.

    Raises:
      ValueError: a number out of range.
    """

    def __init__(
        self,
        model: Model,
        attention: Attention | None = None,
        *,
        slots: int = 8,
        capacity: int | None = None,
        tokens_per_dispatch: int = 8,
        queue: int = 1024,
    ):
        self._groups = devices.groups(model)
        if slots % self._groups:
            raise ValueError(f"slots must be a multiple of the mesh's {self._groups} data groups, found {slots}")
        for name, value in (("slots", slots), ("tokens_per_dispatch", tokens_per_dispatch), ("queue", queue)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        longest = model.config.max_position_embeddings
        capacity = min(_DEFAULT_CAPACITY, longest) if capacity is None else capacity
        if not 2 <= capacity <= longest:
            raise ValueError(f"capacity must be in 2 .. {longest}, the model's longest sequence, found {capacity}")
        self.model, self.attention = model, attention or model.attention
        self.attention.scheme.check(model.config)
        self.capacity, self.tokens_per_dispatch, self.queue = capacity, tokens_per_dispatch, queue
        self._slots: list[_Entry | None] = [None] * slots
        self._waiting: collections.deque[_Entry] = collections.deque()
        self._entries: dict[int, _Entry] = {}  # in order of submission, until their results are handed out
        self._news: collections.deque[_Entry] = collections.deque()  # to be told to their callbacks
        self._next_id = 0
        self._device: devices.Slots | None = None
        self._settings: devices.Settings | None = None  # None when a slot has changed
        self._stop_width = 4

    @property
    def slots(self) -> int:
        """Sequences decoded together."""
        return len(self._slots)

    def submit(self, request: Request) -> int:
        """Queues a request; `run` works on it. Returns its id, for `cancel`.

        Raises:
          QueueFullError: `queue` requests wait already.
          ValueError: an empty or impossible prompt, a request longer than the capacity, or a setting out of range.
        """
        if len(self._waiting) >= self.queue:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already; take results from run(), or make the engine with queue="
                f"{2 * self.queue}"
            )
        entry = self._checked(request)
        self._next_id += 1
        self._waiting.append(entry)
        self._entries[entry.id] = entry
        return entry.id

    def cancel(self, request_id: int) -> bool:
        """Ends a request, whose result has the tokens made so far and the finish reason "cancelled". Returns False if
        it is over already.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.result is not None:
            return False
        if entry in self._waiting:
            self._waiting.remove(entry)
        self._finish(entry, "cancelled")
        return True

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Generation]:
        """Works until every request is over, and yields their results in order of submission as soon as they are there.

        `requests` are submitted as the queue has room, after those that wait already. A run that is left early can be
        taken up by calling this again.

        Raises:
          EngineMemoryError: a single slot does not fit the device's memory.
          ValueError: as `submit`, of a request among `requests`.
        """
        source = iter(requests)
        while True:
            while len(self._waiting) < self.queue and (request := next(source, None)) is not None:
                self.submit(request)
            self._call_back()
            yield from self._ready()
            if not self._waiting and not any(self._slots):
                return
            try:
                made = self._turn()
            except BaseException as error:
                # The devices may have lost the cache, or made tokens that did not come here.
                self._put_back()
                if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                self._halve(error)
                continue
            self._deliver(made)

    # One turn: prompts are read into all free slots, or all slots decode.

    def _turn(self) -> list[tuple[_Entry, list[int]]]:
        """Returns new tokens of requests in slots."""
        if self._device is None:
            self._device = devices.Slots(self.model, self.attention, len(self._slots), self.capacity)
        if not self._waiting or None not in self._slots:
            return self._decode(self._device)
        made = []
        while self._waiting and None in self._slots:
            made.append(self._enter(self._device))
        return [(entry, [int(token)]) for entries, first in made for entry, token in zip(entries, np.asarray(first))]

    def _enter(self, device: devices.Slots) -> tuple[list[_Entry], Int[Array, " R"]]:
        """Reads the prompt of the request that waits longest, and others of its width, wherever they wait. Returns
        these requests and their first tokens.
        """
        free = [slot for slot, entry in enumerate(self._slots) if entry is None]
        free.sort(
            key=lambda slot: slot % (len(self._slots) // self._groups)
        )  # each group gets its part of few requests
        width = self._waiting[0].width
        rows = self._groups * max(1, min(self._eighth, _PROMPT_TOKENS // width))
        alike = (entry for entry in self._waiting if entry.width == width)
        entered = list(itertools.islice(alike, min(len(free), rows)))
        for slot, entry in zip(free, entered):
            self._waiting.remove(entry)
            self._slots[slot] = entry
        self._settings = None
        nobody = rows - len(entered)
        first = device.enter(
            free[: len(entered)],
            [entry.prompt for entry in entered],
            width,
            self._settings_of([*entered, *[None] * nobody]),
            [*[entry.tokens[0] if entry.tokens else -1 for entry in entered], *[-1] * nobody],
        )
        return entered, first

    @property
    def _eighth(self) -> int:
        """Of a group's slots."""
        return max(1, len(self._slots) // self._groups // 8)

    def _decode(self, device: devices.Slots) -> list[tuple[_Entry, list[int]]]:
        if self._settings is None:
            self._settings = self._settings_of(self._slots)
        enough = min(len(self._waiting), self._eighth) or len(self._slots)
        out = device.decode(self._settings, self.tokens_per_dispatch, jnp.asarray(enough, jnp.int32), self._given())
        return [(entry, [int(t) for t in row if t >= 0]) for entry, row in zip(self._slots, out) if entry]

    def _deliver(self, made: Sequence[tuple[_Entry, list[int]]]) -> None:
        """Notes new tokens, and frees the slots of those that are over."""
        for entry, tokens in made:
            for token in tokens:
                if entry.result is None:
                    self._note(entry, token)
            if entry.request.stream is not None:
                self._news.append(entry)

    def _call_back(self) -> None:
        """Hands out what is new. A callback that raises ends the run; the next run goes on with the others' news."""
        while self._news:
            entry = self._news.popleft()
            cancelled = entry.result is not None and entry.result.finish_reason == "cancelled"
            new = entry.tokens[entry.streamed :]
            entry.streamed += len(new)
            text = entry.text.take() if entry.text else ""
            if (new or text) and not cancelled and entry.request.stream:
                entry.request.stream(entry.id, new, text)
            if entry.result is not None and entry.request.finished and not entry.told:
                entry.told = True
                entry.request.finished(entry.id, entry.result)

    def _note(self, entry: _Entry, token: int) -> None:
        entry.seen += 1
        if entry.seen <= len(entry.tokens):  # made before a restart
            return
        if token in entry.stops:
            return self._finish(entry, "stop")
        entry.tokens.append(token)
        if entry.text and entry.text.push(token):
            return self._finish(entry, "stop")
        if len(entry.tokens) == entry.request.max_new_tokens:
            self._finish(entry, "length")

    def _finish(self, entry: _Entry, reason: str) -> None:
        text = None
        if entry.text:
            entry.text.finish()
            text = entry.text.text
        elif self.model.has_tokenizer:
            text = str(self.model.tokenizer.decode(entry.tokens))
        entry.result = Generation(entry.tokens, reason, text)
        self._news.append(entry)
        if entry in self._slots:
            self._slots[self._slots.index(entry)] = None
            self._settings = None

    def _ready(self) -> Iterator[Generation]:
        """Results whose predecessors were all handed out."""
        while self._entries and (result := (first := next(iter(self._entries.values()))).result) is not None:
            del self._entries[first.id]
            yield result

    # When memory runs out, or a turn fails.

    def _put_back(self) -> None:
        """Requests in flight go back to the head of the queue, and the cache is dropped. They will read their prompts
        again, and the tokens they have will be given to them rather than sampled: not every cache reads a new token as
        it reads a prompt.
        """
        active = [entry for entry in self._slots if entry]
        for entry in sorted(active, key=lambda entry: entry.id, reverse=True):
            entry.seen = 0
            self._waiting.appendleft(entry)
        if self._device is not None:
            self._device.delete()
        self._slots = [None] * len(self._slots)
        self._device = self._settings = None

    def _halve(self, error: Exception) -> None:
        slots = len(self._slots)
        fewer = slots // 2 // self._groups * self._groups
        if fewer == 0:
            raise EngineMemoryError(
                f"one slot of {self.capacity:,} tokens does not fit the device's memory beside the model; lower the "
                "capacity, or take a scheme with fewer bytes per token"
            ) from error
        self._slots = [None] * fewer
        _LOG.warning(
            "out of memory with %d slots: going on with %d. Requests in flight start again from their prompts, with the"
            " tokens they have; finished ones are kept",
            slots,
            fewer,
        )

    def _given(self) -> Int[Array, "B M"] | None:
        """Tokens of requests that started again, as long as one of them has not come to where it was."""
        if not any(entry and entry.seen < len(entry.tokens) for entry in self._slots):
            return None
        tokens = [entry.tokens if entry else [] for entry in self._slots]
        width = bucket(max(map(len, tokens)))
        return jnp.asarray([[*row, *[-1] * (width - len(row))] for row in tokens], jnp.int32)

    def _settings_of(self, entries: Sequence[_Entry | None]) -> devices.Settings:
        requests = [entry.request if entry else _IDLE for entry in entries]
        stops = [entry.stops if entry else () for entry in entries]
        stop = [[*row, *[-1] * (self._stop_width - len(row))] for row in stops]
        return devices.Settings(
            batch_sampling([request.sampling for request in requests]),
            _request_keys(jnp.asarray(np.asarray([request.seed for request in requests], np.uint32))),
            jnp.asarray(stop, jnp.int32),
            jnp.asarray([request.max_new_tokens for request in requests], jnp.int32),
        )

    def _checked(self, request: Request) -> _Entry:
        """Raises what `submit` says."""
        number, model = self._next_id, self.model
        prompt = prompt_ids(model, request.prompt, number)
        if request.max_new_tokens < 1:
            raise ValueError(f"request {number}: max_new_tokens must be at least 1, found {request.max_new_tokens}")
        if len(prompt) + request.max_new_tokens > self.capacity:
            raise ValueError(
                f"request {number}: a prompt of {len(prompt)} tokens and {request.max_new_tokens} new ones exceed the "
                f"capacity of {self.capacity} tokens; make the engine with a larger one"
            )
        if not 0 <= request.seed < 2**32:
            raise ValueError(f"request {number}: seed must be in 0 .. 2^32 - 1, found {request.seed}")
        request.sampling  # noqa: B018 (raises)
        strings = request.stop_strings
        if isinstance(strings, str) or not all(isinstance(text, str) and text for text in strings):
            raise ValueError(f"request {number}: stop_strings must be a list of texts, none empty, found {strings!r}")
        wanted = bool(strings) or (request.stream is not None and model.has_tokenizer)
        text = TextStream(model.tokenizer, strings) if wanted else None
        stops = tuple(model.stop_tokens if request.stop_tokens is None else request.stop_tokens)
        if len(stops) > self._stop_width:
            self._stop_width, self._settings = 1 << (len(stops) - 1).bit_length(), None
        width = min(bucket(len(prompt)), model.config.max_position_embeddings)
        return _Entry(number, request, prompt, width, stops, text)


_request_keys = jax.jit(request_keys)
