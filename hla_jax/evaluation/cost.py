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

from hla_jax.attention.lla import LLA
from hla_jax.attention.outer import whole
from hla_jax.attention.scheme import Scheme
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import OURO_1P4B, OURO_2P6B, ModelConfig
from hla_jax.evaluation.markdown import table
from hla_jax.evaluation.schemes import FULL, HLA_PAPER, LLA_PAPER, REUSE, SHARED, papers_schemes
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


def step_traffic(config: ModelConfig, scheme: Scheme, context: int, batch: int, dtype: DTypeLike) -> Traffic:
    """Bytes of one decoding step of `batch` sequences with `context` tokens stored each."""
    size = jnp.dtype(dtype).itemsize
    looped, outer, head = weight_numbers(config)
    scheme = whole(config, scheme)
    reads = scheme.reads(config)
    buffers = scheme.cache_shapes(config, batch, context, dtype)
    cache = sum(reads[name] * math.prod(buffer.shape) * buffer.dtype.itemsize for name, buffer in buffers.items())
    passes = scheme.passes
    return Traffic(
        size * (passes * (config.num_loops * looped + outer) + head),
        passes * size * map_numbers(config, scheme),
        round(cache),
    )


def weight_numbers(config: ModelConfig) -> tuple[int, int, int]:
    """Numbers that every loop reads, in layers outside of the loops, and in the head. An embedding is one row."""

    def numbers(*first: str) -> int:
        rows = weights.parameters(config)
        return sum(math.prod(row.shape(config)) for row in rows if row.path.partition(".")[0] in first)

    return numbers("layers", "adapter"), numbers("prelude", "coda"), config.vocab_size * config.hidden_size


def map_numbers(config: ModelConfig, scheme: Scheme) -> int:
    """Numbers in the maps of all layers."""
    return config.num_layers * sum(math.prod(shape) for shape in scheme.map_shapes(config).values())


def device_memory() -> int:
    """Bytes that arrays can take on the first device: what jax may allocate there, or the machine's memory."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def capacity(config: ModelConfig, scheme: Scheme, context: int, memory: int, dtype: DTypeLike) -> int:
    """Sequences of `context` tokens whose caches fit beside the model and its maps in `memory` bytes."""
    size = jnp.dtype(dtype).itemsize
    model = sum(math.prod(row.shape(config)) for row in weights.parameters(config)) + map_numbers(config, scheme)
    return max(0, (memory - size * model) // whole(config, scheme).cache_bytes(config, context, dtype))


def memory_table(memory: int = 80 * 2**30, context: int = 16384, dtype: DTypeLike = "bfloat16") -> list[str]:
    """Markdown: bytes of each cache for the released models, and sequences of `context` tokens that `memory` bytes hold
    beside the weights and maps. `docs/serving.md` shows it.
    """
    models = {"1.4B": OURO_1P4B, "2.6B": OURO_2P6B}
    first = OURO_1P4B
    numbers, papers = 2 * first.num_loops * first.num_kv_heads * first.head_dim, papers_schemes(first)
    # 3 : 5, as LLA's.
    two_d = {
        ratio: LLA(round(3 * numbers / ratio / 8), round(5 * numbers / ratio / 8), fold_heads=True)
        for ratio in (4, 32 / 3)
    }
    schemes = {
        FULL: papers[FULL],
        "HLA": papers[HLA_PAPER],
        "LLA": papers[LLA_PAPER],
        **{f"LLA-2D, {ratio:.3g}x": scheme for ratio, scheme in two_d.items()},
        SHARED: SharedLoop(papers[HLA_PAPER].window_tokens()),
        REUSE: SharedLoop(0),
    }

    def row(name: str, scheme: Scheme) -> tuple[str, ...]:
        cells = [name, as_call(scheme)]
        for config in models.values():
            window, token = (scheme.cache_bytes(config, tokens, dtype) for tokens in (0, 1))
            held = capacity(config, scheme, context, memory, dtype)
            cells += [f"{(token - window) / 2**10:,.4g} KiB", f"{window / 2**20:,.4g} MiB", f"{held:,}"]
        return tuple(cells)

    columns = ("a token", "a sequence", f"{context // 1024}K in {memory / 2**30:.3g} GiB")
    head = ["cache", "scheme", *(f"{model}: {column}" for model in models for column in columns)]
    return table(head, [row(name, scheme) for name, scheme in schemes.items()])


def as_call(scheme: Scheme) -> str:
    """A scheme in Markdown, as its class is called, defaults left out."""
    fields = [field for field in dataclasses.fields(scheme) if getattr(scheme, field.name) != field.default]  # type: ignore[arg-type]
    return f"`{type(scheme).__name__}({', '.join(f'{field.name}={getattr(scheme, field.name)}' for field in fields)})`"


def copy_bandwidth(nbytes: int = 1 << 30, rounds: int = 10) -> float:
    """Bytes a second that a copy on the first device reads and writes; the median of some copies of `nbytes`."""
    x = jnp.zeros(nbytes // 4, jnp.float32)
    # A copy alone would be left out.
    copy = jax.jit(lambda x, y: x + y)
    return 2 * x.nbytes / median_seconds(lambda: copy(x, 1.0), rounds)
