"""lm-eval's tasks through any cache: by their names there, from the hub or from a folder, as lines like those of our
own tasks.

A name may say a length, for tasks that are made to one: "niah_single_1@8192"; these need `lm-eval[ruler]`, and the hub
for their texts.
"""

from __future__ import annotations

import functools
import json
import logging
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from hla_jax.evaluation.lm_eval import HlaLM
from hla_jax.evaluation.run_tasks import Line
from hla_jax.evaluation.task import TaskError
from hla_jax.generation.engine import EngineMemoryError

_NOTHING = "[invalid]"
"""What lm-eval's filters make of a text without an answer."""


def ask(
    lm: HlaLM,
    name: str,
    workdir: pathlib.Path,
    *,
    data: pathlib.Path | None = None,
    include: pathlib.Path | None = None,
    limit: int | None = None,
    few_shot: int | None = None,
    chat: bool = False,
    run_code: bool = False,
) -> dict[str, list[Line]]:
    """One task, or one group of them, through one cache.

    Args:
      lm: the model and its cache.
      name: as in lm-eval, perhaps with "@length".
      workdir: keeps the answers, with which a run that was stopped continues; one for each cache.
      data: a folder of data files, see `local_tasks`; None for the hub.
      include: a folder with more task files of lm-eval's kind.
      limit: most items of each task.
      few_shot: examples shown before a question; None as the task says.
      chat: questions are put in the chat template, examples as earlier turns.
      run_code: answers that are programs may be run.

    Returns:
      "task metric" -> lines with `id`, `group` (the task, of a group), `correct`, `answered` and `text`.

    Raises:
      TaskError: no such task, or its data is missing.
    """
    name, _, length = name.partition("@")
    workdir.mkdir(parents=True, exist_ok=True)
    if length and not length.isdigit():
        raise TaskError(f"lm-eval's {name}@{length}: expected a number of tokens behind the @")
    made = (
        {"tokenizer": _tokenizer_alone(lm, workdir / "tokenizer"), "max_seq_lengths": [int(length)]} if length else {}
    )
    manager = TaskManager(include_path=include, metadata=made) if made else task_files(include)
    # A group's members may override what their files say; a task alone may not.
    tasks: list[Any] = [name] if data is None else [{"group": f"{name} here", "task": local_tasks(name, data)}]
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    try:
        found = simple_evaluate(
            lm,
            tasks=tasks,
            num_fewshot=few_shot,
            use_cache=str(workdir / "answers"),
            limit=limit,
            bootstrap_iters=0,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            task_manager=manager,
            confirm_run_unsafe_code=run_code,
            metadata=made or None,
        )
    except EngineMemoryError as error:
        raise TaskError(f"lm-eval's {name}: {error}") from error
    except (ImportError, AssertionError, LookupError, OSError) as error:  # a task's packages; its name; its data
        source = "the hub" if data is None else data
        raise TaskError(f"lm-eval's {name} from {source}: {type(error).__name__}: {error}") from error
    lines: dict[str, list[Line]] = {}
    for task, samples in found["samples"].items():
        for metric, line in _lines(samples, length):
            group = "" if task == name else task.removeprefix(f"{name}_")
            lines.setdefault(f"{name} {metric}", []).append({**line, "id": f"{task}/{line['id']}", "group": group})
    return lines


@functools.lru_cache(maxsize=4)
def task_files(include: pathlib.Path | None = None) -> TaskManager:
    """lm-eval's task files, thousands of them, and the user's."""
    return TaskManager(include_path=include)


def _lines(samples: Sequence[dict[str, Any]], length: str) -> Iterator[tuple[str, Line]]:
    """(metric, line) of every document and metric. Tasks made to a length name their metric after it."""
    for sample in samples:
        kind = "" if sample["filter"] == "none" else f" ({sample['filter']})"
        for metric in sample["metrics"]:
            value = sample[metric]
            if isinstance(value, bool | int | float) and (not length or metric == length):
                text = sample["resps"][0][0] if sample["resps"] else ""
                line = {
                    "id": sample["doc_id"],
                    "sample": 0,
                    "correct": float(value),
                    "answered": _NOTHING not in sample["filtered_resps"],
                    "extracted": str(sample["filtered_resps"][0]),
                    "text": text if isinstance(text, str) else json.dumps(sample["resps"]),
                }
                yield f"{metric}{kind}", line


