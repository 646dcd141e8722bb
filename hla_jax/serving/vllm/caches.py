"""Kinds of cache that vLLM pages for us, and what it says of a batch.

A page has the keys of its tokens first and then their values, so that each are rows of one width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

_IN_FLIGHT = 2  # tokens of a request that asynchronous scheduling is ahead by

KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers vLLM's own, which it does only in an empty registry


class WindowManager(SlidingWindowManager):
    """Gives a prompt blocks for its last tokens only: the others are read in the prompt's own pass, never later."""

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        return super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, num_tokens, *args, **kwargs
        )

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        blocks = self.req_to_blocks[request_id]
        if not blocks:
            blocks.extend([self._null_block] * (self.get_num_skipped_tokens(num_tokens) // self.block_size))
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)


@register_kv_cache_spec(manager_class=WindowManager, uniform_type_base_spec=SlidingWindowSpec)
@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """A window whose prompts take no more than the window."""

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        return cdiv(min(self.sliding_window + _IN_FLIGHT, max_model_len), self.block_size) + 1


class PageViews(NamedTuple):
    """A cache by pages."""

    keys: Tensor
    """[pages, tokens, N, rk]"""
    values: Tensor
    """[pages, tokens, N, rv]"""


class PagedCache(nn.Module, AttentionLayerBase):
    """One layer's part of a kind of cache.

    Args:
      prefix: vLLM's name of it, with exactly one number.
      heads, size_k, size_v: of a token.
      tokens: in a page.
      page: numbers in a page.
      window: tokens that are read, the current one among them; None: all.
    """

    def __init__(
        self,
        prefix: str,
        heads: int,
        size_k: int,
        size_v: int,
        tokens: int,
        page: int,
        dtype: torch.dtype,
        window: int | None = None,
    ):
        super().__init__()
        self.name, self.size_k = prefix, size_k
        # One head of keys and values together: the split into parts is ours.
        sizes: dict[str, Any] = dict(
            block_size=tokens, num_kv_heads=heads, head_size=size_k + size_v, head_size_v=0, dtype=dtype
        )
        kind: Any = FullAttentionSpec if window is None else WindowSpec
        spec = kind(**sizes) if window is None else kind(**sizes, sliding_window=window)
        nbytes = page * dtype.itemsize
        self.spec: AttentionSpec = spec if spec.page_size_bytes == nbytes else replace(spec, page_size_padded=nbytes)
        self.pages: PageViews | None = None
        context = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"there are two caches named {prefix}")
        context[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return Backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        return self.spec

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache
        pages, tokens, heads, size = kv_cache.shape
        size_v = size - self.size_k
        numbers = kv_cache.as_strided((pages, tokens * heads * size), (kv_cache.stride(0), 1))
        keys, values = numbers.split([tokens * heads * self.size_k, tokens * heads * size_v], dim=1)
        self.pages = PageViews(
            keys.unflatten(1, (tokens, heads, self.size_k)), values.unflatten(1, (tokens, heads, size_v))
        )

    # Tokens of a batch, by their slots. Slot -1 is padding; page 0 is never anyone's, and takes what is not kept.

    def put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys [n, N, rk] and values [n, N, rv]."""
        page, token = self._where(slots)
        for stored, new in zip(self.views, (keys, values), strict=True):
            stored[page, token] = new.to(stored.dtype)

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What is stored of tokens: [n, N, rk] and [n, N, rv]."""
        page, token = self._where(slots)
        return self.views.keys[page, token], self.views.values[page, token]

    @property
    def views(self) -> PageViews:
        assert self.pages is not None, "vLLM binds a cache before it runs a batch"
        return self.pages

    def _where(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        slots = slots.clamp(min=0)
        tokens = self.spec.block_size
        return slots // tokens, slots % tokens


@dataclass
class Rows(AttentionMetadata):
    """One step's batch as a kind of cache sees it: first rows that decode one token each, then prompts.

    Attributes:
      decodes: rows that decode.
      starts: where each prompt begins among the tokens, and where the last one ends; on the host.
      query_start_loc: the same of all rows, on the device.
      lengths: tokens of each row with this step's, [rows].
      tables: ids of each row's pages, [rows, n].
      slots: of this step's tokens, [tokens].
      longest: no sequence is longer.
    """

    decodes: int
    starts: list[int]
    query_start_loc: Tensor
    lengths: Tensor
    tables: Tensor
    slots: Tensor
    longest: int


class Builder(AttentionMetadataBuilder[Rows]):
    """Hands on what is the runner's own memory: a captured step reads it again at every replay."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        scheme = vllm_config.model_config.hf_config.scheme
        # Rebuilding takes memory for the longest sequence, which a captured step would always take at its most.
        rebuilds = scheme.name == "lla" and scheme.rank_rope is None
        return AttentionCGSupport.NEVER if rebuilds else cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Rows:
        batch = common_attn_metadata
        decodes, prompts, _, _ = split_decodes_and_prefills(batch)
        starts = batch.query_start_loc_cpu[decodes:].tolist() if prompts else []
        known = batch.seq_lens_cpu_upper_bound
        if prompts and known is not None:
            new = batch.query_start_loc_cpu[decodes + 1 :] - batch.query_start_loc_cpu[decodes:-1]
            if not torch.equal(known[decodes:].to(new.dtype), new):
                raise RuntimeError("a prompt arrived in parts: pass --no-enable-chunked-prefill")
        return Rows(
            decodes,
            starts,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table_tensor,
            batch.slot_mapping,
            batch.max_seq_len,
        )


class Backend(AttentionBackend):
    """vLLM asks it for the shape of a cache and for the builder; the model attends by itself."""

    @staticmethod
    def get_name() -> str:
        return "HLA_JAX"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the model attends by itself")

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
