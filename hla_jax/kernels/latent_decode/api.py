"""`latent_decode`: one decode step of attention, by the implementation for the platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import jax.numpy as jnp
from jax import Array

from hla_jax.kernels import implementations
from hla_jax.kernels.latent_decode import Rotation, Stored, Window, blockwise, reference

if TYPE_CHECKING:
    from jaxtyping import Float


_KERNELS = ("pallas_tpu", "triton_gpu")
NAMES = (implementations.REFERENCE, "blockwise", *_KERNELS)


@overload
def latent_decode(
    q: Array,
    stored: Stored,
    scale: float,
    window: Window,
    rotation: Rotation | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]: ...


@overload
def latent_decode(
    q: Array,
    stored: Stored,
    scale: float,
    window: None = None,
    rotation: Rotation | None = None,
    implementation: str | None = None,
) -> tuple[Array, None, Array]: ...


def latent_decode(
    q: Float[Array, "B H rk"],
    stored: Stored,
    scale: float,
    window: Window | None = None,
    rotation: Rotation | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H rv"], Float[Array, "B H dh"] | None, Float[Array, "B H"]]:
    """Attends to the stored tokens of each sequence and to its window, with one softmax over both.

    Args:
      q: one query a head, in latent space; rotated, unless `rotation` says how to.
      stored: the past in a cache.
      scale: of all scores.
      window: the recent tokens and the current one, read exactly; None: only what is stored.
      rotation: turns `q` first.
      implementation: "reference", "blockwise" (jnp, like the reference), "pallas_tpu" or "triton_gpu"; None: by
        platform, see `choose`.

    Returns:
      The attention-weighted sum of stored values and that of the window's values (None without a window), in the
      cache's dtype, and the log-sum-exp of all scores in float32. Where there is nothing to attend to: zeros, and
      minus infinity.

    Raises:
      ValueError: the named implementation is unknown, does not run on this platform, or cannot take these inputs.
    """
    name, _ = choose(implementation, stored, window)
    if name == "pallas_tpu":
        from hla_jax.kernels.latent_decode import pallas_tpu

        return pallas_tpu.latent_decode(q, stored, scale, window, rotation)
    if name == "triton_gpu":
        from hla_jax.kernels.latent_decode import triton_gpu

        return triton_gpu.latent_decode(q, stored, scale, window, rotation)
    plain = reference if name == "reference" else blockwise
    return plain.latent_decode(q, stored, scale, window, rotation)


def choose(
    implementation: str | None = None, stored: Stored | None = None, window: Window | None = None
) -> tuple[str, str]:
    """The implementation that `latent_decode` takes, and why, in words for the banner."""
    problem = None
    if stored is not None and stored.visible is not None:
        problem = "reads all tokens up to the length, and these are masked"
    elif stored is not None and stored.keys.dtype not in (jnp.bfloat16, jnp.float32):
        problem = f"takes bfloat16 and float32, and the cache is {stored.keys.dtype}"
    cannot: dict[str, str | None] = dict.fromkeys(_KERNELS, problem)
    if stored is not None and problem is None and implementations.platform() == "tpu":
        from hla_jax.kernels.latent_decode import pallas_tpu

        cannot["pallas_tpu"] = pallas_tpu.problem(stored, window)
    return implementations.choose("latent_decode", implementation, cannot, plain="blockwise")