def _tokenizer_alone(lm: HlaLM, directory: pathlib.Path) -> str:
    """The tokenizer in a folder without anything else: lm-eval's made tasks load it with leave to run the checkpoint's
    code.
    """
    lm.tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "auto_map"}
    file.write_text(json.dumps(config))
    return str(directory)


def local_tasks(name: str, data: pathlib.Path) -> list[dict[str, Any]]:
    """lm-eval's configurations of a task, or of all of its group, that read a folder instead of the hub.

    The folder has one folder a data set: `gsm8k/{train,test}.jsonl`, `math500/*.jsonl`, `mmlu_pro/*.jsonl` (examples
    need `mmlu_pro/validation.jsonl`) and `bbh/bbh/{kind}.json`. Other tasks are read as a YAML file in lm-eval's format
    says (`include`).

    Raises:
      TaskError: no such task here, or its data is missing.
    """
    for begin, override in _LOCAL.items():
        if name == begin or name.startswith(f"{begin}_"):
            return [
                {"task": task, "dataset_path": "json", "dataset_name": None, **settings}
                for task, settings in override(name, data).items()
            ]
    raise TaskError(f"lm-eval's {name} is not read from a folder here; those are {', '.join(_LOCAL)}")


def _files(data: pathlib.Path, **splits: str) -> dict[str, list[str]]:
    """Files of the splits that are there; at least the first must be."""
    found = {split: sorted(map(str, data.glob(pattern))) for split, pattern in splits.items()}
    first, pattern = next(iter(splits.items()))
    if not found[first]:
        raise TaskError(f"{data / pattern}: no such file, expected the {first} split")
    return {split: files for split, files in found.items() if files}


def _gsm8k(name: str, data: pathlib.Path) -> dict[str, dict[str, Any]]:
    files = _files(data, test="gsm8k/test.jsonl", train="gsm8k/train.jsonl")
    return {name: {"dataset_kwargs": {"data_files": files}}}


def _math500(name: str, data: pathlib.Path) -> dict[str, dict[str, Any]]:
    return {name: {"dataset_kwargs": {"data_files": _files(data, test="math500/*.jsonl")}}}


def _mmlu_pro(name: str, data: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Every subject reads all files and keeps its own questions."""
    shown = (data / "mmlu_pro/validation.jsonl").exists()
    splits = {"test": "test", "validation": "validation"} if shown else {"test": "*"}
    files = _files(data, **{split: f"mmlu_pro/{file}.jsonl" for split, file in splits.items()})
    settings: dict[str, Any] = {"dataset_kwargs": {"data_files": files}}
    if not shown:
        settings |= {"fewshot_split": None, "fewshot_config": None, "num_fewshot": 0}
    if name != "mmlu_pro":
        return {name: settings}
    rows = [json.loads(row) for file in files["test"] for row in pathlib.Path(file).read_text().splitlines() if row]
    return {f"mmlu_pro_{re.sub(' ', '_', subject)}": settings for subject in sorted({row["category"] for row in rows})}


def _bbh(name: str, data: pathlib.Path) -> dict[str, dict[str, Any]]:
    kind = name.removeprefix("bbh_cot_fewshot").removeprefix("_") or "*"
    files = _files(data, test=f"bbh/bbh/{kind}.json")["test"]
    return {
        f"bbh_cot_fewshot_{pathlib.Path(file).stem}": {
            "dataset_kwargs": {"data_files": {"test": [file]}, "field": "examples"}
        }
        for file in files
    }


_LOCAL: dict[str, Callable[[str, pathlib.Path], dict[str, dict[str, Any]]]] = {
    "gsm8k": _gsm8k,
    "minerva_math500": _math500,
    "hendrycks_math500": _math500,
    "mmlu_pro": _mmlu_pro,
    "bbh_cot_fewshot": _bbh,
}
