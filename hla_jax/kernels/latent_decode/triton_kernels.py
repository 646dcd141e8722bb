"""The two GPU kernels of `latent_decode`, and how to launch them. Plain Triton: JAX and PyTorch launch the same.

`attend_parts` has one program for each sequence and part of it. A part is a share of the stored tokens that one block
of query heads reads (all heads of a latent at once, so that each byte of the cache is read once), or a share of the
window of one key-value head. Each leaves a partial sum of values and a log-sum-exp. `merge_parts` combines them.
Logarithms are to the base 2 until the last line: a GPU's own exponential is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

PROCESSORS = 132
"""Multiprocessors of an H100 or H200; an A100 has 108."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)

_SMALLEST = 16  # what one side of a product may be
_TILE_BYTES = 34 * 1024  # keys and values of one step: room for two of them, in two programs a multiprocessor
_MOST_TOKENS = 128
_SUMS = 32 * 512  # weighted values that a program can keep
_SHARED_BYTES = 150 * 1024  # leaves room for what the compiler adds, on an A100


class Shapes(NamedTuple):
    """What is static of the operands."""

    batch: int
    heads: int
    latent_heads: int
    rank_k: int
    rank_v: int
    pages: int
    page: int  # tokens
    columns: int = 0  # of the page tables; 0: there are none, and page b is all of sequence b
    itemsize: int = 2  # bytes of a number in the cache or in the queries, whichever is wider
    window: int | None = None  # tokens of the ring; None: no exact window, not even the current token
    kv_heads: int = 1
    head_size: int = 1
    stride_k: int = 0  # numbers from one page of keys to the next; 0: they lie side by side
    stride_v: int = 0


class Geometry(NamedTuple):
    """How the work is cut."""

    rows: int  # query heads of a program, padded
    block: int  # stored tokens of one step
    splits: int  # parts of the stored tokens
    near_rows: int  # as above, for the window
    near_block: int
    near_splits: int
    warps: int
    stages: int
    columns: int  # that a program of `merge_parts` writes


class Launch(NamedTuple):
    """Static arguments of a kernel, and the shapes of what it writes."""

    grid: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    constants: dict[str, Any]
    options: dict[str, int]


