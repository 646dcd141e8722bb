"""The layers of Ouro with a full cache in PyTorch, one step at a time: what `benchmark` is compared with on a CPU."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F

from hla_jax.config import ModelConfig


def step_seconds(
    config: ModelConfig, contexts: list[int], batch: int, dtype: str, new_tokens: int, rounds: int
) -> list[float]:
    """Median time of a decoding step at each context: all loops of `config.num_layers` layers with random weights."""
    kind = getattr(torch, dtype)
    d, f, heads, groups, size = (
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )
    draw = lambda *shape: torch.randn(*shape, dtype=kind) * shape[-1] ** -0.5
    layers = [
        {
            "qkv": draw((heads + 2 * groups) * size, d),
            "o": draw(d, heads * size),
            "gate_up": draw(2 * f, d),
            "down": draw(d, f),
        }
        for _ in range(config.num_layers)
    ]
    frequencies = config.rope_theta ** (-torch.arange(0, size, 2) / size)
    norm = lambda x: F.rms_norm(x, (d,), eps=config.rms_norm_eps)

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        cos, sin = (fn(position * frequencies).to(kind) for fn in (torch.cos, torch.sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def step(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int) -> torch.Tensor:
        for loop in range(config.num_loops):
            for number, p in enumerate(layers):
                slot = loop * config.num_layers + number
                joint = F.linear(norm(x), p["qkv"]).view(batch, -1, size)
                q, k, v = joint.split([heads, groups, groups], dim=1)
                keys[slot, :, :, position], values[slot, :, :, position] = rotate(k, position), v
                read = slice(0, position + 1)
                out = F.scaled_dot_product_attention(
                    rotate(q, position)[:, :, None],
                    keys[slot][:, :, read],
                    values[slot][:, :, read],
                    enable_gqa=heads != groups,
                )
                x = x + norm(F.linear(out.reshape(batch, -1), p["o"]))
                gate, up = F.linear(norm(x), p["gate_up"]).chunk(2, dim=-1)
                x = x + norm(F.linear(F.silu(gate) * up, p["down"]))
            x = norm(x)
        return x

    found = []
    for context in contexts:
        shape = (config.num_loops * config.num_layers, batch, groups, context + new_tokens, size)
        keys, values = torch.zeros(shape, dtype=kind), torch.zeros(shape, dtype=kind)
        seconds = []
        with torch.inference_mode():
            for _ in range(rounds + 1):
                start = time.perf_counter()
                x = torch.randn(batch, d, dtype=kind)
                for token in range(new_tokens):
                    x = step(x, keys, values, context + token)
                seconds.append((time.perf_counter() - start) / new_tokens)
        # The first round warms up.
        found.append(float(np.median(seconds[1:])))
    return found
