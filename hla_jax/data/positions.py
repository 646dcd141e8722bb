"""Shifted positions: short sequences that show the latent distant tokens (HLA paper, section 4.1, as in PoSE).

A document is cut into up to four chunks, and every chunk after the first is moved further away by a random offset. The
tokens, their order and the exact window, which counts tokens, stay as they are; only the positions that the rotary
embedding sees change.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from hla_jax.data.packing import Batch
from hla_jax.data.streams import DataError, State, Stream

if TYPE_CHECKING:
    from jaxtyping import Int32


@dataclasses.dataclass(frozen=True)
class ShiftConfig:
    """How positions are shifted.

    Attributes:
      fraction: probability that a document is shifted.
      max_chunks: a shifted document is cut into 2 .. max_chunks chunks.
      max_distance: the largest distance between two tokens of a document that shifting may reach.
    """

    fraction: float = 0.75
    max_chunks: int = 4
    max_distance: int = 16_384

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise DataError(f"fraction must lie in [0, 1]; got {self.fraction}")
        if self.max_chunks < 2:
            raise DataError(f"max_chunks must be at least 2, or nothing is shifted; got {self.max_chunks}")


def shift(
    rng: np.random.Generator,
    segments: Int32[np.ndarray, "B S"],
    positions: Int32[np.ndarray, "B S"],
    config: ShiftConfig,
) -> Int32[np.ndarray, "B S"]:
    """Positions with the later chunks of some documents moved away.

    Args:
      rng: decides which documents are shifted, where they are cut, and how far.
      segments: document of each token within its row, 0 for padding; the tokens of a document are contiguous.
      positions: position of each token in its document, increasing by one.

    Returns:
      New positions: strictly increasing within a document, the first chunk unmoved, no distance beyond `max_distance`
      (a document that is already that long keeps its positions); padding unchanged.
    """
    shifted = positions.copy()
    for row in range(len(segments)):
        for segment in range(1, int(segments[row].max(initial=0)) + 1):
            (tokens,) = np.nonzero(segments[row] == segment)
            wanted = rng.random() < config.fraction
            spare = config.max_distance - (len(tokens) - 1)
            if not wanted or len(tokens) < 2 or spare < 1:
                continue
            chunks = min(int(rng.integers(2, config.max_chunks + 1)), len(tokens))
            cuts = np.sort(rng.choice(np.arange(1, len(tokens)), size=chunks - 1, replace=False))
            # Sorted draws: each chunk moves at least as far as the one before, and none beyond what is spare.
            offsets = np.concatenate([[0], np.sort(rng.integers(0, spare + 1, size=chunks - 1))])
            chunk = np.searchsorted(cuts, np.arange(len(tokens)), side="right")
            shifted[row, tokens] += offsets[chunk].astype(np.int32)
    return shifted


class ShiftedPositions(Stream[Batch]):
    """The batches of `batches` with shifted positions. Batch number n depends on (seed, n) and the batch only."""

    def __init__(self, batches: Stream[Batch], config: ShiftConfig, seed: int):
        self._batches, self._config, self._seed = batches, config, seed
        self._number = 0

    def __next__(self) -> Batch:
        batch = next(self._batches)
        rng = np.random.default_rng([self._seed, self._number])
        self._number += 1
        return {**batch, "positions": shift(rng, batch["segments"], batch["positions"], self._config)}

    def get_state(self) -> State:
        return {"number": self._number, "batches": self._batches.get_state()}

    def set_state(self, state: State) -> None:
        self._number = state["number"]
        self._batches.set_state(state["batches"])
