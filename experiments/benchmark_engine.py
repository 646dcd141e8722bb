"""Throughput of the engine against `generate`, one batch at a time, on requests whose lengths have a long tail.

    python -m experiments.benchmark_engine --workdir=runs/benchmark_engine
    python -m experiments.benchmark_engine --model=ByteDance/Ouro-1.4B --slots=64 --median=1024 --longest=8192 \\
        --workdir=runs/benchmark_engine

A batch of `generate` lasts as long as its longest request; the engine refills a slot when its request is over. Both
hold as many sequences, and decode greedily to lengths drawn from a log-normal distribution with sigma 1; a stop token
does not end a request here. Only the tokens that were asked for count. Both run every round, one after the other, and
ratios are within a round. Compilation is not counted. A CPU computes 16-bit floats in float32.

Prints a table and leaves it in `benchmark_engine.md`, with `benchmark_engine.json`, in the work directory. On two CPU
cores the first command takes a few minutes.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from tqdm.auto import tqdm

import hla_jax
from experiments import command_line
from experiments.measure_decode import paper_hla
from hla_jax import tensor_files
from hla_jax.attention.scheme import Attention
from hla_jax.banner import banner
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.schemes import FULL
from hla_jax.kernels.latent_decode import api
from hla_jax.models import looped

HLA = "HLA"
Tokens = list[list[int]]

_MODEL = flags.DEFINE_string("model", str(hla_jax.NANO), "Directory or hub id; the embedded model by default.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_DTYPE = flags.DEFINE_string("dtype", None, "Of weights and caches; by default bfloat16, and float32 on a CPU.")
_SCHEMES = flags.DEFINE_multi_enum("schemes", [FULL, HLA], [FULL, HLA], "Caches; HLA has random maps.")
_SLOTS = flags.DEFINE_integer("slots", 16, "Sequences decoded together.", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("requests", 192, "How many; the last ones leave slots idle.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 32, "Most prompt tokens; lengths are uniform.", lower_bound=1)
_MEDIAN = flags.DEFINE_integer("median", 24, "Median of the new tokens.", lower_bound=1)
_LONGEST = flags.DEFINE_integer("longest", 192, "Most new tokens.", lower_bound=1)
_DISPATCH = flags.DEFINE_integer("tokens_per_dispatch", 8, "Of the engine.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Repetitions, of which the median counts.", lower_bound=1)


def main() -> None:
    dtype = _DTYPE.value or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    attention, reason = api.choose(None)
    print(banner("benchmark_engine", dtype=dtype, dtype_reason="--dtype", attention=attention, attention_reason=reason))
    model = hla_jax.load(_MODEL.value, dtype)
    model = dataclasses.replace(model, params=jax.jit(looped.for_decoding)(model.params))
    requests = draw(model.config.vocab_size)
    new = [request.max_new_tokens for request in requests]
    batches = [new[at : at + _SLOTS.value] for at in range(0, len(new), _SLOTS.value)]
    schemes = {FULL: Attention(hla_jax.FullCache()), HLA: paper_hla(model, dtype)}
    found = {name: compare(model, schemes[name], requests) for name in dict.fromkeys(_SCHEMES.value)}
    about = {
        "model": _MODEL.value,
        "dtype": dtype,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "slots": _SLOTS.value,
        "tokens_per_dispatch": _DISPATCH.value,
        "new_tokens": new,
        "prompt_tokens": [len(request.prompt) for request in requests],
        "full_slots_ratio": sum(max(batch) * _SLOTS.value for batch in batches) / sum(new),
    }
    lines = [
        f"{len(new)} requests of {min(new)} to {max(new)} new tokens, median {np.median(new):.0f}, mean"
        f" {np.mean(new):.0f}; {_SLOTS.value} sequences at a time.",
        f"Were no slot ever idle and prompts free, the engine would be {about['full_slots_ratio']:.2f} times as fast.",
        "",
        *table(
            ["cache", "generate, tokens/s", "engine, tokens/s", "ratio (least to most)", "same tokens"],
            [row(name, one, sum(new)) for name, one in found.items()],
        ),
    ]
    print("\n" + "\n".join(lines))
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    with tensor_files.new_file(workdir / "benchmark_engine.json") as partial:
        tensor_files.write_json(partial, about | {"schemes": found})
    with tensor_files.new_file(workdir / "benchmark_engine.md") as partial:
        partial.write_text("\n".join(lines) + "\n")


def draw(vocabulary: int) -> list[hla_jax.Request]:
    """Random prompts, and how many new tokens each gets."""
    rng = np.random.default_rng(0)
    count = _REQUESTS.value
    new = np.clip(np.rint(_MEDIAN.value * rng.lognormal(0, 1, count)), 1, _LONGEST.value).astype(int)
    lengths = rng.integers(1, _PROMPT.value + 1, count)
    prompts = [rng.integers(0, vocabulary, length).tolist() for length in lengths]
    return [hla_jax.Request(prompt, int(most), stop_tokens=()) for prompt, most in zip(prompts, new, strict=True)]


def compare(model: hla_jax.Model, attention: Attention, requests: list[hla_jax.Request]) -> dict[str, Any]:
    """Seconds of both in every round, and in how many requests their tokens agree."""
    most = max(len(request.prompt) + request.max_new_tokens for request in requests)
    engine = hla_jax.Engine(
        model, attention, slots=_SLOTS.value, capacity=most, tokens_per_dispatch=_DISPATCH.value, queue=len(requests)
    )

    def batch_by_batch() -> Tokens:
        made: Tokens = []
        for at in range(0, len(requests), _SLOTS.value):
            batch = requests[at : at + _SLOTS.value]
            longest = max(request.max_new_tokens for request in batch)
            out = hla_jax.generate(model, [one.prompt for one in batch], longest, attention, stop_tokens=())
            made += [one.tokens[: request.max_new_tokens] for one, request in zip(out, batch, strict=True)]
        return made

    both: dict[str, Callable[[], Tokens]] = {
        "generate": batch_by_batch,
        "engine": lambda: [one.tokens for one in engine.run(requests)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in both}
    made: dict[str, Tokens] = {}
    with tqdm(total=(1 + _ROUNDS.value) * len(both), desc=type(attention.scheme).__name__, unit="run") as bar:
        for number in range(1 + _ROUNDS.value):
            for name, run in both.items():
                start = time.perf_counter()
                made[name] = run()
                if number:  # the first round compiles
                    seconds[name].append(time.perf_counter() - start)
                bar.update()
    same = sum(one == other for one, other in zip(*made.values(), strict=True))
    return {"seconds": seconds, "same_tokens": same, "requests": len(requests), "slots_at_the_end": engine.slots}


def row(name: str, found: dict[str, Any], tokens: int) -> tuple[str, ...]:
    """A line of the table."""
    generated, engine = (np.asarray(found["seconds"][name]) for name in ("generate", "engine"))
    ratios = np.sort(generated / engine)
    return (
        name,
        f"{tokens / np.median(generated):,.0f}",
        f"{tokens / np.median(engine):,.0f}",
        f"{np.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        f"{found['same_tokens']} of {found['requests']}",
    )


if __name__ == "__main__":
    command_line.run(main)
