"""RULER's two question-answering tasks, under their original settings and in the chat template (HLA, Appendix H).

A question of SQuAD or HotpotQA behind its own documents and as many others as fit. Originally the prompt ends in
"Answer:" and 32 new tokens are allowed; Ouro begins to reason about the question instead and runs out of them, so the
paper's table 1 puts the same prompt in the chat template, with 2,048 new tokens.

Prompts are made as RULER makes them, but the other documents are drawn by our own generator: no prompt is the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from hla_jax.evaluation.task import Item, Options, Score, Settings, Task, TaskError
from hla_jax.evaluation.tasks.rows import Dataset, Row

_TASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
_NEW_TOKENS = 32
_COUNT = 500
# Documents are added and left out so many at a time.
_STEP = 10

_ORIGINAL = Settings(max_new_tokens=_NEW_TOKENS)
_CHAT = Settings(max_new_tokens=2048, chat=True)

_SOURCES = {
    "squad": Dataset("squad", "rajpurkar/squad_v2", ("question", "context", "answers"), split="validation"),
    "hotpot": Dataset(
        "hotpotqa", "hotpotqa/hotpot_qa", ("question", "answer", "context"), config="distractor", split="validation"
    ),
}

LENGTHS = (4096, 8192, 16_384)
NAMES = tuple(f"ruler_qa_{source}_{{length}}{chat}" for source in _SOURCES for chat in ("", "_chat"))


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its right answers, its own documents, and others of the same article, which are added first."""

    text: str
    answers: tuple[str, ...]
    own: tuple[str, ...]
    related: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RulerQa(Task):
    """Prompts of up to `length` tokens with the 32 of an original answer; the chat template is beyond them."""

    name: str
    settings: Settings
    questions: Sequence[Question] = dataclasses.field(repr=False)
    length: int
    count: int
    seed: int

    def items(self, tokenizer: PreTrainedTokenizerBase) -> list[Item]:
        documents = sorted({document for question in self.questions for document in question.own + question.related})
        items: list[Item] = []
        most = None
        for number, question in enumerate(self.questions[: self.count]):
            rng = np.random.default_rng([self.seed, number])
            order = [documents[index] for index in rng.permutation(len(documents))]
            most = self._most(tokenizer, question, order) if most is None else most
            text = self._fitting(tokenizer, question, order, most, rng)
            if text is not None:
                items.append(Item(id=str(number), prompt=f"{text} Answer:", answer=list(question.answers)))
        if not items:
            raise TaskError(f"{self.name}: no question fits {self.length} tokens with its own documents")
        return items

    def score(self, item: Item, text: str) -> Score:
        """Right if any of the right answers occurs anywhere in the reply, in any case (RULER's `string_match_part`).

        "fraction" is lm-eval's number: how many of the right answers occur. It cannot be told whether a reply answers.
        """
        reply = re.sub(r"[\x00-\x1f]", "\n", text.strip()).lower()
        there = [answer.lower() in reply for answer in item.answer]
        score: Score = {"correct": float(any(there)), "answered": bool(reply.strip()), "extracted": None}
        return {**score, "fraction": sum(there) / len(there)}  # type: ignore[typeddict-unknown-key]

    def _most(self, tokenizer: PreTrainedTokenizerBase, question: Question, order: Sequence[str]) -> int:
        """How many documents the prompts are tried with: as many as fit the first question."""
        count = _STEP
        while count < len(order) and self._fits(tokenizer, prompt(question, chosen(question, order, count + _STEP))):
            count += _STEP
        return count

    def _fitting(
        self,
        tokenizer: PreTrainedTokenizerBase,
        question: Question,
        order: Sequence[str],
        most: int,
        rng: np.random.Generator,
    ) -> str | None:
        """The prompt with the most documents that fit; None where not even the question's own do."""
        fewest = len(question.own)
        for count in (*range(max(most, fewest), fewest, -_STEP), fewest):
            documents = chosen(question, order, count)
            text = prompt(question, [documents[index] for index in rng.permutation(len(documents))])
            if self._fits(tokenizer, text):
                return text
        return None

    def _fits(self, tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
        return len(tokenizer.encode(text)) + _NEW_TOKENS <= self.length


def chosen(question: Question, order: Sequence[str], count: int) -> list[str]:
    """`count` documents: the question's own, then those of its article, then the first of `order`."""
    documents = list(dict.fromkeys((*question.own, *question.related, *order)))
    return documents[: max(count, len(question.own))]


def prompt(question: Question, documents: Sequence[str]) -> str:
    """The prompt but for "Answer:"."""
    numbered = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, start=1))
    given = f"The following are given documents.\n\n{numbered}"
    return f"{_TASK}\n\n{given}\n\n{_TASK}\n\nQuestion: {question.text}"


def squad_questions(rows: Sequence[Row]) -> list[Question]:
    """Those that have an answer; a document is a paragraph, related ones are the other paragraphs of its article."""
    of_article: dict[str, dict[str, None]] = {}
    for row in rows:
        of_article.setdefault(row.get("title", ""), {})[row["context"]] = None
    return [
        Question(
            row["question"],
            tuple(row["answers"]["text"]),
            (row["context"],),
            tuple(other for other in of_article[row.get("title", "")] if other != row["context"])
            if row.get("title")
            else (),
        )
        for row in rows
        if row["answers"]["text"]
    ]


def hotpot_questions(rows: Sequence[Row]) -> list[Question]:
    """All; a document is a paragraph below its title, and ten come with a question, two of them needed."""
    paragraphs = lambda context: zip(context["title"], context["sentences"], strict=True)
    return [
        Question(
            row["question"],
            (row["answer"],),
            tuple(f"{title}\n{''.join(sentences)}" for title, sentences in paragraphs(row["context"])),
        )
        for row in rows
    ]


def make(name: str, options: Options) -> Task | None:
    """The task of this name; None if it is none of these. Raises `TaskError` without data."""
    match = re.fullmatch(r"ruler_qa_(squad|hotpot)_(\d+)(_chat)?", name)
    if not match:
        return None
    source, length, chat = match.groups()
    rows = _SOURCES[source].rows(options)
    try:
        questions = squad_questions(rows) if source == "squad" else hotpot_questions(rows)
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{name}: the rows of {_SOURCES[source].hub} are not as expected ({error!r})") from error
    return RulerQa(
        name, _CHAT if chat else _ORIGINAL, questions, int(length), min(_COUNT, options.limit or _COUNT), options.seed
    )
