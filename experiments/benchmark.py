"""Decoding with each cache side by side in one run: latency, bytes against a copy's, throughput, capacity.

    python -m experiments.benchmark --shapes=1p4b --layers=1 --workdir=runs/benchmark             # a CPU: one layer
    python -m experiments.benchmark --shapes=1p4b --throughput=4096,16384 --workdir=runs/benchmark  # an accelerator
    python -m experiments.benchmark --model=runs/nano_hla/export --contexts=1024,4096 --workdir=runs/benchmark

`--shapes` takes the released model's sizes and random weights and maps, which cost the same time as trained ones. With
`--layers` only so many are run, through all loops, with a small vocabulary; the whole step is then estimated as their
time in proportion, and the head's, which is measured apart. A CPU computes 16-bit floats in float32.

Prints tables and leaves them in `benchmark.md`, with `benchmark.json` and `benchmark.png`, in the work directory. On
two CPU cores the first command takes about 10 minutes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import hla_jax
from experiments import command_line
from experiments.random_checkpoint import SIZES
from hla_jax import tensor_files
from hla_jax.analysis import figures
from hla_jax.attention.scheme import Attention
from hla_jax.banner import banner
from hla_jax.calibration.random import random_maps
from hla_jax.config import ModelConfig
from hla_jax.evaluation import cost, report, speed
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.memory import cache_memory
from hla_jax.evaluation.schemes import FULL, HLA_PAPER, LLA_ABSORBED, LLA_PAPER, LLA_REBUILT, papers_schemes
from hla_jax.kernels import implementations
from hla_jax.kernels.latent_decode import api
from hla_jax.model import Model
from hla_jax.models import layers, looped, weights

NAMES = (FULL, HLA_PAPER, LLA_PAPER, LLA_REBUILT, LLA_ABSORBED)
SMALL_VOCABULARY = 256

PAPERS = {
    "1p4b": [
        "HLA paper, Ouro-1.4B in vLLM, one sequence: full cache 13.6 ms a token at 1K and 49.3 at 16K, HLA 17.1 and"
        " 25.1 (26% slower at 1K, equal at 4K, twice as fast at 16K); 4.0 to 8.8 times the sequences and 2.5 to 7.4"
        " times the peak throughput from 1K to 16K.",
        "LLA paper, Ouro-1.4B: 63.6 ms a token with the full cache, 74.1 with the rebuilt cache; at 4K 32 sequences on"
        " one H200 with the full cache, 128 with LLA at 4x, whose peak is 108 tokens/s against 748; absorbed reading"
        " 2.3 times faster than rebuilding at 262K.",
    ],
    "2p6b": ["LLA paper, Ouro-2.6B-Thinking at 4K on one H200: 16 sequences with the full cache, 64 with LLA at 4x."],
}

_MODEL = flags.DEFINE_string("model", None, "Directory or hub id; or else --shapes.")
_SHAPES = flags.DEFINE_enum("shapes", None, list(SIZES), "A released model's sizes, with random weights.")
_LAYERS = flags.DEFINE_integer("layers", None, "With --shapes: run so many layers, and scale.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_DTYPE = flags.DEFINE_string("dtype", None, "Of weights and caches; by default bfloat16, and float32 on a CPU.")
_CONTEXTS = flags.DEFINE_list("contexts", ["1024", "4096", "8192", "16384", "65536"], "Tokens stored before decoding.")
_LONG = flags.DEFINE_integer(
    "long_context", None, "Also LLA, absorbed and rebuilding, at so many tokens, in one layer."
)
_SCHEMES = flags.DEFINE_multi_enum("schemes", None, NAMES, "Only these; the full cache always.")
_IMPLEMENTATION = flags.DEFINE_enum("implementation", None, api.NAMES, "By default by platform.")
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences decoded together.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 8, "Tokens timed at once.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Repetitions, of which the median counts.", lower_bound=1)
_THROUGHPUT = flags.DEFINE_list("throughput", [], "Contexts at which the batch grows until memory is full.")
_MEMORY = flags.DEFINE_float("memory_gib", None, "Of the capacity; by default what the device has.")


def main() -> None:
    if (_MODEL.value is None) == (_SHAPES.value is None):
        raise app.UsageError("give one of --model and --shapes")
    if _LAYERS.value and not _SHAPES.value:
        raise app.UsageError("--layers needs --shapes")
    dtype = _DTYPE.value or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    attention, reason = api.choose(_IMPLEMENTATION.value)
    print(banner("benchmark", dtype=dtype, dtype_reason="--dtype", attention=attention, attention_reason=reason))
    full_size, model = load(dtype)
    chosen = {FULL, *(_SCHEMES.value or NAMES)}
    schemes = {name: one for name, one in attentions(model, dtype).items() if name in chosen}
    contexts = list(command_line.whole_numbers("contexts", _CONTEXTS.value))
    settings: dict[str, Any] = dict(batch=_BATCH.value, new_tokens=_TOKENS.value, rounds=_ROUNDS.value)
    kernels = attention in implementations.PLATFORMS
    speeds = speed.decode_speed(model, schemes, contexts, **settings, kernels=kernels)
    bandwidth = cost.copy_bandwidth()
    memory = int(_MEMORY.value * 2**30) if _MEMORY.value else cost.device_memory()
    head = head_seconds(full_size, dtype) if _LAYERS.value else 0.0
    found = {
        "model": _MODEL.value or _SHAPES.value,
        "layers": model.config.num_layers,
        "dtype": dtype,
        "implementation": attention,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "copy_bytes_per_second": bandwidth,
        "head_seconds": head,
        "speed": [dataclasses.asdict(one) for one in speeds],
        "traffic": {
            name: [
                dataclasses.asdict(cost.step_traffic(model.config, one.scheme, context, _BATCH.value, dtype))
                for context in contexts
            ]
            for name, one in schemes.items()
        },
        "capacity": {
            name: {c: cost.capacity(full_size, one.scheme, c, memory, dtype) for c in contexts}
            for name, one in schemes.items()
        },
        "memory": {
            name: dataclasses.asdict(m) for name, m in cache_memory(full_size, schemes, contexts, dtype).items()
        },
    }
    lines = [
        *latency_table(full_size, model.config, schemes, speeds, bandwidth, head, dtype),
        "",
        *capacity_table(found["capacity"], contexts, memory),
    ]
    if _THROUGHPUT.value:
        grown = {
            name: {
                context: speed.throughput(
                    model,
                    one,
                    context,
                    speed.doubling(cost.capacity(model.config, one.scheme, context, memory, dtype)),
                    kernels=kernels,
                )
                for context in command_line.whole_numbers("throughput", _THROUGHPUT.value)
            }
            for name, one in schemes.items()
        }
        found["throughput"] = {
            name: {context: [dataclasses.asdict(one) for one in many] for context, many in by_context.items()}
            for name, by_context in grown.items()
        }
        lines += ["", *throughput_table(grown)]
    if _LONG.value:
        found["long"] = long_reading(
            model.config, _LONG.value, dtype, {"batch": _BATCH.value, "new_tokens": 1, "rounds": 1, "kernels": kernels}
        )
        lines += ["", *found["long"]["lines"]]
    if importlib.util.find_spec("torch") and _LAYERS.value:
        from experiments import benchmark_torch

        rows = benchmark_torch.step_seconds(model.config, contexts, _BATCH.value, dtype, _TOKENS.value, _ROUNDS.value)
        found["torch"] = dict(zip(contexts, rows))
        mine = [_BATCH.value / one.tokens_per_second[FULL] for one in speeds]
        pairs = ", ".join(f"{c:,}: {1e3 * t:.1f} and {1e3 * m:.1f}" for c, t, m in zip(contexts, rows, mine))
        lines += ["", f"The same layers with the full cache in PyTorch and here, ms a token at a context of: {pairs}."]
    lines += ["", *PAPERS.get(_SHAPES.value or "", [])]
    print("\n" + "\n".join(lines))
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    figures.save(report.speed_figure(speeds, NAMES), workdir / "benchmark.png")
    with tensor_files.new_file(workdir / "benchmark.json") as partial:
        tensor_files.write_json(partial, found)
    with tensor_files.new_file(workdir / "benchmark.md") as partial:
        partial.write_text("\n".join(lines) + "\n")


def load(dtype: str) -> tuple[ModelConfig, Model]:
    """The config that bytes and capacities are of, and the model to time."""
    if _MODEL.value:
        model = hla_jax.load(_MODEL.value, dtype)
        params = jax.jit(looped.for_decoding)(model.params)
        return model.config, dataclasses.replace(model, params=params)
    config = SIZES[str(_SHAPES.value)]
    run = config
    if _LAYERS.value and config.outer_layers:
        raise app.UsageError(f"--layers: only looped layers can be scaled; {_SHAPES.value} has others, leave it out")
    if _LAYERS.value:
        run = dataclasses.replace(config, num_layers=_LAYERS.value, vocab_size=SMALL_VOCABULARY)
    make = jax.jit(lambda key: looped.for_decoding(weights.init_params(run, key, dtype)))
    return config, Model(run, make(jax.random.key(0)))


def attentions(model: Model, dtype: str) -> dict[str, Attention]:
    """The full cache, HLA at 10.7x, and LLA at 4x in its three modes; a model's own scheme instead of its namesake."""
    config = model.config
    found = {name: random_maps(scheme, config, 0, dtype) for name, scheme in papers_schemes(config).items()}
    own = {hla_jax.HLA: HLA_PAPER, hla_jax.LLA: LLA_PAPER}.get(type(model.attention.scheme))
    if own:
        found[own] = model.attention
    return {name: dataclasses.replace(one, implementation=_IMPLEMENTATION.value) for name, one in found.items()}


