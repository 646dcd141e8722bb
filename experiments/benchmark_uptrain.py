"""Cost of a step of uptraining against the reference's forward pass alone, and against one that builds S x S arrays.

    python -m experiments.benchmark_uptrain --workdir=runs/benchmark_uptrain                 # a narrow layer, for a CPU
    python -m experiments.benchmark_uptrain --workdir=runs/wide --heads=16 --rank=512 --tokens=512,2048 --dtype=bfloat16

One document, loss on all its tokens, random weights, all cases in one run:
`forward` the exact pass that every step begins with; `step` the whole step: pass, loss, gradients, AdamW; `direct` the
step with all scores of a layer and loop at once. `planned` are the temporaries in XLA's plan; `peak` is what the
process's resident set grew by at its peak (on a CPU, where each case has a process of its own). `forwards` is the time
over the forward pass's; on a CPU the time of all its cores, so that other work on the machine counts little. What plans
more than `--run_up_to_gib` is not run. Prints a table, and leaves `uptrain.json` in the work directory.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from tqdm import tqdm

from experiments import command_line
from experiments.processes import in_fresh_process, memory
from hla_jax import tensor_files
from hla_jax.attention.full import exact_stages
from hla_jax.attention.hla import HLA
from hla_jax.banner import banner
from hla_jax.config import OURO_1P4B, OuroConfig
from hla_jax.evaluation.markdown import table
from hla_jax.kernels import implementations
from hla_jax.kernels.attention_match import api
from hla_jax.models import looped, weights
from hla_jax.models.stages import Params
from hla_jax.training.optimizer import OptimizerConfig, adamw
from hla_jax.training.step import init, make_step
from hla_jax.training.uptrain import make_loss

MIB = 1 << 20
CASES = ("forward", "step", "direct")
COLUMNS = ("case", "tokens", "planned_mib", "peak_mib", "seconds", "cpu_seconds", "tokens_per_second", "forwards")

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_TOKENS = flags.DEFINE_list("tokens", ["512", "1024", "2048", "4096"], "Lengths of the document.")
_CASES = flags.DEFINE_list("cases", list(CASES), "Of: " + ", ".join(CASES) + ".")
_LAYERS = flags.DEFINE_integer("layers", 1, "Layers.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 2, "Heads of 128; Ouro-1.4B has 16.", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", 256, "rk and rv; loop 1 has half of it.", lower_bound=128)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["bfloat16", "float32"], "Of the frozen weights.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Repetitions, of which the median counts.", lower_bound=1)
_RUN_UP_TO_GIB = flags.DEFINE_float("run_up_to_gib", 4, "Larger plans are not run.", lower_bound=0)


def measure(
    config: OuroConfig, scheme: HLA, dtype: str, case: str, tokens: int, rounds: int, limit: int
) -> dict[str, Any]:
    """One case. Runs nothing if the plan takes more than `limit` bytes."""
    optimizer = adamw(OptimizerConfig(1e-3, total_steps=rounds + 2))
    batch = {
        "tokens": jnp.arange(tokens)[None] % config.vocab_size,
        "positions": jnp.arange(tokens)[None],
        "segments": jnp.ones((1, tokens), jnp.int32),
    }
    draw_maps = lambda: {
        name: jax.random.normal(jax.random.key(0), (config.num_layers, *shape)) * shape[-1] ** -0.5
        for name, shape in scheme.map_shapes(config).items()
    }
    make = jax.jit(lambda: (init(draw_maps(), optimizer, 0), weights.init_params(config, jax.random.key(1), dtype)))

    def forward(state: Any, batch: dict[str, jax.Array], params: Params) -> tuple[Any, jax.Array]:
        stages = exact_stages(config, batch["positions"], batch["segments"])
        return state, looped.run(params, config, batch["tokens"], stages, None)[0]

    how = "reference" if case == "direct" else None
    step: Any = make_step(make_loss(scheme, config, implementation=how), optimizer)
    function: Any = jax.jit(forward, donate_argnums=0) if case == "forward" else step
    compiled = function.lower(*_shapes(make, batch)).compile()
    plan = compiled.memory_analysis()
    found: dict[str, Any] = {"case": case, "tokens": tokens, "planned_mib": round(plan.temp_size_in_bytes / MIB, 1)}
    if plan.temp_size_in_bytes > limit:
        return found
    state, params = jax.block_until_ready(make())
    on_cpu = implementations.platform() == "cpu"
    before = memory("VmRSS") if on_cpu else 0
    seconds, cpu_seconds = [], []
    for _ in range(rounds):
        start, cpu_start = time.perf_counter(), time.process_time()
        state, _ = jax.block_until_ready(compiled(state, batch, params))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    median = statistics.median(seconds)
    if on_cpu:
        found["peak_mib"] = round((memory("VmHWM") - before) / MIB, 1)
        found["cpu_seconds"] = round(statistics.median(cpu_seconds), 4)
    return found | {"seconds": round(median, 4), "tokens_per_second": round(tokens / median, 1)}


def _shapes(make: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, Any]:
    state, params = jax.eval_shape(make)
    return state, batch, params


def main() -> None:
    chosen, reason = api.choose()
    settings = banner(
        "benchmark_uptrain",
        dtype=_DTYPE.value,
        dtype_reason="--dtype",
        attention=chosen,
        attention_reason=reason,
    )
    print(settings)
    hidden = _HEADS.value * OURO_1P4B.head_dim
    config = dataclasses.replace(
        OURO_1P4B,
        num_layers=_LAYERS.value,
        num_heads=_HEADS.value,
        num_kv_heads=_HEADS.value,
        hidden_size=hidden,
        intermediate_size=hidden * OURO_1P4B.intermediate_size // OURO_1P4B.hidden_size,
        vocab_size=1024,  # a step does not compute logits
    )
    scheme = HLA(_RANK.value, _RANK.value, _RANK.value // 2, window=128)
    scheme.check(config)
    limit = int(_RUN_UP_TO_GIB.value * (1 << 30))
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    cases = [(case, tokens) for tokens in command_line.whole_numbers("tokens", _TOKENS.value) for case in _CASES.value]
    for case, tokens in tqdm(cases, unit="case"):
        arguments = (config, scheme, _DTYPE.value, case, tokens, _ROUNDS.value, limit)
        # An accelerator belongs to one process.
        on_cpu = implementations.platform() == "cpu"
        rows.append(in_fresh_process(measure, *arguments) if on_cpu else measure(*arguments))
        time_of = "cpu_seconds" if on_cpu else "seconds"
        forward = next((r[time_of] for r in rows if (r["case"], r["tokens"]) == ("forward", tokens)), None)
        if forward and time_of in rows[-1]:
            rows[-1]["forwards"] = round(rows[-1][time_of] / forward, 2)
        with tensor_files.new_file(workdir / "uptrain.json") as partial:
            tensor_files.write_json(partial, {"config": dataclasses.asdict(config), "uptrain": rows})
    print("\n".join(table(COLUMNS, [[str(row.get(column, "-")) for column in COLUMNS] for row in rows])))


if __name__ == "__main__":
    command_line.run(main)
