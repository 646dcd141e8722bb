"""One decode step of attention over stored tokens and an exact window, with one softmax over both (HLA, Eq. 4).

`api.latent_decode` picks an implementation; `reference` is the operation in plain jnp.

Shapes: B sequences, H query heads, N latent heads (1 for HLA and LLA-2D, G for per-head LLA and for keys and values),
rk and rv sizes of a stored key and value, W window, G key-value heads, dh head size. Buffers of a cache keep the heads
of a token side by side in one axis, N rk numbers: a kernel reads a head as a slice of lanes, and one shared latent
needs no axis of length 1, which a TPU would pad.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Stored(NamedTuple):
    """The past of a layer at a loop, as part of a whole cache: token j of sequence b is
    `keys[slot, tables[b, j // page], j % page]`.

    Kernels read the cache where it lies: no slot is copied out of it.
    """

    keys: Float[Array, "slots P page Nrk"]
    values: Float[Array, "slots P page Nrv"]
    slot: Int[Array, ""]
    lengths: Int[Array, " B"]  # tokens to read; what lies beyond is never used, whatever it holds
    tables: Int[Array, "B n"] | None = None  # None: P = B, and page b is all of sequence b
    visible: Bool[Array, "B C"] | None = None  # which of those tokens to read; None: all. Reference only.


class Window(NamedTuple):
    """The exact part: W recent tokens (a ring, in any order), and the current token."""

    q: Float[Array, "B H dh"]  # rotated
    keys: Float[Array, "slots B W Gdh"]  # W may be 0
    values: Float[Array, "slots B W Gdh"]
    slot: Int[Array, ""]
    filled: Int[Array, " B"]  # the first `filled` slots of the ring hold tokens
    k: Float[Array, "B G dh"]  # of the current token
    v: Float[Array, "B G dh"]


class Rotation(NamedTuple):
    """Turns latent queries before they are scored: coordinates (i, i + half) of each block of 2 half numbers are one
    pair, and pair p = block * half + i has the angle with `cos[b, p]`, `sin[b, p]`.
    """

    cos: Float[Array, "B rk/2"]
    sin: Float[Array, "B rk/2"]
    half: int
