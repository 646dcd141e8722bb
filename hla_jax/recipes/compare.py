"""The comparison as one function: every cell a scheme at one size, calibrated, trained, measured; one report of all."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import dacite
import numpy as np

from hla_jax import tensor_files
from hla_jax.attention import registry
from hla_jax.attention.codec import Codec
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention, Scheme, SchemeError
from hla_jax.banner import banner
from hla_jax.calibration.calibrate import calibrate
from hla_jax.calibration.random import random_maps
from hla_jax.config import ConfigError, ModelConfig, read_json
from hla_jax.data import pipeline, synthetic
from hla_jax.evaluation.comparison import Row, measure
from hla_jax.evaluation.comparison_report import write_report
from hla_jax.evaluation.evaluate import EvaluationConfig, task_settings
from hla_jax.evaluation.schemes import FULL
from hla_jax.kernels.latent_decode import api as latent_decode
from hla_jax.model import Model, load
from hla_jax.recipes.uptrain import Calibration
from hla_jax.recipes.workdir import EXPORT, claim, kept_maps, read_maps
from hla_jax.serving.export import export
from hla_jax.training.distill import DistillConfig, distill
from hla_jax.training.on_policy import OnPolicyConfig, refine
from hla_jax.training.uptrain import UptrainConfig, uptrain

if TYPE_CHECKING:
    from jaxtyping import Int

RANDOM = "random"

TRAINING: dict[str, Callable[..., Attention]] = {"distill": distill, "uptrain": uptrain, "on_policy": refine}
"""The field of `Comparison` that says how, and the function: (model, attention, tokenizer, config, workdir)."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One scheme at one size.

    Attributes:
      name: its row in the table, and its folder.
      curve: the name it shares with the same scheme at other sizes.
      scheme: its registry entries.
      training: "distill", "uptrain", "on_policy" or "none".
      start: maps before training: the closed-form initialisation (None), `RANDOM` ones, or the trained ones of the cell
        of that name.
      output_weight: of distillation's attention-output error, where it is not the comparison's.
    """

    name: str
    curve: str
    scheme: dict[str, Any]
    training: str = "none"
    start: str | None = None
    output_weight: float | None = None

    @classmethod
    def of(
        cls,
        name: str,
        curve: str,
        scheme: Scheme,
        training: str = "none",
        start: str | None = None,
        output_weight: float | None = None,
    ) -> Cell:
        """A cell of a scheme as an object."""
        return cls(name, curve, registry.to_entries(scheme), training, start, output_weight)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything that decides a comparison.

    Attributes:
      model: a directory or hub id.
      dtype: of the frozen weights; maps and optimizers are float32.
      cells: in the order in which they run; the full cache is the first.
      calibration: of all cells, from the sources of `distill`.
      distill, uptrain, on_policy: the three ways of training.
      evaluation: what is measured, on held-out text of the sources of `distill`.
      seed: of calibration and random maps.
    """

    model: str
    dtype: str
    cells: tuple[Cell, ...]
    calibration: Calibration
    distill: DistillConfig
    uptrain: UptrainConfig
    on_policy: OnPolicyConfig
    evaluation: EvaluationConfig
    seed: int = 0


def run(job: Comparison, workdir: pathlib.Path, title: str, cells: str | None = None) -> pathlib.Path:
    """Runs the cells that `workdir` has no result of yet; the report is written anew after each.

    Args:
      job: see there.
      workdir: gets a folder a cell, and the report.
      title: the command, for banner and report.
      cells: names or regular expressions, separated by commas: only the cells that one of them matches in full, and
        the full cache. None: all.

    Returns:
      The path of the report, which has every cell that is finished.

    Raises:
      ConfigError: cells that contradict each other, or `workdir` belongs to another comparison or cannot be written.
      SchemeError: a scheme does not fit the model.
    """
    chosen = select(job.cells, cells)
    task_settings(job.evaluation)
    model = load(job.model, job.dtype)
    check(job.cells, chosen, model.config, workdir)
    # Cells can be added later, so each has its own claim.
    claim(workdir, {name: value for name, value in dataclasses.asdict(job).items() if name != "cells"})
    attention, reason = latent_decode.choose()
    print(
        banner(
            title,
            dtype=job.dtype,
            dtype_reason="the config's choice for the frozen weights; maps and optimizers in float32",
            attention=attention,
            attention_reason=reason,
        )
    )
    for cell in chosen:
        claim(_folder(workdir, cell.name), dataclasses.asdict(cell))
    if missing := [cell for cell in chosen if not _result(workdir, cell.name).exists()]:
        data = Data.of(job, model)
        for number, cell in enumerate(missing, start=1):
            print(f"cell {number} of {len(missing)}: {cell.name}", flush=True)
            row = run_cell(job, cell, model, data, workdir)
            with tensor_files.new_file(_result(workdir, cell.name)) as partial:
                tensor_files.write_json(partial, dataclasses.asdict(row))
            write_report(finished(job, workdir), workdir, title)
    return write_report(finished(job, workdir), workdir, title)


def select(cells: Sequence[Cell], pattern: str | None) -> list[Cell]:
    """The full cache, and the cells whose names one of the patterns matches in full, in their order."""
    names = [cell.name for cell in cells]
    if names[:1] != [FULL] or cells[0].scheme or cells[0].training != "none":
        raise ConfigError(f"cells: the first must be {FULL!r}, without a scheme and training; found {names[:1]}")
    if pattern is None:
        return list(cells)
    kept = {FULL}
    for part in filter(None, map(str.strip, pattern.split(","))):
        try:
            found = {name for name in names if re.fullmatch(part, name)}
        except re.error as error:
            raise ConfigError(f"--cells: {part!r} is not a regular expression ({error})") from None
        if not found:
            raise ConfigError(f"--cells: nothing matches {part!r}; there are {', '.join(names)}")
        kept |= found
    return [cell for cell in cells if cell.name in kept]


