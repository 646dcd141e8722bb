"""Fine-tuning as one function: with each cache, from the same model on the same conversations; evaluate, export, check
the export, report side by side.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from hla_jax import sharding, tensor_files
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention, Maps, Scheme
from hla_jax.banner import banner
from hla_jax.config import ConfigError, ModelConfig, read_json
from hla_jax.data.supervised import conversations, make_batch, single_rows
from hla_jax.evaluation import answers, finetune_report
from hla_jax.evaluation.answers import Rows
from hla_jax.evaluation.schemes import FULL, HLA_PAPER
from hla_jax.model import Model, load
from hla_jax.models.stages import Params
from hla_jax.recipes.workdir import check_reload, claim
from hla_jax.serving.export import export
from hla_jax.sharding import MeshConfig
from hla_jax.training.finetune import FinetuneConfig, finetune
from hla_jax.training.two_pass import exact_hidden, two_pass_hidden

if TYPE_CHECKING:
    from jaxtyping import Float

_CHECK_PROMPTS, _CHECK_TOKENS = 4, 16


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out conversations that are scored before and after fine-tuning, each alone in its row.

    Attributes:
      conversations: how many.
      longest: tokens of the longest; longer ones are passed over.
      batch_size: conversations at a time.
    """

    conversations: int
    longest: int
    batch_size: int = 16


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that decides a run.

    Attributes:
      model: a directory or hub id; for HLA, one that brings its maps, such as an export of uptraining.
      dtype: that the base weights are rounded to in every step; what trains is float32.
      caches: "full cache" for standard fine-tuning, "HLA" for two passes; each is fine-tuned from the same start.
      finetune, evaluation: see there.
      mesh: sizes of the mesh over all devices of all processes; None computes on one device.
    """

    model: str
    dtype: str
    caches: tuple[str, ...]
    finetune: FinetuneConfig
    evaluation: Evaluation
    mesh: MeshConfig | None = None

    def __post_init__(self) -> None:
        if not self.caches or set(self.caches) - {FULL, HLA_PAPER}:
            raise ValueError(f"caches must be some of {FULL!r} and {HLA_PAPER!r}; found {self.caches}")


def run(job: Job, workdir: pathlib.Path, title: str) -> pathlib.Path:
    """Fine-tunes with the caches that `workdir` has no result of yet, and writes the report of all.

    Where several processes share the devices, they only train; the same command in one process does the rest.

    Returns:
      The path of the report, or of `workdir` if there is more to do.

    Raises:
      ConfigError: the model brings no HLA, or `workdir` belongs to another job or cannot be written.
      DataError: conversations that cannot be read.
      WeightsError: the reloaded export does not give the same tokens.
    """
    mesh = sharding.of_job(job.mesh)
    model = load(job.model, job.dtype, mesh)
    if HLA_PAPER in job.caches and not isinstance(model.attention.scheme, HLA):
        found = type(model.attention.scheme).__name__
        raise ConfigError(f"{job.model}: expected a model with HLA's maps, found {found}; fit them with uptraining")
    # A run may continue on other devices.
    claim(workdir, {key: value for key, value in dataclasses.asdict(job).items() if key != "mesh"})
    print(
        banner(
            title,
            dtype=job.dtype,
            dtype_reason="the config's choice to compute in; what trains is float32",
            attention="jnp, block-wise",
            attention_reason="differentiated through",
            mesh=mesh,
        )
    )
    if jax.process_count() > 1:
        for cache in job.caches:
            finetune(model, attention_of(model, cache), job.finetune, _folder(workdir, cache), mesh)
        print("trained; the same command in one process exports and evaluates")
        return workdir
    rows = held_out_rows(job, model)
    for cache in job.caches:
        folder = _folder(workdir, cache)
        if not (folder / "result.json").exists():
            result = run_one(job, model, cache, rows, folder, mesh)
            with tensor_files.new_file(folder / "result.json") as partial:
                tensor_files.write_json(partial, result)
    results = {cache: read_json(_folder(workdir, cache) / "result.json") for cache in job.caches}
    return finetune_report.write_report({"command": title, "job": _plain(job), "caches": results}, workdir)


def attention_of(model: Model, cache: str) -> Attention:
    """The model's own HLA, or the full cache."""
    return model.attention if cache == HLA_PAPER else Attention(FullCache())


