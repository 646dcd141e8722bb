"""Measures the peak memory of prefilling prompts of 1K to 16K tokens into the full cache, HLA's and LLA's.

    python -m experiments.measure_prefill --workdir=runs/prefill      # 15 minutes on 2 cores
    python -m experiments.measure_prefill --workdir=runs/long --tokens=8192,16384,32768,65536 --plan_only    # 3 minutes

LLA reads a prompt twice: exactly, and through its latents, one layer and loop at a time. A narrow random model (d =
128; by default 8 layers, 4 loops, 2 heads) in float32; every length and scheme in a process of its own. Leaves
prefill.json, prefill.md and prefill.png. `peak` is what the process's resident set grew by at its peak, `planned` what
XLA's plan of the compiled prefill says it needs beside weights and prompt: the cache and its temporaries.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from absl import app, flags
from tqdm import tqdm

import hla_jax
from experiments.processes import in_fresh_process, memory
from hla_jax.attention.scheme import Attention
from hla_jax.config import OuroConfig
from hla_jax.evaluation import markdown
from hla_jax.generation import decode
from hla_jax.models import weights

CONFIG = OuroConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=352,
    num_layers=8,
    num_loops=4,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    max_position_embeddings=1 << 16,
    tie_word_embeddings=False,
)
SCHEMES = {
    "full cache": hla_jax.FullCache(),
    "HLA": hla_jax.HLA(rank_k=64, rank_v=64, rank_loop1=64, window=32),
    "LLA": hla_jax.LLA(rank_k=48, rank_v=80),
}
MIB = 1 << 20
COLUMNS = ("scheme", "tokens", "all_keys_values", "cache", "planned", "peak", "seconds")


def measure(config: OuroConfig, plan_only: bool, scheme: str, tokens: int) -> dict[str, Any]:
    """One prefill; sizes in MiB. To be called in a fresh process."""
    params = weights.init_params(config, jax.random.key(0))
    kind = SCHEMES[scheme]
    draw = lambda shape: jnp.asarray(np.random.default_rng(0).normal(size=(config.num_layers, *shape)), jnp.float32)
    attention = Attention(kind, {name: draw(shape) for name, shape in kind.map_shapes(config).items()})
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (1, tokens)), jnp.int32)
    lengths = jnp.asarray([tokens])
    prefill = decode.prefill.lower(params, config, attention, prompt, lengths, tokens).compile()
    plan: Any = prefill.memory_analysis()
    before, start = memory("VmRSS"), time.perf_counter()
    if not plan_only:
        jax.block_until_ready(prefill(params, attention, prompt, lengths))
    seconds = time.perf_counter() - start
    sizes = {
        "all_keys_values": SCHEMES["full cache"].cache_bytes(config, tokens, "float32"),
        "cache": kind.cache_bytes(config, tokens, "float32"),
        "planned": plan.output_size_in_bytes + plan.temp_size_in_bytes,
    } | ({} if plan_only else {"peak": memory("VmHWM") - before})
    in_mib = {name: round(size / MIB, 1) for name, size in sizes.items()}
    return {"scheme": scheme, "tokens": tokens} | in_mib | ({} if plan_only else {"seconds": round(seconds, 1)})


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    columns = [column for column in COLUMNS if column in rows[0]]
    return "\n".join(markdown.table(columns, [[str(row[column]) for column in columns] for row in rows]))


def draw_figure(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Peak memory against the prompt's length, and beside it the keys and values of all loops and layers."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    schemes = dict.fromkeys(row["scheme"] for row in rows)
    for scheme in schemes:
        mine = [row for row in rows if row["scheme"] == scheme]
        axes.plot(
            [row["tokens"] for row in mine], [row.get("peak", row["planned"]) for row in mine], "o-", label=scheme
        )
    full = [(row["tokens"], row["all_keys_values"]) for row in rows if row["scheme"] == next(iter(schemes))]
    axes.plot(*zip(*full), "k:", label="all keys and values")
    axes.set(xlabel="tokens of the prompt", ylabel="MiB", xscale="log", yscale="log", title="Memory of prefill")
    lengths, sizes = zip(*full)
    axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    axes.set_yticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    cases = [(scheme, int(tokens)) for tokens in flags.FLAGS.tokens for scheme in flags.FLAGS.schemes or SCHEMES]
    heads = flags.FLAGS.heads
    sizes = {"num_layers": flags.FLAGS.layers, "num_loops": flags.FLAGS.loops, "num_heads": heads}
    config = dataclasses.replace(CONFIG, num_kv_heads=heads, **sizes)
    workdir = pathlib.Path(flags.FLAGS.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for case in tqdm(cases, desc="prefill"):
        rows.append(in_fresh_process(measure, config, flags.FLAGS.plan_only, *case))
        (workdir / "prefill.json").write_text(json.dumps(rows, indent=1))
    (workdir / "prefill.md").write_text(table(rows) + "\n")
    draw_figure(rows, workdir / "prefill.png")
    print(table(rows))


if __name__ == "__main__":
    matplotlib.use("agg")
    flags.DEFINE_string("workdir", None, "Folder for the numbers and the figure.", required=True)
    flags.DEFINE_multi_enum("schemes", None, [*SCHEMES], "Only these.")
    flags.DEFINE_bool("plan_only", False, "Compile only: XLA's plan, for lengths that would run for hours.")
    flags.DEFINE_integer("layers", CONFIG.num_layers, "L of the model.")
    flags.DEFINE_integer("loops", CONFIG.num_loops, "T of the model.")
    flags.DEFINE_integer("heads", CONFIG.num_heads, "H and G of the model.")
    flags.DEFINE_list("tokens", ["1024", "2048", "4096", "8192", "16384"], "Lengths of the prompts.")
    app.run(main)
