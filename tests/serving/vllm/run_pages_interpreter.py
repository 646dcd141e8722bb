"""Runs the Triton kernels over vLLM's pages in Triton's interpreter: `python run_pages_interpreter.py OUT.npz`.

A process of its own, for Triton decides when it is imported whether it compiles.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from hla_jax.serving.torch.looped_cache import Angles
from hla_jax.serving.vllm import decode
from hla_jax.serving.vllm.caches import PageViews

CASES = {
    "HLA": dict(lengths=(0, 1, 37, 64), rank_k=32, rank_v=24, window=8, filled=(0, 1, 8, 8), turned=True),
    "HLA without a window": dict(lengths=(5, 16), rank_k=16, rank_v=16, window=0, filled=(0, 0), turned=True),
    "keys and values of one width": dict(lengths=(30, 3), rank_k=16, rank_v=16),
    "a latent a head": dict(lengths=(30, 3), rank_k=12, rank_v=20, latent_heads=4),
    "pages with a rest": dict(lengths=(30, 17), rank_k=16, rank_v=8, rest=5, tokens=7),
}
SCALE = 0.3


def inputs(lengths, rank_k, rank_v, window=None, filled=(), turned=False, latent_heads=1, rest=0, tokens=8, heads=4):
    """What `latent_decode` takes. Everything that must not be read is no number."""
    torch.manual_seed(0)
    batch, columns = len(lengths), max(1, -(-max(lengths) // tokens)) + 1
    count = 1 + batch * columns
    pool = torch.full((count, tokens * latent_heads * (rank_k + rank_v) + rest), torch.nan)
    keys, values = pool[:, : pool.shape[1] - rest].split([tokens * latent_heads * r for r in (rank_k, rank_v)], dim=1)
    pages = PageViews(
        keys.unflatten(1, (tokens, latent_heads, rank_k)), values.unflatten(1, (tokens, latent_heads, rank_v))
    )
    tables = (1 + torch.randperm(batch * columns).reshape(batch, columns)).to(torch.int32)
    for row, length in enumerate(lengths):
        for token in range(length):
            at = tables[row, token // tokens], token % tokens
            pages.keys[at], pages.values[at] = torch.randn(latent_heads, rank_k), torch.randn(latent_heads, rank_v)
    stored = decode.Stored(pages, tables, torch.tensor(lengths, dtype=torch.int32), max(lengths))
    near = None
    if window is not None:
        draw = lambda *shape: torch.randn(batch, *shape)
        rings = [draw(window, 2, 8) for _ in range(2)]
        for ring in rings:
            for row, used in enumerate(filled):
                ring[row, used:] = torch.nan
        near = decode.Window(draw(heads, 8), *rings, torch.tensor(filled, dtype=torch.int32), draw(2, 8), draw(2, 8))
    by = None
    if turned:
        angles = torch.rand(batch, rank_k // 8, 4) * 6
        by = Angles(angles.cos(), angles.sin())
    return torch.randn(batch, heads, rank_k), stored, SCALE, near, by


if __name__ == "__main__":
    found = {}
    for name, case in CASES.items():
        results = decode.by_triton(*inputs(**case), geometry=None)
        found |= {f"{name}/{i}": x.numpy() for i, x in enumerate(results) if x is not None}
    np.savez(sys.argv[1], **found)
