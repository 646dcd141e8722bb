"""Measures the peak memory of prefilling prompts of 1K to 16K tokens into the full cache and into HLA's.

    python -m experiments.measure_prefill --workdir=runs/prefill      # 8 minutes on 2 cores

A narrow random model (d = 128, 8 layers, 4 loops) in float32; every length and scheme in a process of its own. Leaves
prefill.json, prefill.md and prefill.png. `peak` is what the process's resident set grew by at its peak, `planned` what
XLA's plan of the compiled prefill says it needs beside weights and prompt: the cache and its temporaries.
"""

from __future__ import annotations

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
SCHEMES = {"full cache": hla_jax.FullCache(), "HLA": hla_jax.HLA(rank_k=64, rank_v=64, rank_loop1=64, window=32)}
MIB = 1 << 20
COLUMNS = ("scheme", "tokens", "all_keys_values", "cache", "planned", "peak", "seconds")


def measure(scheme: str, tokens: int) -> dict[str, Any]:
    """One prefill; sizes in MiB. To be called in a fresh process."""
    params = weights.init_params(CONFIG, jax.random.key(0))
    kind = SCHEMES[scheme]
    draw = lambda shape: jnp.asarray(np.random.default_rng(0).normal(size=(CONFIG.num_layers, *shape)), jnp.float32)
    attention = Attention(kind, {name: draw(shape) for name, shape in kind.map_shapes(CONFIG).items()})
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, tokens)), jnp.int32)
    lengths = jnp.asarray([tokens])
    prefill = decode.prefill.lower(params, CONFIG, attention, prompt, lengths, tokens).compile()
    plan: Any = prefill.memory_analysis()
    before, start = memory("VmRSS"), time.perf_counter()
    jax.block_until_ready(prefill(params, attention, prompt, lengths))
    seconds = time.perf_counter() - start
    sizes = {
        "all_keys_values": SCHEMES["full cache"].cache_bytes(CONFIG, tokens, "float32"),
        "cache": kind.cache_bytes(CONFIG, tokens, "float32"),
        "planned": plan.output_size_in_bytes + plan.temp_size_in_bytes,
        "peak": memory("VmHWM") - before,
    }
    in_mib = {name: round(size / MIB, 1) for name, size in sizes.items()}
    return {"scheme": scheme, "tokens": tokens} | in_mib | {"seconds": round(seconds, 1)}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row[column] for column in COLUMNS] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def draw_figure(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Peak memory against the prompt's length, and beside it the keys and values of all loops and layers."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    for scheme in SCHEMES:
        mine = [row for row in rows if row["scheme"] == scheme]
        axes.plot([row["tokens"] for row in mine], [row["peak"] for row in mine], "o-", label=f"peak, {scheme}")
    full = [row for row in rows if row["scheme"] == "full cache"]
    axes.plot([row["tokens"] for row in full], [row["cache"] for row in full], "k:", label="all keys and values")
    axes.set(xlabel="tokens of the prompt", ylabel="MiB", xscale="log", yscale="log", title="Memory of prefill")
    lengths = [row["tokens"] for row in full]
    axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    axes.set_yticks(sizes := [row["cache"] for row in full], [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    cases = [(scheme, int(tokens)) for tokens in flags.FLAGS.tokens for scheme in SCHEMES]
    workdir = pathlib.Path(flags.FLAGS.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for case in tqdm(cases, desc="prefill"):
        rows.append(in_fresh_process(measure, *case))
        (workdir / "prefill.json").write_text(json.dumps(rows, indent=1))
    (workdir / "prefill.md").write_text(table(rows) + "\n")
    draw_figure(rows, workdir / "prefill.png")
    print(table(rows))


if __name__ == "__main__":
    matplotlib.use("agg")
    flags.DEFINE_string("workdir", None, "Folder for the numbers and the figure.", required=True)
    flags.DEFINE_list("tokens", ["1024", "2048", "4096", "8192", "16384"], "Lengths of the prompts.")
    app.run(main)
