"""`latent_decode` for TPUs: one kernel that streams the valid tokens of each sequence from the cache where it lies.

The grid is (splits, B). A step reads the blocks of one sequence, or one split's share of them, through two buffers:
while a block is scored the next one, be it of the next sequence, is on its way. The window's copy starts before the
first block and is waited for after the last. Where one program runs on two cores there are two splits.

Several heads of a token lie side by side. A query is zero outside its head's lanes: one matrix product a block then
serves any number of heads of any size, and no buffer is cut or padded.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hla_jax.kernels.latent_decode import Rotation, Stored, Window, reference

if TYPE_CHECKING:
    from jaxtyping import Float

BLOCK_TOKENS, BLOCK_BYTES = 512, 2**20
"""A block of keys and values has at most so many tokens and bytes: enough to hide a copy's latency, and little to read
in vain at the end of a sequence."""
SHORT_BLOCK = 128
"""Latency would rule over shorter blocks of a long page."""
RING_BYTES = 2**23
"""The window's keys and values are in vector memory at once; v5e has 16 MiB for a kernel."""
TABLE_IDS = 3 * 2**16
"""Page ids are in scalar memory, 1 MiB of it."""
ROWS, LANES = 8, 128
"""A TPU's tile. Arrays of other sizes XLA may lay out in another order, and hand a kernel a copy of all of them."""
LOWEST = float(jnp.finfo(jnp.float32).min)


