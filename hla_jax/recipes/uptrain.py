"""The main job as one function: calibrate, initialise, uptrain, evaluate, export, check the export, report."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from hla_jax import sharding, tensor_files
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention
from hla_jax.banner import banner
from hla_jax.calibration.calibrate import calibrate
from hla_jax.data import pipeline
from hla_jax.data.pipeline import Source
from hla_jax.evaluation.evaluate import EvaluationConfig, evaluate
from hla_jax.evaluation.report import write_report
from hla_jax.kernels.attention_match import api as attention_match
from hla_jax.model import Model, load
from hla_jax.recipes.workdir import check_reload, claim, kept_maps
from hla_jax.serving.export import export
from hla_jax.sharding import MeshConfig
from hla_jax.training.uptrain import UptrainConfig, uptrain

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Data of the initialisation: `sequences` rows of `tokens` tokens from the training mixture."""

    sequences: int
    tokens: int

    def rows(self, model: Model, sources: tuple[Source, ...], seed: int) -> Int[np.ndarray, "N S"]:
        """The rows themselves."""
        return pipeline.sequences(sources, model.tokenizer, self.sequences, self.tokens, held_out=False, seed=seed)


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that decides a run.

    Attributes:
      model: a directory or hub id.
      dtype: of the frozen weights; the maps and the optimizer are float32.
      scheme: sizes of HLA.
      calibration, uptrain: see there.
      phase2: a second phase, which starts from the maps of the first and leaves its files in `phase2`.
      mesh: sizes of the mesh over all devices of all processes; None computes on one device.
      evaluation: what is measured at the end; None leaves it out, and the report with it.
      check_prompts, check_tokens: prompts and new tokens on which the reloaded export is compared.
    """

    model: str
    dtype: str
    scheme: HLA
    calibration: Calibration
    uptrain: UptrainConfig
    evaluation: EvaluationConfig | None
    check_prompts: int = 4
    check_tokens: int = 32
    phase2: UptrainConfig | None = None
    mesh: MeshConfig | None = None

    def phases(self, workdir: pathlib.Path) -> dict[pathlib.Path, UptrainConfig]:
        """Each phase by the folder of its files."""
        return {workdir: self.uptrain} | ({workdir / "phase2": self.phase2} if self.phase2 else {})


def run(job: Job, workdir: pathlib.Path, title: str) -> pathlib.Path:
    """Runs the job, or the rest of it where `workdir` holds a part already.

    Where several processes share the devices, they only train; the same command in one process does the rest.

    Returns:
      The path of the report, of the export where the job has no evaluation, or of `workdir` if there is more to do.

    Raises:
      ConfigError: `workdir` belongs to another job, or cannot be written.
      SchemeError: the scheme does not fit the model.
      WeightsError: the reloaded export does not give the same tokens.
    """
    mesh = sharding.of_job(job.mesh)
    model = load(job.model, job.dtype, mesh)
    job.scheme.check(model.config)
    # A run may continue on other devices.
    claim(workdir, {key: value for key, value in dataclasses.asdict(job).items() if key != "mesh"})
    attention, reason = attention_match.choose()
    print(
        banner(
            title,
            dtype=job.dtype,
            dtype_reason="the config's choice for the frozen weights; maps and optimizer in float32",
            attention=attention,
            attention_reason=reason,
            mesh=mesh,
        )
    )
    initial = fitted = initial_maps(job, model, workdir / "initial", mesh)
    for directory, phase in job.phases(workdir).items():
        fitted = uptrain(model, fitted, model.tokenizer, phase, directory, mesh)
    if jax.process_count() > 1:
        print("trained; the same command in one process exports and evaluates")
        return workdir
    if mesh is not None:
        # Decoding is not spread over a mesh: its kernels run on one device.
        model = load(job.model, job.dtype)
        initial, fitted = (Attention(job.scheme, sharding.on_one_device(each.params)) for each in (initial, fitted))
    directory = workdir / "export"
    export(model, fitted, directory, overwrite=True)
    check_export(job, model, fitted, directory)
    if job.evaluation is None:
        return directory
    metrics = joined_metrics(job, workdir)
    results = evaluate(model, initial, fitted, job.uptrain.sources, job.evaluation, command=title, metrics=metrics)
    return write_report(results, workdir)


def joined_metrics(job: Job, workdir: pathlib.Path) -> pathlib.Path:
    """The metrics of all phases as one file, in which the steps go on counting."""
    lines, before = [], 0
    for directory, phase in job.phases(workdir).items():
        for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            metrics = json.loads(line)
            lines.append(json.dumps(metrics | {"step": before + metrics["step"]}))
        before += phase.loop.steps
    with tensor_files.new_file(workdir / "all_metrics.jsonl") as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return workdir / "all_metrics.jsonl"


def initial_maps(job: Job, model: Model, directory: pathlib.Path, mesh: Mesh | None = None) -> Attention:
    """The closed-form initialisation, from `directory` if an earlier start of the job left it there."""

    def make() -> Attention:
        rows = job.calibration.rows(model, job.uptrain.sources, job.uptrain.seed)
        with sharding.use(mesh):
            return calibrate(model, job.scheme, rows)

    return kept_maps(directory, job.scheme, model.config, make, mesh)


def check_export(job: Job, model: Model, attention: Attention, directory: pathlib.Path) -> None:
    """Reloads an export and compares greedy tokens, beyond the window. Raises `WeightsError` where they differ."""
    length = 2 * job.scheme.window + 1
    sources, tokenizer = job.uptrain.sources, model.tokenizer
    rows = pipeline.sequences(sources, tokenizer, job.check_prompts, length, held_out=True, seed=job.uptrain.seed)
    check_reload(directory, model, attention, rows.tolist(), job.check_tokens)
