"""Ouro's looped layers on vLLM's tensor-parallel ones. They take attention as an argument.

Shapes: n tokens of a batch one after another, d hidden size, H and G this process's query and key-value heads, dh head
size. Loops are counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class Inputs(NamedTuple):
    """What a layer at a loop hands to attention. Queries and keys are not rotated yet."""

    h: Tensor
    """[n, d]"""
    q: Tensor
    """[n, H, dh]"""
    k: Tensor
    """[n, G, dh]"""
    v: Tensor
    loop: int
    layer: int


Attend = Callable[[Inputs], Tensor]
"""To the heads' outputs [n, H, dh]."""


class Attention(nn.Module):
    def __init__(self, config: Any, layer: int, prefix: str):
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.layer, self.size = layer, size
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, size, heads, kv_heads, bias=False, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(heads * size, config.hidden_size, bias=False, prefix=f"{prefix}.o_proj")

    def forward(self, h: Tensor, loop: int, attend: Attend) -> Tensor:
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        joint = self.qkv_proj(h)[0].unflatten(-1, (-1, self.size))
        q, k, v = joint.split([heads, kv_heads, kv_heads], dim=1)
        return self.o_proj(attend(Inputs(h, q, k, v, loop, self.layer)).flatten(1))[0]


class MLP(nn.Module):
    def __init__(self, config: Any, prefix: str):
        super().__init__()
        d, width = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(d, [width] * 2, bias=False, prefix=f"{prefix}.gate_up_proj")
        self.down_proj = RowParallelLinear(width, d, bias=False, prefix=f"{prefix}.down_proj")
        self.act = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)[0]))[0]


class Layer(nn.Module):
    def __init__(self, config: Any, layer: int, prefix: str):
        super().__init__()
        norm = lambda: RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, f"{prefix}.self_attn")
        self.mlp = MLP(config, f"{prefix}.mlp")
        self.input_layernorm, self.input_layernorm_2 = norm(), norm()
        self.post_attention_layernorm, self.post_attention_layernorm_2 = norm(), norm()

    def forward(self, x: Tensor, loop: int, attend: Attend) -> Tensor:
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), loop, attend))
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class Stack(nn.Module):
    """The same layers, applied T times. The normed state after a loop feeds the next one."""

    def __init__(self, config: Any, prefix: str):
        super().__init__()
        self.num_loops = config.total_ut_steps
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(Layer(config, layer, f"{prefix}.layers.{layer}") for layer in layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        for loop in range(self.num_loops):
            for layer in self.layers:
                x = layer(x, loop, attend)
            x = self.norm(x)
        return x
