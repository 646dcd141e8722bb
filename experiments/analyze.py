"""What the papers measured to justify their design, on any looped model: structure of the cache, where HLA errs, and
sweeps of what a latent cache is made of.

    python -m experiments.analyze --what=all --model=hla_jax/assets/nano --workdir=runs/analysis
    python -m experiments.analyze --what=effective_rank,ridge --model=ByteDance/Ouro-1.4B --workdir=runs/analysis_1p4b \
        --data=FOLDER_OF_PARQUET --sequences=128 --tokens=1024

The page is `results.md` in the work directory, with a JSON file and figures for each analysis. A finished analysis is
not run again, nor a finished cell of a sweep: a run that was stopped continues with the same command, and others can
be added. The sweeps train, with the sizes of `--config`: of the embedded model by default, or of Ouro with
`--config=configs/ouro_1p4b_sweeps.py`. `docs/analysis` has the embedded model's, from 16 + 8 sequences of 512 tokens:
11 minutes on two cores, without `steps`, which is asked for by name.
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import platform
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import flags

import hla_jax
from experiments import command_line, launch
from hla_jax import attention_files, tensor_files
from hla_jax.analysis import steps
from hla_jax.analysis.analyses import ANALYSES, Settings, Subject
from hla_jax.analysis.bench import Bench, Sweeps
from hla_jax.analysis.divergence import RANGES
from hla_jax.analysis.page import write_page
from hla_jax.analysis.sweeps import SWEEPS
from hla_jax.attention import registry
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention, SchemeError
from hla_jax.banner import banner
from hla_jax.config import ConfigError, ModelConfig, read_json
from hla_jax.data import pipeline
from hla_jax.data.pipeline import STANDARD_LIBRARY, SYNTHETIC, Source
from hla_jax.model import Model, load_attention
from hla_jax.recipes.workdir import claim

if TYPE_CHECKING:
    from jaxtyping import Int

_SWEEPS = SWEEPS | {"steps": steps.steps_sweep}
_NAMES = (*ANALYSES, *_SWEEPS)
_WHAT = flags.DEFINE_list("what", ["all"], f"Which: all (but steps), or some of {', '.join(_NAMES)}.")
_MODEL = flags.DEFINE_string("model", str(hla_jax.NANO), "Directory or hub id.")
_DTYPE = flags.DEFINE_string("dtype", None, "Of the weights; by default bfloat16, and float32 on a CPU.")
_DATA = flags.DEFINE_list("data", [SYNTHETIC, STANDARD_LIBRARY], "Files, folders or hub data sets, in equal parts.")
_SEQUENCES = flags.DEFINE_integer("sequences", 64, "To fit to.", lower_bound=1)
_HELD_OUT = flags.DEFINE_integer("held_out", 32, "Held-out sequences.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 512, "Of each sequence.", lower_bound=2)
_SEED = flags.DEFINE_integer("seed", 0, "Of the data.")
_PENALTY = flags.DEFINE_float("penalty", 1e-4, "Of the ridge regression, in the inputs' mean variance.", lower_bound=0)
_MAPS = flags.DEFINE_string("maps", None, "An export with HLA maps for the model; by default closed-form ones.")
_RANKS = flags.DEFINE_list("hla", None, "Of closed-form maps: rank_k,rank_v,rank_loop1; by default 10.7x as the paper.")
_WINDOW = flags.DEFINE_integer("window", 0, "Of closed-form maps.", lower_bound=0)
_QUERIES = flags.DEFINE_integer("queries", 32, "Positions of each sequence in `divergence`.", lower_bound=1)
_RANGES = flags.DEFINE_list("ranges", [str(start) for start in RANGES], "First distance of each range.")
_COMPARISON = flags.DEFINE_string("comparison", None, "Work directory of experiments.compare, for `quality`.")
_CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "nano_sweeps.py"


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that decides the results.

    Attributes:
      model: a directory or hub id.
      dtype: of the weights.
      data: files, folders, hub data sets or built-in sources, in equal parts.
      sequences, held_out, tokens: rows to fit to, held-out rows, and the tokens of each.
      seed: of the data.
      settings: of the analyses.
      maps: an export with HLA maps, or None for closed-form ones.
      hla: rank_k, rank_v and rank_loop1 of closed-form maps; None as `closed_form` says.
      window: of closed-form maps.
      sweeps: sizes and trainings of the sweeps.
      comparison: work directory of `experiments.compare` on the same model, for `quality`.
    """

    model: str
    dtype: str
    data: tuple[str, ...]
    sequences: int
    held_out: int
    tokens: int
    seed: int
    settings: Settings
    maps: str | None
    hla: tuple[int, ...] | None
    window: int
    sweeps: Sweeps
    comparison: str | None = None

    def claims(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """What all analyses of a work directory share, and what decides one of them besides."""
        settings = self.settings
        common = {"model": self.model, "dtype": self.dtype, "data": self.data, "seed": self.seed}
        common |= {"sequences": self.sequences, "held_out": self.held_out, "tokens": self.tokens}
        maps = {"maps": self.maps, "hla": self.hla, "window": self.window}
        split = maps | {"queries": settings.queries, "ranges": settings.ranges}
        cells, own = self.sweeps.claims()
        own["divergence_uptrained"] |= {"queries": settings.queries, "ranges": settings.ranges}
        own["quality"] |= {"comparison": self.comparison}
        own |= {"ridge": {"penalty": settings.penalty}, "divergence": split, "cells": cells}
        return common, own


def main() -> None:
    job = from_flags()
    print(f"page: {run(job, chosen(_WHAT.value, job), launch.workdir(), launch.title())}")


def run(job: Job, names: Sequence[str], workdir: pathlib.Path, title: str) -> pathlib.Path:
    """Runs those of the named analyses that the work directory does not hold; the page is written anew after each.

    Returns:
      The path of the page, which has every analysis that is finished.

    Raises:
      ConfigError: `workdir` belongs to another job, or cannot be written.
      SchemeError: a size of the sweeps does not fit the model.
    """
    sweeps = [name for name in names if name in _SWEEPS]
    # Trainings run on one device, as their recipes do; passes over the data are shared.
    mesh = None if sweeps else launch.devices()
    model = hla_jax.load(job.model, job.dtype, mesh)
    if sweeps:
        job.sweeps.check(model.config, job.tokens)
    if "steps" in names:
        steps.sizes(job.sweeps, model.config)
    common, own = job.claims()
    claim(workdir, common)
    for name in [*names, *(["cells"] if sweeps else [])]:
        claim(workdir / name, {"analysis": name} | own.get(name, {}))
    print(banner(title, mesh=mesh, dtype=job.dtype, dtype_reason="--dtype", attention="jnp", attention_reason="exact"))
    missing = [name for name in names if not result_file(workdir, name).exists()]
    if missing:
        rows = draw(job, model, job.sequences, held_out=False)
        subject = Subject(
            model,
            rows,
            draw(job, model, job.held_out, held_out=True),
            lambda: attention(job, model, rows),
            job.settings,
        )
        bench = Bench(subject, job.sweeps, workdir, job.comparison)
    for number, name in enumerate(missing, start=1):
        print(f"analysis {number} of {len(missing)}: {name}", flush=True)
        start = time.monotonic()
        result = ANALYSES[name](subject) if name in ANALYSES else _SWEEPS[name](bench)
        found = {"command": title, "seconds": round(time.monotonic() - start, 1), "result": result}
        with tensor_files.new_file(result_file(workdir, name)) as partial:
            tensor_files.write_json(partial, found)
        write(job, model.config, workdir)
    return write(job, model.config, workdir)


def from_flags() -> Job:
    """The job of the command line. Raises `ConfigError` for impossible values."""
    starts = command_line.whole_numbers("ranges", _RANGES.value)
    if not starts or starts[0] != 0 or list(starts) != sorted(set(starts)):
        raise ConfigError(f"--ranges: must start at 0 and grow, found {','.join(map(str, starts))}")
    ranks = command_line.whole_numbers("hla", _RANKS.value) if _RANKS.value else None
    if ranks and len(ranks) != 3:
        raise ConfigError(f"--hla: expected rank_k,rank_v,rank_loop1, found {','.join(map(str, ranks))}")
    if _MAPS.value and (ranks or _WINDOW.value):
        raise ConfigError("--maps: brings its own sizes; leave out --hla and --window")
    return Job(
        model=_MODEL.value,
        dtype=_DTYPE.value or ("float32" if jax.default_backend() == "cpu" else "bfloat16"),
        data=tuple(_DATA.value),
        sequences=_SEQUENCES.value,
        held_out=_HELD_OUT.value,
        tokens=_TOKENS.value,
        seed=_SEED.value,
        settings=Settings(_PENALTY.value, _QUERIES.value, starts),
        maps=_MAPS.value,
        hla=ranks,
        window=_WINDOW.value,
        sweeps=launch.read_config(Sweeps),
        comparison=_COMPARISON.value,
    )


def chosen(what: Sequence[str], job: Job) -> list[str]:
    """The analyses asked for, in their order. Raises `ConfigError` for an unknown one, or one that lacks something."""
    if unknown := sorted(set(what) - {"all", *_NAMES}):
        raise ConfigError(f"--what: no analysis {', '.join(unknown)}; there are all, {', '.join(_NAMES)}")
    if "quality" in what and job.comparison is None:
        raise ConfigError("--what: quality needs --comparison, the work directory of experiments.compare")
    if job.comparison:
        other = read_json(pathlib.Path(job.comparison) / "job.json")["model"]
        if pathlib.PurePath(other).name != pathlib.PurePath(job.model).name:
            raise ConfigError(f"--comparison: {job.comparison} compares caches of {other}, not of --model={job.model}")
    by_name = {"steps", *(() if job.comparison else ("quality",))}
    return [name for name in _NAMES if name in what or ("all" in what and name not in by_name)]


def result_file(workdir: pathlib.Path, name: str) -> pathlib.Path:
    """Is there when the analysis is finished."""
    return workdir / name / "result.json"


def draw(job: Job, model: Model, count: int, *, held_out: bool) -> Int[np.ndarray, "N S"]:
    """Token ids of the job's data."""
    sources = tuple(Source(path) for path in job.data)
    return pipeline.sequences(sources, model.tokenizer, count, job.tokens, held_out=held_out, seed=job.seed)


def attention(job: Job, model: Model, rows: Int[np.ndarray, "N S"]) -> Attention:
    """HLA's maps: of the export, or fitted in closed form to the rows."""
    if job.maps is None:
        rank_k, rank_v, rank_loop1 = job.hla or closed_form(model.config)
        return hla_jax.calibrate(model, HLA(rank_k, rank_v, rank_loop1, job.window), rows)
    directory = attention_files.local_directory(job.maps)
    scheme = registry.from_entries(attention_files.read_attention(directory))
    if not isinstance(scheme, HLA):
        raise SchemeError(f"--maps: {directory} holds {type(scheme).__name__}, expected HLA")
    return load_attention(job.maps, model)


def closed_form(config: ModelConfig) -> tuple[int, int, int]:
    """The paper's ranks in proportion to the model (512, 512 and 256 where G dh is 2,048), in whole heads."""
    whole = lambda rank: max(rank // config.head_dim, 1) * config.head_dim
    numbers = config.num_kv_heads * config.head_dim
    return whole(numbers // 4), numbers // 4, whole(numbers // 8)


def write(job: Job, config: ModelConfig, workdir: pathlib.Path) -> pathlib.Path:
    """The page of all that is finished."""
    found = {name: read_json(result_file(workdir, name)) for name in _NAMES if result_file(workdir, name).exists()}
    sizes = f"{config.num_layers} layers, {config.num_loops} loops, {config.num_kv_heads} key-value heads of"
    rows = f"{job.sequences} sequences to fit to and {job.held_out} held-out ones, of {job.tokens:,} tokens"
    facts = {
        "commands": ", ".join(dict.fromkeys(f"`{one['command']}`" for one in found.values())),
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "model": f"{job.model}: {sizes} {config.head_dim}, {job.dtype}",
        "data": f"{' and '.join(job.data)}: {rows}",
        "device": f"{jax.devices()[0].device_kind}, python {platform.python_version()}, jax {jax.__version__}",
        "seconds": ", ".join(f"{name} {one['seconds']:,.0f}" for name, one in found.items())
        + " (a pass over the data that several need counts in the first)",
    }
    return write_page({name: one["result"] for name, one in found.items()}, facts, workdir)


if __name__ == "__main__":
    flags.FLAGS.set_default("config", str(_CONFIG))
    flags.mark_flag_as_required("workdir")
    command_line.run(main)
