"""Time and memory of the loss of uptraining and its gradient, for one layer and loop, side by side in one run.

    python -m experiments.benchmark_match --workdir=runs/match                                    # Ouro-1.4B's layer
    python -m experiments.benchmark_match --workdir=runs/match --heads=2 --head_dim=64 --rank_k=128 --rank_v=128 \
        --dtype=float32 --rounds=1          # a narrow layer, for a CPU

Compares the direct formula, the blockwise one and, on a TPU, the kernels. `planned` are the temporaries in XLA's plan;
`peak` is what the process's resident set grew by at its peak (on a CPU, where each case has a process of its own). What
plans more than `--run_up_to_gib` is not run. Prints a table, and leaves `match.json` in the work directory.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from experiments import command_line
from experiments.processes import in_fresh_process, memory
from hla_jax import tensor_files
from hla_jax.banner import banner
from hla_jax.evaluation.markdown import table
from hla_jax.kernels import implementations
from hla_jax.kernels.attention_match import Fitted, Fixed, api

MIB = 1 << 20
COLUMNS = ("implementation", "tokens", "queries", "planned_mib", "peak_mib", "seconds")

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_TOKENS = flags.DEFINE_list("tokens", ["2048", "4096", "8192", "16384"], "Lengths of the document.")
_QUERIES = flags.DEFINE_integer("queries", None, "Queries of a document; by default all its tokens.", lower_bound=1)
_IMPLEMENTATIONS = flags.DEFINE_list("implementations", None, "By default all that run here.")
_HEADS = flags.DEFINE_integer("heads", 16, "Query heads.", lower_bound=1)
_KV_HEADS = flags.DEFINE_integer("kv_heads", None, "Key-value heads; by default as many.", lower_bound=1)
_HEAD_DIM = flags.DEFINE_integer("head_dim", 128, "Size of a head.", lower_bound=1)
_RANK_K = flags.DEFINE_integer("rank_k", 512, "Of the key latent.", lower_bound=1)
_RANK_V = flags.DEFINE_integer("rank_v", 512, "Of the value latent.", lower_bound=1)
_WINDOW = flags.DEFINE_integer("window", 128, "Tokens read exactly.", lower_bound=0)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of all inputs.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Repetitions, of which the median counts.", lower_bound=1)
_PLAN_ONLY = flags.DEFINE_bool("plan_only", False, "Compile only.")
_RUN_UP_TO_GIB = flags.DEFINE_float("run_up_to_gib", 4, "Larger plans are not run.", lower_bound=0)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and the type of its numbers."""

    heads: int
    kv_heads: int
    head_dim: int
    rank_k: int
    rank_v: int
    window: int
    dtype: str


def measure(layer: Layer, implementation: str, tokens: int, queries: int, rounds: int, limit: int) -> dict[str, Any]:
    """One case. Runs nothing if the plan takes more than `limit` bytes."""

    def loss(fitted: Fitted, fixed: Fixed, index: jax.Array, counted: jax.Array) -> tuple[jax.Array, Any]:
        return api.attention_match(fitted, fixed, index, counted, layer.window, implementation)

    inputs = jax.eval_shape(lambda: draw(layer, tokens, queries))
    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*inputs).compile()
    plan: Any = compiled.memory_analysis()
    found = {"implementation": implementation, "tokens": tokens, "queries": queries}
    found["planned_mib"] = round(plan.temp_size_in_bytes / MIB, 1)
    if plan.temp_size_in_bytes > limit:
        return found
    inputs = jax.block_until_ready(jax.jit(lambda: draw(layer, tokens, queries))())
    on_cpu = implementations.platform() == "cpu"
    before = memory("VmRSS") if on_cpu else 0
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        seconds.append(time.perf_counter() - start)
    peak = {"peak_mib": round((memory("VmHWM") - before) / MIB, 1)} if on_cpu else {}
    return found | peak | {"seconds": round(statistics.median(seconds), 4)}


def draw(layer: Layer, tokens: int, queries: int) -> tuple[Fitted, Fixed, jax.Array, jax.Array]:
    """Random inputs: one document, its queries spread evenly."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, layer.dtype)
    heads, size, hidden = layer.heads, layer.head_dim, layer.heads * layer.head_dim
    fitted = Fitted(
        normal(1, queries, heads, layer.rank_k),
        normal(1, tokens, layer.rank_k),
        normal(1, tokens, layer.rank_v),
        normal(heads, layer.rank_v, size) / layer.rank_v**0.5,
    )
    k, v = normal(1, tokens, layer.kv_heads, size), normal(1, tokens, layer.kv_heads, size)
    o_proj = normal(hidden, hidden) / hidden**0.5
    fixed = Fixed(normal(1, queries, heads, size), k, v, o_proj, jnp.ones((1, tokens), jnp.int32))
    index = (jnp.arange(queries) * tokens // queries)[None]
    return fitted, fixed, index, jnp.full((1, queries), 1 / queries, jnp.float32)


def main() -> None:
    chosen, reason = api.choose()
    print(
        banner("benchmark_match", dtype=_DTYPE.value, dtype_reason="--dtype", attention=chosen, attention_reason=reason)
    )
    names = _IMPLEMENTATIONS.value or list(dict.fromkeys(["reference", "blockwise", chosen]))
    for name in names:
        api.choose(name)
    layer = Layer(
        _HEADS.value,
        _KV_HEADS.value or _HEADS.value,
        _HEAD_DIM.value,
        _RANK_K.value,
        _RANK_V.value,
        _WINDOW.value,
        _DTYPE.value,
    )
    limit = -1 if _PLAN_ONLY.value else int(_RUN_UP_TO_GIB.value * (1 << 30))
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    cases = [
        (layer, name, tokens, min(_QUERIES.value or tokens, tokens), _ROUNDS.value, limit)
        for tokens in map(int, _TOKENS.value)
        for name in names
    ]
    rows: list[dict[str, Any]] = []
    for case in cases:
        # An accelerator belongs to one process.
        on_cpu = implementations.platform() == "cpu"
        rows.append(in_fresh_process(measure, *case) if on_cpu else measure(*case))
        print(rows[-1])
        found = {"layer": dataclasses.asdict(layer), "platform": implementations.platform(), "match": rows}
        tensor_files.write_json(workdir / ".match.json.partial", found)
        os.replace(workdir / ".match.json.partial", workdir / "match.json")
    print("\n".join(table(COLUMNS, [[str(row.get(column, "-")) for column in COLUMNS] for row in rows])))


if __name__ == "__main__":
    command_line.run(main)
