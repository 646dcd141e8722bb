"""Streaming second moments of keys and values over calibration sequences.

Every pass over the data runs the exact model on one micro-batch after another and keeps sums only, so memory does not
depend on the number of tokens. Layers are taken in groups where the sums of all layers would be too large, at the price
of one pass a group. Where the weights lie on a mesh with a "data" axis, its devices share the rows of every
micro-batch, and every one gets the sums. All moments are uncentred.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from tqdm import tqdm

from hla_jax import sharding
from hla_jax.attention.capture import attention_inputs
from hla_jax.config import ModelConfig
from hla_jax.models.layers import accumulation_dtype, linear
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# Bytes of captured attention inputs of one micro-batch on one device, and of the sums of one group of layers.
CAPTURE_BYTES = 1 << 30
MOMENT_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Calibration sequences: right-padded token ids and how many of each row count."""

    tokens: Int[np.ndarray, "N S"]
    lengths: Int[np.ndarray, " N"]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]] | Int[np.ndarray, "N S"]) -> Sequences:
        """From a [N, S] array or from lists of token ids. Raises `ValueError` if there is no token."""
        rows = [np.asarray(row, np.int32) for row in sequences]
        if not rows or min(map(len, rows)) == 0:
            raise ValueError("calibration needs at least one sequence, and no empty one")
        tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = row
        return cls(tokens, np.asarray([len(row) for row in rows], np.int32))


class Measure(Protocol):
    """A sum over tokens that is kept for every layer. Implementations are frozen dataclasses, static under
    `jax.jit`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the sum of one layer."""
        ...

    def __call__(
        self, h: Float[Array, "T N d"], counted: Bool[Array, " N"], projections: dict[str, Array], operand: Any
    ) -> Array:
        """What the tokens of one layer add: its attention inputs, which of them count, its key and value projections
        (for `projected`), and the measure's own operand for the layer.
        """
        ...


@dataclasses.dataclass(frozen=True)
class KeyMoments:
    """Sigma_f = sum_j K_f K_f^T of every rotary frequency f over both coordinates (HLA, Appendix A): [F, P, P], with
    the P key pairs of `loops` in the order loop, head.
    """

    config: ModelConfig
    loops: range

    @property
    def shape(self) -> tuple[int, ...]:
        pairs = len(self.loops) * self.config.num_kv_heads
        return self.config.head_dim // 2, pairs, pairs

    def __call__(self, h, counted, projections, operand):
        keys = projected(h[self.loops.start : self.loops.stop], projections, "k") * counted[None, :, None]
        pairs = keys.reshape(*keys.shape[:2], self.config.num_kv_heads, 2, self.config.head_dim // 2)
        stacked = jnp.moveaxis(pairs, 1, 0).reshape(h.shape[1], -1, 2, self.config.head_dim // 2)
        return jnp.einsum("npcf,nqcf->fpq", stacked, stacked, preferred_element_type=accumulation_dtype(h.dtype))


@dataclasses.dataclass(frozen=True)
class ValueMoments:
    """sum_j V_j V_j^T of the values of `loops` concatenated in the order loop, head, coordinate: [D, D]."""

    config: ModelConfig
    loops: range

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.loops) * self.config.num_kv_heads * self.config.head_dim,) * 2

    def __call__(self, h, counted, projections, operand):
        values = _joint_values(h, counted, projections, self.loops)
        return jnp.einsum("nd,ne->de", values, values, preferred_element_type=accumulation_dtype(h.dtype))


@dataclasses.dataclass(frozen=True)
class ValueProducts:
    """(sum_j V_j V_j^T) Q for the operand Q [D, k], without forming the moments: one step of subspace iteration."""

    config: ModelConfig
    loops: range
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.loops) * self.config.num_kv_heads * self.config.head_dim, self.width

    def __call__(self, h, counted, projections, operand):
        values = _joint_values(h, counted, projections, self.loops).astype(operand.dtype)
        return values.T @ (values @ operand)


