"""`latent_decode` on a GPU: two launches of Triton kernels (`triton_kernels`) through jax-triton.

The whole cache is an operand: nothing of it is sliced or copied, and slot, lengths and page tables stay on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax import compat
from hla_jax.kernels.latent_decode import Rotation, Stored, Window, triton_kernels

if TYPE_CHECKING:
    from jaxtyping import Float


def latent_decode(
    q: Float[Array, "B H rk"],
    stored: Stored,
    scale: float,
    window: Window | None = None,
    rotation: Rotation | None = None,
    geometry: triton_kernels.Geometry | None = None,
) -> tuple[Float[Array, "B H rv"], Float[Array, "B H dh"] | None, Float[Array, "B H"]]:
    """See `api.latent_decode`.

    Args:
      geometry: how the work is cut; None: `triton_kernels.geometry` for an H100.

    Raises:
      ImportError: there is no jax-triton.
      ValueError: only some tokens are visible.
    """
    if stored.visible is not None:
        raise ValueError("the Triton kernel reads all tokens up to the length, and these are masked")
    static = shapes(q, stored, window)
    cut = triton_kernels.geometry(static) if geometry is None else geometry
    attend = triton_kernels.attend_launch(static, cut, scale, 0 if rotation is None else rotation.half)
    merge = triton_kernels.merge_launch(static, cut)

    numbers = lambda x: jnp.asarray(x, jnp.int32)
    lengths = numbers(stored.lengths)
    absent = lengths  # stands in for what the kernels do not read
    near = (absent,) * 7
    near_dtype = q.dtype
    if window is not None:
        # A ring of no tokens has no memory to point to.
        rings = (window.keys, window.values) if static.window else (window.k, window.v)
        near = (window.q, *rings, numbers(window.slot), numbers(window.filled), window.k, window.v)
        near_dtype = window.values.dtype
    parts = _call(
        triton_kernels.attend_parts,
        attend,
        (jnp.float32,) * 3,
        q,
        stored.keys,
        stored.values,
        numbers(stored.slot),
        lengths,
        absent if stored.tables is None else numbers(stored.tables),
        *((absent, absent) if rotation is None else rotation[:2]),
        *near,
    )
    latent, exact, lse = _call(
        triton_kernels.merge_parts, merge, (stored.values.dtype, near_dtype, jnp.float32), *parts
    )
    return latent, None if window is None else exact, lse


def shapes(q: Float[Array, "B H rk"], stored: Stored, window: Window | None = None) -> triton_kernels.Shapes:
    """The static side of the operands."""
    batch, heads, rank_k = q.shape
    _, pages, page, width = stored.keys.shape
    latent_heads = width // rank_k
    near = {}
    if window is not None:
        near = dict(window=window.keys.shape[2], kv_heads=window.k.shape[1], head_size=window.k.shape[2])
    return triton_kernels.Shapes(
        batch,
        heads,
        latent_heads,
        rank_k,
        stored.values.shape[-1] // latent_heads,
        pages,
        page,
        columns=0 if stored.tables is None else stored.tables.shape[1],
        itemsize=max(q.dtype.itemsize, stored.keys.dtype.itemsize),
        **near,
    )


def _call(kernel: Any, launch: triton_kernels.Launch, dtypes: tuple, *args: Array) -> list[Array]:
    out_type = tuple(map(jax.ShapeDtypeStruct, launch.outputs, dtypes))
    return compat.triton_call(
        *args, kernel=kernel, out_type=out_type, grid=launch.grid, **launch.options, **launch.constants
    )
