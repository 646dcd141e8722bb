"""Looped Latent Attention in vLLM, as `hla_jax` decodes it with `first_pass="latent"`.

Each step runs the layers on its tokens once to make their latents, and (unless `single_pass`) once more with every key
and value read through latents, which gives the logits. Keys and values are rebuilt when they are read, or, with
`rank_rope`, the maps are absorbed into queries and outputs. Prompts are read exactly by the first run and through their
latents by the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce

from hla_jax.serving.torch.looped_cache import Angles, turn
from hla_jax.serving.vllm import decode
from hla_jax.serving.vllm.caches import PagedCache, Rows
from hla_jax.serving.vllm.decode import Stored, latent_decode
from hla_jax.serving.vllm.full import angles, frequencies, head_angles
from hla_jax.serving.vllm.maps import Maps
from hla_jax.serving.vllm.parallel import Share
from hla_jax.serving.vllm.prompts import causal_attention
from hla_jax.serving.vllm.stack import Inputs, Stack


class LLA:
    """The latents of all layers, and one step's attention."""

    def __init__(self, config: Any, share: Share, kv_heads: int, tokens: int, dtype: torch.dtype):
        self.config, self.share, scheme = config, share, config.scheme
        heads = 1 if scheme.fold_heads else kv_heads
        size_k, size_v = scheme.rank_k + (scheme.rank_rope or 0), scheme.rank_v
        page = tokens * heads * (size_k + size_v)
        self.caches = [
            PagedCache(f"caches.{layer}.latent", heads, size_k, size_v, tokens, page, dtype)
            for layer in range(config.num_hidden_layers)
        ]

    def run(self, stack: Stack, maps: Maps, x: Tensor, positions: Tensor, metadata: dict[str, Rows]) -> Tensor:
        """One step of a batch of embedded tokens [n, d]: hidden states."""
        step = _Step(self, maps, positions, metadata)
        out = stack(x, step.first)
        step.finish()
        return out if self.config.scheme.single_pass else stack(x, step.second)


