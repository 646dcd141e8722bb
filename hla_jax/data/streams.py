"""Streams: iterators that know where they are, and the ways to combine them.

Everything the data pipeline is made of (sources of documents, mixtures, packed batches) is a `Stream`: an iterator
whose position is a small dict of JSON values. A position is taken between two elements; given to a stream built in the
same way, possibly in another process, it continues with exactly the elements that would have followed. A position holds
no data: what was buffered is read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

State = dict[str, Any]
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class DataError(ValueError):
    """Training data is missing, unreadable, or not what was asked for. The message says what was expected and found."""


class Stream(Protocol[T_co]):
    """An iterator with a position. Finite streams raise `StopIteration`; training streams repeat for ever."""

    def __iter__(self) -> Stream[T_co]:
        return self

    def __next__(self) -> T_co: ...

    def get_state(self) -> State:
        """The position before the next element, as JSON values."""
        ...

    def set_state(self, state: State) -> None:
        """Moves to a position that `get_state` gave."""
        ...


class Indexed(Stream[T]):
    """Elements computed from their index: `get(0), get(1), ...`; for example documents made from a seed and the index.

    With a `length`, the indices 0 .. length-1 repeat for ever, each epoch in another order drawn from `seed`;
    without a seed they come once, in order.
    """

    def __init__(self, get: Callable[[int], T], length: int | None = None, seed: int | None = None):
        if length is not None and length < 1:
            raise DataError(f"a stream needs at least one element; length is {length}")
        self._get, self._length, self._seed = get, length, seed
        self._index = 0
        self._order: tuple[int, np.ndarray] | None = None

    def __next__(self) -> T:
        index = self._index
        if self._length is not None:
            epoch, index = divmod(index, self._length)
            if self._seed is not None:
                if self._order is None or self._order[0] != epoch:
                    self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._length)
                index = int(self._order[1][index])
            elif epoch > 0:
                raise StopIteration
        element = self._get(index)
        self._index += 1
        return element

    def get_state(self) -> State:
        return {"index": self._index}

    def set_state(self, state: State) -> None:
        self._index = state["index"]


class Mixture(Stream[T]):
    """Each element comes from one of `streams`, drawn with probability proportional to its weight, as in (3, 2).

    Draw number n depends on (seed, n) only. Ends when the drawn stream ends.
    """

    def __init__(self, streams: Sequence[Stream[T]], weights: Sequence[float], seed: int):
        if not streams or len(streams) != len(weights):
            raise DataError(f"a mixture needs one weight per stream; got {len(weights)} for {len(streams)} streams")
        if min(weights) < 0 or sum(weights) <= 0:
            raise DataError(f"weights must be non-negative and not all zero; got {tuple(weights)}")
        self._streams, self._seed = streams, seed
        self._upper = np.cumsum(np.asarray(weights, np.float64) / sum(weights))
        self._drawn = 0

    def __next__(self) -> T:
        uniform = np.random.default_rng([self._seed, self._drawn]).random()
        # The last cumulative sum may round to just below one.
        choice = min(int(np.searchsorted(self._upper, uniform, side="right")), len(self._streams) - 1)
        element = next(self._streams[choice])
        self._drawn += 1
        return element

    def get_state(self) -> State:
        return {"drawn": self._drawn, "streams": [stream.get_state() for stream in self._streams]}

    def set_state(self, state: State) -> None:
        if len(state["streams"]) != len(self._streams):
            saved = len(state["streams"])
            raise DataError(f"the saved position is of {saved} streams; this mixture has {len(self._streams)}")
        self._drawn = state["drawn"]
        for stream, inner in zip(self._streams, state["streams"]):
            stream.set_state(inner)


class Shuffled(Stream[T]):
    """The stream in blocks of `block` elements, each block in an order drawn from (seed, number of the block)."""

    def __init__(self, stream: Stream[T], block: int, seed: int):
        if block < 1:
            raise DataError(f"a block to shuffle needs at least one element; got {block}")
        self._stream, self._block, self._seed = stream, block, seed
        self._number, self._taken = 0, 0
        self._start = stream.get_state()
        self._elements: list[T] = []

    def __next__(self) -> T:
        if not self._elements:
            self._elements = self._read_block()
        if self._taken == self._block:
            self._start, self._number, self._taken = self._stream.get_state(), self._number + 1, 0
            self._elements = self._read_block()
        if self._taken == len(self._elements):  # the last, shorter block is used up
            raise StopIteration
        self._taken += 1
        return self._elements[self._taken - 1]

    def _read_block(self) -> list[T]:
        elements = list(itertools.islice(self._stream, self._block))
        order = np.random.default_rng([self._seed, self._number]).permutation(len(elements))
        return [elements[i] for i in order]

    def get_state(self) -> State:
        return {"start": self._start, "number": self._number, "taken": self._taken}

    def set_state(self, state: State) -> None:
        self._start, self._number, self._taken = state["start"], state["number"], state["taken"]
        self._elements = []
        self._stream.set_state(self._start)


class Flattened(Stream[T]):
    """The elements of the lists of a stream, one after another."""

    def __init__(self, lists: Stream[list[T]]):
        self._lists = lists
        self._start, self._taken = lists.get_state(), 0
        self._elements: list[T] | None = None

    def __next__(self) -> T:
        if self._elements is None:
            self._elements = next(self._lists)
        while self._taken == len(self._elements):
            self._start, self._taken = self._lists.get_state(), 0
            self._elements = next(self._lists)
        self._taken += 1
        return self._elements[self._taken - 1]

    def get_state(self) -> State:
        return {"start": self._start, "taken": self._taken}

    def set_state(self, state: State) -> None:
        self._start, self._taken, self._elements = state["start"], state["taken"], None
        self._lists.set_state(self._start)


class Shard(Stream[T]):
    """Every `count`-th element of the stream, starting with number `index`: the part of process `index` of `count`.

    Each process reads the whole stream and keeps its own share: the shares are disjoint and together complete.
    """

    def __init__(self, stream: Stream[T], index: int, count: int):
        if not 0 <= index < count:
            raise DataError(f"a shard's index must lie in 0 .. count-1; got index {index}, count {count}")
        self._stream, self._index, self._count = stream, index, count
        self._seen = 0

    def __next__(self) -> T:
        while True:
            element = next(self._stream)
            self._seen += 1
            if (self._seen - 1) % self._count == self._index:
                return element

    def get_state(self) -> State:
        return {"seen": self._seen, "stream": self._stream.get_state()}

    def set_state(self, state: State) -> None:
        self._seen = state["seen"]
        self._stream.set_state(state["stream"])
