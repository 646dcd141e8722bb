"""The embedded model with maps that some steps of training have moved: for tests of what comes after training."""

import dataclasses
import pathlib

import hla_jax
from hla_jax.attention.scheme import Attention
from hla_jax.data import pipeline
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import STANDARD_LIBRARY, Source
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig
from hla_jax.training.uptrain import UptrainConfig, uptrain

SCHEMES = {
    "full": hla_jax.FullCache(),
    "hla": hla_jax.HLA(rank_k=64, rank_v=64, rank_loop1=32, window=16),
    "lla": hla_jax.LLA(rank_k=24, rank_v=40),
}
"""HLA at the paper's 10.7x with a short window, and LLA at 4x."""

_SOURCES = (Source(STANDARD_LIBRARY, 1.0),)


def trained(name: str, workdir: pathlib.Path) -> hla_jax.Model:
    """The embedded model in float32 with HLA's maps uptrained, LLA's of the closed form, or its full cache."""
    model = hla_jax.load(hla_jax.NANO, dtype="float32")
    return dataclasses.replace(model, attention=_trained_maps(model, name, workdir))


def _trained_maps(model: hla_jax.Model, name: str, workdir: pathlib.Path) -> Attention:
    rows = pipeline.sequences(_SOURCES, model.tokenizer, 8, 64, held_out=False, seed=0)
    initial = hla_jax.calibrate(model, SCHEMES[name], rows)
    batches = BatchConfig(batch_size=2, length=64, pack=False)
    if name == "hla":
        how = UptrainConfig(
            _SOURCES, batches, OptimizerConfig(5e-3, 32, 4), LoopConfig(32, evaluate_every=32), held_out_batches=1
        )
        return uptrain(model, initial, model.tokenizer, how, workdir)
    return initial