def latent_decode(
    q: Float[Array, "B H rk"],
    stored: Stored,
    scale: float,
    window: Window | None = None,
    rotation: Rotation | None = None,
    *,
    interpret: Any = False,
    splits: int | None = None,
) -> tuple[Float[Array, "B H rv"], Float[Array, "B H dh"] | None, Float[Array, "B H"]]:
    """See `api.latent_decode`.

    Args:
      interpret: `pltpu.InterpretParams` runs the kernel on a CPU, where any shape will do.
      splits: shares that the blocks of each sequence are cut into; None: one a core.

    Raises:
      ValueError: a TPU cannot take these shapes, see `problem`, or only some tokens are visible.
    """
    if stored.visible is not None:
        raise ValueError("latent_decode: pallas_tpu reads all tokens up to the length; `visible` needs the reference")
    if not interpret and (reason := problem(stored, window)):
        raise ValueError(f"latent_decode: pallas_tpu {reason}")
    if splits is None:
        splits = pltpu.get_tpu_info().num_cores if pltpu.is_tpu_device() else 1
    if rotation is not None:
        q = reference.rotate(q, rotation)
    (batch, heads, rank_k), dtype = q.shape, stored.values.dtype
    latent_heads = stored.keys.shape[-1] // rank_k
    tables = jnp.arange(batch, dtype=jnp.int32)[:, None] if stored.tables is None else stored.tables
    block = _block(stored)

    scalars = _Scalars(stored.slot[None], stored.lengths, tables.reshape(-1))
    # Else XLA may copy all of a small cache to vector memory first.
    in_hbm = lambda x: x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)
    operands = _Operands(_spread(q, latent_heads), in_hbm(stored.keys), in_hbm(stored.values))
    scratch = _Scratch(
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((2, 2)),
        *(pltpu.VMEM((2, block, x.shape[-1]), x.dtype) for x in stored[:2]),
    )
    # Several splits are merged in float32.
    part = lambda size, dtype: jax.ShapeDtypeStruct((splits, batch, heads, size), dtype if splits == 1 else jnp.float32)
    out = _Out(part(stored.values.shape[-1] // latent_heads, dtype), part(1, jnp.float32))
    if window is not None:
        out = out._replace(exact=part(window.k.shape[2], dtype))
        k, v = (x.reshape(batch, 1, -1) for x in (window.k, window.v))
        operands = operands._replace(near_q=_spread(window.q, window.k.shape[1]), k=k, v=v)
        if window.keys.shape[2]:
            scalars = scalars._replace(window_slot=window.slot[None], filled=window.filled)
            operands = operands._replace(ring_keys=in_hbm(window.keys), ring_values=in_hbm(window.values))
            ring = (pltpu.VMEM(x.shape[2:], x.dtype) for x in window[1:3])
            scratch = _Scratch(*scratch[:4], pltpu.SemaphoreType.DMA((2,)), *ring)

    of_sequence = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda s, b, *_: (b, 0, 0))
    in_place = pl.BlockSpec(memory_space=pltpu.HBM)
    of_step = lambda x: pl.BlockSpec((None, None, *x.shape[2:]), lambda s, b, *_: (s, b, 0, 0))
    # Of full sequences: lengths are known on the device only.
    read = [(tables.size * stored.keys.shape[2], x) for x in stored[:2]]
    read += [] if window is None else [(batch * x.shape[2], x) for x in window[1:3]]
    (parts,) = pl.pallas_call(
        functools.partial(_kernel, scale=scale, splits=splits),
        (out,),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(splits, batch),
            in_specs=[jax.tree.map(lambda x: of_sequence(x) if x.ndim == 3 else in_place, operands)],
            out_specs=(jax.tree.map(of_step, out),),
            scratch_shapes=[scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=sum(2 * heads * tokens * x.shape[3] for tokens, x in read),
            bytes_accessed=sum(tokens * x.shape[3] * x.dtype.itemsize for tokens, x in read),
            transcendentals=sum(heads * tokens for tokens, _ in read[::2]),
        ),
        interpret=interpret,
        name="latent_decode",
    )(scalars, operands)
    return _merge(parts, dtype)


def problem(stored: Stored, window: Window | None = None) -> str | None:
    """What a TPU cannot take of these shapes, in words that follow the kernel's name; None: it takes them."""
    buffers = [("cache", x) for x in stored[:2]]
    if window is not None and window.keys.shape[2]:
        buffers += [("window", x) for x in window[1:3]]
        if (ring := sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in window[1:3])) > RING_BYTES:
            return f"holds a window of up to {RING_BYTES} bytes in vector memory, and this one has {ring}"
    for name, buffer in buffers:
        tokens, lanes = buffer.shape[2:]
        if lanes % LANES:
            return (
                f"needs a multiple of {LANES} numbers a token, and the {name} has {lanes} (all of it would be copied): "
                "pad keys and queries, or values, with zeros; a TPU's memory has that room for them anyway"
            )
        if tokens % ROWS:
            return f"needs a multiple of {ROWS} tokens a page, capacity or window, and the {name} has {tokens}"
    if stored.tables is not None and stored.tables.size > TABLE_IDS:
        return (
            f"holds up to {TABLE_IDS} page ids in scalar memory, and these are {stored.tables.size}: use longer pages"
        )
    page, block, most = stored.keys.shape[2], _block(stored), _most(stored)
    if block < min(page, SHORT_BLOCK, most):
        return f"would cut {page} tokens into blocks of {block}: make the page, or the capacity, a multiple of {most}"
    return None


class _Scalars(NamedTuple):
    """In scalar memory before the kernel starts."""

    slot: Any
    lengths: Any
    tables: Any
    window_slot: Any = None
    filled: Any = None


class _Operands(NamedTuple):
    """The queries and current tokens of a step's sequence, in vector memory; cache and ring where they lie."""

    q: Any
    keys: Any
    values: Any
    near_q: Any = None
    k: Any = None
    v: Any = None
    ring_keys: Any = None
    ring_values: Any = None


class _Scratch(NamedTuple):
    turn: Any  # blocks that this split has read before the step
    arrived: Any
    keys: Any
    values: Any
    ring_arrived: Any = None
    ring_keys: Any = None
    ring_values: Any = None


class _Out(NamedTuple):
    """Of one split of one sequence."""

    latent: Any
    lse: Any
    exact: Any = None


class _State(NamedTuple):
    """A softmax over what was attended to so far: the largest score, and the sums of weights and of weighted values."""

    top: Float[Array, "H 1"]
    total: Float[Array, "H 1"]
    weighted: Float[Array, "H r"]


