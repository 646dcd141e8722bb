"""The random state that Huginn's loops start from, drawn as hla_jax draws it.

jax.random's Threefry generator (20 rounds of 32-bit words; Salmon et al., 2011), seed 0 folded with the token id, one
pair of words for each coordinate. The numbers are the same up to the rounding of float32, and do not depend on the
batch or on where a prompt ends.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_WORD = 0xFFFFFFFF
_CUT = 3.0  # standard deviations


def threefry(key: tuple[Tensor, Tensor], count: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Encrypts pairs of 32-bit words, held in int64, under keys of two words; all of them broadcast."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = ((word + part) & _WORD for word, part in zip(count, key, strict=True))
    for group in range(5):
        for by in _ROTATIONS[group % 2]:
            x = (x + y) & _WORD
            y = ((y << by) & _WORD | y >> (32 - by)) ^ x
        x = (x + keys[(group + 1) % 3]) & _WORD
        y = (y + keys[(group + 2) % 3] + group + 1) & _WORD
    return x, y


def drawn(tokens: Tensor, size: int) -> Tensor:
    """States [B, S, d] of token ids [B, S] in float32: normal, cut at three standard deviations."""
    zero = torch.zeros((), dtype=torch.int64, device=tokens.device)
    ids = tokens.long()[..., None]
    key = threefry((zero, zero), (zero, ids))
    left, right = threefry(key, (zero, torch.arange(size, device=tokens.device)))
    # 23 bits are a float32 in [1, 2).
    unit = (((left ^ right) >> 9) | 0x3F800000).to(torch.int32).view(torch.float32) - 1
    low, high = (torch.erf(torch.tensor(cut / math.sqrt(2))) for cut in (-_CUT, _CUT))
    uniform = torch.maximum(low, unit * (high - low) + low)
    normal = math.sqrt(2) * torch.erfinv(uniform)
    # The standard deviation before the cut, and the scale of the embeddings: sqrt(2 / 5d) sqrt(d).
    return math.sqrt(2 / (5 * size)) * size**0.5 * normal.clamp(-_CUT, _CUT)
