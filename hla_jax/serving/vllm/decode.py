"""`latent_decode` over vLLM's pages: one decoding step of attention for all rows at once, without a word to the host.

On a GPU the project's Triton kernels, elsewhere PyTorch. The interface is that of `kernels/latent_decode/api.py`.

Shapes: D rows, H query heads, N latent heads, G key-value heads, dh head size, W window, ranks rk and rv.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.utils.math_utils import cdiv

from hla_jax.serving.torch.looped_cache import Angles, turn, wide
from hla_jax.serving.vllm.caches import PageViews


class Stored(NamedTuple):
    """The past in pages, of which row d reads its first `lengths[d]` tokens."""

    pages: PageViews
    tables: Tensor
    """Ids of pages, int32 [D, n]; beyond the length they may be anything."""
    lengths: Tensor
    """int32 [D]"""
    longest: int
    """No length is larger."""


class Window(NamedTuple):
    """The recent tokens, in any order, and the current one; queries and keys are rotated."""

    q: Tensor
    """[D, H, dh]"""
    keys: Tensor
    """[D, W, G, dh]"""
    values: Tensor
    filled: Tensor
    """Of which the first so many count, int32 [D]."""
    k: Tensor
    """[D, G, dh]"""
    v: Tensor


def latent_decode(
    q: Tensor, stored: Stored, scale: float, window: Window | None = None, turned: Angles | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attends to the stored tokens and to the window, with one softmax over both.

    Args:
      q: queries in latent space [D, H, rk].
      scale: of all scores.
      turned: rotates `q` first, as blocks [rk/dh] of heads: angles [D, rk/dh, dh/2].

    Returns:
      The weighted sums of stored values [D, H, rv] and of the window's [D, H, dh] (None without one), and the
      log-sum-exp of all scores, float32 [D, H]: minus infinity, and sums of zero, where there was nothing to read.
    """
    return (by_triton if q.is_cuda else by_torch)(q, stored, scale, window, turned)


def by_torch(
    q: Tensor, stored: Stored, scale: float, window: Window | None, turned: Angles | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    keys, values = gather(stored)
    if turned is not None:
        q = turn(q.unflatten(-1, (-1, 2 * turned.cos.shape[-1])), Angles(*(x[:, None] for x in turned))).flatten(-2)
    wider = wide(q.dtype)
    parts = [_scores(q, keys).masked_fill(~visible(stored)[:, None], -torch.inf)]
    if window is not None:
        unused = torch.arange(window.keys.shape[1], device=q.device) >= window.filled[:, None]
        near = _scores(window.q, window.keys).masked_fill(unused[:, None], -torch.inf)
        parts += [near, _scores(window.q, window.k[:, None])]
    scores = torch.cat(parts, dim=-1) * scale
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(wider).min)[..., None])
    far, *recent = weights.split([part.shape[-1] for part in parts], dim=-1)
    latent = _weighted(far, values).to(q.dtype)
    if window is None:
        return latent, None, lse.float()
    near_values = window.values.masked_fill(unused[:, :, None, None], 0)
    exact = _weighted(recent[0], near_values) + _weighted(recent[1], window.v[:, None])
    return latent, exact.to(q.dtype), lse.float()


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, own: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotated queries [D, H, dh] over rebuilt keys and values [D, C, G, dh], of which `seen` [D, C] count, and over the
    rows' own key and value [D, G, dh], if given: [D, H, dh].
    """
    parts, values = [_scores(q, k).masked_fill(~seen[:, None], -torch.inf)], [v]
    if own is not None:
        parts.append(_scores(q, own[0][:, None]))
        values.append(own[1][:, None])
    weights = torch.softmax(torch.cat(parts, dim=-1) * scale, dim=-1).split([part.shape[-1] for part in parts], dim=-1)
    return sum(_weighted(w, x) for w, x in zip(weights, values, strict=True)).to(q.dtype)  # type: ignore[union-attr]


def visible(stored: Stored) -> Tensor:
    """Which tokens of `gather` a row reads, [D, C]."""
    columns = _columns(stored) * stored.pages.keys.shape[1]
    return torch.arange(columns, device=stored.lengths.device) < stored.lengths[:, None]


def gather(stored: Stored) -> tuple[Tensor, Tensor]:
    """Keys [D, C, N, rk] and values [D, C, N, rv] of as many pages as the longest row has; zeros beyond a length."""
    tables = stored.tables[:, : _columns(stored)]
    hidden = ~visible(stored)[:, :, None, None]
    # Pages of other rows, which may hold anything, must not reach a sum even with no weight.
    keys, values = (pages[tables].flatten(1, 2).masked_fill_(hidden, 0) for pages in stored.pages)
    return keys, values


def _columns(stored: Stored) -> int:
    return min(cdiv(stored.longest, stored.pages.keys.shape[1]), stored.tables.shape[1])


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Queries [D, H, r] times keys [D, C, N, r]: [D, H, C]."""
    grouped = q.unflatten(1, (k.shape[2], -1)).to(wide(q.dtype))
    return torch.einsum("dngr,dcnr->dngc", grouped, k.to(grouped.dtype)).flatten(1, 2)


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """Sum of values [D, C, N, r] by weights [D, H, C]: [D, H, r]."""
    grouped = weights.unflatten(1, (v.shape[2], -1))
    return torch.einsum("dngc,dcnr->dngr", grouped, v.to(weights.dtype)).flatten(1, 2)


