"""The embedded model's own tasks: recall, tracking and chained arithmetic, at a given distance to what an answer needs.

Recall is asked up to 16 windows back (the embedded model's window is 32 tokens).
"""

from __future__ import annotations

import dataclasses
import functools
import re

from transformers import PreTrainedTokenizerBase

from hla_jax.data import pipeline, synthetic
from hla_jax.evaluation.task import Item, Options, Score, Settings, Task

_KINDS: dict[str, tuple[synthetic.Task, int]] = {
    "recall": (synthetic.Recall(), 8),
    "tracking": (synthetic.Tracking(), 32),
    "chain": (synthetic.Chain(), 64),
}
"""Each with the new tokens that its longest answer needs, and some more."""
# Tokens of a question beyond its distance: for the definitions before, and the answer.
_ROOM = 128
_COUNT = 64

DISTANCES = (32, 64, 128, 256, 512)
NAMES = tuple(f"{kind}_{{distance}}" for kind in _KINDS)


@dataclasses.dataclass(frozen=True)
class Questions(Task):
    """`count` questions whose nearest needed definition ends `distance` tokens before the answer begins."""

    name: str
    settings: Settings
    kind: synthetic.Task = dataclasses.field(repr=False)
    distance: int
    count: int
    seed: int

    def items(self, tokenizer: PreTrainedTokenizerBase) -> list[Item]:
        from hla_jax.evaluation.synthetic_tasks import Setting  # imports jax

        setting = Setting(self.kind, self.distance + _ROOM, self.distance)
        examples = setting.examples(self.count, _filler(tokenizer), self.seed)
        return [
            Item(id=str(number), prompt=example.prompt, answer=example.answer, metadata={"distance": example.distance})
            for number, example in enumerate(examples)
        ]

    def score(self, item: Item, text: str) -> Score:
        """By the final result only, as the main job does; an answer is a line that ends in a number."""
        example = synthetic.Example(item.prompt, item.answer, self.kind.kind, self.distance)
        answered = synthetic.is_answer(text.split("\n")[0] + "\n")
        found = text.split("\n")[0] if answered else None
        return {"correct": float(synthetic.score(example, text)), "answered": answered, "extracted": found}


@functools.lru_cache(maxsize=1)
def _filler(tokenizer: PreTrainedTokenizerBase) -> synthetic.Filler:
    """Made once for all tasks: it reads the whole standard library."""
    return pipeline.task_filler(tokenizer, held_out=True)


def make(name: str, options: Options) -> Task | None:
    """The task of this name; None if it is none of these."""
    match = re.fullmatch(rf"({'|'.join(_KINDS)})_(\d+)", name)
    if not match:
        return None
    kind, tokens = _KINDS[match.group(1)]
    settings = Settings(max_new_tokens=tokens, stop_strings=("\n",))
    return Questions(name, settings, kind, int(match.group(2)), min(_COUNT, options.limit or _COUNT), options.seed)
