"""Inputs of `latent_decode` as a serving cache holds them, and the operation in float64 loops: what every kernel is
tested against.

What must not be read is NaN (unused slots, pages, tokens and ring entries) or an id of no page.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from hla_jax.kernels.latent_decode import Rotation, Stored, Window

SLOTS, SLOT, WINDOW_SLOT = 3, 1, 2
BOGUS = (2**30, -7)


def make(
    batch: int = 2,
    heads: int = 4,
    latent_heads: int = 1,
    rank_k: int = 16,
    rank_v: int = 8,
    page: int = 16,
    lengths: Sequence[int] = (11, 16),
    window: int | None = 8,
    kv_heads: int = 2,
    head_dim: int = 8,
    paged: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    rotation: bool = False,
    spoil: bool = True,
    filled: Sequence[int] | None = None,
    magnitude: float = 1.0,
) -> tuple[jnp.ndarray, Stored, Window | None, Rotation | None]:
    """Random inputs: q, stored, window, rotation.

    Args:
      page: tokens of a page; of the whole capacity unless `paged`.
      lengths: tokens of each sequence.
      window: entries of the ring, may be 0; None: no window at all.
      spoil: False leaves zeros where nothing may be read, and page 0 for ids of no page.
      filled: ring entries that hold tokens, by sequence; None: full.
      magnitude: of the queries, for large scores.
    """
    assert len(lengths) == batch
    rng = np.random.default_rng(seed)
    rounded = lambda x: jnp.asarray(x, dtype)
    unused = np.nan if spoil else 0.0
    drawn = lambda *shape: rounded(rng.normal(size=shape))
    widths = latent_heads * rank_k, latent_heads * rank_v

    counts = [-(-length // page) for length in lengths]
    if paged:
        # One column of ids and three pages more than any sequence needs.
        columns = max(counts) + 1
        pages = sum(counts) + 3
        tables = np.resize(np.array(BOGUS if spoil else (0,)), (batch, columns)).astype(np.int32)
        free = list(rng.permutation(pages))
        for b, count in enumerate(counts):
            tables[b, :count] = [free.pop() for _ in range(count)]
    else:
        assert max(counts) <= 1, "an unpaged cache holds a sequence in one page"
        pages, tables = batch, np.arange(batch, dtype=np.int32)[:, None]
    buffers = [np.full((SLOTS, pages, page, width), unused) for width in widths]
    for b, length in enumerate(lengths):
        for j in range(length):
            for buffer in buffers:
                buffer[SLOT, tables[b, j // page], j % page] = rng.normal(size=buffer.shape[-1])
    stored = Stored(
        rounded(buffers[0]),
        rounded(buffers[1]),
        jnp.int32(SLOT),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(tables) if paged else None,
    )

    recent = None
    if window is not None:
        filled = [window] * batch if filled is None else filled
        rings = np.full((2, SLOTS, batch, window, kv_heads * head_dim), unused)
        for b, count in enumerate(filled):
            rings[:, WINDOW_SLOT, b, :count] = rng.normal(size=(2, count, kv_heads * head_dim))
        recent = Window(
            drawn(batch, heads, head_dim) * magnitude,
            rounded(rings[0]),
            rounded(rings[1]),
            jnp.int32(WINDOW_SLOT),
            jnp.asarray(filled, jnp.int32),
            drawn(batch, kv_heads, head_dim),
            drawn(batch, kv_heads, head_dim),
        )
    turn = None
    if rotation:
        angles = rng.uniform(0, 2 * np.pi, (batch, rank_k // 2))
        turn = Rotation(jnp.asarray(np.cos(angles), "float32"), jnp.asarray(np.sin(angles), "float32"), rank_k // 4)
    return drawn(batch, heads, rank_k) * magnitude, stored, recent, turn


def oracle(
    q: jnp.ndarray, stored: Stored, scale: float, window: Window | None = None, rotation: Rotation | None = None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """The operation in float64, one sequence and head at a time: latent [B, H, rv], exact [B, H, dh], lse [B, H]."""
    wide = lambda x: np.asarray(x).astype(np.float64)
    batch, heads, rank_k = q.shape
    latent_heads = stored.keys.shape[-1] // rank_k
    rank_v = stored.values.shape[-1] // latent_heads
    page = stored.keys.shape[2]
    tables = np.arange(batch)[:, None] if stored.tables is None else np.asarray(stored.tables)
    latent = np.zeros((batch, heads, rank_v))
    exact = None if window is None else np.zeros((batch, heads, window.k.shape[-1]))
    lse = np.full((batch, heads), -np.inf)
    stored_keys, stored_values = wide(stored.keys[stored.slot]), wide(stored.values[stored.slot])
    for b in range(batch):
        tokens = [(tables[b, j // page], j % page) for j in range(int(stored.lengths[b]))]
        for h in range(heads):
            n = h * latent_heads // heads
            query = wide(q[b, h]) if rotation is None else _turned(wide(q[b, h]), rotation, b)
            far_scores = [query @ stored_keys[at][n * rank_k : (n + 1) * rank_k] for at in tokens]
            far_values = [stored_values[at][n * rank_v : (n + 1) * rank_v] for at in tokens]
            near_scores, near_values = [], []
            if window is not None:
                kv_heads, size = window.k.shape[1:]
                g = h * kv_heads // heads
                lanes = slice(g * size, (g + 1) * size)
                count = int(window.filled[b])
                near_keys = [*wide(window.keys[window.slot, b])[:count, lanes], wide(window.k[b, g])]
                near_values = [*wide(window.values[window.slot, b])[:count, lanes], wide(window.v[b, g])]
                near_scores = [wide(window.q[b, h]) @ key for key in near_keys]
            scores = scale * np.array([*far_scores, *near_scores])
            if not len(scores):
                continue
            lse[b, h] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
            weights = np.exp(scores - lse[b, h])
            for weight, value in zip(weights, far_values):
                latent[b, h] += weight * value
            for weight, value in zip(weights[len(tokens) :], near_values):
                exact[b, h] += weight * value
    return latent, exact, lse


def _turned(query: np.ndarray, rotation: Rotation, b: int) -> np.ndarray:
    """One latent query, a pair at a time."""
    out, half = query.copy(), rotation.half
    for pair in range(len(query) // 2):
        first = pair // half * 2 * half + pair % half
        cos, sin = (float(x[b, pair]) for x in rotation[:2])
        out[first] = query[first] * cos - query[first + half] * sin
        out[first + half] = query[first + half] * cos + query[first] * sin
    return out


def agree(
    got: tuple[jnp.ndarray, jnp.ndarray | None, jnp.ndarray],
    want: tuple[np.ndarray, np.ndarray | None, np.ndarray],
    absolute: float,
    relative: float,
) -> None:
    """Asserts equality within a tolerance, and that the outputs of each head point the same way."""
    assert (got[1] is None) == (want[1] is None)
    for name, x, y in zip(("latent", "exact", "lse"), got, want):
        if y is None:
            continue
        x = np.asarray(x).astype(np.float64)
        assert x.shape == y.shape, name
        np.testing.assert_allclose(x, y, atol=absolute, rtol=relative, err_msg=name)
        if name != "lse":
            norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
            cosine = np.where(norms > 0, (x * y).sum(-1) / np.where(norms > 0, norms, 1), 1)
            assert cosine.min() > 1 - max(relative, 1e-6), f"{name}: cosine {cosine.min()}"
