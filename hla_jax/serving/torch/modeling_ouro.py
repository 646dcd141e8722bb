"""Ouro in PyTorch with the full cache, HLA or LLA. Shapes: B sequences, S tokens, d hidden size."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_ouro import OuroConfig
from .looped_cache import Attend, FullLoopedCache, Inputs, LoopedCache
from .looped_latent_cache import HLACache, LLACache
from .looped_model import LoopedForCausalLM, Maps, RMSNorm, Run
from .looped_schemes import HLA, LLA


class OuroAttention(nn.Module):
    def __init__(self, config: OuroConfig, layer: int):
        super().__init__()
        d, size, self.layer = config.hidden_size, config.head_dim, layer
        self.size = size
        self.q_proj = nn.Linear(d, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, d, bias=False)
        # Maps are a module under the scheme's name, as in the names of their tensors.
        if shapes := config.scheme.map_shapes(config):
            self.add_module(config.scheme.name, Maps(shapes))

    @property
    def maps(self) -> nn.Module | None:
        return getattr(self, "hla", getattr(self, "lla", None))

    def forward(self, h: Tensor, loop: int, attend: Attend) -> Tensor:
        q, k, v = (project(h).unflatten(-1, (-1, self.size)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(Inputs(h, q, k, v, loop, self.layer, self.maps)).flatten(2))


class OuroMLP(nn.Module):
    def __init__(self, config: OuroConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OuroLayer(nn.Module):
    def __init__(self, config: OuroConfig, layer: int):
        super().__init__()
        norm = lambda: RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = OuroAttention(config, layer)
        self.mlp = OuroMLP(config)
        self.input_layernorm, self.input_layernorm_2 = norm(), norm()
        self.post_attention_layernorm, self.post_attention_layernorm_2 = norm(), norm()

    def forward(self, x: Tensor, loop: int, attend: Attend) -> Tensor:
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), loop, attend))
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class OuroModel(nn.Module):
    """The same layers, applied T times. The normed state after a loop feeds the next one."""

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.num_loops = config.total_ut_steps
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Kept with the weights; generation always takes the last loop.
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(tokens)
        for loop in range(self.num_loops):
            for layer in self.layers:
                x = layer(x, loop, attend)
            x = self.norm(x)
        return x


class OuroForCausalLM(LoopedForCausalLM):
    """Ouro with the full cache; the subclasses have the latent ones."""

    config_class = OuroConfig
    base_model_prefix = "model"
    attention_module = "model.layers.{layer}.self_attn"
    cache_class: type[LoopedCache] = FullLoopedCache
    _no_split_modules = ["OuroLayer"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def runs(self, tokens: Tensor, cache: LoopedCache, initial_state: Any) -> tuple[Run, tuple[Tensor, ...]]:
        if initial_state is not None:
            raise ValueError("initial_state is an option of Huginn")
        return self.model, ()

    def new_cache(self, num_steps: int | None = None) -> LoopedCache:
        if num_steps is not None:
            raise ValueError("num_steps is an option of Huginn")
        return super().new_cache()


class OuroHLAForCausalLM(OuroForCausalLM):
    """Ouro with Hybrid Latent Attention."""

    scheme = HLA
    cache_class = HLACache


class OuroLLAForCausalLM(OuroForCausalLM):
    """Ouro with Looped Latent Attention."""

    scheme = LLA
    cache_class = LLACache


OuroForCausalLM.kinds = {kind.scheme.name: kind for kind in (OuroForCausalLM, OuroHLAForCausalLM, OuroLLAForCausalLM)}
