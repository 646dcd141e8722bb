"""Latent key-value caches (HLA, LLA) for looped language models in JAX.

The public names are imported when first used, so that `import hla_jax` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hla_jax.attention.baselines import HeadLatent as HeadLatent
    from hla_jax.attention.baselines import LayerLatent as LayerLatent
    from hla_jax.attention.eviction import Evicted as Evicted
    from hla_jax.attention.full import FullCache as FullCache
    from hla_jax.attention.hla import HLA as HLA
    from hla_jax.attention.lla import LLA as LLA
    from hla_jax.attention.low_bit import LowBit as LowBit
    from hla_jax.attention.scheme import Attention as Attention
    from hla_jax.attention.shared import SharedLoop as SharedLoop
    from hla_jax.calibration.calibrate import calibrate as calibrate
    from hla_jax.generation.engine import Engine as Engine
    from hla_jax.generation.engine import Request as Request
    from hla_jax.generation.generate import decode_forced as decode_forced
    from hla_jax.generation.generate import generate as generate
    from hla_jax.model import NANO as NANO
    from hla_jax.model import Model as Model
    from hla_jax.model import forward as forward
    from hla_jax.model import forward_swapped as forward_swapped
    from hla_jax.model import load as load
    from hla_jax.serving.export import export as export

_HOME = {
    "HLA": "attention.hla",
    "HeadLatent": "attention.baselines",
    "LLA": "attention.lla",
    "LayerLatent": "attention.baselines",
    "NANO": "model",
    "Attention": "attention.scheme",
    "Engine": "generation.engine",
    "Evicted": "attention.eviction",
    "FullCache": "attention.full",
    "LowBit": "attention.low_bit",
    "Model": "model",
    "Request": "generation.engine",
    "SharedLoop": "attention.shared",
    "calibrate": "calibration.calibrate",
    "decode_forced": "generation.generate",
    "export": "serving.export",
    "forward": "model",
    "forward_swapped": "model",
    "generate": "generation.generate",
    "load": "model",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hla_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hla_jax.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
