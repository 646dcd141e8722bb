"""`latent_decode` as a platform runs it against the reference, and its time, at the shapes of the released models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from hla_jax.evaluation.speed import median_seconds
from hla_jax.kernels.latent_decode import Rotation, Stored, Window, api, reference


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a layer of a scheme reads.

    Attributes:
      latent_heads, rank_k, rank_v: of what is stored.
      window: tokens of the ring; None: no exact part at all.
      heads: of queries, and of the window.
      rotated: whether the kernel turns the queries.
      page: tokens of a page; None: a sequence is one page.
    """

    latent_heads: int
    rank_k: int
    rank_v: int
    window: int | None
    heads: int = 16
    rotated: bool = False
    page: int | None = None

    def bytes_read(self, batch: int, context: int, itemsize: int = 2) -> int:
        """Bytes of the cache that one call must read."""
        stored = self.latent_heads * (self.rank_k + self.rank_v) * context
        return itemsize * batch * (stored + 2 * (self.window or 0) * self.heads * HEAD_DIM)


HEAD_DIM = 128
SHAPES = {
    "HLA": Shape(1, 512, 512, 128, rotated=True),
    "HLA, loop 1": Shape(1, 256, 256, 128, rotated=True),
    "HLA, paged": Shape(1, 512, 512, 128, rotated=True, page=64),
    "full cache": Shape(16, 128, 128, 0),
    "LLA absorbed, folded": Shape(1, 576, 512, None),
    "LLA absorbed, by head": Shape(16, 96, 160, None),
    "odd heads": Shape(1, 256, 64, 5, heads=5),
}


class Operands(NamedTuple):
    """Of `latent_decode`; `half` of the rotation is HEAD_DIM / 2."""

    q: Array
    stored: Stored
    window: Window | None
    angles: tuple[Array, Array] | None


def operands(
    shape: Shape, lengths: list[int], capacity: int, dtype: DTypeLike, slots: int = 2, filled: bool = False
) -> Operands:
    """Random operands of the last of `slots` slots, NaN wherever nothing may be read; `filled` fills all slots."""
    rng, batch = np.random.default_rng(0), len(lengths)

    def draw(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes, np.float32)

    slot, beyond = jnp.asarray(slots - 1, jnp.int32), np.arange(capacity) >= np.asarray(lengths)[:, None]

    def buffer(rank: int) -> Array:
        own = draw(batch, capacity, shape.latent_heads * rank)
        own[beyond] = np.nan
        rest = jnp.asarray(own if filled else np.full_like(own, np.nan), dtype)
        return jnp.broadcast_to(rest, (slots, *own.shape)).at[-1].set(jnp.asarray(own, dtype))

    stored = Stored(buffer(shape.rank_k), buffer(shape.rank_v), slot, jnp.asarray(lengths, jnp.int32))
    if shape.page:
        order = rng.permutation(batch * capacity // shape.page)
        pages = lambda x: x.reshape(slots, len(order), shape.page, -1)
        scattered = lambda x: jnp.zeros_like(pages(x)).at[:, order].set(pages(x))
        used = np.arange(0, capacity, shape.page) < np.asarray(lengths)[:, None]
        tables = np.where(used, order.reshape(batch, -1), 2**30).astype(np.int32)
        stored = stored._replace(
            keys=scattered(stored.keys), values=scattered(stored.values), tables=jnp.asarray(tables)
        )
    window = None
    if shape.window is not None:
        held = np.asarray([shape.window if filled else length % (shape.window + 1) for length in lengths])
        keys, values = draw(2, slots, batch, shape.window, shape.heads * HEAD_DIM)
        for ring in (keys, values):
            ring[:, np.arange(shape.window) >= held[:, None]] = np.nan
        near_q, k, v = (jnp.asarray(x, dtype) for x in draw(3, batch, shape.heads, HEAD_DIM))
        rings = jnp.asarray(keys, dtype), jnp.asarray(values, dtype)
        window = Window(near_q, rings[0], rings[1], slot, jnp.asarray(held, jnp.int32), k, v)
    angles = None
    if shape.rotated:
        turns = rng.uniform(0, 2 * np.pi, (batch, shape.rank_k // 2)).astype(np.float32)
        angles = jnp.cos(turns), jnp.sin(turns)
    return Operands(jnp.asarray(draw(batch, shape.heads, shape.rank_k), dtype), stored, window, angles)


def errors(given: Operands, implementation: str | None = None) -> dict[str, float]:
    """Largest difference from the reference in float32 over its largest value, of each output; infinite where one has a
    number and the other has none.
    """
    attend = functools.partial(api.latent_decode, implementation=implementation)
    got = jax.jit(functools.partial(_call, attend))(given)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, given)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(_call, reference.latent_decode))(wide)
    found = {}
    for part, x, y in zip(("latent", "exact", "lse"), got, want):
        if y is not None:
            x, y = (np.asarray(z, np.float32) for z in (x, y))
            nothing = np.isneginf(y)
            same = np.array_equal(np.isneginf(x), nothing) and np.isfinite(x[~nothing]).all()
            apart = np.abs(x[~nothing] - y[~nothing]).max() / max(np.abs(y[~nothing]).max(), 1e-6)
            found[part] = float(apart) if same else float("inf")
    return found


def seconds(given: Operands, calls: int, implementation: str | None = None) -> float:
    """Time of a call, of `calls` in a row that go through the slots."""
    slots = given.stored.keys.shape[0]
    attend = functools.partial(api.latent_decode, implementation=implementation)

    @jax.jit
    def many(given: Operands) -> Array:
        def one(call: Array, q: Array) -> Array:
            stored = given.stored._replace(slot=call % slots)
            window = None if given.window is None else given.window._replace(slot=call % slots)
            out, _, _ = _call(attend, Operands(q, stored, window, given.angles))
            # The next call waits for this one.
            return q + (0 * jnp.sum(out)).astype(q.dtype)

        return jax.lax.fori_loop(0, calls, one, given.q)

    return median_seconds(lambda: many(given), 3) / calls


def _call(attend: Callable, given: Operands) -> tuple[Array, Array | None, Array]:
    rotation = None if given.angles is None else Rotation(given.angles[0], given.angles[1], HEAD_DIM // 2)
    return attend(given.q, given.stored, HEAD_DIM**-0.5, given.window, rotation)