def _kernel(scalars: _Scalars, x: _Operands, out: _Out, scratch: _Scratch, *, scale: float, splits: int) -> None:
    split, b, batch = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    page, block, heads = x.keys.shape[2], scratch.keys.shape[1], x.q.shape[0]
    columns = scalars.tables.shape[0] // scalars.lengths.shape[0]

    def share(sequence: Array) -> tuple[Array, Array]:
        """The split's blocks of a sequence: the first, and the one after the last."""
        count = pl.cdiv(scalars.lengths[sequence], block)
        return split * count // splits, (split + 1) * count // splits

    def copies(sequence: Array, i: Array, buffer: Array) -> list[Any]:
        start = i * block
        rows = pl.ds(pl.multiple_of(lax.rem(start, page), block), block)
        source = (scalars.slot[0], scalars.tables[sequence * columns + lax.div(start, page)], rows)
        return [
            pltpu.make_async_copy(hbm.at[source], vmem.at[buffer], scratch.arrived.at[j, buffer])
            for j, (hbm, vmem) in enumerate([(x.keys, scratch.keys), (x.values, scratch.values)])
        ]

    first, end = share(b)
    turn = jnp.where(b == 0, 0, scratch.turn[0])
    scratch.turn[0] = turn + end - first

    def fetch_after(i: Array) -> None:
        """Starts to copy the block that is read after block i of this sequence."""
        more = i + 1 < end
        sequence = jnp.where(more, b, jnp.minimum(b + 1, batch - 1))
        its_first, its_end = share(sequence)
        following = jnp.where(more, i + 1, its_first)

        @pl.when(more | ((b + 1 < batch) & (following < its_end)))
        def _() -> None:
            for copy in copies(sequence, following, _buffer(turn + i + 1 - first)):
                copy.start()

    # A block fetches the one after it. There was none before the first sequence's, and there is none in an empty one.
    pl.when((b == 0) | (first == end))(lambda: fetch_after(first - 1))

    ring: list[Any] = []
    filled = jnp.int32(0)
    if x.ring_keys is not None:
        filled = jnp.where(split == 0, scalars.filled[b], 0)
        source = (scalars.window_slot[0], b)
        pairs = [(x.ring_keys, scratch.ring_keys), (x.ring_values, scratch.ring_values)]
        ring = [
            pltpu.make_async_copy(hbm.at[source], vmem, scratch.ring_arrived.at[j])
            for j, (hbm, vmem) in enumerate(pairs)
        ]
    for copy in ring:
        pl.when(filled > 0)(copy.start)

    def attend_to_block(i: Array, state: _State) -> _State:
        fetch_after(i)
        buffer = _buffer(turn + i - first)
        for copy in copies(b, i, buffer):
            _wait(copy)
        valid = scalars.lengths[b] - i * block
        return _attend(state, x.q[...], scratch.keys[buffer], scratch.values[buffer], valid, scale)

    far = lax.fori_loop(first, end, attend_to_block, _nothing(heads, x.values.shape[-1]))
    near = _nothing(heads, 1)
    if x.near_q is not None:
        near = _attend_to_current(x.near_q[...], x.k[...], x.v[...], split == 0, scale)
        for copy in ring:
            pl.when(filled > 0)(functools.partial(_wait, copy))
        if ring:
            near = _attend(near, x.near_q[...], scratch.ring_keys[...], scratch.ring_values[...], filled, scale)

    top = jnp.maximum(far.top, near.top)
    parts = [jnp.exp(state.top - top) for state in (far, near)]
    total = far.total * parts[0] + near.total * parts[1]
    out.lse[...] = jnp.where(total == 0, -jnp.inf, top + jnp.log(total))
    for ref, state, part in zip((out.latent, out.exact), (far, near), parts):
        if ref is not None:
            own = _gather(state.weighted, ref.shape[-1])
            ref[...] = (own * (part / jnp.where(total == 0, 1, total))).astype(ref.dtype)