def head_seconds(config: ModelConfig, dtype: str) -> float:
    """Time of the whole vocabulary's logits of one token in each sequence."""
    head = jnp.zeros((config.vocab_size, config.hidden_size), dtype)
    hidden = jnp.zeros((_BATCH.value, config.hidden_size), dtype)
    logits = jax.jit(lambda head, hidden: layers.logits({"lm_head": head, "embed_tokens": head}, hidden))
    return speed.median_seconds(lambda: logits(head, hidden), _ROUNDS.value)


def latency_table(
    full_size: ModelConfig,
    config: ModelConfig,
    schemes: dict[str, Attention],
    speeds: list[speed.Speed],
    bandwidth: float,
    head: float,
    dtype: str,
) -> list[str]:
    """Milliseconds a step, ratio to the full cache, and the share of the copy bandwidth that the step reaches."""
    scale = full_size.num_layers / config.num_layers

    def cell(one: speed.Speed, name: str) -> str:
        if name not in one.tokens_per_second:
            return "out of memory"
        seconds = one.batch / one.tokens_per_second[name]
        moved = cost.step_traffic(config, schemes[name].scheme, one.context, one.batch, dtype).total
        ratio = f"{one.ratio[name].median:.2f}x, " if name != FULL and name in one.ratio else ""
        return f"{1e3 * (seconds * scale + head):,.1f} ({ratio}{moved / seconds / bandwidth:.0%})"

    names = list(schemes)
    whole = "" if scale == 1 else f" Estimated for {full_size.num_layers} layers and the head from {config.num_layers}."
    return [
        f"Milliseconds a step of {_BATCH.value} sequence(s) at a context.{whole}",
        "In brackets: speed over the full cache's in the same round (of the layers that ran), and the bytes a step",
        f"must read over what a copy moves in that time ({bandwidth / 1e9:,.1f} GB/s).",
        "",
        *table(["context", *names], [(f"{o.context:,}", *(cell(o, n) for n in names)) for o in speeds]),
    ]