class _Step:
    """What all layers share, and the decoding rows' latents on the way."""

    def __init__(self, lla: LLA, maps: Maps, positions: Tensor, metadata: dict[str, Rows]):
        self.lla, self.maps, self.config, self.scheme = lla, maps, lla.config, lla.config.scheme
        self.rows, self.positions = metadata[lla.caches[0].name], positions
        self.decodes, self.scale = self.rows.decodes, self.config.head_dim**-0.5
        self.frequencies = frequencies(self.config, positions.device)
        self.by = head_angles(self.config, positions)
        self.lengths = self.rows.lengths[: self.decodes]
        self.new: list[tuple[Tensor, Tensor]] = []
        self.all_angles: Angles | None = None
        if self.scheme.rank_rope is not None:
            pairs = torch.arange(self.scheme.rank_rope // 2, device=positions.device) % self.frequencies.numel()
            self.by_rotary = angles(positions, self.frequencies[pairs][None])

    # First run: exact keys and values of this step's tokens, which make their latents.

    def first(self, inputs: Inputs) -> Tensor:
        self.add(inputs)
        q, k = turn(inputs.q, self.by), turn(inputs.k, self.by)
        out, decodes = torch.empty_like(q), self.decodes
        if self.rows.starts:
            out[decodes:] = causal_attention(q[decodes:], k[decodes:], inputs.v[decodes:], self.rows, self.scale)
        if decodes:
            past = (self.lengths - 1).clamp(min=0)
            read = self.read_absorbed if self.scheme.rank_rope is not None else self.read_rebuilt
            own = q[:decodes], k[:decodes], inputs.v[:decodes]
            out[:decodes] = read(inputs, past, own)
        return out

    def add(self, inputs: Inputs) -> None:
        """Adds this loop's share to the latents: of prompts in the pages, of decoding rows in float32."""
        maps, at, fold = self.maps, (inputs.layer, inputs.loop), self.scheme.fold_heads

        def latent(x: Tensor, down: Tensor) -> Tensor:
            if not fold:
                return torch.einsum("nge,ger->ngr", x, down)
            part = torch.einsum("nge,ger->nr", x, down)[:, None]
            return tensor_model_parallel_all_reduce(part) if self.lla.share.ranks > 1 else part

        keys = latent(inputs.k - maps.k_mean[at], maps.k_down[at])
        if self.scheme.rank_rope is not None:
            keys = torch.cat([keys, latent(inputs.k, maps.rope_down[at])], dim=-1)
        values = latent(inputs.v - maps.v_mean[at], maps.v_down[at])
        prompts, cache = slice(self.decodes, None), self.lla.caches[inputs.layer]
        if self.rows.starts:
            slots, parts = self.slots(prompts, keys), (keys[prompts], values[prompts])
            if inputs.loop > 0:
                stored = cache.at(slots)
                parts = parts[0] + stored[0], parts[1] + stored[1]
            cache.put(slots, *parts)
        if self.decodes:
            mine = keys[: self.decodes].float(), values[: self.decodes].float()
            if inputs.loop == 0:
                self.new.append(mine)
            else:
                for total, part in zip(self.new[inputs.layer], mine, strict=True):
                    total += part

    def finish(self) -> None:
        """Turns rotary keys, and stores the decoding rows' latents."""
        prompts, tokens = slice(self.decodes, None), slice(self.decodes)
        for layer, cache in enumerate(self.lla.caches):
            if self.decodes:
                keys, values = self.new[layer]
                cache.put(self.slots(tokens, self.positions), self.turn_rotary(keys, tokens), values)
            if self.rows.starts and self.scheme.rank_rope is not None:
                slots = self.slots(prompts, self.positions)
                keys, values = cache.at(slots)
                cache.put(slots, self.turn_rotary(keys, prompts), values)

    # Second run: everything through latents.

    def second(self, inputs: Inputs) -> Tensor:
        out, decodes = torch.empty_like(inputs.q), self.decodes
        absorbed = self.scheme.rank_rope is not None
        if self.rows.starts:
            read = self.prompts_absorbed if absorbed else self.prompts_rebuilt
            out[decodes:] = read(inputs)
        if decodes:
            out[:decodes] = (self.read_absorbed if absorbed else self.read_rebuilt)(inputs, self.lengths, None)
        return out

    # Rebuilt keys and values.

    def rebuilt(self, inputs: Inputs, keys: Tensor, values: Tensor, by: Angles) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [..., G, dh] of a layer at a loop from latents [..., N, r]."""
        at, maps = (inputs.layer, inputs.loop), self.maps
        product = "...r,gre->...ge" if self.scheme.fold_heads else "...gr,gre->...ge"
        latents = (x.squeeze(-2) if self.scheme.fold_heads else x for x in (keys, values))
        k, v = (torch.einsum(product, x, up[at]) for x, up in zip(latents, (maps.k_up, maps.v_up), strict=True))
        return turn(k + maps.k_mean[at], by), v + maps.v_mean[at]

    def prompts_rebuilt(self, inputs: Inputs) -> Tensor:
        prompts = slice(self.decodes, None)
        by = Angles(self.by.cos[prompts], self.by.sin[prompts])
        keys, values = self.lla.caches[inputs.layer].at(self.slots(prompts, inputs.q))
        k, v = self.rebuilt(inputs, keys, values, by)
        return causal_attention(turn(inputs.q[prompts], by), k, v, self.rows, self.scale)

    def read_rebuilt(self, inputs: Inputs, lengths: Tensor, own: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        """Reads so many tokens' latents, and the row's `own` rotated query, key and value exactly, if given."""
        stored = self.stored(inputs.layer, lengths)
        keys, values = decode.gather(stored)
        if self.all_angles is None or self.all_angles.cos.shape[0] != keys.shape[1]:
            self.all_angles = angles(torch.arange(keys.shape[1], device=keys.device), self.frequencies[None])
        k, v = self.rebuilt(inputs, keys, values, self.all_angles)
        q = turn(inputs.q[: self.decodes], Angles(*(x[: self.decodes] for x in self.by)))
        return decode.attend(q, k, v, decode.visible(stored), self.scale, None if own is None else own[1:])

    # Absorbed maps: queries and outputs are mapped instead of keys and values.

    def prompts_absorbed(self, inputs: Inputs) -> Tensor:
        prompts = slice(self.decodes, None)
        query, _ = self.absorbed_query(inputs, prompts)
        keys, values = self.lla.caches[inputs.layer].at(self.slots(prompts, inputs.q))
        mixed = causal_attention(query, keys, values, self.rows, self.scale)
        return self.absorbed_output(inputs, mixed, torch.ones_like(mixed[..., :1]))

    def read_absorbed(self, inputs: Inputs, lengths: Tensor, own: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        """As `read_rebuilt`."""
        query, content = self.absorbed_query(inputs, slice(self.decodes))
        mixed, _, lse = latent_decode(query, self.stored(inputs.layer, lengths), self.scale)
        if own is None:
            return self.absorbed_output(inputs, mixed, torch.ones_like(mixed[..., :1]))
        q, k, v = own
        heads = q.shape[1] // k.shape[1]
        # The stored tokens' scores lack the mean's part: it is taken from the row's own score instead.
        mean = self.maps.k_mean[inputs.layer, inputs.loop].repeat_interleave(heads, 0)
        exact = (q.float() * k.repeat_interleave(heads, 1).float()).sum(-1)
        score = exact - (content.float() * mean.float()).sum(-1)
        itself = torch.sigmoid(score * self.scale - lse)[..., None].to(mixed.dtype)
        out = self.absorbed_output(inputs, mixed * (1 - itself), 1 - itself)
        return out + v.repeat_interleave(heads, 1) * itself

    def absorbed_query(self, inputs: Inputs, tokens: slice) -> tuple[Tensor, Tensor]:
        """A query of stored keys [n, H, rk + rr], and one of a mean without position [n, H, dh]."""
        maps, at, q = self.maps, (inputs.layer, inputs.loop), inputs.q[tokens]
        content = torch.einsum("nhe,hef->nhf", q, maps.query_adapter[at]) if self.scheme.query_adapter else q
        up = maps.k_up[at]
        latent = torch.einsum("ngme,gre->ngmr", content.unflatten(1, (up.shape[0], -1)), up).flatten(1, 2)
        rotary = torch.einsum("nhe,her->nhr", q, maps.rope_query[at])
        return self.turn_rotary(torch.cat([latent, rotary], dim=-1), tokens), content

    def absorbed_output(self, inputs: Inputs, mixed: Tensor, weight: Tensor) -> Tensor:
        """Heads' outputs from sums of value latents [n, H, rv], which have `weight` [n, H, 1] in all."""
        at = inputs.layer, inputs.loop
        up, mean = self.maps.v_up[at], self.maps.v_mean[at]
        out = torch.einsum("ngmr,gre->ngme", mixed.unflatten(1, (up.shape[0], -1)), up).flatten(1, 2)
        return out + weight * mean.repeat_interleave(mixed.shape[1] // up.shape[0], 0)

    def turn_rotary(self, keys: Tensor, tokens: slice) -> Tensor:
        """Stored keys, or queries to them, [n, N, rk + rr] with their last part turned."""
        if self.scheme.rank_rope is None:
            return keys
        latent, rotary = keys.split([keys.shape[-1] - self.scheme.rank_rope, self.scheme.rank_rope], dim=-1)
        return torch.cat([latent, turn(rotary, Angles(*(x[tokens] for x in self.by_rotary)))], dim=-1)

    def stored(self, layer: int, lengths: Tensor) -> Stored:
        tables = self.rows.tables[: self.decodes]
        return Stored(self.lla.caches[layer].views, tables, lengths.to(torch.int32), self.rows.longest)

    def slots(self, tokens: slice, like: Tensor) -> Tensor:
        """Of some of the batch's tokens; `like` has as many as the batch."""
        return self.rows.slots[: like.shape[0]][tokens]
