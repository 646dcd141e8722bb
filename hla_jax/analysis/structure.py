"""Structure of the cache along loops, heads and layers, from the exact model (LLA, section 4; HLA, section 5.5).

Two passes over the data keep sums only, so memory does not depend on the number of tokens: `hidden_moments` gives mean
and covariance of a layer's attention inputs of all loops together, from which everything linear follows without data
(`projected`, and the functions of one layer's `Projected` after it); `axis_energies` decomposes the keys and values of
every single token.

Keys are those before rotation, as in both papers: a token's keys at all loops are turned by the same angles, so
rotation changes none of what is measured between loops.

Shapes: T loops, L layers, d hidden size, G key-value heads, dh head size, D = G dh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.calibration import moments
from hla_jax.calibration.moments import Sequences
from hla_jax.config import ModelConfig
from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Axis = Literal["loops", "heads", "layers"]
AXES: tuple[Axis, ...] = ("loops", "heads", "layers")
PROJECTIONS = {"keys": "k_proj", "values": "v_proj"}

# Joint dimensions T d up to which a layer's covariance is formed.
LARGEST_JOINT = 16384


class Moments(NamedTuple):
    """Mean and covariance of the attention inputs h of every layer, all loops of a token together."""

    tokens: int
    mean: Float[np.ndarray, "L T d"]
    covariance: Float[np.ndarray, "L T d T d"]


class Projected(NamedTuple):
    """Mean and covariance, in float64, of one layer's keys or values, all loops of a token together."""

    mean: Float[np.ndarray, "T D"]
    covariance: Float[np.ndarray, "T D T D"]


class Energies(NamedTuple):
    """What single tokens' keys (first) and values (second) look like along one axis with n entries.

    Attributes:
      effective_rank: exp(entropy of the energies), over the largest possible, min(n, dh): 1 for equal energies.
      spectrum: mean share of the energy of each singular direction, largest first.
    """

    effective_rank: Float[np.ndarray, "L 2"]
    spectrum: Float[np.ndarray, "L 2 n"]


@dataclasses.dataclass(frozen=True)
class _Sum:
    """Of the attention inputs of all loops: [T, d]."""

    config: ModelConfig

    @property
    def shape(self) -> tuple[int, ...]:
        return self.config.num_loops, self.config.hidden_size

    def __call__(self, h, counted, projections, operand):
        return jnp.einsum("tnd,n->td", h, counted.astype(h.dtype), preferred_element_type=accumulation_dtype(h.dtype))