def measure(
    params: Params,
    config: ModelConfig,
    sequences: Sequences,
    measures: Sequence[Measure],
    operands: Sequence[Float[np.ndarray, "L ..."] | None] | None = None,
    together: int = 1,
) -> list[Float[np.ndarray, "L ..."]]:
    """The sums of all measures over all tokens, for every layer, in one pass over the data for each group of layers.

    `operands` has one for each measure that takes one. With `together` > 1 a measure is of that many adjacent layers:
    it gets attention inputs [n, T, N, d] and projections [n, ...], and L counts such sets of layers.
    """
    operands = operands or [None] * len(measures)
    wide = accumulation_dtype(params["embed_tokens"].dtype)
    groups = []
    for group in sets_at_once(config, measures, wide, together):
        layers = range(group.start * together, group.stop * together)
        mine = jax.tree.map(lambda operand: operand[group.start : group.stop], list(operands))  # noqa: B023
        sums = [jnp.zeros((len(group), *each.shape), wide) for each in measures]
        for tokens, lengths in _micro_batches(params, config, sequences, layers):
            sums = _add(params, config, tokens, lengths, layers, together, tuple(measures), sums, mine)
        groups.append([sharding.to_host(total) for total in sums])
    return [np.concatenate(parts) for parts in zip(*groups, strict=True)]


def sets_at_once(config: ModelConfig, measures: Sequence[Measure], dtype: DTypeLike, together: int = 1) -> list[range]:
    """The sets of layers that each pass over the data measures."""
    numbers = sum(math.prod(each.shape) for each in measures)
    sets = config.num_layers // together
    size = int(np.clip(MOMENT_BYTES // (numbers * jnp.dtype(dtype).itemsize), 1, sets))
    return [range(start, min(start + size, sets)) for start in range(0, sets, size)]


def _micro_batches(
    params: Params, config: ModelConfig, sequences: Sequences, layers: range
) -> Iterator[tuple[Int[Array, "b S"], Int[Array, " b"]]]:
    count, length = sequences.tokens.shape
    per_sequence = sequence_bytes(config, params["embed_tokens"].dtype, length, layers)
    held = getattr(params["embed_tokens"], "sharding", None)
    mesh = held.mesh if isinstance(held, NamedSharding) and isinstance(held.mesh, Mesh) else None
    devices = sharding.row_parts(mesh)
    size = devices * int(np.clip(CAPTURE_BYTES // per_sequence, 1, -(-count // devices)))
    label = f"calibration, layers {layers.start + 1}-{layers.stop}"
    with tqdm(total=count, desc=label, unit="sequence", leave=False) as bar:
        for start in range(0, count, size):
            rows = np.arange(start, start + size)
            # The last micro-batch repeats a row with length 0 rather than compiling another shape.
            tokens, lengths = (np.take(x, rows, axis=0, mode="clip") for x in (sequences.tokens, sequences.lengths))
            yield sharding.put_shared((tokens, np.where(rows < count, lengths, 0)), mesh)
            bar.update(int(np.sum(rows < count)))


def sequence_bytes(config: ModelConfig, dtype: DTypeLike, length: int, layers: range) -> int:
    """Bytes of the attention inputs that one sequence is held with while it is measured."""
    return config.num_loops * len(layers) * length * config.hidden_size * jnp.dtype(dtype).itemsize


@functools.partial(jax.jit, static_argnames=("config", "layers", "together", "measures"), donate_argnames="sums")
def _add(params, config, tokens, lengths, layers, together, measures, sums, operands):
    positions = jnp.arange(tokens.shape[1])[None]
    h = attention_inputs(params, config, tokens, positions, layers=layers)
    h = h.reshape(*h.shape[:2], -1, config.hidden_size)
    counted = (positions < lengths[:, None]).reshape(-1)
    names = ("k_proj", "v_proj", "k_bias") if config.qk_bias else ("k_proj", "v_proj")
    projections = {name: params["layers"][name][layers.start : layers.stop] for name in names}

    def one_layer(xs):
        sums, h, projections, operands = xs
        return [
            total + each(h, counted, projections, operand).astype(total.dtype)
            for each, total, operand in zip(measures, sums, operands, strict=True)
        ]

    h = jnp.moveaxis(h, 1, 0)
    if together > 1:
        h, projections = jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), (h, projections))
    return jax.lax.map(one_layer, (sums, h, projections, operands))


def projected(h: Float[Array, "... d"], projections: dict[str, Array], name: str) -> Float[Array, "... Gdh"]:
    """Keys ("k") or values ("v") of one layer, before rotation."""
    x = linear(h, projections[f"{name}_proj"])
    return x + projections[f"{name}_bias"] if f"{name}_bias" in projections else x


def _joint_values(h, counted, projections, loops: range):
    values = linear(h[loops.start : loops.stop], projections["v_proj"]) * counted[None, :, None]
    return jnp.moveaxis(values, 1, 0).reshape(h.shape[1], -1)
