"""Hybrid Latent Attention in vLLM: three kinds of cache, one forward pass a token (HLA paper, serving appendix).

Prompts are read exactly; their latents and window are written from that pass, the latents' sum over loops in the pages
themselves. A decoding row reads latents before its window and the window exactly, and its latents are written after the
last loop, by one product for all layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hla_jax.serving.torch.looped_cache import Angles, turn
from hla_jax.serving.vllm import pages
from hla_jax.serving.vllm.caches import PagedCache, Rows
from hla_jax.serving.vllm.decode import Stored, Window, latent_decode
from hla_jax.serving.vllm.full import angles, frequencies, head_angles
from hla_jax.serving.vllm.maps import Maps
from hla_jax.serving.vllm.prompts import causal_attention
from hla_jax.serving.vllm.stack import Inputs, Stack


class HLA:
    """The caches of all layers, and one step's attention.

    Args:
      kv_heads: this process's key-value heads.
      tokens: of the widest kind in a page.
    """

    def __init__(self, config: Any, kv_heads: int, tokens: int, dtype: torch.dtype):
        self.config, scheme = config, config.scheme
        self.window, self.loops, self.scale = scheme.window, config.total_ut_steps, config.head_dim**-0.5
        widths = {"main": scheme.rank_k + scheme.rank_v, "first": 2 * scheme.rank_loop1}
        if self.window:
            widths |= {"window": 2 * kv_heads * config.head_dim}
        cut = pages.cut(widths, tokens)
        layers = config.num_hidden_layers

        def caches(kind: str, first: int, count: int, heads: int, size_k: int, size_v: int) -> list[PagedCache]:
            window = self.window + 1 if kind == "window" else None
            return [
                PagedCache(
                    f"caches.{first + n}.{kind}", heads, size_k, size_v, cut.tokens[kind], cut.numbers, dtype, window
                )
                for n in range(count)
            ]

        self.main = caches("main", 0, layers, 1, scheme.rank_k, scheme.rank_v)
        self.first = caches("first", layers, layers, 1, scheme.rank_loop1, scheme.rank_loop1)
        slots = self.loops * layers if self.window else 0
        self.windows = caches("window", 2 * layers, slots, kv_heads, config.head_dim, config.head_dim)

    def run(self, stack: Stack, maps: Maps, x: Tensor, positions: Tensor, metadata: dict[str, Rows]) -> Tensor:
        """One step of a batch of embedded tokens [n, d]: hidden states."""
        return _Step(self, maps, positions, metadata).run(stack, x)


class _Step:
    """What all layers share, computed once."""

    def __init__(self, hla: HLA, maps: Maps, positions: Tensor, metadata: dict[str, Rows]):
        self.hla, self.maps, self.metadata = hla, maps, metadata
        config, scheme = hla.config, hla.config.scheme
        self.rows = metadata[hla.main[0].name]
        self.decodes = self.rows.decodes
        heads = frequencies(config, positions.device)
        self.by = head_angles(config, positions)
        self.by_main = angles(positions, _of_blocks(heads, scheme.rank_k, scheme.pair_frequency))
        self.by_first = angles(positions, _of_blocks(heads, scheme.rank_loop1, scheme.pair_frequency_loop1))
        # A padded row of a captured step has no token, not even its own.
        past = (self.rows.lengths[: self.decodes] - 1).clamp(min=0)
        self.far = (past - hla.window).clamp(min=0).to(torch.int32)
        back = torch.arange(1, hla.window + 1, device=positions.device)
        self.near, self.filled = (past[:, None] - back).clamp(min=0), past.clamp(max=hla.window).to(torch.int32)
        self.near_slots: dict[int, Tensor] = {}
        self.noted: list[Tensor] = []

    def run(self, stack: Stack, x: Tensor) -> Tensor:
        out = stack(x, self.attend)
        if self.decodes:
            self.write_tokens()
        if self.rows.starts:
            self.finish_prompts()
        return out

    def attend(self, inputs: Inputs) -> Tensor:
        q, k = turn(inputs.q, self.by), turn(inputs.k, self.by)
        out = torch.empty_like(q)
        decodes = self.decodes
        if self.rows.starts:
            self.add_to_latents(inputs)
            out[decodes:] = causal_attention(q[decodes:], k[decodes:], inputs.v[decodes:], self.rows, self.hla.scale)
        if decodes:
            self.noted.append(inputs.h[:decodes])
            out[:decodes] = self.read(inputs, q[:decodes], k[:decodes])
        if self.hla.windows:
            window = self.window_of(inputs)
            window.put(self.metadata[window.name].slots[: q.shape[0]], k, inputs.v)
        return out

    def read(self, inputs: Inputs, q: Tensor, k: Tensor) -> Tensor:
        """A decoding row's latents before the window, and the window."""
        maps, hla, layer, decodes = self.maps, self.hla, inputs.layer, self.decodes
        if inputs.loop == 0:
            cache, by, read_q, read_o = hla.first[layer], self.by_first, maps.read_q1[layer], maps.read_o1[layer]
        else:
            at = layer, inputs.loop - 1
            cache, by, read_q, read_o = hla.main[layer], self.by_main, maps.read_q[at], maps.read_o[at]
        rows = self.metadata[cache.name]
        query = torch.einsum("dhe,her->dhr", inputs.q[:decodes], read_q)
        stored = Stored(cache.views, rows.tables[:decodes], self.far, max(rows.longest - hla.window, 0))
        turned = Angles(by.cos[:decodes], by.sin[:decodes])
        latent, exact, _ = latent_decode(query, stored, hla.scale, self.recent(inputs, q, k), turned)
        return torch.einsum("dhr,hre->dhe", latent, read_o) + exact

    def recent(self, inputs: Inputs, q: Tensor, k: Tensor) -> Window:
        v = inputs.v[: self.decodes]
        if not self.hla.windows:
            none = k[:, None].narrow(1, 0, 0)
            return Window(q, none, none, self.filled, k, v)
        cache = self.window_of(inputs)
        rows = self.metadata[cache.name]
        if id(rows) not in self.near_slots:  # layers whose pages have the same ids share one
            tokens = cache.spec.block_size
            page = rows.tables[: self.decodes].gather(1, self.near // tokens)
            self.near_slots[id(rows)] = (page * tokens + self.near % tokens).flatten()
        keys, values = (x.unflatten(0, (self.decodes, -1)) for x in cache.at(self.near_slots[id(rows)]))
        return Window(q, keys, values, self.filled, k, v)

    def window_of(self, inputs: Inputs) -> PagedCache:
        return self.hla.windows[inputs.loop * self.hla.config.num_hidden_layers + inputs.layer]

    # Writing latents.

    def write_tokens(self) -> None:
        """All latents of the decoding rows: the sum over loops 2 .. T is inside one product."""
        hla, maps, decodes = self.hla, self.maps, self.decodes
        layers = hla.config.num_hidden_layers
        h = torch.stack(self.noted).unflatten(0, (hla.loops, layers))
        rest = h[1:].permute(1, 2, 0, 3).flatten(2)  # [L, D, (T-1) d]
        product = lambda x, name: torch.bmm(x, getattr(maps, name).transpose(1, 2))
        for caches, x, names, by in (
            (hla.first, h[0], ("write_k1", "write_v1"), self.by_first),
            (hla.main, rest, ("write_k", "write_v"), self.by_main),
        ):
            keys, values = (product(x, name) for name in names)
            for layer, cache in enumerate(caches):
                slots = self.metadata[cache.name].slots[:decodes]
                cache.put(slots, _turn_latents(keys[layer], by, slice(decodes))[:, None], values[layer][:, None])

    def add_to_latents(self, inputs: Inputs) -> None:
        """Prompts' shares of this loop. The key part of the main latent is rotated at the end."""
        hla, maps, layer = self.hla, self.maps, inputs.layer
        h, prompts = inputs.h[self.decodes :], slice(self.decodes, None)
        if inputs.loop == 0:
            cache = hla.first[layer]
            keys, values = F.linear(h, maps.write_k1[layer]), F.linear(h, maps.write_v1[layer])
            keys = _turn_latents(keys, self.by_first, prompts)
            cache.put(self.prompt_slots(cache, h), keys[:, None], values[:, None])
            return
        cache, d = hla.main[layer], h.shape[-1]
        mine = slice((inputs.loop - 1) * d, inputs.loop * d)
        parts = [F.linear(h, part[layer][:, mine])[:, None] for part in (maps.write_k, maps.write_v)]
        slots = self.prompt_slots(cache, h)
        if inputs.loop > 1:
            parts = [part + sofar for part, sofar in zip(parts, cache.at(slots), strict=True)]
        cache.put(slots, *parts)

    def finish_prompts(self) -> None:
        prompts = slice(self.decodes, self.rows.starts[-1])
        for cache in self.hla.main:
            slots = self.metadata[cache.name].slots[prompts]
            keys, values = cache.at(slots)
            cache.put(slots, _turn_latents(keys[:, 0], self.by_main, prompts)[:, None], values)

    def prompt_slots(self, cache: PagedCache, h: Tensor) -> Tensor:
        return self.metadata[cache.name].slots[self.decodes : self.decodes + h.shape[0]]


def _of_blocks(heads: Tensor, rank: int, pairs: list[int] | None) -> Tensor:
    """Frequencies of a latent's pairs, as blocks that rotate like a head each."""
    return heads.expand(rank // (2 * heads.numel()), -1) if pairs is None else heads[pairs].view(-1, heads.numel())


def _turn_latents(x: Tensor, by: Angles, tokens: slice) -> Tensor:
    """Latents [n, r], turned as r/dh blocks by the angles of some of the tokens."""
    mine = Angles(by.cos[tokens], by.sin[tokens])
    return turn(x.unflatten(-1, (-1, 2 * by.cos.shape[-1])), mine).flatten(-2)