@dataclasses.dataclass(frozen=True)
class _Products:
    """Of the attention inputs of all loops around the operand [T, d]: [T d, T d]."""

    config: ModelConfig

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.config.num_loops * self.config.hidden_size,) * 2

    def __call__(self, h, counted, projections, operand):
        around = _around(h, operand) * counted[None, :, None]
        joint = jnp.moveaxis(around, 1, 0).reshape(h.shape[1], -1)
        return joint.T @ joint


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Normalised effective rank and energies along one axis of every token's keys and values, after the operand
    [..., T, d] is taken from the attention inputs: [2, 1 + n], averaged over the other axes.
    """

    config: ModelConfig
    axis: Axis
    centred: bool

    @property
    def length(self) -> int:
        """n, entries of the axis."""
        sizes = {"loops": self.config.num_loops, "heads": self.config.num_kv_heads, "layers": self.config.num_layers}
        return sizes[self.axis]

    @property
    def shape(self) -> tuple[int, ...]:
        return 2, 1 + self.length

    def __call__(self, h, counted, projections, operand):
        if h.ndim == 3:  # one layer by itself
            h, operand = h[None], operand[None]
            projections = {name: weight[None] for name, weight in projections.items()}
        around = _around(h, operand)
        x = {
            name: jnp.einsum("ltnd,led->nlte", around, projections[name].astype(h.dtype))
            for name in PROJECTIONS.values()
        }
        if self.config.qk_bias and not self.centred:
            x["k_proj"] = x["k_proj"] + projections["k_bias"][:, None].astype(h.dtype)
        return jnp.stack([self._of(each, counted) for each in x.values()])

    def _of(self, x: Float[Array, "N l T D"], counted: Bool[Array, " N"]) -> Array:
        x = x.reshape(*x.shape[:3], self.config.num_kv_heads, self.config.head_dim)
        rows = jnp.moveaxis(x, {"layers": 1, "loops": 2, "heads": 3}[self.axis], -2)
        energies = jnp.linalg.eigvalsh(jnp.einsum("...ie,...je->...ij", rows, rows))[..., ::-1]
        energies = jnp.maximum(energies, 0)
        found = jnp.concatenate([normalised_rank(energies, self.config.head_dim)[..., None], shares(energies)], -1)
        by_token = jnp.mean(found, axis=tuple(range(1, found.ndim - 1)))
        return jnp.sum(jnp.where(counted[:, None], by_token, 0), axis=0)


def hidden_moments(params: Params, config: ModelConfig, sequences: Sequences) -> Moments:
    """Mean and covariance of the attention inputs of every layer, in two passes over the sequences.

    Memory: (T d)^2 numbers a layer on the host; on the device so many layers as `calibration.moments.MOMENT_BYTES`
    holds.

    Raises:
      ValueError: T d is above `LARGEST_JOINT`.
    """
    joint = config.num_loops * config.hidden_size
    if joint > LARGEST_JOINT:
        raise ValueError(f"loops x hidden size is {joint}; its covariance is formed up to {LARGEST_JOINT}")
    count = int(sequences.lengths.sum())
    mean = hidden_mean(params, config, sequences)
    (products,) = moments.measure(params, config, sequences, [_Products(config)], [mean])
    shape = (config.num_layers, *(config.num_loops, config.hidden_size) * 2)
    return Moments(count, mean, (products / count).reshape(shape))


def hidden_mean(params: Params, config: ModelConfig, sequences: Sequences) -> Float[np.ndarray, "L T d"]:
    """Mean of the attention inputs of every layer and loop, in one pass."""
    (total,) = moments.measure(params, config, sequences, [_Sum(config)])
    return total / total.dtype.type(sequences.lengths.sum())


def axis_energies(
    params: Params,
    config: ModelConfig,
    sequences: Sequences,
    axis: Axis,
    around: Float[np.ndarray, "L T d"] | None = None,
) -> Energies:
    """Effective rank and energies of every token's own matrix with the entries of one axis as rows [n, dh], averaged
    over tokens and over what the other axes have.

    Args:
      params: the parameter tree.
      config: sizes.
      sequences: what the exact model reads.
      axis: whose rows; for "layers" the results' L is 1.
      around: `hidden_mean`, for keys and values as they differ from their mean; None takes them as they are.
    """
    measure = _Axis(config, axis, centred=around is not None)
    around = (
        np.zeros((config.num_layers, config.num_loops, config.hidden_size), np.float32) if around is None else around
    )
    together = config.num_layers if axis == "layers" else 1
    operand = around[None] if together > 1 else around
    (total,) = moments.measure(params, config, sequences, [measure], [operand], together)
    found = total / sequences.lengths.sum()
    return Energies(found[..., 0], found[..., 1:])


def shares(energies: Float[Array, "... n"]) -> Float[Array, "... n"]:
    """Each energy over their sum; zeros where there is none."""
    total = jnp.sum(energies, axis=-1, keepdims=True)
    return energies / jnp.where(total > 0, total, 1)


def normalised_rank(energies: Float[Array, "... n"], size: int) -> Float[Array, "..."]:
    """exp(entropy of the shares of the energies) over min(n, size): between 1 over that, for one direction, and 1."""
    p = shares(energies)
    entropy = -jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1)), axis=-1)
    return jnp.exp(entropy) / min(energies.shape[-1], size)


def projected(found: Moments, layer: int, weight: Float[np.ndarray, "D d"]) -> Projected:
    """Keys or values of one layer, from the moments of its attention inputs."""
    weight = np.asarray(weight, np.float64)
    mean, covariance = (np.asarray(x[layer], np.float64) for x in (found.mean, found.covariance))
    loops, hidden = mean.shape
    left = (weight @ covariance.reshape(loops, hidden, -1)).reshape(-1, hidden)
    both = (left @ weight.T).reshape(loops, len(weight), loops, len(weight))
    return Projected(mean @ weight.T, both)


def squared_distances(x: Projected) -> Float[np.ndarray, "T T"]:
    """E |x_t - x_u|^2 of every two loops, over tokens."""
    traces = np.einsum("tiui->tu", x.covariance)
    own = np.diagonal(traces)
    between = np.sum((x.mean[:, None] - x.mean[None]) ** 2, axis=-1)
    return np.maximum(own[:, None] + own[None] - 2 * traces, 0) + between


class Changes(NamedTuple):
    """Root mean squares over tokens, over that of the last loop's vectors."""

    step: Float[np.ndarray, " T-1"]
    """From each loop to the next."""
    to_last: Float[np.ndarray, " T"]
    """From each loop to the last one, for which it is 0."""


