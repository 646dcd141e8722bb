"""The full cache in vLLM: its own attention, once a layer and loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import CacheConfig
from vllm.model_executor.layers.attention import Attention

from hla_jax.serving.torch.looped_cache import Angles, turn
from hla_jax.serving.vllm.stack import Inputs, Stack


class Full:
    """A cache of vLLM's for every layer and loop."""

    def __init__(self, config: Any, heads: int, kv_heads: int, cache_config: CacheConfig):
        self.config, size = config, config.head_dim
        self.caches = [
            Attention(
                heads,
                size,
                size**-0.5,
                num_kv_heads=kv_heads,
                cache_config=cache_config,
                prefix=f"caches.{slot}.full",
            )
            for slot in range(config.total_ut_steps * config.num_hidden_layers)
        ]

    def run(self, stack: Stack, x: Tensor, positions: Tensor) -> Tensor:
        """One step of a batch of embedded tokens [n, d]: hidden states."""
        by = head_angles(self.config, positions)

        def attend(inputs: Inputs) -> Tensor:
            q, k = turn(inputs.q, by), turn(inputs.k, by)
            cache = self.caches[inputs.loop * self.config.num_hidden_layers + inputs.layer]
            return cache(q.flatten(1), k.flatten(1), inputs.v.flatten(1)).view_as(q)

        return stack(x, attend)


def head_angles(config: Any, positions: Tensor) -> Angles:
    """Of a head's pairs at positions [n]: [n, 1, dh/2]."""
    return angles(positions, frequencies(config, positions.device)[None])


def frequencies(config: Any, device: torch.device) -> Tensor:
    """Rotary frequencies of a head's pairs, in radians per position."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    return config.rope_theta ** (-steps / config.head_dim)


def angles(positions: Tensor, frequencies: Tensor) -> Angles:
    """Of tokens at positions [n], in pairs with frequencies [N, pairs]: [n, N, pairs]."""
    turns = positions[:, None, None].to(frequencies.dtype) * frequencies
    return Angles(turns.cos(), turns.sin())
