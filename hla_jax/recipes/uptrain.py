"""The main job as one function: calibrate, initialise, uptrain, evaluate, export, check the export, report."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

import numpy as np

from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention
from hla_jax.banner import banner
from hla_jax.calibration.calibrate import calibrate
from hla_jax.data import pipeline
from hla_jax.data.pipeline import Source
from hla_jax.evaluation.evaluate import EvaluationConfig, evaluate
from hla_jax.evaluation.report import write_report
from hla_jax.generation.generate import generate
from hla_jax.kernels.attention_match import api as attention_match
from hla_jax.model import Model, load
from hla_jax.recipes.workdir import claim, kept_maps
from hla_jax.serving.export import export
from hla_jax.tensor_files import WeightsError
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


def run(job: Job, workdir: pathlib.Path, title: str) -> pathlib.Path:
    """Runs the job, or the rest of it where `workdir` holds a part already.

    Returns:
      The path of the report, or of the export where the job has no evaluation.

    Raises:
      ConfigError: `workdir` belongs to another job, or cannot be written.
      SchemeError: the scheme does not fit the model.
      WeightsError: the reloaded export does not give the same tokens.
    """
    model = load(job.model, job.dtype)
    job.scheme.check(model.config)
    claim(workdir, dataclasses.asdict(job))
    attention, reason = attention_match.choose()
    print(
        banner(
            title,
            dtype=job.dtype,
            dtype_reason="the config's choice for the frozen weights; maps and optimizer in float32",
            attention=attention,
            attention_reason=reason,
        )
    )
    initial = initial_maps(job, model, workdir / "initial")
    fitted = uptrain(model, initial, model.tokenizer, job.uptrain, workdir)
    directory = workdir / "export"
    export(model, fitted, directory, overwrite=True)
    check_export(job, model, fitted, directory)
    if job.evaluation is None:
        return directory
    metrics = workdir / "metrics.jsonl"
    results = evaluate(model, initial, fitted, job.uptrain.sources, job.evaluation, command=title, metrics=metrics)
    return write_report(results, workdir)


def initial_maps(job: Job, model: Model, directory: pathlib.Path) -> Attention:
    """The closed-form initialisation, from `directory` if an earlier start of the job left it there."""

    def make() -> Attention:
        rows = job.calibration.rows(model, job.uptrain.sources, job.uptrain.seed)
        return calibrate(model, job.scheme, rows)

    return kept_maps(directory, job.scheme, model.config, make)


def check_export(job: Job, model: Model, attention: Attention, directory: pathlib.Path) -> None:
    """Reloads an export and compares greedy tokens, beyond the window. Raises `WeightsError` where they differ."""
    length = 2 * job.scheme.window + 1
    sources, tokenizer = job.uptrain.sources, model.tokenizer
    rows = pipeline.sequences(sources, tokenizer, job.check_prompts, length, held_out=True, seed=job.uptrain.seed)
    expected = generate(model, rows.tolist(), job.check_tokens, attention)
    found = generate(load(directory, dtype=None), rows.tolist(), job.check_tokens)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.tokens != other.tokens:
            raise WeightsError(f"{directory}: prompt {number} expected tokens {one.tokens}, found {other.tokens}")
    print(f"{directory}: reloaded, and gives the same {job.check_prompts} x {job.check_tokens} greedy tokens")
