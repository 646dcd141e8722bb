"""Writes a checkpoint with random weights, to measure memory and time of the real models without their weights.

    python -m experiments.random_checkpoint --size=1p4b --directory=runs/ouro-1p4b      # 2.9 GB, about a minute
    python -m experiments.random_checkpoint --size=3p5b --directory=runs/huginn-3p5b    # Huginn, 7.1 GB

Weights are bf16 in shards of 500 MB, made one tensor at a time, so that it needs little memory.
"""

from __future__ import annotations

import functools
import itertools
import pathlib

import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

from hla_jax import tensor_files
from hla_jax.config import HUGINN_3P5B, OURO_1P4B, OURO_2P6B, ModelConfig
from hla_jax.models import weights
from hla_jax.tensor_files import PendingTensor

SIZES = {"1p4b": OURO_1P4B, "2p6b": OURO_2P6B, "3p5b": HUGINN_3P5B}


def write_checkpoint(
    config: ModelConfig, directory: str | pathlib.Path, seed: int = 0, shard_bytes: int = 500_000_000
) -> None:
    """Writes random bf16 weights as a new Hugging Face directory. Raises `FileExistsError` if it is not empty."""
    dtype = jnp.dtype("bfloat16")
    total = sum(dtype.itemsize * int(np.prod(row.shape(config))) for row in weights.parameters(config))
    with tqdm(total=total, unit="B", unit_scale=True, desc="random weights") as bar:

        def draw(row: weights.Parameter, number: int) -> np.ndarray:
            shape = row.tensor_shape(config)
            mean, std = weights.start_moments(row, config)
            values = np.random.default_rng([seed, number]).standard_normal(shape, np.float32)
            bar.update(values.size * dtype.itemsize)
            return (mean + std * values).astype(dtype)

        number = itertools.count()

        def pending(row: weights.Parameter, layer: int) -> PendingTensor:
            nbytes = dtype.itemsize * int(np.prod(row.tensor_shape(config)))
            return PendingTensor(nbytes, functools.partial(draw, row, next(number)))

        tensors = weights.pending_tensors(config, pending)
        with tensor_files.new_directory(directory) as partial:
            tensor_files.write_json(partial / "config.json", config.to_dict(str(dtype)))
            tensor_files.write_tensors(partial, tensors, shard_bytes)


def main(argv: list[str]) -> None:
    options = flags.FLAGS
    if len(argv) > 1 or (options.size is None) == (options.config_json is None):
        raise app.UsageError("give --directory and one of --size and --config_json")
    config = SIZES[options.size] if options.size else ModelConfig.from_json(options.config_json)
    write_checkpoint(config, options.directory, options.seed)


if __name__ == "__main__":
    flags.DEFINE_enum("size", None, list(SIZES), "Which released model's sizes to take.")
    flags.DEFINE_string("config_json", None, "A config.json to take the sizes from instead.")
    flags.DEFINE_string("directory", None, "Where to write; must not exist or be empty.", required=True)
    flags.DEFINE_integer("seed", 0, "Seed of the weights.")
    app.run(main)
