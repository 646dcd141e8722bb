"""Time and memory of a fine-tuning step by its number of repetitions, against standard fine-tuning, in one run.

    python -m experiments.benchmark_finetune --workdir=runs/benchmark_finetune                    # the embedded model
    python -m experiments.benchmark_finetune --workdir=runs/benchmark_finetune --shapes=1p4b --layers=1 \
        --rows=1 --length=1024                                                                    # a CPU: one layer
    python -m experiments.benchmark_finetune --workdir=runs/benchmark_finetune --shapes=1p4b --dtype=bfloat16 \
        --rows=4 --length=2048                                                                    # an accelerator

Every case updates all weights, float32 copies of them by AdamW. The cases take turns, round by round, and the ratio is
the median over rounds of a case's seconds by those of standard fine-tuning in the same round. `planned` are the
temporaries in XLA's plan of the step, `state` what it keeps: trained numbers and optimizer. Prints a table and leaves
`finetune.json` and `finetune.md` in the work directory.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

import hla_jax
from experiments import command_line
from experiments.random_checkpoint import SIZES
from hla_jax import tensor_files
from hla_jax.attention.scheme import Attention
from hla_jax.banner import banner
from hla_jax.config import ModelConfig
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.schemes import FULL, HLA_PAPER, papers_schemes
from hla_jax.evaluation.two_pass import procedure
from hla_jax.models import weights
from hla_jax.training import finetune, step, two_pass
from hla_jax.training.lora import ALL_WEIGHTS, Lora
from hla_jax.training.optimizer import OptimizerConfig

MIB = 1 << 20
STANDARD = "standard"
COLUMNS = ("step", "seconds", "ratio", "planned MiB", "state MiB")

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_SHAPES = flags.DEFINE_enum("shapes", None, list(SIZES), "A released model's sizes; by default the embedded model's.")
_LAYERS = flags.DEFINE_integer("layers", None, "Only so many layers, with a small vocabulary.", lower_bound=1)
_DTYPE = flags.DEFINE_string("dtype", "float32", "Computed in.")
_ROWS = flags.DEFINE_integer("rows", 4, "Rows of a batch.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 256, "Tokens of a row, of which a quarter is the prompt.", lower_bound=8)
_REPETITIONS = flags.DEFINE_multi_integer("repetitions", [0, 1, 2], "Numbers of repetitions.", lower_bound=0)
_RANK = flags.DEFINE_integer("rank", None, "Also two passes with low-rank updates of this rank.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds.", lower_bound=1)


class Case(NamedTuple):
    """A step that is compiled, its state and what it is called with besides the batch."""

    run: Any
    state: step.TrainState
    constants: Any
    planned: int


def build(config: ModelConfig, scheme_name: str, repetitions: int, low_rank: Lora, batch: Any) -> Case:
    """Compiles one kind of step on random weights and maps."""
    scheme, dtype = papers_schemes(config)[scheme_name], jnp.dtype(_DTYPE.value)
    params = weights.init_params(config, jax.random.key(0), dtype)
    shapes = {name: (config.num_layers, *shape) for name, shape in scheme.map_shapes(config).items()}
    maps = {name: jnp.full(shape, shape[-1] ** -0.5) for name, shape in shapes.items()}
    optimizer = finetune.make_optimizer(OptimizerConfig(1e-5, total_steps=100))
    model = hla_jax.Model(config, params, Attention(scheme, maps))
    start = finetune.start(model, model.attention, low_rank, seed=0)
    state = step.init(start, optimizer, 0)
    loss = finetune.make_loss(two_pass.make_loss(scheme, config, repetitions), low_rank, dtype)
    constants = params if low_rank.rank else None
    jitted: Any = step.make_step(loss, optimizer)
    compiled = jitted.lower(state, batch, constants).compile()
    return Case(compiled, state, constants, compiled.memory_analysis().temp_size_in_bytes)


def size_of(tree: Any) -> int:
    """Bytes of all leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def main() -> None:
    print(
        banner(
            "benchmark_finetune",
            dtype=_DTYPE.value,
            dtype_reason="--dtype; what trains is float32",
            attention="jnp, block-wise",
            attention_reason="differentiated through",
        )
    )
    config = SIZES[_SHAPES.value] if _SHAPES.value else ModelConfig.from_directory(hla_jax.NANO)
    if _LAYERS.value:
        config = dataclasses.replace(config, num_layers=_LAYERS.value, vocab_size=256)
    tokens = jnp.zeros((_ROWS.value, _LENGTH.value), jnp.int32)
    response = jnp.broadcast_to(jnp.arange(_LENGTH.value) >= _LENGTH.value // 4, tokens.shape)
    batch = {"tokens": tokens, "segments": tokens + 1, "response": response.astype(jnp.int32)}
    cases = {STANDARD: build(config, FULL, 0, ALL_WEIGHTS, batch)}
    cases |= {procedure(number): build(config, HLA_PAPER, number, ALL_WEIGHTS, batch) for number in _REPETITIONS.value}
    if _RANK.value:
        low_rank = Lora(_RANK.value, 2.0 * _RANK.value)
        cases[f"two passes, rank {_RANK.value}"] = build(config, HLA_PAPER, 0, low_rank, batch)
    kept = {name: size_of(one.state.params) + size_of(one.state.opt_state) for name, one in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(_ROUNDS.value + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            state, _ = jax.block_until_ready(case.run(case.state, batch, case.constants))
            seconds[name].append(time.perf_counter() - start)
            cases[name] = case._replace(state=state)
    timed = {name: times[1:] for name, times in seconds.items()}  # the first round warms up
    ratios = {
        name: statistics.median(one / base for one, base in zip(times, timed[STANDARD]))
        for name, times in timed.items()
    }
    rows = [
        (
            name,
            f"{statistics.median(timed[name]):.3f}",
            f"{ratios[name]:.2f}",
            f"{case.planned / MIB:,.1f}",
            f"{kept[name] / MIB:,.1f}",
        )
        for name, case in cases.items()
    ]
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    found = {
        "model": _SHAPES.value or "embedded",
        "layers": config.num_layers,
        "dtype": _DTYPE.value,
        "rows": _ROWS.value,
        "length": _LENGTH.value,
        "device": jax.devices()[0].device_kind,
        "seconds": timed,
        "ratio": ratios,
        "planned_bytes": {name: case.planned for name, case in cases.items()},
        "state_bytes": kept,
    }
    lines = table(COLUMNS, rows)
    with tensor_files.new_file(workdir / "finetune.json") as partial:
        tensor_files.write_json(partial, found)
    with tensor_files.new_file(workdir / "finetune.md") as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    command_line.run(main)