def capacity_table(found: dict[str, dict[int, int]], contexts: list[int], memory: int) -> list[str]:
    """Sequences that fit beside the model."""
    return [
        f"Sequences that fit into {memory / 2**30:.0f} GiB beside the whole model and its maps.",
        "",
        *table(["context", *found], [(f"{c:,}", *(f"{found[n][c]:,}" for n in found)) for c in contexts]),
    ]


def throughput_table(grown: dict[str, dict[int, list[speed.Speed]]]) -> list[str]:
    """Best tokens a second as the batch grows, and at which batch."""

    def cell(many: list[speed.Speed]) -> str:
        if not many:
            return "out of memory"
        best = max(many, key=lambda one: one.tokens_per_second[FULL])
        return f"{best.tokens_per_second[FULL]:,.0f} at {best.batch}, {many[-1].batch} fit"

    contexts = list(next(iter(grown.values())))
    return [
        "Highest throughput in tokens/s as the batch grows until memory is full.",
        "",
        *table(["context", *grown], [(f"{c:,}", *(cell(grown[n][c]) for n in grown)) for c in contexts]),
    ]


def long_reading(config: ModelConfig, context: int, dtype: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One layer of LLA at a long context: absorbed against rebuilding."""
    one_layer = dataclasses.replace(
        config, num_layers=1, vocab_size=SMALL_VOCABULARY, max_position_embeddings=2 * context
    )
    model = Model(one_layer, jax.jit(lambda key: weights.init_params(one_layer, key, dtype))(jax.random.key(0)))
    both = {name: one for name, one in attentions(model, dtype).items() if name in (LLA_PAPER, LLA_ABSORBED)}
    (found,) = speed.decode_speed(model, both, [context], **settings)
    rates = found.tokens_per_second
    text = "did not fit memory"
    if len(rates) == 2:
        text = f"absorbed {rates[LLA_ABSORBED] / rates[LLA_PAPER]:.1f} times as fast as rebuilding"
    return dataclasses.asdict(found) | {"lines": [f"One layer of LLA at {context:,} tokens: {text}."]}


if __name__ == "__main__":
    command_line.run(main)
