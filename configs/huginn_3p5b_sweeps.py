"""Sweeps on Huginn-3.5B: those of `configs/ouro_1p4b_sweeps.py` at its sizes, and the number of steps.

    python -m experiments.analyze --what=steps,stabilisation --model=tomg-group-umd/huginn-0125 \\
        --config=configs/huginn_3p5b_sweeps.py --data=HuggingFaceFW/fineweb-edu --sequences=64 --held_out=16 \\
        --tokens=2048 --workdir=runs/huginn_3p5b_analysis

Needs the hub (weights as safetensors) and an accelerator with 80 GB; not yet run on one, so its time is not known.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from configs import ouro_1p4b_sweeps
from configs._cells import split
from hla_jax.analysis.bench import StepSweep
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA

TRAJECTORY = 3072  # numbers of a head's keys over 32 steps
RANKS = (480, 960, 1920, 3840)


def get_config() -> ml_collections.ConfigDict:
    sweeps = ouro_1p4b_sweeps.get_config()
    steps = StepSweep(numbers=(4, 8, 16, 32, 64), ranks=RANKS, rank_loop1=5280, ratios=(8, 16, 32, 64, 128))
    llas = [LLA(*split(2 * TRAJECTORY / ratio)) for ratio in (8, 16, 32)]
    trained = (HLA(960, 960, 480, 0), HLA(960, 960, 480, 32))
    with sweeps.ignore_type():
        sweeps.scheme = dataclasses.asdict(trained[1])
        sweeps.trained = tuple(map(dataclasses.asdict, trained))
        sweeps.rank_k, sweeps.rank_v, sweeps.rank_loop1 = RANKS, RANKS, RANKS[:3]
        sweeps.lla = dataclasses.asdict(llas[0])
        sweeps.passkey.schemes = tuple(map(dataclasses.asdict, llas))
        sweeps.passkey.contexts = (1024, 2048)
        sweeps.steps = dataclasses.asdict(steps)
    return sweeps
