"""The whole evaluation of HLA on one model, before and after uptraining, next to the baselines."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import pathlib
import platform

import jax

from hla_jax.attention.scheme import Attention
from hla_jax.config import ConfigError
from hla_jax.data import pipeline, synthetic
from hla_jax.data.pipeline import Source
from hla_jax.evaluation.accuracy import score_tasks
from hla_jax.evaluation.fidelity import attention_divergence, compare_decoding
from hla_jax.evaluation.memory import cache_memory
from hla_jax.evaluation.results import Results
from hla_jax.evaluation.schemes import HLA_INITIAL, HLA_UPTRAINED, side_by_side
from hla_jax.evaluation.speed import decode_speed
from hla_jax.evaluation.synthetic_tasks import Setting
from hla_jax.model import Model

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers")
_TASKS = {task.kind: task for task in (synthetic.Recall(), synthetic.Tracking(), synthetic.Chain())}


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Sizes of an evaluation.

    Attributes:
      sequences, tokens: held-out text for the divergences: rows, and tokens of each.
      prompt: tokens of each row that are read in one exact pass; the others are decoded through the caches.
      batch_size: rows at a time.
      tasks: kinds of questions; empty for a model that was not trained on them.
      lengths: (tokens of a question, distance of what it needs), each asked of every task.
      examples: questions of each task and length.
      contexts: context lengths of the speed and the bytes.
      speed_batch, speed_tokens, speed_rounds: of the speed, see `evaluation.speed`.
      seed: of text and questions.
    """

    sequences: int = 16
    tokens: int = 256
    prompt: int = 96
    batch_size: int = 16
    tasks: tuple[str, ...] = ("recall", "tracking", "chain")
    lengths: tuple[tuple[int, int], ...] = ((192, 64), (512, 256))
    examples: int = 32
    contexts: tuple[int, ...] = (256, 1024, 4096)
    speed_batch: int = 1
    speed_tokens: int = 8
    speed_rounds: int = 5
    seed: int = 0


def task_settings(config: EvaluationConfig) -> list[Setting]:
    """Every task at every length. Raises `ConfigError` for a task that does not exist."""
    if unknown := sorted(set(config.tasks) - set(_TASKS)):
        raise ConfigError(f"evaluation.tasks: expected some of {', '.join(_TASKS)}; found {unknown[0]!r}")
    return [
        Setting(_TASKS[kind], length, distance)
        for kind, (length, distance) in itertools.product(config.tasks, config.lengths)
    ]


def evaluate(
    model: Model,
    initial: Attention,
    uptrained: Attention,
    sources: tuple[Source, ...],
    config: EvaluationConfig,
    *,
    command: str,
    metrics: pathlib.Path | None = None,
) -> Results:
    """Measures everything that the report shows.

    Args:
      model: the exact model, with a tokenizer.
      initial, uptrained: HLA before and after uptraining.
      sources: mixture whose held-out part is decoded.
      config: sizes.
      command: noted in the results.
      metrics: `metrics.jsonl` of the uptraining, for its curves.
    """
    schemes = side_by_side(initial, uptrained)
    rows = pipeline.sequences(
        sources, model.tokenizer, config.sequences, config.tokens, held_out=True, seed=config.seed
    )
    settings = task_settings(config)
    filler = pipeline.task_filler(model.tokenizer, held_out=True)
    dtype = model.params["embed_tokens"].dtype
    return Results(
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        device=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        model={"path": model.path.name if model.path else None, **dataclasses.asdict(model.config)},
        scheme=uptrained.scheme.to_config(),
        dtype=str(dtype),
        settings=dataclasses.asdict(config),
        attention={name: attention_divergence(model, schemes[name], rows) for name in (HLA_INITIAL, HLA_UPTRAINED)},
        decoding=compare_decoding(model, schemes, rows, config.prompt, batch_size=config.batch_size),
        tasks=score_tasks(model, schemes, settings, filler, examples=config.examples, seed=config.seed)
        if settings
        else [],
        memory=cache_memory(model.config, schemes, config.contexts, dtype),
        speed=decode_speed(
            model,
            schemes,
            config.contexts,
            batch=config.speed_batch,
            new_tokens=config.speed_tokens,
            rounds=config.speed_rounds,
        ),
        training=[] if metrics is None else [json.loads(line) for line in metrics.read_text().splitlines()],
    )
