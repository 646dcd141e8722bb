"""Compression up to 128 times on Huginn-3.5B of 32 steps: the cells of `nano_huginn_compare`, the settings of
`ouro_1p4b_compare`.

    python -m experiments.compare --config=configs/huginn_3p5b_compare.py --workdir=runs/huginn_3p5b_compare

Needs the hub (tomg-group-umd/huginn-0125, as safetensors, and the data of `ouro_1p4b_compare`) and an accelerator with
80 GB. Not yet run. The LLA paper finds refined latents of a model of many loops near-lossless up to 32 times.
"""

from __future__ import annotations

import ml_collections

from configs import ouro_1p4b_compare
from configs.nano_huginn_compare import cells
from hla_jax.config import HUGINN_3P5B


def get_config() -> ml_collections.ConfigDict:
    return ouro_1p4b_compare.comparison(
        "tomg-group-umd/huginn-0125", cells(HUGINN_3P5B, main=1344, window=128), contexts=(1024, 4096)
    )
