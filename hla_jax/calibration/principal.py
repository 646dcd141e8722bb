"""Leading principal directions of a layer's values: exact, or by subspace iteration on formed or streamed moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import scipy.linalg
from tqdm import tqdm

from hla_jax.calibration import moments
from hla_jax.calibration.moments import Sequences, ValueProducts
from hla_jax.config import ModelConfig
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Float

# Above this many joint dimensions the moment matrix is not formed.
LARGEST_MOMENT = 8192
# Up to this size a moment matrix is decomposed exactly; above, by subspace iteration (Halko, Martinsson and Tropp,
# arXiv:0909.4061) with this many extra directions and rounds.
LARGEST_EXACT = 2048
_OVERSAMPLING = 32
ROUNDS_FORMED, ROUNDS_STREAMED = 4, 2


def leading_eigenvectors(moment: Float[np.ndarray, "D D"], count: int) -> Float[np.ndarray, "D k"]:
    """Eigenvectors of the `count` largest eigenvalues of a symmetric matrix, largest first."""
    size = moment.shape[0]
    if size > LARGEST_EXACT:
        return subspace_iteration(lambda basis: moment @ basis, random_basis(size, count), count, ROUNDS_FORMED)
    _, vectors = scipy.linalg.eigh(np.asarray(moment, np.float64), subset_by_index=(size - count, size - 1))
    return vectors[:, ::-1]


def value_directions(
    params: Params,
    config: ModelConfig,
    sequences: Sequences,
    loops: range,
    rank: int,
    formed: Float[np.ndarray, "L D D"] | None,
) -> Float[np.ndarray, "L D rank"]:
    """Leading `rank` uncentred principal directions of every layer's values over `loops`, D in the order loop, head,
    coordinate: from their moments where these were formed, else from more passes over the data.
    """
    if formed is not None:
        layers = tqdm(formed, "principal directions of values", leave=False)
        return np.stack([leading_eigenvectors(moment, rank) for moment in layers])
    dimensions = len(loops) * config.num_kv_heads * config.head_dim
    start = random_basis(dimensions, rank)
    product = [ValueProducts(config, loops, start.shape[1])]
    multiply = lambda basis: moments.measure(params, config, sequences, product, [basis])[0]
    basis = np.broadcast_to(start, (config.num_layers, *start.shape))
    return subspace_iteration(multiply, basis, rank, ROUNDS_STREAMED)


def random_basis(dimensions: int, rank: int) -> Float[np.ndarray, "D k"]:
    """An orthonormal start of `subspace_iteration`: the rank, and some directions more."""
    width = min(rank + _OVERSAMPLING, dimensions)
    return np.linalg.qr(np.random.default_rng(0).standard_normal((dimensions, width)))[0].astype(np.float32)


def subspace_iteration(
    multiply: Callable[[np.ndarray], np.ndarray], basis: Float[np.ndarray, "*L D k"], rank: int, rounds: int
) -> Float[np.ndarray, "*L D rank"]:
    """Leading eigenvectors of the symmetric matrices that `multiply` applies, from an orthonormal start."""
    for _ in range(rounds):
        basis = np.linalg.qr(multiply(basis))[0]
    # Rayleigh-Ritz: the best directions inside the subspace that was found.
    small = np.swapaxes(basis, -1, -2) @ multiply(basis)
    _, vectors = np.linalg.eigh((small + np.swapaxes(small, -1, -2)) / 2)
    return basis @ vectors[..., ::-1][..., :rank]
