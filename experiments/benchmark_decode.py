"""Decoding speed and bytes of the caches of one model, side by side in one run.

    python -m experiments.benchmark_decode --model=runs/nano_hla/export --contexts=1024,4096,16384 --workdir=runs/decode

Compares the full cache, the model's own HLA, single-loop sharing at the same window, and final-loop reuse. A model
without HLA gets random maps with the sizes `--hla`: they take the same time as fitted ones. Prints a table, and leaves
`speed.json` and `speed.png` in the work directory.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

import jax
import jax.numpy as jnp
from absl import app, flags

import hla_jax
from hla_jax import tensor_files
from hla_jax.analysis import figures
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention
from hla_jax.banner import banner
from hla_jax.evaluation import report
from hla_jax.evaluation.memory import cache_memory
from hla_jax.evaluation.schemes import FULL, NAMES, side_by_side
from hla_jax.evaluation.speed import decode_speed
from hla_jax.model import Model

_MODEL = flags.DEFINE_string("model", None, "Directory or hub id.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Of weights and caches.")
_CONTEXTS = flags.DEFINE_list("contexts", ["1024", "4096"], "Tokens stored before decoding starts.")
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences decoded together.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 16, "Tokens timed at once.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Repetitions, of which the median counts.", lower_bound=1)
_SCHEMES = flags.DEFINE_multi_enum("schemes", None, [*NAMES], "Only these; the full cache always.")
_HLA = flags.DEFINE_list("hla", ["512", "512", "256", "128"], "rank_k, rank_v, rank_loop1, window for a model without.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    model = hla_jax.load(_MODEL.value, _DTYPE.value)
    print(
        banner(
            "benchmark_decode",
            dtype=_DTYPE.value,
            dtype_reason="--dtype",
            attention="jnp",
            attention_reason="the reference decode step",
        )
    )
    own = model.attention
    if not isinstance(own.scheme, HLA):
        rank_k, rank_v, rank_loop1, window = map(int, _HLA.value)
        own = random_hla(model, HLA(rank_k, rank_v, rank_loop1, window))
    schemes = side_by_side(own, own)
    if _SCHEMES.value:
        schemes = {name: schemes[name] for name in (FULL, *_SCHEMES.value)}
    contexts = [int(context) for context in _CONTEXTS.value]
    memory = cache_memory(model.config, schemes, contexts, _DTYPE.value)
    speeds = decode_speed(model, schemes, contexts, batch=_BATCH.value, new_tokens=_TOKENS.value, rounds=_ROUNDS.value)
    print("\n".join([*report.speed_table(speeds), "", *report.memory_table(memory)]))
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    figures.save(report.speed_figure(speeds, NAMES), workdir / "speed.png")
    found = {
        "speed": [dataclasses.asdict(speed) for speed in speeds],
        "memory": {name: dataclasses.asdict(one) for name, one in memory.items()},
    }
    tensor_files.write_json(workdir / ".speed.json.partial", found)
    os.replace(workdir / ".speed.json.partial", workdir / "speed.json")


def random_hla(model: Model, scheme: HLA) -> Attention:
    """HLA with random maps for a model that has none. Raises `SchemeError` if the sizes do not fit the model."""
    scheme.check(model.config)
    shapes = scheme.map_shapes(model.config)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    dtype = model.params["embed_tokens"].dtype

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, (model.config.num_layers, *shape), dtype) / jnp.sqrt(shape[-1]).astype(dtype)

    return Attention(scheme, {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items())})


if __name__ == "__main__":
    app.run(main)
