"""One step of the main job at the size of Ouro-1.4B on a CPU, with random weights: shows its memory, teaches nothing.

    python -m experiments.random_checkpoint --size=1p4b --directory=runs/ouro_1p4b
    cp TOKENIZER_DIRECTORY/tokenizer.json runs/ouro_1p4b/          # any tokenizer of at most 49,152 tokens
    python -m experiments.uptrain --config=configs/ouro_1p4b_one_step.py --workdir=runs/ouro_1p4b_one_step

Measured on two CPU cores with XLA_FLAGS=--xla_disable_hlo_passes=while-loop-invariant-code-motion (see
`experiments/measure_decode.py`): 8 minutes, 14.6 GiB at the peak; 512 tokens, the step with its compilation 68 s.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from configs import ouro_1p4b_hla
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import STANDARD_LIBRARY, Source
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig

LENGTH = 512


def get_config() -> ml_collections.ConfigDict:
    config = ouro_1p4b_hla.get_config()
    config.model = "runs/ouro_1p4b"
    config.evaluation = None
    config.check_prompts, config.check_tokens = 1, 2
    config.calibration = {"sequences": 1, "tokens": LENGTH}
    config.uptrain.sources = (dataclasses.asdict(Source(STANDARD_LIBRARY)),)
    config.uptrain.batches = dataclasses.asdict(BatchConfig(batch_size=1, length=LENGTH))
    config.uptrain.optimizer = dataclasses.asdict(OptimizerConfig(peak_learning_rate=1e-3, total_steps=1))
    config.uptrain.loop = dataclasses.asdict(LoopConfig(steps=1))
    config.uptrain.micro_batches = config.uptrain.held_out_batches = config.uptrain.lanes = 1
    config.uptrain.long = config.phase2 = config.mesh = None
    return config
