"""Fine-tuning Ouro-1.4B on math reasoning traces with the settings of the HLA paper (arXiv:2610.07940, section 5.4):
400 steps of about 128 sequences at a learning rate of 1e-5, all weights, one repetition of the second pass.

    python -m experiments.uptrain --config=configs/ouro_1p4b_hla.py --workdir=runs/ouro_1p4b_hla
    python -m experiments.finetune --config=configs/ouro_1p4b_finetune.py --workdir=runs/ouro_1p4b_finetune

Needs the hub (open-r1/OpenR1-Math-220k) and an accelerator with 80 GB; not yet run on one, so its time is not known.
On 8 devices --config.finetune.micro_batches=6: weights, masters and moments are spread over all of them.
The paper does not name its traces. Its validation losses end at 0.293 for the full cache and 0.292 for HLA. For the
2.6B model: --config.model=runs/ouro_2p6b_hla/export --config.finetune.repetitions=0
"""

from __future__ import annotations

import dataclasses

import ml_collections

from hla_jax.data.supervised import ChatBatches, ChatSource
from hla_jax.recipes.finetune import Evaluation, Job
from hla_jax.sharding import MeshConfig
from hla_jax.training.finetune import FinetuneConfig
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig

STEPS = 400


def get_config() -> ml_collections.ConfigDict:
    job = Job(
        model="runs/ouro_1p4b_hla/export",
        dtype="bfloat16",
        caches=("full cache", "HLA"),
        finetune=FinetuneConfig(
            sources=(ChatSource("open-r1/OpenR1-Math-220k", name="default", kind="verified"),),
            # 128 traces have about 1,500 tokens each.
            batches=ChatBatches(tokens=48 * 4096, lengths=(1024, 2048, 4096)),
            optimizer=OptimizerConfig(peak_learning_rate=1e-5, total_steps=STEPS, warmup_steps=20),
            loop=LoopConfig(steps=STEPS, log_every=5, evaluate_every=50, save_every=50),
            repetitions=1,
            micro_batches=48,
        ),
        evaluation=Evaluation(conversations=32, longest=4096, batch_size=4),
        mesh=MeshConfig(fsdp=-1),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(job))
