"""Batches to pretrain on: synthetic tasks and real text, in stages of growing length.

A small model learns to look a value up by its key only when sequences start very short; length and filler come later,
and shifted positions teach it to do so at a distance before the rows are that long.
A batch depends on the seed and its number alone, so a run can continue anywhere.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32, Int32

from hla_jax.data import synthetic
from hla_jax.data.packing import Tokenize
from hla_jax.data.positions import ShiftConfig, shift
from hla_jax.data.streams import Indexed

Batch = dict[str, Int32[np.ndarray, "B S"] | Float32[np.ndarray, "B S"]]

TEXT = "text"
TASKS: dict[str, synthetic.Task] = {
    task.kind: task for task in (synthetic.Copy(), synthetic.Recall(), synthetic.Tracking(), synthetic.Chain())
}

# Answers teach; the rest of a task's text is random or filler, and real text is what fills the model's capacity last.
_PROMPT_WEIGHT, _TEXT_WEIGHT = 0.05, 0.2
_COPIES = 3


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the curriculum.

    Attributes:
      steps: batches.
      rows, length: shape of a batch: B rows of S tokens, each packed with documents.
      mixture: kind of document (`text` or a key of `TASKS`) -> weight.
      filler: fraction of the tasks' documents whose definitions stand between lines of real text.
      shortest: tokens of the shortest documents; lengths are log-uniform from there to the room left in the row.
      whole: fraction of the documents that take all the room left.
      longest_bare: most tokens of a document without filler: these hold nothing but definitions and questions.
      shift: moves parts of documents apart, so that short rows teach to look far back; None does not.
      learning_rate: factor on the recipe's learning rates, from the stage's first to its last step.
    """

    steps: int
    rows: int
    length: int
    mixture: Mapping[str, float]
    filler: float
    shortest: int = 24
    whole: float = 0.3
    longest_bare: int = 256
    shift: ShiftConfig | None = None
    learning_rate: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if unknown := self.mixture.keys() - TASKS.keys() - {TEXT}:
            raise ValueError(f"a mixture is of {TEXT}, {', '.join(TASKS)}; found {', '.join(sorted(unknown))}")


class Curriculum:
    """Makes the documents and packs them.

    Args:
      stages: in order.
      documents: real text, for filler and as documents.
      tokenize: text -> token ids, without special tokens.
      end: id of the token after each document.
      seed: of all random choices.
    """

    def __init__(
        self, stages: Sequence[Stage], documents: Sequence[str], tokenize: Tokenize, end: int, seed: int
    ) -> None:
        self._stages, self._tokenize, self._end, self._seed = tuple(stages), tokenize, end, seed
        self._filler = synthetic.Filler(documents, lambda lines: [len(tokenize(line)) for line in lines])
        self._text = np.concatenate([np.asarray([*tokenize(document), end], np.int32) for document in documents])
        self._ends = list(itertools.accumulate(stage.steps for stage in stages))

    @property
    def steps(self) -> int:
        """Batches of all stages."""
        return self._ends[-1]

    def batches(self) -> Indexed[Batch]:
        """The stream of batches; past the last stage, it goes on with batches like the last stage's."""
        return Indexed(self.batch)

    def batch(self, index: int) -> Batch:
        """Batch number `index`, arrays [B, S].

        `tokens`; `labels`, the next tokens; `weights` of the labels in the loss, 0 across documents; `segments`, 0 for
        padding and 1, 2, ... for the documents of a row; `positions` in the document.
        """
        stage = self._stages[min(bisect.bisect_right(self._ends, index), len(self._stages) - 1)]
        rng = np.random.default_rng([self._seed, index])
        rows = [self._row(rng, stage) for _ in range(stage.rows)]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        if stage.shift is not None:
            batch["positions"] = shift(rng, batch["segments"], batch["positions"], stage.shift)
        return batch

    def _row(self, rng: np.random.Generator, stage: Stage) -> dict[str, np.ndarray]:
        size = stage.length + 1
        tokens, segments, positions = (np.zeros(size, np.int32) for _ in range(3))
        weights = np.zeros(size, np.float32)
        used = 0
        while size - used >= stage.shortest:
            ids, weight = self._document(rng, stage, size - used)
            here = slice(used, used + len(ids))
            tokens[here], weights[here] = ids, weight
            segments[here] = segments.max() + 1
            positions[here] = np.arange(len(ids))
            used += len(ids)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "weights": weights[1:],
            "segments": segments[:-1],
            "positions": positions[:-1],
        }

    def _document(self, rng: np.random.Generator, stage: Stage, room: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of one document of at most `room` tokens, and the weight of predicting each."""
        shares = np.array(list(stage.mixture.values()))
        kind = str(rng.choice(list(stage.mixture), p=shares / shares.sum()))
        length = room
        if rng.random() >= stage.whole and room > 2 * stage.shortest:
            length = int(stage.shortest * (room / stage.shortest) ** rng.random())
        if kind == TEXT:
            start = int(rng.integers(len(self._text) - length))
            ids = self._text[start : start + length]
            weights = np.full(length, _TEXT_WEIGHT, np.float32)
        else:
            filler = self._filler if rng.random() < stage.filler else None
            length = length - 1 if filler else min(length - 1, stage.longest_bare)
            questions = _COPIES if kind == synthetic.Copy.kind else len(synthetic.WORDS)
            ids, weights = self._example(TASKS[kind].sample(rng, length, filler, questions=questions), room)
        weights[0] = 0.0  # nothing before a document tells how it starts
        return ids, weights

    def _example(self, example: synthetic.Example, room: int) -> tuple[np.ndarray, np.ndarray]:
        """All turns of an example, cut to `room`; the end-of-text token counts as an answer."""
        parts = []
        for question, answer in example.turns:
            parts += [(self._tokenize(question), _PROMPT_WEIGHT), (self._tokenize(answer), 1.0)]
        parts.append(([self._end], 1.0))
        ids = np.concatenate([part for part, _ in parts]).astype(np.int32)
        weights = np.repeat(np.array([weight for _, weight in parts], np.float32), [len(part) for part, _ in parts])
        return ids[:room], weights[:room]
