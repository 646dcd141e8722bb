"""The loss of uptraining as one operation: KL and output error of hybrid latent attention against exact attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Fitted(NamedTuple):
    """What is being fitted, in one layer and loop."""

    q: Float[Array, "B Q H rk"]  # rotated latent queries
    k: Float[Array, "B S rk"]  # rotated key latents
    v: Float[Array, "B S rv"]  # value latents
    read: Float[Array, "H rv dh"]  # B_t


class Fixed(NamedTuple):
    """The exact attention it is fitted to."""

    q: Float[Array, "B Q H dh"]  # rotated
    k: Float[Array, "B S G dh"]  # rotated
    v: Float[Array, "B S G dh"]
    o_proj: Float[Array, "d Hdh"]
    segments: Int[Array, "B S"]  # only tokens of the same segment see each other
