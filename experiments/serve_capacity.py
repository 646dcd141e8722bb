"""What vLLM holds and how fast it is with each cache, for the same bytes: sequences, latency, throughput, a batch.

    python -m experiments.serve_capacity --workdir=runs/serve_capacity                         # a CPU, 6 minutes
    python -m experiments.serve_capacity --model=ByteDance/Ouro-1.4B --pool_mib=40960 --contexts=1024,4096,16384 \\
        --requests=256 --prompt=512 --new=4096 --workdir=runs/serve_capacity_1p4b              # a GPU

Needs vLLM beside this package (docs/serving.md). Caches are the full one, HLA at 10.7x and LLA at 4x with random maps,
which cost what trained ones cost; `--caches` takes others, exports or schemes. Each has an engine in a process of its
own and the same pool of pages. The result is `serve_capacity.md` in the work directory, with its JSON and figure. A run
that was stopped continues with the same command.
"""

from __future__ import annotations

import jax
from absl import flags

import hla_jax
from experiments import command_line, launch
from hla_jax.attention.scheme import Scheme
from hla_jax.config import ConfigError
from hla_jax.recipes import serve_capacity


def main() -> None:
    options = flags.FLAGS
    # The device is the engines'.
    jax.config.update("jax_platforms", "cpu")
    accelerated = serve_capacity.accelerated()
    job = serve_capacity.Job(
        model=options.model,
        caches=caches(options.caches) if options.caches else None,
        dtype=options.dtype or ("bfloat16" if accelerated else "float32"),
        pool_mib=options.pool_mib,
        contexts=command_line.whole_numbers("contexts", options.contexts),
        rounds=options.rounds,
        requests=options.requests,
        prompt=options.prompt,
        new=options.new,
        eager=not accelerated,
    )
    print(f"report: {serve_capacity.run(job, launch.workdir(), launch.title())}")


def caches(values: list[str]) -> dict[str, Scheme | str]:
    """name -> a scheme, or an export's path under its folder's name. Raises `ConfigError` for two of one name."""
    found: dict[str, Scheme | str] = {}
    for value in values:
        scheme = command_line.scheme("caches", value) if value.rstrip().endswith(")") else None
        name = type(scheme).__name__ if scheme else value.rstrip("/").rsplit("/", 1)[-1]
        if name in found:
            raise ConfigError(f"--caches: two are called {name}")
        found[name] = scheme or value
    return found


if __name__ == "__main__":
    flags.DEFINE_string("model", str(hla_jax.NANO), "Directory or hub id; by default the embedded model.")
    flags.DEFINE_multi_string("caches", None, "An export, or a scheme such as HLA(rank_k=64, ...); once for each.")
    flags.DEFINE_string("dtype", None, "Of weights and caches; by default bfloat16, and float32 on a CPU.")
    flags.DEFINE_integer("pool_mib", 64, "Of the pages, in MiB.", lower_bound=1)
    flags.DEFINE_list("contexts", ["256", "512", "1024"], "Tokens of a sequence.")
    flags.DEFINE_integer("rounds", 16, "Steps that are timed.", lower_bound=1)
    flags.DEFINE_integer("requests", 48, "Of the batch that is run to its end.", lower_bound=1)
    flags.DEFINE_integer("prompt", 32, "Prompt tokens of each.", lower_bound=1)
    flags.DEFINE_integer("new", 224, "New tokens of each.", lower_bound=1)
    flags.mark_flag_as_required("workdir")
    command_line.run(main)
