"""Memory, work and time of uptraining at true size, from the real compiler without the hardware.

    python -m experiments.plan_training --config=configs/ouro_1p4b_hla.py --shapes=1p4b --tpu=v5e:4x4 \
        --config.mesh.fsdp=8 --config.mesh.sequence=2 --config.phase2.long.micro_batches=1
    python -m experiments.plan_training --config=configs/ouro_1p4b_hla.py --shapes=1p4b --gpu=h100_sxm.txtpb
    python -m experiments.plan_training --config=configs/ouro_1p4b_hla.py --shapes=1p4b           # for this machine

Compiles the step of each phase as the job would run it and prints a line for each: bytes on a device, operations, and
hours at the utilisation that is assumed (`--utilisation`). See `hla_jax/evaluation/offline.py` for what must be
installed. A TPU's compiler refuses what does not fit, and its own number is printed.
"""

from __future__ import annotations

import pathlib

import jax
from absl import app, flags

from experiments import command_line, launch
from experiments.random_checkpoint import SIZES
from hla_jax.config import ConfigError
from hla_jax.evaluation import offline
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.training_plan import plan
from hla_jax.kernels.attention_match import api as attention_match
from hla_jax.recipes.uptrain import Job
from hla_jax.sharding import MeshConfig

PEAK = {"v5e": 197e12, "v6e": 918e12, "v5p": 459e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Operations a second in bfloat16, as the makers state them."""

_SHAPES = flags.DEFINE_enum("shapes", "1p4b", list(SIZES), "A released model's sizes, in place of the config's model.")
_TPU = flags.DEFINE_string("tpu", None, 'Topology, such as "v5e:4x4".')
_GPU = flags.DEFINE_string("gpu", None, "File with XLA's description of the card.")
_CAPABILITY = flags.DEFINE_integer("compute_capability", 90, "Of the card, times 10.")
_PHASES = flags.DEFINE_list("phases", ["1", "2"], "Phases to compile.")
_UTILISATION = flags.DEFINE_float("utilisation", 0.4, "Assumed share of the peak.", lower_bound=0.01, upper_bound=1)


def main() -> None:
    if _TPU.value and _GPU.value:
        raise app.UsageError("give one of --tpu and --gpu, or none for this machine")
    if _GPU.value and not pathlib.Path(_GPU.value).is_file():
        raise ConfigError(f"--gpu: {_GPU.value}: no such file")
    job = launch.read_config(Job)
    devices = jax.devices()
    if _TPU.value:
        devices = offline.tpus(_TPU.value)
    elif _GPU.value:
        devices = [offline.gpu(_GPU.value, _CAPABILITY.value)]
    mesh = (job.mesh or MeshConfig()).make(devices)
    with jax.set_mesh(mesh):
        print(f"attention_match: {', '.join(attention_match.choose())}")
    kind = _TPU.value.split(":")[0] if _TPU.value else devices[0].device_kind
    peak = next((value for name, value in PEAK.items() if name in kind), None)
    rows = []
    for number, phase in enumerate(job.phases(pathlib.Path()).values(), start=1):
        if str(number) not in _PHASES.value:
            continue
        found = plan(SIZES[_SHAPES.value], job.scheme, phase, mesh, job.dtype)
        seconds = found.flops / (len(devices) * peak * _UTILISATION.value) if peak else float("nan")
        sizes = [f"{size / 2**30:.1f}" for size in (found.arguments, found.temporary, found.total)]
        time = [f"{found.flops / 1e12:,.0f}", f"{seconds:.1f}", f"{seconds * phase.loop.steps / 3600:.1f}"]
        rows.append([str(number), *sizes, "no" if found.too_large else "yes", f"{found.tokens:,}", *time])
        if found.too_large:
            print(found.too_large)
    shape = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    print(f"{_SHAPES.value} on {len(devices)} x {kind}, {shape}; utilisation {_UTILISATION.value:g} is assumed")
    head = ["phase", "arguments GiB", "temporary GiB", "a device GiB", "fits", "tokens a step"]
    print("\n".join(table([*head, "TFLOP a step", "s a step", "hours"], rows)))


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    command_line.run(main)
