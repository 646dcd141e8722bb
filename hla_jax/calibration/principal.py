"""Leading principal directions of a layer's values, exact or by a streamed randomised range finder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.linalg
from tqdm import tqdm

from hla_jax.calibration import moments
from hla_jax.calibration.moments import Sequences, ValueProducts
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
    params: ouro.Params,
    config: OuroConfig,
    sequences: Sequences,
    loops: range,
    rank: int,
    formed: Float[np.ndarray, "L D D"] | None,
) -> Float[np.ndarray, "L D rank"]:
    """Leading `rank` uncentred principal directions of every layer's values over `loops`, D in the order loop, head,
    coordinate: from their moments where these were formed, else from more passes over the data.
    """
    if formed is not None:
        return np.stack([leading_eigenvectors(moment, rank) for moment in tqdm(formed, "eigenvectors", leave=False)])
    dimensions = len(loops) * config.num_kv_heads * config.head_dim
    width = min(rank + _OVERSAMPLING, dimensions)
    rng = np.random.default_rng(0)
    start = np.linalg.qr(rng.standard_normal((dimensions, width)))[0].astype(np.float32)
    basis = np.broadcast_to(start, (config.num_layers, dimensions, width))
    product = [ValueProducts(config, loops, width)]
    for _ in range(_POWER_PASSES):
        basis = np.linalg.qr(moments.measure(params, config, sequences, product, [basis])[0])[0]
    # Rayleigh-Ritz: the best directions inside the subspace that was found.
    products = moments.measure(params, config, sequences, product, [basis])[0]
    return np.stack(
        [q @ leading_eigenvectors((q.T @ y + y.T @ q) / 2, rank) for q, y in zip(basis, products, strict=True)]
    )
