"""Streaming second moments of keys and values over calibration sequences.

Every pass over the data runs the exact model on one micro-batch after another and keeps sums only, so memory does not
depend on the number of tokens. Layers are taken in groups where the sums of all layers would be too large, at the price
of one pass a group. All moments are uncentred.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from hla_jax.attention.capture import attention_inputs
from hla_jax.config import OuroConfig
from hla_jax.models import ouro
from hla_jax.models.layers import accumulation_dtype, linear

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Bytes of captured attention inputs of one micro-batch, and of the sums of one group of layers.
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


Accumulate = Callable[[Any, Array, Array, dict[str, Array]], Any]
"""(sums of one layer, its attention inputs [T, N, d], which tokens count [N], its projections) -> sums."""


def stream(
    params: ouro.Params,
    config: OuroConfig,
    sequences: Sequences,
    layers: range,
    accumulate: Accumulate,
    sums: Any,
    description: str,
) -> Any:
    """One pass over the sequences.

    Args:
      params: the parameter tree.
      config: sizes.
      sequences: calibration data.
      layers: the group of layers.
      accumulate: adds one layer's tokens to its sums.
      sums: initial sums, with a leading axis over `layers`.
      description: label of the progress bar.

    Returns:
      The sums over all tokens.
    """
    count, length = sequences.tokens.shape
    per_sequence = config.num_loops * len(layers) * length * config.hidden_size * params["embed_tokens"].dtype.itemsize
    size = int(np.clip(CAPTURE_BYTES // per_sequence, 1, count))
    for start in tqdm(range(0, count, size), desc=description, unit="batch", leave=False):
        rows = np.arange(start, start + size)
        # The last micro-batch repeats a row with length 0 rather than compiling another shape.
        tokens, lengths = (np.take(x, rows, axis=0, mode="clip") for x in (sequences.tokens, sequences.lengths))
        sums = _add(params, config, tokens, np.where(rows < count, lengths, 0), layers, accumulate, sums)
    return sums


@functools.partial(jax.jit, static_argnames=("config", "layers", "accumulate"), donate_argnames="sums")
def _add(params, config, tokens, lengths, layers, accumulate, sums):
    positions = jnp.arange(tokens.shape[1])[None]
    h = attention_inputs(params, config, tokens, positions, layers=layers)
    h = h.reshape(*h.shape[:2], -1, config.hidden_size)
    counted = (positions < lengths[:, None]).reshape(-1)
    projections = {name: params["layers"][name][layers.start : layers.stop] for name in ("k_proj", "v_proj")}
    one_layer = lambda xs: accumulate(xs[0], xs[1], counted, xs[2])
    return jax.lax.map(one_layer, (sums, jnp.moveaxis(h, 1, 0), projections))


def key_moments(
    params: ouro.Params, config: OuroConfig, sequences: Sequences, layers: range
) -> tuple[Float[np.ndarray, "L F P P"], Float[np.ndarray, "L F G G"]]:
    """Sigma_f = sum_j K_f K_f^T of every rotary frequency f (HLA, Appendix A), over both coordinates of the pairs.

    Returns:
      For loops 2 .. T jointly, with the P = (T-1) G pairs in the order loop, head; and for loop 1.
    """
    frequencies, heads = config.head_dim // 2, config.num_kv_heads
    joint = (config.num_loops - 1) * heads
    dtype = accumulation_dtype(params["embed_tokens"].dtype)
    sums = (
        jnp.zeros((len(layers), frequencies, joint, joint), dtype),
        jnp.zeros((len(layers), frequencies, heads, heads), dtype),
    )
    rest, first = stream(params, config, sequences, layers, _KeyMoments(config), sums, "key moments")
    return np.asarray(rest), np.asarray(first)


@dataclasses.dataclass(frozen=True)
class _KeyMoments:
    config: OuroConfig

    def __call__(self, sums, h, counted, projections):
        pairs = linear(h, projections["k_proj"]) * counted[None, :, None]
        pairs = pairs.reshape(*h.shape[:2], self.config.num_kv_heads, 2, self.config.head_dim // 2)

        def moment(pairs: Float[Array, "t N G 2 F"]) -> Float[Array, "F P P"]:
            stacked = jnp.moveaxis(pairs, 1, 0).reshape(pairs.shape[1], -1, 2, pairs.shape[-1])
            return jnp.einsum("npcf,nqcf->fpq", stacked, stacked, preferred_element_type=sums[0].dtype)

        return sums[0] + moment(pairs[1:]), sums[1] + moment(pairs[:1])


def value_moments(
    params: ouro.Params, config: OuroConfig, sequences: Sequences, layers: range, loops: range
) -> Float[np.ndarray, "L D D"]:
    """sum_j V_j V_j^T of the values of `loops` concatenated in the order loop, head, coordinate: D = len(loops) G
    dh.
    """
    dimensions = len(loops) * config.num_kv_heads * config.head_dim
    sums = jnp.zeros((len(layers), dimensions, dimensions), accumulation_dtype(params["embed_tokens"].dtype))
    return np.asarray(
        stream(params, config, sequences, layers, _ValueMoments(loops), sums, f"value moments, {_name(loops)}")
    )


@dataclasses.dataclass(frozen=True)
class _ValueMoments:
    loops: range

    def __call__(self, sums, h, counted, projections):
        values = _joint_values(h, counted, projections, self.loops)
        return sums + jnp.einsum("nd,ne->de", values, values, preferred_element_type=sums.dtype)


def value_products(
    params: ouro.Params,
    config: OuroConfig,
    sequences: Sequences,
    layers: range,
    loops: range,
    basis: Float[np.ndarray, "L D k"],
) -> Float[np.ndarray, "L D k"]:
    """(sum_j V_j V_j^T) basis, without forming the D x D moments: one step of subspace iteration."""
    sums = (jnp.asarray(basis), jnp.zeros_like(basis))
    return np.asarray(
        stream(params, config, sequences, layers, _ValueProducts(loops), sums, f"value sketch, {_name(loops)}")[1]
    )


@dataclasses.dataclass(frozen=True)
class _ValueProducts:
    loops: range

    def __call__(self, sums, h, counted, projections):
        basis, products = sums
        values = _joint_values(h, counted, projections, self.loops).astype(basis.dtype)
        return basis, products + values.T @ (values @ basis)


def _joint_values(h, counted, projections, loops: range):
    values = linear(h[loops.start : loops.stop], projections["v_proj"]) * counted[None, :, None]
    return jnp.moveaxis(values, 1, 0).reshape(h.shape[1], -1)


def _name(loops: range) -> str:
    return f"loop {loops.start + 1}" if len(loops) == 1 else f"loops {loops.start + 1}-{loops.stop}"


def layer_groups(config: OuroConfig, bytes_per_layer: int) -> list[range]:
    """Consecutive layers whose sums fit in `MOMENT_BYTES` together."""
    size = int(np.clip(MOMENT_BYTES // bytes_per_layer, 1, config.num_layers))
    return [range(start, min(start + size, config.num_layers)) for start in range(0, config.num_layers, size)]
