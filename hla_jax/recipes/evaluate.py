"""An evaluation as one function: tasks and fidelity through several caches of one model, side by side in one report.

Everything is resumed: answers item by item, the fidelity scheme by scheme. Tasks, schemes, items and samples can be
added between runs.
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import dacite
import jax
from jax.sharding import Mesh

from hla_jax import tensor_files
from hla_jax.attention import registry
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.banner import banner
from hla_jax.config import ConfigError, read_json
from hla_jax.data import pipeline
from hla_jax.data.pipeline import STANDARD_LIBRARY, SYNTHETIC, Source
from hla_jax.evaluation import fidelity, run_tasks, tasks
from hla_jax.evaluation.fidelity import Fidelity
from hla_jax.evaluation.memory import Memory, cache_memory
from hla_jax.evaluation.run_tasks import Line, Running, slug
from hla_jax.evaluation.schemes import FULL, Schemes
from hla_jax.evaluation.task import Options, Task, TaskError
from hla_jax.evaluation.task_report import Evaluation, write_report
from hla_jax.evaluation.task_summary import Result, summarise
from hla_jax.kernels.latent_decode import api as latent_decode
from hla_jax.model import Model, load, load_attention
from hla_jax.models import looped
from hla_jax.recipes.workdir import claim

FIDELITY = "fidelity"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A cache to evaluate, beside the full one.

    Attributes:
      name: its row in the tables.
      maps: an export of it (directory or hub id), with its maps; or None:
      scheme: its registry entries, of a scheme without maps.
    """

    name: str
    maps: str | None = None
    scheme: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Answering:
    """What replaces a task's own settings where it is not None; of lm-eval's tasks only `chat` and `few_shot`."""

    max_new_tokens: int | None = None
    samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    chat: bool | None = None
    few_shot: int | None = None


@dataclasses.dataclass(frozen=True)
class FidelityConfig:
    """Held-out text for the fidelity: rows, tokens of each, and how many of those are read exactly as the prompt."""

    sources: tuple[Source, ...] = (Source(SYNTHETIC), Source(STANDARD_LIBRARY))
    sequences: int = 16
    tokens: int = 512
    prompt: int = 128
    batch_size: int = 8
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class EvaluationJob:
    """What to evaluate.

    Attributes:
      model: directory or hub id.
      candidates: caches beside the full one.
      tasks: ours by name, or a suite of them; lm-eval's as "lm_eval:NAME"; and "fidelity".
      dtype: of weights and caches.
      data: a folder of data files; None for the hub.
      include: a folder with more task files of lm-eval's kind.
      answering: in place of the tasks' own settings.
      running: limits, sizes and seed.
      run_code: whether answers that are programs may be run.
      fidelity: of the task "fidelity".
    """

    model: str
    candidates: tuple[Candidate, ...]
    tasks: tuple[str, ...]
    dtype: str = "bfloat16"
    data: str | None = None
    include: str | None = None
    answering: Answering = Answering()
    running: Running = dataclasses.field(default_factory=Running)
    run_code: bool = False
    fidelity: FidelityConfig = FidelityConfig()


def run(job: EvaluationJob, workdir: pathlib.Path, title: str, mesh: Mesh | None = None) -> pathlib.Path:
    """Evaluates what the work directory does not have; the report is written anew after each task.

    With a mesh that has an axis "data", each of its devices generates for its own part of the slots.

    Returns:
      The path of the report.

    Raises:
      ConfigError: the job is impossible, or `workdir` belongs to another one.
      TaskError: a task cannot be asked.
    """
    names = [candidate.name for candidate in job.candidates]
    if FULL in names or len({slug(name) for name in names}) < len(names):
        raise ConfigError(f"caches need names of their own, and {FULL!r} is always there; found {', '.join(names)}")
    wanted = tasks.expand(job.tasks)
    # Missing data is told before the model is loaded.
    ours = {name: _task(job, name) for name in wanted if name != FIDELITY and not name.startswith(tasks.LM_EVAL)}
    claim(workdir, {"model": job.model, "dtype": job.dtype, "seed": job.running.seed, "read": job.running.read})
    for candidate in job.candidates:
        claim(workdir / "caches" / slug(candidate.name), {"maps": candidate.maps, "scheme": candidate.scheme})
    kernel, reason = latent_decode.choose()
    about = {"dtype": job.dtype, "dtype_reason": "of the job", "attention": kernel, "attention_reason": reason}
    print(banner(title, mesh=mesh, **about))
    model = load(job.model, job.dtype, mesh)
    schemes = {FULL: Attention(FullCache())} | {one.name: _attention(one, model, mesh) for one in job.candidates}
    memory = _memory(model, schemes)
    facts = {
        "command": f"`{title}`",
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "model": f"{job.model}, {job.dtype}",
        "log-likelihoods": f"the context is read as in `{job.running.read}` (evaluation/loglikelihood.py)",
        "items": "all" if job.running.limit is None else f"the first {job.running.limit} of each task",
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, python {platform.python_version()}, "
        f"jax {jax.__version__}",
    }
    results: dict[str, dict[str, Result]] = {}
    close: dict[str, Fidelity] = {}
    report = workdir / "report.md"
    decoding = dataclasses.replace(model, params=jax.jit(looped.for_decoding)(model.params))
    for number, name in enumerate(wanted, start=1):
        print(f"task {number} of {len(wanted)}: {name}", flush=True)
        if name == FIDELITY:
            close = _fidelity(job.fidelity, model, schemes, workdir / FIDELITY)
        elif name in ours:
            settings = dataclasses.replace(ours[name].settings, samples=1)  # more of them are only added
            claim(workdir / "answers" / slug(name), dataclasses.asdict(settings) | {"data": job.data})
            results[name] = summarise(run_tasks.answer(decoding, schemes, ours[name], workdir, job.running))
        else:
            results |= _lm_eval(job, decoding, schemes, name.removeprefix(tasks.LM_EVAL), workdir)
        report = write_report(Evaluation(facts, memory, results, close), workdir)
    return report