def geometry(x: Shapes, processors: int = PROCESSORS) -> Geometry:
    """The cut for a GPU of so many multiprocessors."""
    narrow = x.itemsize <= 2
    group = x.heads // x.latent_heads
    width_k, width_v = sum(_parts(x.rank_k)), _power(x.rank_v)
    # All heads of a latent, while their sums fit into registers. Beyond that, neighbours read the same tokens at the
    # same time: from memory once, then from the GPU's cache.
    rows = max(_SMALLEST, min(_power(group), _SUMS // width_v)) if narrow else _SMALLEST
    block = _tokens(width_k + width_v, x.itemsize)
    ahead = 2 * block * (width_k + width_v) + rows * width_k
    programs = x.batch * x.latent_heads * triton.cdiv(group, rows)
    # Twice the card; no split has less than two blocks of the longest sequence.
    splits = max(1, min(2 * processors // programs, x.page * max(1, x.columns) // (2 * block)))
    near_splits = 0 if x.window is None else max(1, triton.cdiv(x.window, _MOST_TOKENS))
    return Geometry(
        rows,
        block,
        splits,
        near_rows=_power(x.heads // x.kv_heads),
        near_block=min(_tokens(2 * _power(x.head_size), x.itemsize), _power(x.window or 1)),
        near_splits=near_splits,
        # A thread holds 64 of the sums; float32 needs its registers for products.
        warps=min(16, max(4, rows * width_v // 2048)) if narrow else 8,
        # The next step arrives while one is read, if there is memory for both. Ids of pages come a step earlier.
        stages=(3 if ahead * x.itemsize <= _SHARED_BYTES else 2) + (x.columns > 0),
        columns=64 if splits + near_splits > 4 else 256,
    )


def attend_launch(x: Shapes, cut: Geometry, scale: float, half: int = 0) -> Launch:
    """Of `attend_parts`. `half`: of the rotation; 0: queries are not turned."""
    main, rest = _parts(x.rank_k)
    readers = x.latent_heads * triton.cdiv(x.heads // x.latent_heads, cut.rows)
    parts = cut.near_splits + cut.splits
    return Launch(
        grid=(x.batch, x.kv_heads * cut.near_splits + readers * cut.splits),
        outputs=(
            (x.batch, x.heads, cut.splits, x.rank_v),
            (x.batch, x.heads, cut.near_splits, x.head_size) if cut.near_splits else (1,),
            (x.batch, x.heads, parts),
        ),
        constants=dict(
            SCALE=scale * LOG2_E.value,
            HEADS=x.heads,
            LATENT_HEADS=x.latent_heads,
            RANK_K=x.rank_k,
            RANK_V=x.rank_v,
            PAGES=x.pages,
            PAGE=x.page,
            STRIDE_K=x.stride_k or x.page * x.latent_heads * x.rank_k,
            STRIDE_V=x.stride_v or x.page * x.latent_heads * x.rank_v,
            COLUMNS=x.columns,
            HALF=half,
            KV_HEADS=x.kv_heads,
            HEAD_SIZE=x.head_size,
            WINDOW=x.window or 0,
            MAIN=main,
            REST=rest,
            WIDTH_V=_power(x.rank_v),
            WIDTH=_power(x.head_size),
            ROWS=cut.rows,
            BLOCK=cut.block,
            SPLITS=cut.splits,
            NEAR_ROWS=cut.near_rows,
            NEAR_BLOCK=cut.near_block,
            NEAR_SPLITS=cut.near_splits,
        ),
        options=dict(num_warps=cut.warps, num_stages=cut.stages),
    )


def merge_launch(x: Shapes, cut: Geometry) -> Launch:
    """Of `merge_parts`."""
    latent_blocks = triton.cdiv(x.rank_v, cut.columns)
    exact_blocks = triton.cdiv(x.head_size, cut.columns) if cut.near_splits else 0
    return Launch(
        grid=(x.batch, x.heads, latent_blocks + exact_blocks),
        outputs=(
            (x.batch, x.heads, x.rank_v),
            (x.batch, x.heads, x.head_size) if cut.near_splits else (1,),
            (x.batch, x.heads),
        ),
        constants=dict(
            HEADS=x.heads,
            RANK_V=x.rank_v,
            HEAD_SIZE=x.head_size,
            SPLITS=cut.splits,
            NEAR_SPLITS=cut.near_splits,
            LATENT_BLOCKS=latent_blocks,
            COLUMNS=cut.columns,
            PARTS=triton.next_power_of_2(cut.near_splits + cut.splits),
            TILE=min(64, triton.next_power_of_2(max(cut.splits, cut.near_splits))),
        ),
        options=dict(num_warps=4),
    )


def _power(size: int) -> int:
    return max(_SMALLEST, triton.next_power_of_2(size))


def _parts(rank: int) -> tuple[int, int]:
    """A rank as the largest power of two in it, and what holds the rest: 576 costs 512 + 64, not 1024."""
    main = max(_SMALLEST, 1 << (rank.bit_length() - 1))
    return main, _power(rank - main) if rank > main else 0


def _tokens(width: int, itemsize: int) -> int:
    """Tokens of one step: a power of two."""
    fit = max(1, _TILE_BYTES // (width * itemsize))
    return max(_SMALLEST, min(_MOST_TOKENS, 1 << (fit.bit_length() - 1)))


@triton.jit
def attend_parts(
    q,  # [B, H, rk]
    keys,  # [slots, P, page, N rk]
    values,  # [slots, P, page, N rv]
    slot,  # int32
    lengths,  # int32 [B]
    tables,  # int32 [B, n]; not read where COLUMNS is 0
    cos,  # float32 [B, rk/2]; not read where HALF is 0
    sin,
    near_q,  # [B, H, dh]; this and all below not read where NEAR_SPLITS is 0
    near_keys,  # [slots, B, W, G dh]
    near_values,
    near_slot,
    filled,  # int32 [B]
    k,  # [B, G, dh]
    v,
    latents,  # float32 [B, H, splits, rv], written
    exacts,  # float32 [B, H, near splits, dh], written
    lses,  # float32 [B, H, near splits + splits], written
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT_HEADS: tl.constexpr,
    RANK_K: tl.constexpr,
    RANK_V: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    WIDTH_V: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    NEAR_ROWS: tl.constexpr,
    NEAR_BLOCK: tl.constexpr,
    NEAR_SPLITS: tl.constexpr,
):
    """One part of one sequence. The window's programs come first: they are short."""
    # Whole caches have more numbers than 32 bits count.
    b = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    near_programs: tl.constexpr = KV_HEADS * NEAR_SPLITS
    if NEAR_SPLITS > 0:  # noqa: SIM102 (decided when it compiles)
        if program < near_programs:
            _near_part(
                near_q, near_keys, near_values, near_slot, filled, k, v, tables, exacts, lses,
                b, program // NEAR_SPLITS, program % NEAR_SPLITS, SCALE, HEADS, KV_HEADS, HEAD_SIZE, WINDOW, WIDTH,
                NEAR_ROWS, NEAR_BLOCK, NEAR_SPLITS, SPLITS,
            )  # fmt: skip
    if program >= near_programs:
        # The heads of a token lie side by side, and so do the programs that read them.
        readers: tl.constexpr = LATENT_HEADS * ((HEADS // LATENT_HEADS + ROWS - 1) // ROWS)
        _stored_part(
            q, keys, values, slot, lengths, tables, cos, sin, latents, lses,
            b, (program - near_programs) % readers, (program - near_programs) // readers, SCALE, HEADS, LATENT_HEADS,
            RANK_K, RANK_V, PAGES, PAGE, STRIDE_K, STRIDE_V, COLUMNS, HALF, MAIN, REST, WIDTH_V, ROWS, BLOCK, SPLITS,
            NEAR_SPLITS,
        )  # fmt: skip


@triton.jit
def _stored_part(
    q, keys, values, slot, lengths, tables, cos, sin, latents, lses, b, reader, part,
    SCALE: tl.constexpr, HEADS: tl.constexpr, LATENT_HEADS: tl.constexpr, RANK_K: tl.constexpr, RANK_V: tl.constexpr,
    PAGES: tl.constexpr, PAGE: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, COLUMNS: tl.constexpr,
    HALF: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, NEAR_SPLITS: tl.constexpr,
):  # fmt: skip
    """A share of the stored tokens, for one block of the query heads of one latent head."""
    group: tl.constexpr = HEADS // LATENT_HEADS
    blocks: tl.constexpr = (group + ROWS - 1) // ROWS
    n = reader // blocks
    row = reader % blocks * ROWS + tl.arange(0, ROWS)
    head = b * HEADS + n * group + row
    query = _query(q, cos, sin, b, head, tl.arange(0, MAIN), row < group, RANK_K, HALF)
    query_rest = query
    if REST > 0:
        query_rest = _query(q, cos, sin, b, head, MAIN + tl.arange(0, REST), row < group, RANK_K, HALF)
    page = tl.load(slot).to(tl.int64) * PAGES
    if COLUMNS == 0:
        page += b
    first, last = _share(tl.load(lengths + b), part, SPLITS, BLOCK)
    top, total, summed = _attend(
        tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH_V], tl.float32),
        query, query_rest, keys + page * STRIDE_K + n * RANK_K, values + page * STRIDE_V + n * RANK_V,
        tables + b * COLUMNS, first, last, SCALE, LATENT_HEADS, RANK_K, RANK_V, MAIN, REST, WIDTH_V,
        PAGE if COLUMNS > 0 else 0, STRIDE_K, STRIDE_V, BLOCK,
    )  # fmt: skip
    lses += head * (NEAR_SPLITS + SPLITS) + NEAR_SPLITS + part
    _leave(latents, head * SPLITS + part, tl.arange(0, WIDTH_V), RANK_V, lses, row < group, top, total, summed)


@triton.jit
def _near_part(
    q, keys, values, slot, filled, k, v, tables, exacts, lses, b, g, part,
    SCALE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NEAR_SPLITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A share of the ring of one key-value head. The first part starts from the current token."""
    group: tl.constexpr = HEADS // KV_HEADS
    row = tl.arange(0, ROWS)
    head = b * HEADS + g * group + row
    column = tl.arange(0, WIDTH)
    query = _rows(q, head, column, row < group, HEAD_SIZE)
    at = (b * KV_HEADS + g) * HEAD_SIZE + column
    own_k = tl.load(k + at, column < HEAD_SIZE, 0.0).to(tl.float32)
    own_v = tl.load(v + at, column < HEAD_SIZE, 0.0).to(tl.float32)
    weight = tl.zeros([ROWS], tl.float32) + tl.where(part == 0, 1.0, 0.0)
    top = tl.where(weight > 0, tl.sum(query.to(tl.float32) * own_k[None, :], 1) * SCALE, LOWEST)
    total = weight
    summed = weight[:, None] * own_v[None, :]
    if WINDOW > 0:
        ring = (tl.load(slot).to(tl.int64) * tl.num_programs(0) + b) * (WINDOW * KV_HEADS) + g
        first, last = _share(tl.load(filled + b), part, NEAR_SPLITS, BLOCK)
        top, total, summed = _attend(
            top, total, summed, query, query, keys + ring * HEAD_SIZE, values + ring * HEAD_SIZE, tables, first, last,
            SCALE, KV_HEADS, HEAD_SIZE, HEAD_SIZE, WIDTH, 0, WIDTH, 0, 0, 0, BLOCK,
        )  # fmt: skip
    lses += head * (NEAR_SPLITS + SPLITS) + part
    _leave(exacts, head * NEAR_SPLITS + part, column, HEAD_SIZE, lses, row < group, top, total, summed)


@triton.jit
def merge_parts(
    latents,  # as `attend_parts` left them
    exacts,
    lses,
    latent,  # [B, H, rv], written
    exact,  # [B, H, dh], written where NEAR_SPLITS > 0
    lse,  # float32 [B, H], written
    HEADS: tl.constexpr,
    RANK_V: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    NEAR_SPLITS: tl.constexpr,
    LATENT_BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The parts of one head, some columns of it: each weighs as much as its sum of exponentials."""
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    block = tl.program_id(2)
    lses += head * (NEAR_SPLITS + SPLITS)
    part = tl.arange(0, PARTS)
    sums = tl.load(lses + part, part < NEAR_SPLITS + SPLITS, float("-inf"))
    top = tl.maximum(tl.max(sums, 0), LOWEST)
    total = tl.sum(tl.exp2(sums - top), 0)
    whole = top + tl.log2(total)
    if block == 0:
        tl.store(lse + head, whole / LOG2_E)
    # Nothing was attended to: no part has a weight, and the outputs are zeros.
    whole = tl.where(total > 0, whole, 0.0)
    if block < LATENT_BLOCKS:
        _merge(latents + head * SPLITS * RANK_V, lses + NEAR_SPLITS, latent + head * RANK_V, whole,
               block * COLUMNS + tl.arange(0, COLUMNS), RANK_V, SPLITS, TILE)  # fmt: skip
    if NEAR_SPLITS > 0:  # noqa: SIM102 (decided when it compiles)
        if block >= LATENT_BLOCKS:
            _merge(exacts + head * NEAR_SPLITS * HEAD_SIZE, lses, exact + head * HEAD_SIZE, whole,
                   (block - LATENT_BLOCKS) * COLUMNS + tl.arange(0, COLUMNS), HEAD_SIZE, NEAR_SPLITS, TILE)  # fmt: skip


@triton.jit
def _attend(
    top, total, summed, query, query_rest, keys, values, tables, first, last,
    SCALE: tl.constexpr, HEADS: tl.constexpr, RANK_K: tl.constexpr, RANK_V: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, WIDTH_V: tl.constexpr, PAGE: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Takes tokens first to last into a running softmax: rows' maxima, sums of exponentials and weighted values."""
    main = tl.arange(0, MAIN)
    column = tl.arange(0, WIDTH_V)
    for start in tl.range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        used = token < last
        row_k = token.to(tl.int64) * (HEADS * RANK_K)
        row_v = token.to(tl.int64) * (HEADS * RANK_V)
        if PAGE > 0:
            # Ids beyond the length may be anything.
            page = tl.load(tables + token // PAGE, used, 0).to(tl.int64)
            row_k = page * STRIDE_K + token % PAGE * (HEADS * RANK_K)
            row_v = page * STRIDE_V + token % PAGE * (HEADS * RANK_V)
        key = tl.load(keys + row_k[:, None] + main[None, :], used[:, None] & (main < RANK_K)[None, :], 0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        if REST > 0:
            rest = MAIN + tl.arange(0, REST)
            key_rest = tl.load(keys + row_k[:, None] + rest[None, :], used[:, None] & (rest < RANK_K)[None, :], 0.0)
            scores = tl.dot(query_rest, tl.trans(key_rest.to(query.dtype)), scores, input_precision="ieee")
        # Weights of zero do not silence what is no number: neither keys nor values of other tokens are loaded.
        value = tl.load(values + row_v[:, None] + column[None, :], used[:, None] & (column < RANK_V)[None, :], 0.0)
        scores = tl.where(used[None, :], scores * SCALE, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(top - highest)
        total = total * shrink + tl.sum(weights, 1)
        summed = tl.dot(weights.to(value.dtype), value, summed * shrink[:, None], input_precision="ieee")
        top = highest
    return top, total, summed


@triton.jit
def _query(q, cos, sin, b, head, column, valid, RANK_K: tl.constexpr, HALF: tl.constexpr):
    """Columns of the latent queries, turned if there is a rotation, in their own dtype: that is what is scored."""
    query = _rows(q, head, column, valid, RANK_K)
    if HALF > 0:
        second = column % (2 * HALF) >= HALF
        other = _rows(q, head, tl.where(second, column - HALF, column + HALF), valid, RANK_K)
        pair = b * (RANK_K // 2) + column // (2 * HALF) * HALF + column % HALF
        real = tl.load(cos + pair, column < RANK_K, 0.0).to(tl.float32)
        imaginary = tl.load(sin + pair, column < RANK_K, 0.0).to(tl.float32)
        imaginary = tl.where(second, imaginary, -imaginary)
        turned = query.to(tl.float32) * real[None, :] + other.to(tl.float32) * imaginary[None, :]
        query = turned.to(query.dtype)
    return query


@triton.jit
def _rows(x, row, column, valid, SIZE: tl.constexpr):
    return tl.load(x + row[:, None] * SIZE + column[None, :], valid[:, None] & (column < SIZE)[None, :], 0.0)


@triton.jit
def _share(length, part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens of a part: equal shares of what there is, in whole blocks. The last ones may be empty."""
    share = tl.cdiv(tl.cdiv(length, BLOCK), PARTS) * BLOCK
    first = part * share
    return first, tl.minimum(first + share, length)


@triton.jit
def _leave(sums, at, column, SIZE: tl.constexpr, lses, valid, top, total, summed):
    """Writes a part's average of values and its log-sum-exp. Of a part without tokens, only that it weighs nothing."""
    some = total > 0
    tl.store(lses, tl.where(some, top + tl.log2(total), float("-inf")), valid)
    average = summed / tl.where(some, total, 1.0)[:, None]
    tl.store(sums + at[:, None] * SIZE + column[None, :], average, (valid & some)[:, None] & (column < SIZE)[None, :])


@triton.jit
def _merge(sums, lses, out, whole, column, SIZE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    """Writes the weighted sum of parts. Those without weight may hold anything."""
    merged = tl.zeros_like(column).to(tl.float32)
    for start in tl.static_range(0, PARTS, TILE):
        part = start + tl.arange(0, TILE)
        weight = tl.exp2(tl.load(lses + part, part < PARTS, float("-inf")) - whole)
        used = (weight > 0)[:, None] & (column < SIZE)[None, :]
        merged += tl.sum(weight[:, None] * tl.load(sums + part[:, None] * SIZE + column[None, :], used, 0.0), 0)
    tl.store(out + column, merged.to(out.dtype.element_ty), column < SIZE)
