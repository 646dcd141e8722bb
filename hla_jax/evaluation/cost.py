"""What a decoding step must move, how fast memory moves it, and how many sequences memory holds.

A step reads the layers' weights once a loop, all maps once, and every buffer of the cache as often as the scheme says:
no step is faster than these bytes at the speed of a copy.
"""

from __future__ import annotations

import dataclasses
import math
import os

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hla_jax.attention.scheme import Scheme
from hla_jax.config import OuroConfig
from hla_jax.evaluation.speed import median_seconds
from hla_jax.models import weights


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one decoding step reads."""

    weights: int
    maps: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.maps + self.cache


def step_traffic(config: OuroConfig, scheme: Scheme, context: int, batch: int, dtype: DTypeLike) -> Traffic:
    """Bytes of one decoding step of `batch` sequences with `context` tokens stored each."""
    size = jnp.dtype(dtype).itemsize
    layers, rest = weight_numbers(config)
    reads = scheme.reads(config)
    buffers = scheme.cache_shapes(config, batch, context, dtype)
    cache = sum(reads[name] * math.prod(buffer.shape) * buffer.dtype.itemsize for name, buffer in buffers.items())
    passes = scheme.passes
    return Traffic(
        size * (passes * config.num_loops * layers + rest), passes * size * map_numbers(config, scheme), cache
    )


def weight_numbers(config: OuroConfig) -> tuple[int, int]:
    """Numbers in all layers, and in what a step reads besides them: the head. An embedding is one row."""
    rows = weights.parameters(config)
    layers = sum(math.prod(row.shape(config)) for row in rows if row.stacked)
    return layers, config.vocab_size * config.hidden_size


def map_numbers(config: OuroConfig, scheme: Scheme) -> int:
    """Numbers in the maps of all layers."""
    return config.num_layers * sum(math.prod(shape) for shape in scheme.map_shapes(config).values())


def device_memory() -> int:
    """Bytes that arrays can take on the first device: what jax may allocate there, or the machine's memory."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def capacity(config: OuroConfig, scheme: Scheme, context: int, memory: int, dtype: DTypeLike) -> int:
    """Sequences of `context` tokens whose caches fit beside the model and its maps in `memory` bytes."""
    size = jnp.dtype(dtype).itemsize
    model = sum(math.prod(row.shape(config)) for row in weights.parameters(config)) + map_numbers(config, scheme)
    return max(0, (memory - size * model) // scheme.cache_bytes(config, context, dtype))


def copy_bandwidth(nbytes: int = 1 << 30, rounds: int = 10) -> float:
    """Bytes a second that a copy on the first device reads and writes; the median of some copies of `nbytes`."""
    x = jnp.zeros(nbytes // 4, jnp.float32)
    # A copy alone would be left out.
    copy = jax.jit(lambda x, y: x + y)
    return 2 * x.nbytes / median_seconds(lambda: copy(x, 1.0), rounds)