def _attend(
    state: _State,
    q: Float[Array, "H Nrk"],
    keys: Float[Array, "C Nrk"],
    values: Float[Array, "C Nrv"],
    valid: Array,
    scale: float,
) -> _State:
    """Adds the first `valid` of a block's tokens."""
    scores = _product(q, keys, (1, 1)) * scale
    scores = jnp.where(_before(valid, scores.shape, 1), scores, -jnp.inf)
    # Weights of zero do not silence what is no number.
    values = jnp.where(_before(valid, values.shape, 0), values, 0)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1, keepdims=True))
    weights, kept = jnp.exp(scores - top), jnp.exp(state.top - top)
    total = state.total * kept + jnp.sum(weights, axis=1, keepdims=True)
    return _State(top, total, state.weighted * kept + _product(weights.astype(values.dtype), values, (1, 0)))


def _attend_to_current(
    q: Float[Array, "H Gdh"], k: Float[Array, "1 Gdh"], v: Float[Array, "1 Gdh"], here: Array, scale: float
) -> _State:
    """The current token alone, or nothing if another split reads it."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    score = jnp.sum(q * k, axis=1, keepdims=True) * scale
    alone = _State(score, jnp.ones_like(score), jnp.broadcast_to(v, q.shape))
    return jax.tree.map(lambda x, y: jnp.where(here, x, y), alone, _nothing(*q.shape))


def _nothing(heads: int, width: int) -> _State:
    # The lowest number rather than -inf, whose difference with itself is no number.
    zeros = lambda size: jnp.zeros((heads, size), jnp.float32)
    return _State(jnp.full((heads, 1), LOWEST, jnp.float32), zeros(1), zeros(width))


def _product(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """In float32; of float32 inputs without the rounding to bfloat16 that is a TPU's default."""
    dtype = jnp.promote_types(x.dtype, y.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(x.astype(dtype), y.astype(dtype), contract, precision, jnp.float32)


def _spread(q: Float[Array, "B H r"], groups: int) -> Float[Array, "B H Nr"]:
    """Each query in the lanes of its head of a token, zeros in those of the others."""
    batch, heads, rank = q.shape
    own = jnp.arange(heads)[:, None] // (heads // groups) == jnp.arange(groups)
    return jnp.where(own[..., None], q[:, :, None], 0).reshape(batch, heads, groups * rank)


def _gather(wide: Float[Array, "H Nr"], size: int) -> Float[Array, "H r"]:
    """Of each query the lanes of its head."""
    heads, groups = wide.shape[0], wide.shape[1] // size
    group = lax.broadcasted_iota(jnp.int32, (heads, size), 0) // (heads // groups)
    own = wide[:, :size]
    for n in range(1, groups):
        own = jnp.where(group == n, wide[:, n * size : (n + 1) * size], own)
    return own


def _merge(parts: _Out, dtype: jnp.dtype) -> tuple[Array, Array | None, Array]:
    """One softmax over all splits: latent, exact, log-sum-exp."""
    if parts.lse.shape[0] == 1:
        latent, lse, exact = jax.tree.map(lambda x: x[0], parts)
        return latent, exact, lse[..., 0]
    top = jnp.maximum(jnp.max(parts.lse, axis=0), LOWEST)
    weights = jnp.exp(parts.lse - top)
    total = jnp.sum(weights, axis=0)
    summed = lambda x: (jnp.sum(x * weights, axis=0) / jnp.where(total == 0, 1, total)).astype(dtype)
    exact = None if parts.exact is None else summed(parts.exact)
    return summed(parts.latent), exact, (top + jnp.log(total))[..., 0]


def _most(stored: Stored) -> int:
    """Tokens of the longest block: a power of two."""
    token_bytes = sum(x.shape[3] * x.dtype.itemsize for x in stored[:2])
    return 1 << (max(1, min(BLOCK_TOKENS, BLOCK_BYTES // token_bytes)).bit_length() - 1)


def _block(stored: Stored) -> int:
    """Tokens of a block: all of a short page, else the largest power of two that divides it."""
    page, most = stored.keys.shape[2], _most(stored)
    return page if page <= most else math.gcd(page, most)


# Tests plant faults in these.


def _before(valid: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Which of a block's tokens, along `axis`, are valid."""
    return lax.broadcasted_iota(jnp.int32, shape, axis) < valid


def _buffer(turn: Array) -> Array:
    """Which of the two buffers the block of this turn is in."""
    return lax.rem(turn, 2)


def _wait(copy: Any) -> None:
    copy.wait()
