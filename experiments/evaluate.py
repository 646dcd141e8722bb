"""Tasks and fidelity through several caches of one model, side by side against the full cache.

    python -m experiments.evaluate --config=configs/nano_evaluate.py --workdir=runs/nano_evaluate
    python -m experiments.evaluate --model=ByteDance/Ouro-1.4B --caches="HLA=runs/ouro_1p4b_hla/export" \\
        --tasks=math500,bbh,ruler_4096,fidelity --slots=64 --workdir=runs/evaluate
    python -m experiments.evaluate --config=configs/nano_evaluate.py --tasks=lm_eval:gsm8k --data=FOLDER --limit=4 \\
        --workdir=runs/nano_gsm8k

A cache is NAME=EXPORT (a directory or hub id with maps), or NAME={its registry entries} for a scheme without maps, such
as 'sharing={"shared_loop_config": {"window": 128}}'. Tasks are ours (`hla_jax/evaluation/tasks`) or a suite of them,
lm-eval's as lm_eval:NAME (lm_eval:NAME@LENGTH for those made to a length), and "fidelity".

The report is `report.md` in the work directory, with `results.json`; every answer is a line under `answers`. A run that
was stopped continues with the same command, and tasks, caches, items and samples can be added between runs.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
from absl import flags

from experiments import command_line, launch
from hla_jax.config import ConfigError
from hla_jax.evaluation.loglikelihood import READS
from hla_jax.recipes import evaluate
from hla_jax.recipes.evaluate import Candidate, EvaluationJob

_TASKS = flags.DEFINE_list("tasks", None, "Names, with commas; instead of the config's.")
_SCHEME = flags.DEFINE_list("scheme", None, "Only these caches of the config, and the full one.")
_MODEL = flags.DEFINE_string("model", None, "Directory or hub id; instead of the config's.")
_CACHES = flags.DEFINE_multi_string("caches", None, "NAME=EXPORT or NAME={entries}; instead of the config's.")
_DTYPE = flags.DEFINE_string("dtype", None, "Of weights and caches; by default bfloat16, and float32 on a CPU.")
_DATA = flags.DEFINE_string("data", None, "Folder of data files; by default the hub.")
_INCLUDE = flags.DEFINE_string("include", None, "Folder with more task files of lm-eval's kind.")
_LIMIT = flags.DEFINE_integer("limit", None, "Most items of a task.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", None, "Sequences generated together.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", None, "Log-likelihoods computed together.", lower_bound=1)
_READ = flags.DEFINE_enum("read", None, READS, "How log-likelihoods read the context.")
_SEED = flags.DEFINE_integer("seed", None, "Of sampled answers.")
_NEW = flags.DEFINE_integer("max_new_tokens", None, "Instead of a task's own.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", None, "Of each item, instead of a task's own.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Instead of a task's own.", lower_bound=0)
_TOP_P = flags.DEFINE_float("top_p", None, "Instead of a task's own.", lower_bound=0, upper_bound=1)
_TOP_K = flags.DEFINE_integer("top_k", None, "Instead of a task's own.", lower_bound=1)
_CHAT = flags.DEFINE_bool("chat", None, "Put questions in the chat template.")
_FEW_SHOT = flags.DEFINE_integer("few_shot", None, "Examples, of lm-eval's tasks.", lower_bound=0)
_RUN_CODE = flags.DEFINE_bool("run_code", False, "Let answers that are programs run, in a sandbox.")


def main() -> None:
    report = evaluate.run(job(), launch.workdir(), launch.title(), launch.devices())
    print(f"report: {report}")


def job() -> EvaluationJob:
    """The config's job, or an empty one, with what the command line says. Raises `ConfigError`."""
    if launch.has_config():
        base = launch.read_config(EvaluationJob)
    elif _MODEL.value and _TASKS.value:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        base = EvaluationJob(_MODEL.value, (), tuple(_TASKS.value), dtype)
    else:
        raise ConfigError("give --config, or --model and --tasks")
    found = _given(
        base,
        model=_MODEL.value,
        tasks=_TASKS.value and tuple(_TASKS.value),
        candidates=_CACHES.value and tuple(map(candidate, _CACHES.value)),
        dtype=_DTYPE.value,
        data=_DATA.value,
        include=_INCLUDE.value,
        run_code=_RUN_CODE.value or None,
        running=_given(
            base.running,
            limit=_LIMIT.value,
            slots=_SLOTS.value,
            batch_size=_BATCH.value,
            read=_READ.value,
            seed=_SEED.value,
        ),
        answering=_given(
            base.answering,
            max_new_tokens=_NEW.value,
            samples=_SAMPLES.value,
            temperature=_TEMPERATURE.value,
            top_p=_TOP_P.value,
            top_k=_TOP_K.value,
            chat=_CHAT.value,
            few_shot=_FEW_SHOT.value,
        ),
    )
    return found if _SCHEME.value is None else dataclasses.replace(found, candidates=chosen(found, _SCHEME.value))


def candidate(text: str) -> Candidate:
    """One of `--caches`. Raises `ConfigError`."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise ConfigError(f"--caches: expected NAME=EXPORT or NAME={{entries}}, found {text!r}")
    if not value.startswith("{"):
        return Candidate(name, maps=value)
    try:
        return Candidate(name, scheme=json.loads(value))
    except json.JSONDecodeError as error:
        raise ConfigError(f"--caches: {name}: the entries are no JSON: {error}") from None


def chosen(job: EvaluationJob, names: list[str]) -> tuple[Candidate, ...]:
    """The named caches. Raises `ConfigError` for an unknown one."""
    there = {one.name: one for one in job.candidates}
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(f"--scheme: no cache {', '.join(unknown)}; there are {', '.join(there) or 'none'}")
    return tuple(there[name] for name in names)


def _given(base: Any, **values: Any) -> Any:
    return dataclasses.replace(base, **{name: value for name, value in values.items() if value is not None})


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    command_line.run(main)
