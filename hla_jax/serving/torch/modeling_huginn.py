"""Huginn in PyTorch with the full cache, HLA or LLA.

Tensors keep the layout of the published files: joined projections, and rotary pairs side by side, which are moved apart
as soon as queries and keys are there. So caches and maps are those of hla_jax.

Shapes: B sequences, S tokens, d hidden size, H heads, dh head size.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache_huginn import OUTER, FullHuginnCache, HLAHuginnCache, LLAHuginnCache
from .configuration_huginn import RavenConfig
from .looped_cache import Attend, Inputs, LoopedCache
from .looped_model import LoopedForCausalLM, Maps, RMSNorm, Run
from .looped_schemes import HLA, LLA
from .state_huginn import drawn


class HuginnAttention(nn.Module):
    def __init__(self, config: RavenConfig, layer: int, looped: bool):
        super().__init__()
        d, self.layer, self.heads = config.n_embd, layer, config.n_heads
        self.Wqkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, self.heads, config.head_dim)) if config.qk_bias else None
        # Maps are a module under the scheme's name, as in the names of their tensors.
        if looped and (shapes := config.scheme.map_shapes(config)):
            self.add_module(config.scheme.name, Maps(shapes))

    @property
    def maps(self) -> nn.Module | None:
        return getattr(self, "hla", getattr(self, "lla", None))

    def forward(self, h: Tensor, loop: int, attend: Attend) -> Tensor:
        q, k, v = self.Wqkv(h).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if self.qk_bias is not None:
            q, k = q + self.qk_bias[0], k + self.qk_bias[1]
        return self.proj(attend(Inputs(h, apart(q), apart(k), v, loop, self.layer, self.maps)).flatten(2))


def apart(x: Tensor) -> Tensor:
    """Heads [B, S, H, dh] whose rotary pairs were coordinates (2f, 2f + 1), and are now (f, f + dh/2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class HuginnMLP(nn.Module):
    def __init__(self, config: RavenConfig):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class HuginnBlock(nn.Module):
    """Norms before attention and MLP, and after each has been added."""

    def __init__(self, config: RavenConfig, layer: int, looped: bool):
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (RMSNorm(config.n_embd, config.norm_eps) for _ in range(4))
        self.attn = HuginnAttention(config, layer, looped)
        self.mlp = HuginnMLP(config)

    def forward(self, x: Tensor, loop: int, attend: Attend) -> Tensor:
        x = self.norm_2(x + self.attn(self.norm_1(x), loop, attend))
        return self.norm_4(x + self.mlp(self.norm_3(x)))


class HuginnModel(nn.Module):
    """A prelude, a core that is looped and is given the prelude's output at every step, and a coda."""

    def __init__(self, config: RavenConfig):
        super().__init__()
        self.scale, before = config.n_embd**0.5, config.n_layers_in_prelude
        blocks = lambda count, first, looped: nn.ModuleList(
            HuginnBlock(config, first + layer, looped) for layer in range(count)
        )
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        # Layers outside of the loops are counted together.
        self.prelude = blocks(before, 0, False)
        self.adapter = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.core_block = blocks(config.n_layers_in_recurrent_block, 0, True)
        self.coda = blocks(config.n_layers_in_coda, before, False)
        self.ln_f = RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, tokens: Tensor, attend: Attend, initial: Tensor, steps: int) -> Tensor:
        """Hidden states [B, S, d] of tokens [B, S] from the states [B, S, d] that the loops start from."""

        def through(blocks: Sequence[Any], x: Tensor, loop: int) -> Tensor:
            for block in blocks:
                x = block(x, loop, attend)
            return x

        embedded = self.wte(tokens)
        given = through(self.prelude, embedded * torch.tensor(self.scale, dtype=embedded.dtype), OUTER)
        x = initial
        for step in range(steps):
            x = through(self.core_block, self.adapter(torch.cat([x, given], dim=-1)), step)
        return self.ln_f(through(self.coda, self.ln_f(x), OUTER))


class RavenForCausalLM(LoopedForCausalLM):
    """Huginn with the full cache, for any number of steps; the subclasses have the latent ones.

    A state that the loops start from is "zeros", "random" (hla_jax's: drawn for each token id from a fixed seed, up to
    the rounding of float32 the same numbers), or given for each token of a call.
    """

    config_class = RavenConfig
    base_model_prefix = "transformer"
    attention_module = "transformer.core_block.{layer}.attn"
    cache_class: type[LoopedCache] = FullHuginnCache
    _no_split_modules = ["HuginnBlock"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = ["freqs_cis"]  # noqa: RUF012 (a buffer of the published files)

    def __init__(self, config: RavenConfig):
        super().__init__(config)
        self.transformer = HuginnModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def runs(self, tokens: Tensor, cache: LoopedCache, initial_state: Any) -> tuple[Run, tuple[Tensor, ...]]:
        state = self.config.initial_state if initial_state is None else initial_state
        shape, weight = (*tokens.shape, self.config.n_embd), self.transformer.wte.weight
        if isinstance(state, Tensor):
            if state.shape != shape:
                raise ValueError(f"initial_state must be {list(shape)}, found {list(state.shape)}")
            initial = state.to(weight)
        elif state == "zeros":
            initial = weight.new_zeros(shape)
        elif state == "random":
            initial = drawn(tokens, self.config.n_embd).to(weight)
        else:
            raise ValueError(f'initial_state must be "random", "zeros" or states {list(shape)}, found {state!r}')
        run: Run = self.transformer  # a module is callable, whether or not PyTorch is there to say so
        return functools.partial(run, steps=cache.num_loops), (initial,)

    def new_cache(self, num_steps: int | None = None) -> LoopedCache:
        steps = self.config.mean_recurrence if num_steps is None else num_steps
        if steps < 1:
            raise ValueError(f"num_steps must be at least 1, found {steps}")
        if self.scheme.name != "full" and steps != self.config.mean_recurrence:
            raise ValueError(
                f"num_steps must be {self.config.mean_recurrence}, which the maps of {self.scheme.__name__} are for; "
                f"found {steps}"
            )
        config = copy.copy(self.config)
        config.mean_recurrence = steps
        return self.cache_class(config, self.transformer.wte.weight.dtype)


class RavenHLAForCausalLM(RavenForCausalLM):
    """Huginn with Hybrid Latent Attention."""

    scheme = HLA
    cache_class = HLAHuginnCache


class RavenLLAForCausalLM(RavenForCausalLM):
    """Huginn with Looped Latent Attention."""

    scheme = LLA
    cache_class = LLAHuginnCache


RavenForCausalLM.kinds = {
    kind.scheme.name: kind for kind in (RavenForCausalLM, RavenHLAForCausalLM, RavenLLAForCausalLM)
}
