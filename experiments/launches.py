"""What a decoding step launches for every layer and loop, and its memory, from the real compiler without the hardware.

    python -m experiments.launches --shapes=1p4b --tpu=v5e:2x2
    python -m experiments.launches --shapes=1p4b --gpu=h200.txtpb --compute_capability=90

See `hla_jax/evaluation/offline.py` for what must be installed. `--names` lists the kernels.
"""

from __future__ import annotations

import pathlib

from absl import app, flags

from experiments import command_line
from experiments.random_checkpoint import SIZES
from hla_jax.config import ConfigError
from hla_jax.evaluation import offline
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.schemes import FULL, HLA_PAPER, LLA_ABSORBED, papers_schemes

_SHAPES = flags.DEFINE_enum("shapes", "1p4b", list(SIZES), "A released model's sizes.")
_TPU = flags.DEFINE_string("tpu", None, 'Topology, such as "v5e:2x2".')
_GPU = flags.DEFINE_string("gpu", None, "File with XLA's description of the card.")
_CAPABILITY = flags.DEFINE_integer("compute_capability", 90, "Of the card, times 10.")
_CONTEXT = flags.DEFINE_integer("context", 4096, "Tokens that the cache has room for.")
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences.", lower_bound=1)
_NAMES = flags.DEFINE_bool("names", False, "List the kernels.")


def main() -> None:
    if (_TPU.value is None) == (_GPU.value is None):
        raise app.UsageError("give one of --tpu and --gpu")
    if _GPU.value and not pathlib.Path(_GPU.value).is_file():
        raise ConfigError(f"--gpu: {_GPU.value}: no such file")
    device = offline.tpu(_TPU.value) if _TPU.value else offline.gpu(str(_GPU.value), _CAPABILITY.value)
    rows = []
    config = SIZES[_SHAPES.value]
    schemes = papers_schemes(config)
    for name in (FULL, HLA_PAPER, LLA_ABSORBED):
        step = offline.compile_step(config, schemes[name], device, _CONTEXT.value, _BATCH.value)
        counts = ", ".join(str(len(stage)) for stage in step.launches)
        copied = sum(step.copied.values())
        rows.append((name, counts, *(f"{size / 2**20:,.0f}" for size in (step.cache, step.temporary, copied))))
        if _NAMES.value:
            print("\n".join([f"== {name}", *("  " + ", ".join(stage) for stage in step.launches)]))
    print(f"{device.device_kind}, batch {_BATCH.value}, room for {_CONTEXT.value:,} tokens; MiB")
    head = ["", "launches a layer and loop, by stage", "cache", "temporaries", "copies of the cache"]
    print("\n".join(table(head, rows)))


if __name__ == "__main__":
    command_line.run(main)
