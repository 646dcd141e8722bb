"""Initialisation of linear codecs: the top right singular vectors of the centred trajectories (LLA, section 3).

A trajectory is what one latent stands for: the keys (before rotation) or values of a token over the codec's axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.attention.codec import Codec
from hla_jax.attention.lla import LLA
from hla_jax.calibration import moments, principal
from hla_jax.calibration.moments import KeyMoments, Sequences
from hla_jax.config import ModelConfig
from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclasses.dataclass(frozen=True)
class _Trajectories:
    """What every measure of a codec's trajectories shares; `name` is "k" or "v"."""

    codec: Codec
    config: ModelConfig
    name: str

    @property
    def latents(self) -> tuple[int, int]:
        """Latents of a set of layers, and the numbers that each stands for."""
        axis = self.codec.axis(self.config)
        return axis.slots * axis.layers // self.config.num_layers * axis.groups, axis.size

    def of(self, h: Float[Array, "*n T N d"], projections: dict[str, Array]) -> Float[Array, "N latents size"]:
        if h.ndim == 3:  # one layer by itself
            h, projections = jax.tree.map(lambda x: x[None], (h, projections))
        x = jax.vmap(lambda h, projections: moments.projected(h, projections, self.name))(h, projections)
        return self.codec.trajectories(self.config, x.reshape(*x.shape[:3], self.config.num_kv_heads, -1))


@dataclasses.dataclass(frozen=True)
class TrajectoryMoments(_Trajectories):
    """sum_j [x_j; 1] [x_j; 1]^T for the trajectories x of every latent: [latents, size + 1, size + 1]."""

    @property
    def shape(self) -> tuple[int, ...]:
        latents, size = self.latents
        return latents, size + 1, size + 1

    def __call__(self, h: Array, counted: Bool[Array, " N"], projections: dict[str, Array], operand: None) -> Array:
        x = self.of(h, projections)
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1) * counted[:, None, None]
        return jnp.einsum("jap,jaq->apq", x, x, preferred_element_type=accumulation_dtype(x.dtype))


@dataclasses.dataclass(frozen=True)
class TrajectoryProducts(_Trajectories):
    """The product of `TrajectoryMoments` and the operand Q [latents, size + 1, width], without forming the moments."""

    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        latents, size = self.latents
        return latents, size + 1, self.width

    def __call__(self, h: Array, counted: Bool[Array, " N"], projections: dict[str, Array], operand: Array) -> Array:
        x = self.of(h, projections)
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1) * counted[:, None, None]
        x = x.astype(operand.dtype)
        return jnp.einsum("jap,jak->apk", x, jnp.einsum("jaq,aqk->jak", x, operand))


class Spectrum(NamedTuple):
    """Mean and leading principal directions of every latent's trajectories, for every set of layers."""

    mean: Float[np.ndarray, "sets latents size"]
    directions: Float[np.ndarray, "sets latents size r"]


