"""The fixed quantisers of `LowBit`'s keys: around each channel's mean, in steps that fit its standard deviation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from hla_jax.attention.low_bit import LowBit
from hla_jax.calibration.moments import Sequences, measure, projected
from hla_jax.config import ModelConfig
from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Float

GAUSSIAN_STEP = {2: 0.995687, 4: 0.335201, 8: 0.030762}
"""Bits -> step of the uniform quantiser with 2^bits levels around 0 that has the least mean square error for a standard
normal number (Max, Quantizing for minimum distortion, 1960, table II; 256 levels, beyond that table, by the same
minimisation).
"""


@dataclasses.dataclass(frozen=True)
class ChannelMoments:
    """Sums of the keys and of their squares in every loop, head and channel: [2, T, G, dh]."""

    config: ModelConfig

    @property
    def shape(self) -> tuple[int, ...]:
        return 2, self.config.num_loops, self.config.num_kv_heads, self.config.head_dim

    def __call__(self, h, counted, projections, operand):
        keys = projected(h, projections, "k").astype(accumulation_dtype(h.dtype)) * counted[None, :, None]
        return jnp.stack([jnp.sum(keys, axis=1), jnp.sum(keys**2, axis=1)]).reshape(self.shape)


def channel_maps(
    scheme: LowBit, params: Params, config: ModelConfig, sequences: Sequences
) -> Iterator[dict[str, Float[np.ndarray, "..."]]]:
    """Mean of every channel of the keys, and the best step for a Gaussian of its standard deviation."""
    (moments,) = measure(params, config, sequences, [ChannelMoments(config)])
    for sums in moments:
        mean, square = np.asarray(sums, np.float64) / sequences.lengths.sum()
        deviation = np.sqrt(np.maximum(square - mean**2, 0))
        yield {"k_center": mean, "k_step": GAUSSIAN_STEP[scheme.bits] * deviation}
