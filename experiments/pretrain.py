"""Trains a small Ouro from scratch.

    python -m experiments.pretrain --config=configs/nano_pretrain.py --workdir=runs/nano_pretrain

Leaves `model/` in the work directory, a Hugging Face directory with tokenizer and `scores.json`, which `hla_jax.load`
reads. A run that was stopped continues with the same command. On CPUs with glibc, huge pages and a heap that is not
returned to the system make it a third faster:

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=17179869184
"""

from __future__ import annotations

from experiments import launch
from hla_jax.recipes import pretrain
from hla_jax.training.pretrain import Recipe


def main() -> None:
    for name, score in pretrain.run(launch.read_config(Recipe), launch.workdir(), launch.title()).items():
        print(f"{name:16} {score:.3f}")


if __name__ == "__main__":
    launch.run(main)
