"""What the sweeps share: maps at many sizes, fitted in closed form or by a short training, and what is measured.

Whatever took time lies in the work directory: trainings in `fits`, where their own checkpoints take them up again, and
every measured cell as one file in `cells`. Analyses that need the same cell find it there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from tqdm.auto import tqdm

from hla_jax import tensor_files
from hla_jax.analysis.analyses import Subject
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention, Scheme, SchemeError
from hla_jax.calibration.calibrate import calibrate
from hla_jax.calibration.random import random_maps
from hla_jax.config import ConfigError, ModelConfig, read_json
from hla_jax.data.positions import ShiftConfig
from hla_jax.evaluation import tasks
from hla_jax.evaluation.accuracy import complete
from hla_jax.evaluation.fidelity import attention_divergence, compare_decoding
from hla_jax.evaluation.schemes import FULL, HLA_PAPER
from hla_jax.evaluation.task import Options
from hla_jax.training.distill import HELD_OUT, DistillConfig, distill
from hla_jax.training.uptrain import UptrainConfig, uptrain

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ShiftSweep:
    """Two continuations of the uptraining of `Sweeps.scheme`, and how their queries are moved.

    Attributes:
      uptrain: of both, without shifted positions.
      shift: of the one that has them.
      by: positions by which queries are moved.
      queries, gap: see `divergence.by_shift`.
    """

    uptrain: UptrainConfig
    shift: ShiftConfig
    by: tuple[int, ...]
    queries: int
    gap: int


@dataclasses.dataclass(frozen=True)
class Passkey:
    """Questions that need one thing from far back.

    Attributes:
      kind: family of `evaluation.tasks`: "passkey", or the embedded model's own "recall".
      schemes: LLA's sizes; they are distilled.
      contexts: tokens, as they stand in the tasks' names.
      questions: of each context.
      batch_size: asked at a time.
    """

    kind: str
    schemes: tuple[LLA, ...]
    contexts: tuple[int, ...]
    questions: int
    batch_size: int


@dataclasses.dataclass(frozen=True)
class StepSweep:
    """A model that is run with several numbers of loops.

    Attributes:
      numbers: of loops.
      ranks: of HLA's main latent, keys and values alike.
      rank_loop1: of its loop-1 latent.
      ratios: by which LLA makes the cache smaller.
    """

    numbers: tuple[int, ...]
    ranks: tuple[int, ...]
    rank_loop1: int
    ratios: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Sweeps:
    """Everything that decides the sweeps, besides the model and the rows of text.

    Attributes:
      scheme: HLA's sizes in the middle of the sweeps.
      rank_k, rank_v, rank_loop1: one at a time in the scheme's place, without a window.
      trained: sizes that are measured before and after uptraining.
      windows: in the scheme's place, before and after uptraining.
      rows: held-out rows on which a cell is measured, if there are as many.
      prompt: tokens of each of them that are read in one exact pass; the others are decoded.
      batch_size: rows at a time.
      uptrain: of every cell.
      shifted: see there.
      lla: the sizes whose start is compared.
      distill: of LLA's maps.
      passkey: see there.
      steps: see there; None for a model whose number of loops is fixed.
      seed: of random maps and questions.
    """

    scheme: HLA
    rank_k: tuple[int, ...]
    rank_v: tuple[int, ...]
    rank_loop1: tuple[int, ...]
    trained: tuple[HLA, ...]
    windows: tuple[int, ...]
    rows: int
    prompt: int
    batch_size: int
    uptrain: UptrainConfig
    shifted: ShiftSweep
    lla: LLA
    distill: DistillConfig
    passkey: Passkey
    steps: StepSweep | None = None
    seed: int = 0

    @property
    def largest(self) -> HLA:
        """Every rank as large as it comes."""
        all_of = lambda name: max(getattr(scheme, name) for scheme in (self.scheme, *self.trained))
        ranks = {name: max(*getattr(self, name), all_of(name)) for name in ("rank_k", "rank_v", "rank_loop1")}
        return dataclasses.replace(self.scheme, window=0, **ranks)

    def check(self, config: ModelConfig, tokens: int) -> None:
        """Raises `SchemeError` where a size does not fit the model, and `ConfigError` where held-out rows of `tokens`
        are too short.
        """
        needed = max(self.prompt + 1, self.shifted.gap + self.shifted.queries)
        if tokens < needed:
            raise ConfigError(f"--tokens: the sweeps of --config need rows of at least {needed} tokens, found {tokens}")
        for scheme in (self.scheme, self.largest, *self.trained, self.lla, *self.passkey.schemes):
            try:
                scheme.check(config)
            except SchemeError as error:
                raise SchemeError(f"--config: {type(scheme).__name__} of the sweeps: {error}") from None

    def claims(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """What decides the cells, which all sweeps share, and which cells each sweep has."""
        whole = json.loads(json.dumps(dataclasses.asdict(self)))
        whole["questions"] = self.passkey.questions
        cells = ("rows", "prompt", "uptrain", "shifted", "distill", "questions", "seed")
        own = {
            "rank_sweep": ("scheme", "rank_k", "rank_v", "rank_loop1", "trained"),
            "window_sweep": ("scheme", "windows"),
            "divergence_uptrained": ("scheme",),
            "shifted_positions": ("scheme",),
            "initialisation": ("lla",),
            "passkey": ("scheme", "passkey"),
            "steps": ("steps",),
            "quality": (),
        }
        pick = lambda names: {name: whole[name] for name in names}
        return pick(cells), {analysis: pick(names) for analysis, names in own.items()}


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model and its rows, the sweeps' sizes, and the work directory; `compared` is that of `experiments.compare`."""

    subject: Subject
    sweeps: Sweeps
    workdir: pathlib.Path
    compared: str | None = None

    # Maps.

    @functools.cached_property
    def initial(self) -> Attention:
        """HLA in closed form at the largest ranks: the smaller ones are parts of it."""
        return calibrate(self.subject.model, self.sweeps.largest, self.subject.rows)

    def closed_form(self, scheme: HLA) -> Attention:
        """HLA as `calibrate` gives it."""
        return resized(self.initial, scheme, self.subject.model.config)

    def uptrained(self, scheme: HLA) -> Attention:
        """HLA after the short uptraining."""
        model, config = self.subject.model, self.sweeps.uptrain
        return uptrain(model, self.closed_form(scheme), model.tokenizer, config, self._fit(label(scheme)))

    def continued(self, shifted: bool) -> Attention:
        """The uptrained scheme after a continuation with or without shifted positions."""
        model, sweep, scheme = self.subject.model, self.sweeps.shifted, self.sweeps.scheme
        config = dataclasses.replace(sweep.uptrain, shift=sweep.shift if shifted else None)
        name = f"{label(scheme)} {'with' if shifted else 'without'} shifts"
        return uptrain(model, self.uptrained(scheme), model.tokenizer, config, self._fit(name))

    def distilled(self, scheme: LLA, random: bool = False) -> Attention:
        """LLA after distillation, from closed-form or random maps."""
        model = self.subject.model
        start = (
            random_maps(scheme, model.config, self.sweeps.seed)
            if random
            else calibrate(model, scheme, self.subject.rows)
        )
        return distill(model, start, model.tokenizer, self.sweeps.distill, self._lla_fit(scheme, random))

    def fitted(self, scheme: Scheme) -> Attention:
        """HLA uptrained, LLA distilled, and what has no maps as it is."""
        if isinstance(scheme, HLA):
            return self.uptrained(scheme)
        return self.distilled(scheme) if isinstance(scheme, LLA) else Attention(scheme)

    def held_out_curve(self, scheme: LLA, random: bool) -> Result:
        """Steps and held-out KL of a distillation that is over."""
        metrics = self._lla_fit(scheme, random) / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        followed = [(line["step"], line[HELD_OUT]) for line in lines if HELD_OUT in line]
        return {"steps": [step for step, _ in followed], "kl": [kl for _, kl in followed]}

    # What is measured of them.

    def measured(self, scheme: HLA, trained: bool) -> Result:
        """Attention by loop, and decoding, on the held-out rows; before or after uptraining."""

        def make() -> Result:
            model, rows = self.subject.model, self.subject.held_out_rows[: self.sweeps.rows]
            attention = self.uptrained(scheme) if trained else self.closed_form(scheme)
            # At one size, so that one program serves all ranks.
            size = dataclasses.replace(self.sweeps.largest, window=scheme.window)
            attention = resized(attention, size, model.config)
            near = attention_divergence(model, attention, rows, batch_size=self.sweeps.batch_size)
            schemes = {FULL: Attention(FullCache()), HLA_PAPER: attention}
            decoded = compare_decoding(model, schemes, rows, self.sweeps.prompt, batch_size=self.sweeps.batch_size)
            return {
                "kl": near.kl,
                "error": near.error,
                "decoding_kl": dataclasses.asdict(decoded[HLA_PAPER].kl),
                "top1": dataclasses.asdict(decoded[HLA_PAPER].top1),
            }

        return self.kept(f"{label(scheme)} {'uptrained' if trained else 'initial'}", make)

    def ask(self, attention: Attention, context: int) -> int:
        """How many of the questions of one context are answered rightly, greedily. Raises `TaskError` for an unknown
        kind.
        """
        sweep, model = self.sweeps.passkey, self.subject.model
        task = tasks.make(f"{sweep.kind}_{context}", Options(limit=sweep.questions, seed=self.sweeps.seed))
        items = task.items(model.tokenizer)
        right = 0.0
        for start in tqdm(range(0, len(items), sweep.batch_size), desc=task.name, unit="batch", leave=False):
            part = items[start : start + sweep.batch_size]
            prompts = [item.prompt for item in part]
            ((_, texts),) = complete(model, {"": attention}, prompts, task.settings.max_new_tokens)
            right += sum(task.score(item, text)["correct"] for item, text in zip(part, texts, strict=True))
        return round(right)

    def comparison(self) -> Result:
        """Command and rows of the comparison's `results.json`. Raises `ConfigError` where there is none."""
        if self.compared is None:
            raise ConfigError("quality: needs the work directory of experiments.compare")
        found = read_json(pathlib.Path(self.compared) / "results.json")
        rows = [{name: value for name, value in row.items() if name != "summary"} for row in found["rows"]]
        return {"command": found["command"], "rows": rows}

    def kept(self, name: str, make: Callable[[], Mapping[str, Any]]) -> Result:
        """A cell of that name, made unless an earlier run left it."""
        path = self.workdir / "cells" / f"{name}.json"
        if not path.exists():
            found = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            with tensor_files.new_file(path) as partial:
                tensor_files.write_json(partial, found)
        return read_json(path)

    def _fit(self, name: str) -> pathlib.Path:
        return self.workdir / "fits" / name

    def _lla_fit(self, scheme: LLA, random: bool) -> pathlib.Path:
        return self._fit(f"LLA {scheme.rank_k}-{scheme.rank_v}{' from random maps' if random else ''}")


def resized(attention: Attention, scheme: Scheme, config: ModelConfig) -> Attention:
    """The maps of HLA or LLA at other ranks, HLA's also with another window.

    Closed-form maps have the leading directions first, so a part of them is what `calibrate` gives the smaller scheme.
    Zeros behind the maps change no score and no output.
    """
    shapes = scheme.map_shapes(config)

    def fit(name: str, value: jnp.ndarray) -> jnp.ndarray:
        part = value[(slice(None), *map(slice, shapes[name]))]
        return jnp.pad(part, [(0, 0), *((0, size - have) for size, have in zip(shapes[name], part.shape[1:]))])

    return Attention(scheme, {name: fit(name, value) for name, value in attention.params.items()})


def label(scheme: HLA) -> str:
    """A name for files."""
    return f"HLA {scheme.rank_k}-{scheme.rank_v}-{scheme.rank_loop1} window {scheme.window}"