def _task(job: EvaluationJob, name: str) -> Task:
    options = Options(
        None if job.data is None else pathlib.Path(job.data), job.running.limit, job.run_code, job.running.seed
    )
    task = tasks.make(name, options)
    given = {key: value for key, value in dataclasses.asdict(job.answering).items() if value is not None}
    given.pop("few_shot", None)
    return dataclasses.replace(task, settings=dataclasses.replace(task.settings, **given))  # type: ignore[type-var]


def _attention(candidate: Candidate, model: Model, mesh: Mesh | None) -> Attention:
    """Raises `ConfigError` for a candidate with both or neither, or with a scheme that needs maps."""
    if (candidate.maps is None) == (candidate.scheme is None):
        raise ConfigError(f"{candidate.name}: expected an export with maps, or a scheme without, and one of them only")
    if candidate.maps is not None:
        return load_attention(candidate.maps, model, mesh)
    scheme = registry.from_entries(candidate.scheme or {})
    scheme.check(model.config)
    if scheme.map_shapes(model.config):
        raise ConfigError(
            f"{candidate.name}: {type(scheme).__name__} needs maps; fit it with experiments.compare or "
            "experiments.uptrain, and give the export"
        )
    return Attention(scheme)


def _memory(model: Model, schemes: Schemes) -> dict[str, Memory]:
    """Of every cache, also where two have one scheme and other maps."""
    dtype = model.params["embed_tokens"].dtype
    full = {FULL: schemes[FULL]}
    return {
        name: cache_memory(model.config, full | {name: attention}, (4096,), dtype).get(name)
        or cache_memory(model.config, full, (4096,), dtype)[FULL]
        for name, attention in schemes.items()
    }


def _lm_eval(
    job: EvaluationJob, model: Model, schemes: Schemes, name: str, workdir: pathlib.Path
) -> dict[str, dict[str, Result]]:
    """Results by task and metric."""
    try:
        from hla_jax.evaluation import lm_eval_tasks
        from hla_jax.evaluation.lm_eval import HlaLM
    except ImportError as error:
        raise TaskError(f"lm-eval's tasks need it: pip install lm-eval ({error})") from error
    lines: dict[str, dict[str, Sequence[Line]]] = {}
    running = job.running
    for scheme, attention in schemes.items():
        lm = HlaLM(model, attention, batch_size=running.slots, read=running.read, seed=running.seed)
        found = lm_eval_tasks.ask(
            lm,
            name,
            workdir / "lm_eval" / slug(scheme) / slug(name),
            data=None if job.data is None else pathlib.Path(job.data),
            include=None if job.include is None else pathlib.Path(job.include),
            limit=running.limit,
            few_shot=job.answering.few_shot,
            chat=bool(job.answering.chat),
            run_code=job.run_code,
        )
        for metric, rows in found.items():
            lines.setdefault(metric, {})[scheme] = rows
    return {metric: summarise(by_scheme) for metric, by_scheme in lines.items()}


def _fidelity(config: FidelityConfig, model: Model, schemes: Schemes, workdir: pathlib.Path) -> dict[str, Fidelity]:
    """Of every scheme but the full cache; what is there already is read."""
    claim(workdir, dataclasses.asdict(config))
    file = lambda name: workdir / f"{slug(name)}.json"
    missing = {name: one for name, one in schemes.items() if name == FULL or not file(name).exists()}
    if len(missing) > 1:
        rows = pipeline.sequences(
            config.sources, model.tokenizer, config.sequences, config.tokens, held_out=True, seed=config.seed
        )
        found = fidelity.measure(model, missing, rows, config.prompt, batch_size=config.batch_size)
        for name, one in found.items():
            with tensor_files.new_file(file(name)) as partial:
                tensor_files.write_json(partial, dataclasses.asdict(one))
    read = lambda name: dacite.from_dict(Fidelity, read_json(file(name)), dacite.Config(cast=[tuple]))
    return {name: read(name) for name in schemes if name != FULL}
