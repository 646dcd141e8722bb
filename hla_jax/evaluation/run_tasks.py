"""Asks a task's items through caches, one line an item and sample, so that a run that was stopped continues.

The lines are JSON, in `answers/{task}/{scheme}.jsonl` of the work directory: what `Task.score` says, and `id`,
`sample`, `group`, and of a generated answer `text`, `prompt_tokens`, `new_tokens` and `finish_reason`; of choices
`logprobs`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from hla_jax.attention.scheme import Attention
from hla_jax.evaluation import loglikelihood
from hla_jax.evaluation.schemes import Schemes
from hla_jax.evaluation.task import Item, Settings, Task, TaskError
from hla_jax.generation.engine import Engine, EngineMemoryError, Request
from hla_jax.generation.generate import Generation
from hla_jax.generation.slots import whole_groups
from hla_jax.model import Model

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Running:
    """How the asking is done; no answer depends on the sizes.

    Attributes:
      slots: sequences generated together; on several devices at least one each.
      batch_size: pairs scored together.
      read: how log-likelihoods read the context, see `evaluation.loglikelihood`.
      seed: of sampled answers.
      limit: most items of a task, the first ones; None for all.
    """

    slots: int = 8
    batch_size: int = 8
    read: str = "decode"
    seed: int = 0
    limit: int | None = None


def answer(
    model: Model, schemes: Schemes, task: Task, workdir: pathlib.Path, running: Running = Running()
) -> dict[str, list[Line]]:
    """Asks what the work directory does not have yet.

    Args:
      model: with a tokenizer.
      schemes: name -> scheme and maps.
      task: its `settings` are used as they are.
      workdir: of the answers; one for each model and set of schemes.
      running: how.

    Returns:
      Every scheme's lines, in the order of items and samples.

    Raises:
      TaskError: the task's items cannot be asked of this model.
    """
    items = list(task.items(model.tokenizer))[: running.limit]
    if not items:
        raise TaskError(f"{task.name}: has no items")
    if repeated := len(items) - len({item.id for item in items}):
        raise TaskError(f"{task.name}: {repeated} items have the id of another")
    samples = 1 if items[0].choices else task.settings.samples
    found = {}
    for name, attention in schemes.items():
        file = answers_file(workdir, task.name, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        there = {(line["id"], line["sample"]) for line in read_lines(file)}
        missing = [(item, n) for item in items for n in range(samples) if (item.id, n) not in there]
        with (
            file.open("a", encoding="utf-8") as out,
            tqdm(total=len(missing), desc=f"{task.name}, {name}", unit="answer") as bar,
        ):

            def write(line: Line, out: TextIO = out, bar: tqdm = bar) -> None:
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
                out.flush()
                bar.update()

            if items[0].choices:
                _choose(model, attention, task, [item for item, _ in missing], running, write)
            elif missing:
                _generate(model, attention, task, missing, running, write)
        by_key = {(line["id"], line["sample"]): line for line in read_lines(file)}
        found[name] = [by_key[item.id, sample] for item in items for sample in range(samples)]
    return found


def answers_file(workdir: pathlib.Path, task: str, scheme: str) -> pathlib.Path:
    """The lines of one scheme on one task."""
    return workdir / "answers" / slug(task) / f"{slug(scheme)}.jsonl"


def slug(name: str) -> str:
    """A name as a file's."""
    return re.sub(r"[^\w.@-]+", "_", name)


def read_lines(file: pathlib.Path) -> list[Line]:
    """The lines of a file, if it is there; a last line that was not written to its end is left out, and taken off."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, item: Item, settings: Settings) -> list[int]:
    """Token ids of an item's prompt: its text, or a chat in the model's template, and the answer's beginning.

    Raises `TaskError` for a chat without a template.
    """
    if not item.messages and not settings.chat:
        return list(tokenizer.encode(item.prompt + item.prefix))
    if tokenizer.chat_template is None:
        raise TaskError("the model's tokenizer has no chat template, which this task needs")
    turns = item.messages or ({"role": "user", "content": item.prompt},)
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)) + item.prefix
    return list(tokenizer.encode(text, add_special_tokens=False))


def _generate(
    model: Model,
    attention: Attention,
    task: Task,
    missing: Sequence[tuple[Item, int]],
    running: Running,
    write: Callable[[Line], None],
) -> None:
    """Generates answers, and writes the line of each as soon as it is there."""
    settings = task.settings
    items = {item.id: item for item, _ in missing}
    prompts = {key: prompt_tokens(model.tokenizer, item, settings) for key, item in items.items()}
    capacity = max(map(len, prompts.values())) + settings.max_new_tokens
    if capacity > model.config.max_position_embeddings:
        raise TaskError(
            f"{task.name}: needs {capacity:,} positions, {settings.max_new_tokens:,} of them for new tokens, and the "
            f"model has {model.config.max_position_embeddings:,}; allow fewer new tokens, or leave the task out"
        )

    def finished(number: int, made: Generation) -> None:
        item, sample = missing[number]
        line = {"id": item.id, "sample": sample, "group": item.group, **task.score(item, made.text or "")}
        counts = {"prompt_tokens": len(prompts[item.id]), "new_tokens": len(made.tokens)}
        write({**line, "text": made.text, **counts, "finish_reason": made.finish_reason})

    def requests() -> Iterator[Request]:
        for item, sample in missing:
            yield Request(
                prompts[item.id],
                settings.max_new_tokens,
                settings.temperature,
                settings.top_p,
                settings.top_k,
                seed=zlib.crc32(f"{running.seed}/{task.name}/{item.id}/{sample}".encode()),
                stop_strings=settings.stop_strings,
                finished=finished,
            )

    engine = Engine(model, attention, slots=whole_groups(model, running.slots), capacity=capacity)
    try:
        for _ in engine.run(requests()):
            pass
    except EngineMemoryError as error:
        raise TaskError(f"{task.name}: {error}") from error


def _choose(
    model: Model,
    attention: Attention,
    task: Task,
    missing: Sequence[Item],
    running: Running,
    write: Callable[[Line], None],
) -> None:
    """Scores choices, some batches of items at a time, and writes each item's line."""
    begin, longest = model.tokenizer.bos_token_id, model.config.max_position_embeddings
    empty = int(model.stop_tokens[0] if begin is None else begin)
    encode = lambda choice: loglikelihood.encode_pair(model.tokenizer, empty, *choice)
    at_once = 8 * running.batch_size
    for start in range(0, len(missing), at_once):
        part = missing[start : start + at_once]
        pairs = [loglikelihood.cut_left(encode(choice), longest) for item in part for choice in item.choices]
        scored = iter(
            loglikelihood.score(
                model, attention, pairs, read=running.read, batch_size=running.batch_size, progress=False
            )
        )
        for item in part:
            logprobs = [next(scored).logprob for _ in item.choices]
            line = {"id": item.id, "sample": 0, "group": item.group, **task.score_choices(item, logprobs)}
            write({**line, "logprobs": logprobs})