def codec_maps(
    scheme: Codec, params: Params, config: ModelConfig, sequences: Sequences
) -> Iterator[dict[str, Float[np.ndarray, "..."]]]:
    """Maps of one layer after the other: down has the directions as columns, up as rows, around the mean."""
    rotary = isinstance(scheme, LLA) and scheme.rank_rope is not None
    formed = scheme.axis(config).size <= principal.LARGEST_MOMENT
    measures: list[moments.Measure] = [TrajectoryMoments(scheme, config, name) for name in ("k", "v") if formed]
    measures += [KeyMoments(config, range(config.num_loops))] if rotary else []
    together = scheme.axis(config).layers
    found = moments.measure(params, config, sequences, measures, together=together) if measures else []
    content = content_coordinates(scheme, config) if isinstance(scheme, LLA) else None
    if formed:
        of_keys = _of_moments(found[0], scheme.rank_k, content)
        of_values = _of_moments(found[1], scheme.rank_v)
    else:
        of_keys = _streamed(scheme, params, config, sequences, "k", scheme.rank_k, content)
        of_values = _streamed(scheme, params, config, sequences, "v", scheme.rank_v)
    for number in range(config.num_layers // together):
        layers: list[dict[str, np.ndarray]] = [{} for _ in range(together)]
        for name, spectrum in (("k", of_keys), ("v", of_values)):
            down = spectrum.directions[number]
            spread = scheme.spread(config, down, np.swapaxes(down, -1, -2), spectrum.mean[number])
            for layer, parts in zip(layers, spread, strict=True):
                layer |= {f"{name}_{part}": x for part, x in zip(("down", "up", "mean"), parts, strict=True)}
        if isinstance(scheme, LLA) and scheme.rank_rope is not None:
            layers[0] |= rotary_maps(scheme, config, found[-1][number])
        yield from layers


def content_coordinates(scheme: LLA, config: ModelConfig) -> Float[np.ndarray, " size"] | None:
    """1 for the numbers of a trajectory that an absorbed latent scores, 0 for those left to the rotary key: the
    frequencies that this has pairs for. Scored without rotation they would only disturb. None: all.
    """
    if scheme.rank_rope is None:
        return None
    half = config.head_dim // 2
    left = np.arange(half) >= scheme.rank_rope // 2
    return np.tile(left, scheme.axis(config).size // half).astype(float)


def rotary_maps(
    scheme: LLA, config: ModelConfig, moment: Float[np.ndarray, "F P P"]
) -> dict[str, Float[np.ndarray, "..."]]:
    """The rotary key of one layer: for each pair, the leading combination of its frequency's key pairs over the loops
    (and heads, where folded), on both sides, as HLA's latent has it.
    """
    assert scheme.rank_rope is not None
    loops, heads, half, pairs = config.num_loops, config.num_kv_heads, config.head_dim // 2, scheme.rank_rope // 2
    by_head = moment.reshape(half, loops, heads, loops, heads)
    down = np.zeros((heads, loops, 2, half, 2, pairs))
    for frequency in range(min(half, pairs)):
        mine = np.arange(frequency, pairs, half)
        if scheme.fold_heads:
            directions = principal.leading_eigenvectors(moment[frequency], len(mine))
            down[:, :, 0, frequency, 0, mine] = np.moveaxis(directions.reshape(loops, heads, -1), 0, 1)
        else:
            for head in range(heads):
                own = by_head[frequency, :, head, :, head]
                down[head, :, 0, frequency, 0, mine] = principal.leading_eigenvectors(own, len(mine)).T
    down[:, :, 1, :, 1] = down[:, :, 0, :, 0]
    query = down.reshape(heads, loops, config.head_dim, -1).swapaxes(0, 1)
    trajectories = () if scheme.fold_heads else (heads,)
    maps = {
        "rope_down": down.reshape(*trajectories, -1, scheme.rank_rope),
        "rope_query": np.repeat(query, config.heads_per_kv, axis=1),
    }
    if scheme.query_adapter:
        shape = loops, config.num_heads, config.head_dim, config.head_dim
        maps["query_adapter"] = np.broadcast_to(np.eye(config.head_dim), shape)
    return maps


def _of_moments(
    formed: Float[np.ndarray, "sets latents D D"], rank: int, content: Float[np.ndarray, " size"] | None = None
) -> Spectrum:
    sums, count = formed[..., :-1, -1].astype(np.float64), formed[..., -1:, -1].astype(np.float64)
    mean = sums / count
    directions = np.empty((*mean.shape, rank))
    for index in np.ndindex(*mean.shape[:-1]):  # one by one: in float64, all of them may not fit
        covariance = formed[index][:-1, :-1] - sums[index][:, None] * mean[index]
        if content is not None:
            covariance = covariance * content[:, None] * content
        directions[index] = principal.leading_eigenvectors(covariance, rank)
    return Spectrum(mean, directions)


def _streamed(
    scheme: Codec,
    params: Params,
    config: ModelConfig,
    sequences: Sequences,
    name: str,
    rank: int,
    content: Float[np.ndarray, " size"] | None = None,
) -> Spectrum:
    """As `_of_moments`, where the moments are too large to form: by more passes over the data."""
    axis = scheme.axis(config)
    sets, size = config.num_layers // axis.layers, axis.size

    def times(operand: Float[np.ndarray, "sets latents D k"]) -> Float[np.ndarray, "sets latents D k"]:
        product = [TrajectoryProducts(scheme, config, name, operand.shape[-1])]
        return moments.measure(params, config, sequences, product, [operand], axis.layers)[0]

    start = principal.random_basis(size, rank)
    latents = TrajectoryProducts(scheme, config, name, 1).latents[0]
    augment = lambda basis: np.concatenate([basis, np.zeros_like(basis[..., :1, :])], axis=-2)
    ones = np.zeros((sets, latents, size + 1, 1), start.dtype)
    ones[..., -1, :] = 1
    sums = times(ones)[..., 0]
    mean = sums[..., :-1] / sums[..., -1:]
    mask = np.ones((size, 1)) if content is None else content[:, None]

    def covariance(basis: Float[np.ndarray, "sets latents size k"]) -> Float[np.ndarray, "sets latents size k"]:
        basis = (basis * mask).astype(start.dtype)
        uncentred = times(augment(basis))[..., :-1, :]
        return (uncentred - sums[..., :-1, None] * (mean[..., None, :] @ basis)) * mask

    basis = np.broadcast_to(start, (sets, latents, *start.shape))
    return Spectrum(mean, principal.subspace_iteration(covariance, basis, rank, principal.ROUNDS_STREAMED))