def check(cells: Sequence[Cell], chosen: Sequence[Cell], config: ModelConfig, workdir: pathlib.Path) -> None:
    """Raises `ConfigError` or `SchemeError` for whatever would stop a chosen cell later."""
    schemes: dict[str, Scheme] = {}
    for cell in cells:
        where = f"cell {cell.name!r}"
        if cell.name in schemes or pathlib.PurePath(cell.name).name != cell.name or "," in cell.name:
            raise ConfigError(f"{where}: names must differ, and have no slash and no comma")
        try:
            scheme = schemes[cell.name] = registry.from_entries(cell.scheme)
            scheme.check(config)
        except SchemeError as error:
            raise SchemeError(f"{where}: {error}") from None
        if cell.training not in {"none", *TRAINING}:
            raise ConfigError(f"{where}: training must be none, {', '.join(TRAINING)}; found {cell.training!r}")
        if cell.training == "uptrain" and not isinstance(scheme, HLA):
            raise ConfigError(f"{where}: uptraining fits HLA's maps, the scheme is {type(scheme).__name__}")
        if cell.training != "none" and not scheme.map_shapes(config):
            raise ConfigError(f"{where}: {type(scheme).__name__} has no maps to train")
        if cell.output_weight is not None and cell.training != "distill":
            raise ConfigError(f"{where}: output_weight is distillation's; its training is {cell.training!r}")
        if cell.start == RANDOM and not isinstance(scheme, Codec):
            raise ConfigError(f"{where}: only codecs have random maps to start from, not {type(scheme).__name__}")
        if cell.start not in {None, RANDOM} and cell in chosen:
            _check_start(cell, schemes, chosen, config, workdir)


def _check_start(
    cell: Cell, before: dict[str, Scheme], chosen: Sequence[Cell], config: ModelConfig, workdir: pathlib.Path
) -> None:
    """`before` has the cells above this one, and itself."""
    start = str(cell.start)
    if start not in before or start == cell.name:
        raise ConfigError(f"cell {cell.name!r}: starts from {start!r}, and no cell above it has that name")
    mine, others = before[cell.name], before[start]
    if (mine.interchange, mine.map_shapes(config)) != (others.interchange, others.map_shapes(config)):
        raise ConfigError(f"cell {cell.name!r}: starts from {start!r}, whose maps have other shapes")
    if all(other.name != start for other in chosen) and not _result(workdir, start).exists():
        raise ConfigError(f"cell {cell.name!r}: starts from {start!r}, which has no result yet: add it to --cells")


class Data(NamedTuple):
    """Text that all cells share."""

    calibration: Int[np.ndarray, "N S"]
    held_out: Int[np.ndarray, "N S"]
    filler: synthetic.Filler

    @classmethod
    def of(cls, job: Comparison, model: Model) -> Data:
        """Reads it, from the sources of distillation."""
        sources, sizes = job.distill.sources, job.evaluation
        held_out = pipeline.sequences(
            sources, model.tokenizer, sizes.sequences, sizes.tokens, held_out=True, seed=sizes.seed
        )
        filler = pipeline.task_filler(model.tokenizer, held_out=True)
        return cls(job.calibration.rows(model, sources, job.seed), held_out, filler)


def run_cell(job: Comparison, cell: Cell, model: Model, data: Data, workdir: pathlib.Path) -> Row:
    """Calibrates, trains and measures one cell, from where an earlier start left it."""
    scheme, folder = registry.from_entries(cell.scheme), _folder(workdir, cell.name)

    def start() -> Attention:
        if cell.start is None:
            return calibrate(model, scheme, data.calibration)
        if cell.start == RANDOM and isinstance(scheme, Codec):
            return random_maps(scheme, model.config, job.seed)
        return read_maps(_folder(workdir, cell.start) / EXPORT, scheme, model.config)

    def fit() -> Attention:
        initial = kept_maps(folder / "initial", scheme, model.config, start)
        if cell.training == "none":
            return initial
        train, config = TRAINING[cell.training], getattr(job, cell.training)
        if cell.output_weight is not None:
            config = dataclasses.replace(config, output_weight=cell.output_weight)
        return train(model, initial, model.tokenizer, config, folder)

    if scheme.map_shapes(model.config) and not (folder / EXPORT).exists():
        hub_id = None if pathlib.Path(job.model).is_dir() else job.model
        export(model, fit(), folder / EXPORT, maps_only=True, base_id=hub_id)
    fitted = read_maps(folder / EXPORT, scheme, model.config)
    measured = measure(model, cell.name, fitted, data.held_out, data.filler, job.evaluation)
    return Row(cell.name, cell.curve, cell.scheme, cell.training, measured)


def finished(job: Comparison, workdir: pathlib.Path) -> list[Row]:
    """The results in `workdir`, those of earlier runs among them, in the order of the cells."""
    results = [_result(workdir, cell.name) for cell in job.cells]
    exact = dacite.Config(strict=True, cast=[tuple])
    return [dacite.from_dict(Row, read_json(path), exact) for path in results if path.exists()]


def _folder(workdir: pathlib.Path, name: str) -> pathlib.Path:
    return workdir / "cells" / name


def _result(workdir: pathlib.Path, name: str) -> pathlib.Path:
    return _folder(workdir, name) / "result.json"
