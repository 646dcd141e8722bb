"""Fine-tuning the embedded model on a task it has never seen, lists of words written backwards, as conversations.

    python -m experiments.uptrain --config=configs/nano_hla.py --workdir=runs/nano_hla
    python -m experiments.finetune --config=configs/nano_finetune.py --workdir=runs/nano_finetune

Measured: 50 minutes for both caches on two cores shared by a dozen processes. Expect, after 200 steps, about 47% of the
held-out lists right with the full cache and 62% with HLA, where none were before: docs/nano_finetune.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from hla_jax.data.supervised import ChatBatches, ChatSource
from hla_jax.recipes.finetune import Evaluation, Job
from hla_jax.training.finetune import FinetuneConfig
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig

STEPS = 200


def get_config() -> ml_collections.ConfigDict:
    job = Job(
        model="runs/nano_hla/export",
        dtype="float32",
        caches=("full cache", "HLA"),
        finetune=FinetuneConfig(
            sources=(ChatSource("synthetic", tasks=("reverse",), tokens=(16, 64)),),
            batches=ChatBatches(tokens=1536, lengths=(96,), block=256),
            optimizer=OptimizerConfig(peak_learning_rate=1e-3, total_steps=STEPS, warmup_steps=10),
            loop=LoopConfig(steps=STEPS, log_every=10, evaluate_every=20, save_every=100),
        ),
        evaluation=Evaluation(conversations=128, longest=96, batch_size=32),
    )
    return ml_collections.ConfigDict(dataclasses.asdict(job))
