"""Leading principal directions of a layer's values, exact or by a streamed randomised range finder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.linalg

from hla_jax.calibration import moments
from hla_jax.calibration.moments import Sequences
from hla_jax.config import OuroConfig
from hla_jax.models import ouro

if TYPE_CHECKING:
    from jaxtyping import Float

# Above this many joint dimensions the moment matrix is not formed.
LARGEST_MOMENT = 8192
# Of the range finder: extra directions, and passes over the data after the first (Halko, Martinsson and Tropp,
# arXiv:0909.4061).
_OVERSAMPLING = 32
_POWER_PASSES = 2


def leading_eigenvectors(moment: Float[np.ndarray, "D D"], count: int) -> Float[np.ndarray, "D k"]:
    """Eigenvectors of the `count` largest eigenvalues of a symmetric matrix, largest first, in float64."""
    size = moment.shape[0]
    _, vectors = scipy.linalg.eigh(np.asarray(moment, np.float64), subset_by_index=(size - count, size - 1))
    return vectors[:, ::-1]


def value_directions(
    params: ouro.Params, config: OuroConfig, sequences: Sequences, loops: range, rank: int
) -> Float[np.ndarray, "L D rank"]:
    """Leading `rank` uncentred principal directions of every layer's values over `loops`, D in the order loop, head,
    coordinate.
    """
    dimensions = len(loops) * config.num_kv_heads * config.head_dim
    if dimensions <= LARGEST_MOMENT:
        groups = moments.layer_groups(config, 8 * dimensions**2)
        return np.concatenate(
            [
                np.stack(
                    [
                        leading_eigenvectors(moment, rank)
                        for moment in moments.value_moments(params, config, sequences, group, loops)
                    ]
                )
                for group in groups
            ]
        )
    return _range_finder(params, config, sequences, loops, rank, dimensions)


def _range_finder(
    params: ouro.Params, config: OuroConfig, sequences: Sequences, loops: range, rank: int, dimensions: int
) -> Float[np.ndarray, "L D rank"]:
    width = min(rank + _OVERSAMPLING, dimensions)
    found = []
    for group in moments.layer_groups(config, 16 * dimensions * width):
        rng = np.random.default_rng(group.start)
        basis = np.stack([np.linalg.qr(rng.standard_normal((dimensions, width)))[0] for _ in group]).astype(np.float32)
        for _ in range(_POWER_PASSES):
            products = moments.value_products(params, config, sequences, group, loops, basis)
            basis = np.stack([np.linalg.qr(product)[0] for product in products])
        # Rayleigh-Ritz: the best directions inside the subspace that was found.
        products = moments.value_products(params, config, sequences, group, loops, basis)
        found += [q @ leading_eigenvectors((q.T @ y + y.T @ q) / 2, rank) for q, y in zip(basis, products, strict=True)]
    return np.stack(found)
