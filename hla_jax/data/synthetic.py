"""Tasks with exact answers that test what a cache remembers: recall, variable tracking, chained arithmetic, copying.

All but copying, also backwards, are written as assignments, one a line, scattered among lines of real text; a question
mark asks:

    recall      amber472 ...                                 ?amber    472
    tracking    plum81 ... fox=plum ...                      ?fox      =plum81
    chain       plum8 ... fox=plum+5 ... elm=fox-1 ...       ?elm      =fox-1:9;fox=plum+5:4;plum8:2

A chain is solved step by step: each step copies the definition of the variable that the step before it named, and
writes the running total modulo ten (above -1, then -1 + 5, then -1 + 5 + 8). Words and digits are single tokens of the
embedded model, so the lengths of definitions in tokens are known without its tokenizer.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

_WORDS = """
amber aspen basil beech birch bison cedar cherry clover cobalt coral crane daisy elder elm falcon fern finch fox
ginger hazel heron holly iris ivory ivy jade jasper kiwi lark laurel lemon lilac lily linden lotus lynx maple
mango mint moss moth myrtle nutmeg oak ochre olive onyx opal orchid otter owl panda peach pear pepper plum poppy
puma quail quartz raven robin rose ruby rust sable sage salmon sloth sorrel spruce swan teal tern thyme tiger
topaz trout tulip tuna umber velvet viola walnut willow wren yew zebra
"""
WORDS = tuple(_WORDS.split())


@dataclasses.dataclass(frozen=True)
class Example:
    """`prompt` ends where the answer begins; `answer` is its exact continuation, which a newline ends.

    Attributes:
      kind: the task's name.
      distance: tokens from the end of the nearest definition that the answer needs to the end of the prompt.
      more: further questions about the same text and their answers, each to follow the answer before.
    """

    prompt: str
    answer: str
    kind: str
    distance: int
    more: tuple[tuple[str, str], ...] = ()

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """All questions, the first with the text before it, and their answers with the newline behind."""
        return tuple((question, f"{answer}\n") for question, answer in ((self.prompt, self.answer), *self.more))

    @property
    def document(self) -> str:
        """The whole text."""
        return "".join(question + answer for question, answer in self.turns)


class Task(Protocol):
    """A kind of question. `sample` makes one; `questions` > 1 puts more, with their answers, behind the first."""

    @property
    def kind(self) -> str: ...

    def sample(
        self,
        rng: np.random.Generator,
        length: int,
        filler: Filler | None,
        *,
        questions: int = 1,
        distance: int | None = None,
    ) -> Example: ...


def score(example: Example, completion: str) -> bool:
    """Whether the first line of `completion` ends in the right result: of a derivation, only the last value counts."""
    return _result(completion.split("\n")[0]) == _result(example.answer)


def is_answer(completion: str) -> bool:
    """Whether `completion` gives an answer, right or wrong: a line that has ended, in a number (copying apart)."""
    line, ended, _ = completion.partition("\n")
    return bool(ended) and re.fullmatch("[0-9]+", _result(line)) is not None


class Filler:
    """Lines of real text to put between definitions, with their lengths in tokens.

    Args:
      documents: the text to take lines from, without their indentation.
      count: maps strings to their numbers of tokens.
      longest: lines of more tokens than this are left out, so that a length is met closely.
    """

    def __init__(
        self, documents: Iterable[str], count: Callable[[list[str]], Sequence[int]], longest: int = 24
    ) -> None:
        lines = [line.strip() + "\n" for document in documents for line in document.splitlines() if line.strip()]
        lengths = np.asarray(count(lines))
        kept = np.flatnonzero(lengths <= longest)
        if not kept.size:
            raise ValueError(f"the filler has no line of at most {longest} tokens")
        self.count = count
        self._lines = [lines[index] for index in kept]
        self._ends = np.cumsum(lengths[kept])

    def take(self, rng: np.random.Generator, tokens: int) -> list[str]:
        """Consecutive lines from a random place, together at most `tokens` tokens long."""
        latest = int(np.searchsorted(self._ends, self._ends[-1] - tokens))  # starting there, the lines still suffice
        start = int(rng.integers(max(1, min(latest, len(self._lines)))))
        before = self._ends[start - 1] if start else 0
        return self._lines[start : int(np.searchsorted(self._ends, before + max(tokens, 0), side="right"))]


@dataclasses.dataclass(frozen=True)
class Recall:
    """Values of one to four digits or of one word, asked for by their keys."""

    max_definitions: int = 40
    kind: str = "recall"

    def sample(
        self,
        rng: np.random.Generator,
        length: int,
        filler: Filler | None,
        *,
        questions: int = 1,
        distance: int | None = None,
    ) -> Example:
        most = min(self.max_definitions, length // 15)
        groups = []
        for key in rng.permutation(WORDS)[: int(rng.integers(2, max(3, most + 1)))]:
            value = _digits(rng, int(rng.integers(1, 4)))
            groups.append(_Group(str(key), value, [f"{key}{value}\n"]))
        return _example(self.kind, rng, groups, length, filler, min(questions, 2 * len(groups)), distance)


@dataclasses.dataclass(frozen=True)
class Tracking:
    """Variables that name variables: the answer is the way to the number at the end."""

    max_hops: int = 6
    kind: str = "tracking"

    def sample(
        self,
        rng: np.random.Generator,
        length: int,
        filler: Filler | None,
        *,
        questions: int = 1,
        distance: int | None = None,
    ) -> Example:
        groups = []
        for keys in _chains(rng, self.max_hops, length // 13):
            value = _digits(rng, int(rng.integers(1, 4)))
            definitions = [f"{key}={target}\n" for key, target in itertools.pairwise(keys)] + [f"{keys[-1]}{value}\n"]
            groups.append(_Group(keys[0], "".join(f"={key}" for key in keys[1:]) + value, definitions))
        return _example(self.kind, rng, groups, length, filler, min(questions, len(groups)), distance)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Sums and differences modulo ten over several definitions, with the steps written out."""

    max_steps: int = 6
    kind: str = "chain"

    def sample(
        self,
        rng: np.random.Generator,
        length: int,
        filler: Filler | None,
        *,
        questions: int = 1,
        distance: int | None = None,
    ) -> Example:
        groups = []
        for keys in _chains(rng, self.max_steps, length // 17):
            total, definitions, steps = 0, [], []
            for key, following in zip(keys, [*keys[1:], None]):
                digit, sign = int(rng.integers(10)), int(rng.choice((-1, 1))) if following else 1
                term = f"={following}{'+' if sign > 0 else '-'}{digit}" if following else str(digit)
                total = (total + sign * digit) % 10
                definitions.append(f"{key}{term}\n")
                steps.append(f"{key}{term}:{total}")
            groups.append(_Group(keys[0], ";".join(steps).removeprefix(keys[0]), definitions))
        return _example(self.kind, rng, groups, length, filler, min(questions, len(groups)), distance)


@dataclasses.dataclass(frozen=True)
class Copy:
    """A list of words and digits written again and again; the filler and the distance do not matter."""

    max_items: int = 12
    kind: str = "copy"

    def sample(
        self,
        rng: np.random.Generator,
        length: int,
        filler: Filler | None,
        *,
        questions: int = 1,
        distance: int | None = None,
    ) -> Example:
        del filler, distance
        count = int(rng.integers(2, max(3, min(self.max_items, length // (2 * questions + 2)) + 1)))
        items = [str(rng.choice(WORDS)) if rng.random() < 0.7 else _digits(rng, 1) for _ in range(count)]
        text = ",".join(items)
        return Example(f"{text}\n", text, self.kind, 0, more=(("", text),) * (questions - 1))


@dataclasses.dataclass(frozen=True)
class Reverse:
    """A list of different words written backwards. The embedded model has never seen it, so fine-tuning is tried on it;
    the filler and the distance do not matter.
    """

    max_items: int = 16
    kind: str = "reverse"

    def sample(
        self,
        rng: np.random.Generator,
        length: int,
        filler: Filler | None,
        *,
        questions: int = 1,
        distance: int | None = None,
    ) -> Example:
        del filler, questions, distance
        count = int(rng.integers(2, max(3, min(self.max_items, length // 4) + 1)))
        words = [str(word) for word in rng.permutation(WORDS)[:count]]
        return Example(f"{','.join(words)}\n<", ",".join(reversed(words)), self.kind, 0)


@dataclasses.dataclass(frozen=True)
class _Group:
    """The definitions that one question needs."""

    key: str
    answer: str
    definitions: list[str]


def _example(
    kind: str,
    rng: np.random.Generator,
    groups: list[_Group],
    length: int,
    filler: Filler | None,
    questions: int,
    distance: int | None,
) -> Example:
    """Scatters the definitions of all groups between lines of filler, then asks about `questions` of the groups.

    The text with its answers is `length` tokens long or a little less, unless the definitions alone are longer. With a
    `distance`, the nearest definition that the first answer needs ends that many tokens before the prompt's end.
    """
    asked = [groups[index] for index in rng.integers(len(groups), size=questions)]
    turns = [(f"?{group.key}", group.answer) for group in asked]
    needed = [asked[0].definitions[index] for index in rng.permutation(len(asked[0].definitions))]
    others = [line for group in groups if group is not asked[0] for line in group.definitions]
    others = [others[index] for index in rng.permutation(len(others))]
    room = length - sum(_tokens(f"{question}{answer}\n") for question, answer in turns)
    room -= sum(map(_tokens, needed + others))
    if distance is None:
        body = _scatter(rng, needed + others, _lines(filler, rng, room))
    else:
        # The other definitions are spread evenly over the whole text, so a part of them lies behind the needed ones.
        share = min(1.0, distance / max(1, room + sum(map(_tokens, others))))
        near = others[: round(len(others) * share)]
        behind = _scatter(rng, near, _lines(filler, rng, distance - 3 - sum(map(_tokens, near))))
        before = _lines(filler, rng, room + sum(map(_tokens, near)) - distance)
        body = [*_scatter(rng, needed[:-1] + others[len(near) :], before), needed[-1], *behind]
    last = max(index for index, line in enumerate(body) if line in needed)
    question, answer = turns[0]
    between = [*body[last + 1 :], question]
    return Example(
        prompt="".join(body) + question,
        answer=answer,
        kind=kind,
        distance=sum(filler.count(between) if filler else map(_tokens, between)),
        more=tuple(turns[1:]),
    )


def _lines(filler: Filler | None, rng: np.random.Generator, tokens: int) -> list[str]:
    return filler.take(rng, tokens) if filler else []


def _scatter(rng: np.random.Generator, definitions: list[str], lines: list[str]) -> list[str]:
    """Puts the definitions, in random order, at random places between the lines, in theirs."""
    is_definition = np.zeros(len(definitions) + len(lines), bool)
    is_definition[rng.choice(is_definition.size, len(definitions), replace=False)] = True
    # Nothing but its key may tell which definition a question needs: not its place either.
    sources = iter([definitions[index] for index in rng.permutation(len(definitions))]), iter(lines)
    return [next(sources[0] if chosen else sources[1]) for chosen in is_definition]


def _chains(rng: np.random.Generator, longest: int, definitions: int) -> list[list[str]]:
    """Distinct keys in chains of 2 to `longest`, together up to `definitions` of them (at least one chain of two)."""
    keys = [str(word) for word in rng.permutation(WORDS)[: max(2, int(rng.integers(2, max(3, definitions + 1))))]]
    chains = []
    while len(keys) >= 2:
        size = int(rng.integers(2, min(longest, len(keys)) + 1))
        chains.append(keys[:size])
        keys = keys[size:]
    return chains


def _digits(rng: np.random.Generator, count: int) -> str:
    return "".join(map(str, rng.integers(10, size=count)))


def _tokens(text: str) -> int:
    """The number of tokens of a definition or question: one a word, one any other character."""
    return len(re.findall(r"[a-z]+|[^a-z]", text))


def _result(answer: str) -> str:
    return re.split(r"[a-z=:]", answer)[-1]
