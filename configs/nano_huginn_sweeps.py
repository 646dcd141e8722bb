"""Sweeps on the embedded small Huginn: those of `configs/nano_sweeps.py` at its sizes, and the number of steps.

    python -m experiments.analyze --what=steps --model=hla_jax/assets/nano_huginn --workdir=runs/huginn_analysis \\
        --config=configs/nano_huginn_sweeps.py --sequences=16 --held_out=8 --tokens=256
"""

from __future__ import annotations

import dataclasses

import ml_collections

from configs import nano_sweeps
from configs._cells import split
from hla_jax.analysis.bench import StepSweep
from hla_jax.attention.lla import LLA

TRAJECTORY = 384  # numbers of a head's keys over the loops


def get_config() -> ml_collections.ConfigDict:
    sweeps = nano_sweeps.get_config()
    steps = StepSweep(numbers=(3, 4, 8, 12, 16), ranks=(32, 64, 128, 256), rank_loop1=128, ratios=(8, 16, 32, 64, 128))
    llas = [LLA(*split(2 * TRAJECTORY / ratio)) for ratio in (4, 32 / 3, 64 / 3)]
    with sweeps.ignore_type():
        sweeps.steps = dataclasses.asdict(steps)
        sweeps.lla = dataclasses.asdict(llas[0])
        sweeps.passkey.schemes = tuple(dataclasses.asdict(lla) for lla in llas)
        sweeps.prompt = 192
        sweeps.shifted.gap, sweeps.shifted.queries = 64, 32
    return sweeps