def changes(x: Projected) -> Changes:
    """How keys or values of one layer change from loop to loop, and how far they are from the last."""
    distances = squared_distances(x)
    size = np.trace(x.covariance[-1, :, -1]) + np.sum(x.mean[-1] ** 2)
    relative = np.sqrt(distances / size)
    return Changes(np.diagonal(relative, offset=1), relative[:, -1])


class Variance(NamedTuple):
    """Shares of the variance of keys or values over tokens and loops; they sum to 1."""

    token: float
    """Of what a token has in all loops: its mean over them."""
    loop: float
    """Of what a loop has for all tokens: its mean over them."""
    both: float
    """Of what is left: how each token moves over the loops in its own way."""

    @property
    def along_loops(self) -> float:
        """Within tokens: all but the first."""
        return self.loop + self.both


def variance(x: Projected) -> Variance:
    """Analysis of variance over tokens and loops, of one layer."""
    loops = len(x.mean)
    traces = np.einsum("tiui->tu", x.covariance)
    within = float(np.trace(traces))
    loop = float(np.sum((x.mean - x.mean.mean(axis=0)) ** 2))
    token = float(traces.sum()) / loops
    total = within + loop
    return Variance(token / total, loop / total, (within - token) / total)


def joint(x: Projected, loops: Sequence[int]) -> Float[np.ndarray, "tD tD"]:
    """Covariance of the vectors of some loops, concatenated."""
    chosen = x.covariance[np.ix_(loops, range(x.covariance.shape[1]), loops, range(x.covariance.shape[1]))]
    return chosen.reshape(len(loops) * x.covariance.shape[1], -1)


def trajectory(x: Projected, head: int, head_dim: int) -> Float[np.ndarray, "Tdh Tdh"]:
    """Covariance of one head's vectors of all loops, concatenated: what LLA's codec is fitted to."""
    at = slice(head * head_dim, (head + 1) * head_dim)
    return x.covariance[:, at, :, at].reshape(len(x.mean) * head_dim, -1)


def variances(covariance: Float[np.ndarray, "n n"]) -> Float[np.ndarray, " n"]:
    """Along the principal directions, largest first: squared singular values of the centred data over their number."""
    return np.maximum(np.linalg.eigvalsh(covariance)[::-1], 0)


def kept(
    fit: Float[np.ndarray, "n n"], held_out: Float[np.ndarray, "n n"], ranks: Sequence[int]
) -> Float[np.ndarray, " ranks"]:
    """Share of the variance of held-out data that stays in the leading principal directions of the data fitted to."""
    directions = np.linalg.eigh(fit)[1][:, ::-1]
    along = np.einsum("ij,ij->j", directions, held_out @ directions)
    return np.cumsum(along)[np.asarray(ranks) - 1] / np.trace(held_out)


def ridge_r2(
    fit: Moments, held_out: Moments, layer: int, weight: Float[np.ndarray, "D d"], penalty: float = 1e-4
) -> Float[np.ndarray, " T"]:
    """R2 on held-out tokens of a ridge regression, with intercept, from the last loop's attention input to the keys or
    values of each loop of one layer: 1 - squared error over variance, both summed over coordinates.

    `penalty` is in units of the mean variance of the inputs' coordinates.
    """
    weight = np.asarray(weight, np.float64)
    take = lambda found: tuple(np.asarray(x[layer], np.float64) for x in (found.mean, found.covariance))
    (mean, covariance), (mean_held, covariance_held) = take(fit), take(held_out)
    inputs = covariance[-1, :, -1]
    ridge = inputs + penalty * np.trace(inputs) / len(inputs) * np.eye(len(inputs))
    scores = []
    for loop in range(len(mean)):
        solution = np.linalg.solve(ridge, covariance[-1, :, loop] @ weight.T)
        # The intercept is that of the data fitted to; on others the means may lie beside the line.
        shift = mean_held - mean
        beside = weight @ shift[loop] - shift[-1] @ solution
        total = np.sum((weight @ covariance_held[loop, :, loop]) * weight)
        explained = np.sum(solution * (covariance_held[-1, :, loop] @ weight.T))
        predicted = np.sum(solution * (covariance_held[-1, :, -1] @ solution))
        scores.append(1 - (total - 2 * explained + predicted + beside @ beside) / total)
    return np.asarray(scores)


def _around(h: Float[Array, "... T N d"], centre: Float[Array, "... T d"]) -> Float[Array, "... T N d"]:
    wide = accumulation_dtype(h.dtype)
    return h.astype(wide) - jnp.asarray(centre, wide)[..., None, :]