def run_one(
    job: Job, model: Model, cache: str, rows: Rows, folder: pathlib.Path, mesh: Mesh | None = None
) -> dict[str, Any]:
    """Fine-tunes with one cache, leaves `export/` in its folder, and returns its scores."""
    tuned = finetune(model, attention_of(model, cache), job.finetune, folder, mesh)
    if mesh is not None:
        # Decoding is not spread over a mesh: its kernels run on one device.
        model, tuned = _on_one_device(model), dataclasses.replace(tuned, model=_on_one_device(tuned.model))
    before = score(job, model, attention_of(model, cache), rows)
    counts = tuned.counts
    print(f"{cache}: {counts['conversations']} conversations read, {counts['dropped']} too long, {counts['cut']} cut")
    shutil.rmtree(folder / "export", ignore_errors=True)
    export(tuned.model, None, folder / "export")
    first = (rows["response"] > 0).argmax(axis=1)[:_CHECK_PROMPTS]
    prompts = [rows["tokens"][row, :start].tolist() for row, start in enumerate(first)]
    check_reload(folder / "export", tuned.model, tuned.model.attention, prompts, _CHECK_TOKENS)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    after = score(job, tuned.model, tuned.model.attention, rows)
    return {"counts": counts, "before": before, "after": after, "training": lines}


def _folder(workdir: pathlib.Path, cache: str) -> pathlib.Path:
    return workdir / cache.replace(" ", "_")


def _on_one_device(model: Model) -> Model:
    params, maps = sharding.on_one_device((model.params, model.attention.params))
    return dataclasses.replace(model, params=params, attention=dataclasses.replace(model.attention, params=maps))


def held_out_rows(job: Job, model: Model) -> Rows:
    """The conversations to score, one a row."""
    stream = conversations(job.finetune.sources, model.tokenizer, held_out=True, seed=job.finetune.seed)
    sizes = job.evaluation
    examples = single_rows(stream, model.tokenizer, model.stop_tokens, sizes.conversations, sizes.longest)
    longest = max(len(example.tokens) for example in examples)
    return make_batch(examples, [[index] for index in range(len(examples))], longest)


def score(job: Job, model: Model, attention: Attention, rows: Rows) -> dict[str, list[float]]:
    """By conversation: `loss`, the cross-entropy as training computes it, in nats a response token; `decoded_loss`, the
    same token by token through the cache; `right`, the fraction of its answers that greedy decoding gives exactly.
    """
    hidden = functools.partial(
        _hidden, model.params, attention.params, model.config, attention.scheme, job.finetune.repetitions
    )
    on_device = lambda part: hidden(jax.tree.map(jnp.asarray, part))
    trained = answers.in_parallel(model.params, rows, on_device, job.evaluation.batch_size)
    prompts = (rows["response"] > 0).argmax(axis=1)
    decoded = answers.decoded(
        model.params, model.config, attention, rows, np.maximum(prompts, 1), job.evaluation.batch_size
    )
    return {
        "loss": trained.cross_entropy.tolist(),
        "decoded_loss": decoded.cross_entropy.tolist(),
        "right": decoded.right.tolist(),
    }


@functools.partial(jax.jit, static_argnames=("config", "scheme", "repetitions"))
def _hidden(
    params: Params, maps: Maps, config: ModelConfig, scheme: Scheme, repetitions: int, rows: dict[str, Array]
) -> Float[Array, "B S d"]:
    """As training computes them."""
    tokens, segments = rows["tokens"], rows["segments"]
    if not isinstance(scheme, HLA):
        return exact_hidden(params, config, tokens, segments)
    response = rows["response"] > 0
    return two_pass_hidden(params, maps, scheme, config, tokens, response, segments, repetitions=repetitions)


def _plain(job: Job) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(job)))
