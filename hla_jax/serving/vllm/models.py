"""The classes that vLLM makes: weights, maps, one step, logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from hla_jax.serving.torch.looped_files import checked_base
from hla_jax.serving.vllm import pages
from hla_jax.serving.vllm.full import Full
from hla_jax.serving.vllm.hla import HLA
from hla_jax.serving.vllm.lla import LLA
from hla_jax.serving.vllm.maps import Maps, is_map
from hla_jax.serving.vllm.parallel import Share
from hla_jax.serving.vllm.stack import Stack

_BASE = "base:"  # what the base's tensors are called beside those of a maps-only directory
_JOINED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class OuroForCausalLM(nn.Module):
    """Ouro with the full cache; the subclasses have the latent ones."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.share = Share(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        self.model = Stack(config, "model")
        self.maps = Maps(config, self.share)
        self.lm_head: nn.Module = self.model.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix="lm_head")
        self.logits_processor = LogitsProcessor(config.vocab_size)
        # Not modules: caches have no weights.
        self.caches = [self.new_caches(vllm_config)]
        # What the loader reads besides the directory itself.
        entry = getattr(config, "base_model", None)
        base = None if entry is None else checked_base(vllm_config.model_config.model, entry)
        self.secondary_weights = () if base is None else (DefaultModelLoader.Source(base, None, prefix=_BASE),)

    def new_caches(self, vllm_config: VllmConfig) -> Any:
        heads, kv_heads = self.heads
        return Full(self.config, heads, kv_heads, vllm_config.cache_config)

    @property
    def heads(self) -> tuple[int, int]:
        """This process's query and key-value heads."""
        projection = self.model.layers[0].self_attn.qkv_proj
        return projection.num_heads, projection.num_kv_heads

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.step(x, positions)

    def step(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.caches[0].run(self.model, x, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes the tensors of a directory, and of the base that a maps-only one names.

        Raises:
          ValueError: a map is unknown, missing or of another shape. vLLM itself says so of the other tensors.
        """
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            own, name = not name.startswith(_BASE), name.removeprefix(_BASE)
            if is_map(name):
                if own:  # a base that is an export itself has maps of its own, which do not count
                    loaded.add(f"maps.{self.maps.load(name, tensor)}")
                continue
            if name.startswith("model.early_exit_gate") or (
                name == "lm_head.weight" and self.config.tie_word_embeddings
            ):
                continue
            part = name.split(".")[-2]
            target, shard = _JOINED.get(part, (part, None))
            name = name.replace(part, target)
            if name not in parameters:
                raise ValueError(f"unknown tensor {name}")
            parameter = parameters[name]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, *(() if shard is None else (shard,)))
            loaded.add(name)
        if self.maps.missing:
            some = sorted(self.maps.missing)
            raise ValueError(f"missing tensors {', '.join(some[:3])}{f' and {len(some) - 3} more' * (len(some) > 3)}")
        return loaded


class _Latent(OuroForCausalLM):
    """A class whose caches vLLM binds, and says nothing of before it has."""

    def step(self, x: Tensor, positions: Tensor) -> Tensor:
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory before there is a cache
            return self.model(x, lambda inputs: torch.zeros_like(inputs.q))
        return self.caches[0].run(self.model, self.maps, x, positions, metadata)


class OuroHLAForCausalLM(_Latent):
    """Ouro with Hybrid Latent Attention."""

    def new_caches(self, vllm_config: VllmConfig) -> HLA:
        cache = vllm_config.cache_config
        tokens = cache.block_size if cache.user_specified_block_size else pages.TOKENS
        return HLA(self.config, self.heads[1], tokens, vllm_config.model_config.dtype)


class OuroLLAForCausalLM(_Latent):
    """Ouro with Looped Latent Attention."""

    def new_caches(self, vllm_config: VllmConfig) -> LLA:
        return LLA(
            self.config, self.share, self.heads[1], vllm_config.cache_config.block_size, vllm_config.model_config.dtype
        )
