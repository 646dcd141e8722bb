"""Exact attention of prompts over their own tokens, as they lie one after another in a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hla_jax.serving.vllm.caches import Rows


def causal_attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
    """Queries [n, H, r], keys [n, G, r] and values [n, G, rv] of the prompts of a batch: [n, H, rv]."""
    if q.is_cuda and q.dtype != torch.float32 and v.shape[-1] == q.shape[-1]:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        starts = rows.query_start_loc[rows.decodes :] - rows.starts[0]
        longest = max(end - start for start, end in zip(rows.starts, rows.starts[1:], strict=False))
        return flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
        )
    heads = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(heads, dim=1) for x in (k, v))
    out = q.new_zeros(*q.shape[:2], v.shape[-1])  # padding has to be some number
    for start, end in zip(rows.starts, rows.starts[1:], strict=False):
        mine = slice(start - rows.starts[0], end - rows.starts[0])
        parts = (x[mine].transpose(0, 1)[None] for x in (q, k, v))
        out[mine] = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale)[0].transpose(0, 1)
    return out