def by_triton(
    q: Tensor,
    stored: Stored,
    scale: float,
    window: Window | None,
    turned: Angles | None,
    geometry: Any = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`geometry`: how the work is cut; None: `triton_kernels.geometry` for this GPU."""
    from hla_jax.kernels.latent_decode import triton_kernels

    pages, columns = stored.pages, stored.tables.shape[1]
    count, tokens, latent_heads, rank_k = pages.keys.shape
    near = {}
    if window is not None:
        near = dict(window=window.keys.shape[1], kv_heads=window.k.shape[1], head_size=window.k.shape[2])
    shapes = triton_kernels.Shapes(
        *(q.shape[0], q.shape[1], latent_heads, rank_k, pages.values.shape[-1], count, tokens, columns),
        itemsize=q.element_size(),
        stride_k=pages.keys.stride(0),
        stride_v=pages.values.stride(0),
        **near,
    )
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    cut = triton_kernels.geometry(shapes, processors) if geometry is None else geometry(shapes)
    attend = triton_kernels.attend_launch(shapes, cut, scale, 0 if turned is None else turned.cos.shape[-1])
    merge = triton_kernels.merge_launch(shapes, cut)

    slot = torch.zeros(1, dtype=torch.int32, device=q.device)
    near_args: tuple[Tensor, ...] = (stored.lengths,) * 7  # stands in for what is not read
    if window is not None:
        # A window of no tokens has no memory to point to.
        rings = (window.keys, window.values) if window.keys.shape[1] else (window.k, window.v)
        near_args = (window.q, *rings, slot, window.filled, window.k, window.v)
        near_args = tuple(x.contiguous() for x in near_args)
    rotation = (stored.lengths,) * 2 if turned is None else tuple(x.contiguous() for x in turned)
    empty = lambda shape, dtype: torch.empty(shape, dtype=dtype, device=q.device)
    parts = [empty(shape, torch.float32) for shape in attend.outputs]
    triton_kernels.attend_parts[attend.grid](
        *(q.contiguous(), pages.keys, pages.values, slot, stored.lengths, stored.tables.contiguous()),
        *(*rotation, *near_args, *parts),
        **attend.constants,
        **attend.options,
    )
    outputs = [empty(s, d) for s, d in zip(merge.outputs, (q.dtype, q.dtype, torch.float32), strict=True)]
    triton_kernels.merge_parts[merge.grid](*parts, *outputs, **merge.constants, **merge.options)
    latent, exact, lse = outputs
    return latent, None if window is None else exact, lse
