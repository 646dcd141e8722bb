"""Caches of Hybrid Latent Attention (arXiv:2610.07940) and of Looped Latent Attention (arXiv:2607.15456).

Shapes as in `looped_cache.py`; ranks rk, rv, rr (rotary key). The buffers and maps are those of hla_jax's
`docs/schemes.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .looped_cache import (
    Angles,
    Inputs,
    LoopedCache,
    Model,
    angles,
    causal_attention,
    joint_softmax,
    scores,
    turn,
    weighted,
)
from .looped_schemes import HLA, LLA, Shape


class HLACache(LoopedCache):
    """A main latent that loops 1 .. T-1 read, a loop-0 latent, and exact keys and values of the last W tokens."""

    scheme: HLA

    def token_shapes(self) -> dict[str, Shape]:
        s = self.scheme
        ranks = {"latent_k": s.rank_k, "latent_v": s.rank_v, "latent_k1": s.rank_loop1, "latent_v1": s.rank_loop1}
        return {name: (self.num_layers, 1, rank) for name, rank in ranks.items()}

    def all_angles(self, positions: Tensor) -> tuple[Angles, Angles, Angles]:
        """Of heads, of the main latent's blocks and of the loop-0 latent's."""
        s, heads = self.scheme, self.frequencies()

        def blocks(rank: int, pairs: list[int] | None) -> Angles:
            frequencies = heads.expand(rank // self.size, -1) if pairs is None else heads[pairs].view(-1, heads.numel())
            return angles(positions, frequencies)

        main, first = blocks(s.rank_k, s.pair_frequency), blocks(s.rank_loop1, s.pair_frequency_loop1)
        return angles(positions, heads), main, first

    def turn_latent(self, x: Tensor, by: Angles) -> Tensor:
        """Rotates latents, or queries to them, [B, S, N, r] as r/dh blocks, each like a head."""
        return turn(x.unflatten(-1, (-1, self.size)), Angles(by.cos[:, :, None], by.sin[:, :, None])).flatten(-2)

    def share(self, inputs: Inputs) -> dict[str, Tensor]:
        """What a layer at a loop adds to its latents, not rotated: [B, S, 1, r] by buffer."""
        maps, h = inputs.maps, inputs.h[:, :, None]
        bias = lambda name: getattr(maps, name) if self.config.qk_bias else None
        if inputs.loop == 0:
            return {"latent_k1": F.linear(h, maps.write_k1, bias("bias_k1")), "latent_v1": F.linear(h, maps.write_v1)}
        at = inputs.loop - 1
        # What the keys' bias adds to the main latent comes once.
        key = F.linear(h, maps.write_k[at], bias("bias_k") if at == 0 else None)
        return {"latent_k": key, "latent_v": F.linear(h, maps.write_v[at])}

    def read_prompt(self, model: Model, tokens: Tensor, positions: Tensor) -> Tensor:
        by, main, first = self.all_angles(positions)
        window, last = self.scheme.window, self.lengths[:, None] - 1
        ring = torch.arange(window, device=tokens.device)
        # The newest token of each slot; slots of prompts shorter than the window stay unread, whatever they hold.
        newest = (last - (last - ring) % max(window, 1)).clamp(min=0)
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        shape = self.num_loops * self.num_layers, tokens.shape[0], window, self.config.num_key_value_heads, self.size
        for name in ("window_k", "window_v"):
            self.buffers[name] = self.buffers["latent_k"].new_zeros(shape)

        def attend(inputs: Inputs) -> Tensor:
            for name, part in self.share(inputs).items():
                self.add(name, inputs.layer, part)
            k = turn(inputs.k, by)
            self.buffers["window_k"][self.slot(inputs)] = k[rows, newest]
            self.buffers["window_v"][self.slot(inputs)] = inputs.v[rows, newest]
            return causal_attention(turn(inputs.q, by), k, inputs.v, self.scale)

        hidden = model(tokens, attend)
        for name, turned in (("latent_k", main), ("latent_k1", first)):
            for layer in range(self.num_layers):
                self.put(name, layer, self.turn_latent(self.buffers[name][layer, :, : tokens.shape[1]], turned))
        return hidden

    def read_token(self, model: Model, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        by, main, first = self.all_angles(positions)
        far = self.visible(self.scheme.window)
        near = torch.arange(self.scheme.window, device=tokens.device) < self.lengths[:, None]
        new, recent_k, recent_v = self.new_token(), [], []

        def attend(inputs: Inputs) -> Tensor:
            maps, layer, slot = inputs.maps, inputs.layer, self.slot(inputs)
            for name, part in self.share(inputs).items():
                new[name][layer] += part[:, 0]
            if inputs.loop == 0:
                read_q, read_o, turned, stored = maps.read_q1, maps.read_o1, first, ("latent_k1", "latent_v1")
            else:
                at = inputs.loop - 1
                read_q, read_o, turned, stored = maps.read_q[at], maps.read_o[at], main, ("latent_k", "latent_v")
            query = self.turn_latent(torch.einsum("bshe,her->bshr", inputs.q, read_q), turned)
            q, k = turn(inputs.q, by), turn(inputs.k, by)
            recent_k.append(k[:, 0])
            recent_v.append(inputs.v[:, 0])
            latent_k, latent_v = (self.buffers[name][layer] for name in stored)
            beyond, recent, own = joint_softmax(
                self.scale,
                scores(query, latent_k, far),
                scores(q, self.buffers["window_k"][slot], near),
                scores(q, k),
            )
            exact = weighted(recent, self.buffers["window_v"][slot]) + weighted(own, inputs.v)
            latent = weighted(beyond, latent_v).to(inputs.q.dtype)
            return torch.einsum("bshr,hre->bshe", latent, read_o) + exact.to(inputs.q.dtype)

        hidden = model(tokens, attend)
        for name, turned in (("latent_k", main), ("latent_k1", first)):
            new[name] = torch.stack([self.turn_latent(latent[:, None], turned)[:, 0] for latent in new[name]])
        return hidden, new | {"window_k": torch.stack(recent_k), "window_v": torch.stack(recent_v)}


class Part(NamedTuple):
    """An LLA codec's share of one loop."""

    down: Tensor  # [G, dh, r]
    up: Tensor  # [G, r, dh]
    mean: Tensor  # [G, dh]


class LLACache(LoopedCache):
    """Latents of each token's keys and values over the loops, a head each or one of all (`fold_heads`)."""

    scheme: LLA

    def token_shapes(self) -> dict[str, Shape]:
        s = self.scheme
        latents = 1 if s.fold_heads else self.config.num_key_value_heads
        shapes = {
            "latent_k": (self.num_layers, latents, s.rank_k + (s.rank_rope or 0)),
            "latent_v": (self.num_layers, latents, s.rank_v),
        }
        exact = self.num_loops * self.num_layers, self.config.num_key_value_heads, self.size
        return shapes | ({"k": exact, "v": exact} if s.keeps_all else {})

    def part(self, maps: Any, name: str, loop: int) -> Part:
        """The maps of the keys or values ("k", "v") of one loop."""
        trajectory = self.config.num_key_value_heads, self.num_loops, self.size
        down, up, mean = (getattr(maps, f"{name}_{kind}") for kind in ("down", "up", "mean"))
        down, mean = down.reshape(*trajectory, -1)[:, loop], mean.reshape(trajectory)[:, loop]
        if self.scheme.fold_heads:
            return Part(down, up.reshape(-1, *trajectory)[:, :, loop].transpose(0, 1), mean)
        return Part(down, up.reshape(trajectory[0], -1, *trajectory[1:])[:, :, loop], mean)

    def project(self, x: Tensor, down: Tensor) -> Tensor:
        """[B, S, G, dh] to the latents [B, S, N, r]."""
        if self.scheme.fold_heads:
            return torch.einsum("bsge,ger->bsr", x, down)[:, :, None]
        return torch.einsum("bsge,ger->bsgr", x, down)

    def share(self, inputs: Inputs) -> dict[str, Tensor]:
        """What a layer at a loop adds to its latents; the absorbed mode's rotary key, not rotated, lies behind its
        latent.
        """
        k, v = (self.part(inputs.maps, name, inputs.loop) for name in ("k", "v"))
        latent_k = self.project(inputs.k - k.mean, k.down)
        if self.scheme.rank_rope is not None:
            shape = self.config.num_key_value_heads, self.num_loops, self.size, -1
            rotary = self.project(inputs.k, inputs.maps.rope_down.reshape(shape)[:, inputs.loop])
            latent_k = torch.cat([latent_k, rotary], dim=-1)
        return {"latent_k": latent_k, "latent_v": self.project(inputs.v - v.mean, v.down)}

    def rebuilt(
        self, maps: Any, loop: int, latents: Mapping[str, Tensor], by: Angles, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [B, C, G, dh] of one layer and loop from its latents [B, C, N, r]."""

        def rebuild(name: str) -> Tensor:
            part, latent = self.part(maps, name, loop), latents[f"latent_{name}"]
            up, mean = part.up.to(latent.dtype), part.mean.to(latent.dtype)
            if self.scheme.fold_heads:
                return torch.einsum("bcr,gre->bcge", latent[:, :, 0], up) + mean
            return torch.einsum("bcgr,gre->bcge", latent, up) + mean

        return turn(rebuild("k"), by).to(dtype), rebuild("v").to(dtype)

    def rebuild_all(
        self, maps: Mapping[int, Any], latents: Mapping[str, Tensor], by: Angles
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Rebuilt keys and values of every slot, from latents [L, B, C, N, r] and the maps of each layer."""
        for slot in range(self.num_loops * self.num_layers):
            loop, layer = divmod(slot, self.num_layers)
            mine = {name: latents[name][layer] for name in ("latent_k", "latent_v")}
            yield slot, self.rebuilt(maps[layer], loop, mine, by, self.dtype)

    def read_prompt(self, model: Model, tokens: Tensor, positions: Tensor) -> Tensor:
        s, by, maps = self.scheme, angles(positions, self.frequencies()), {}

        def exact(inputs: Inputs) -> Tensor:
            maps[inputs.layer] = inputs.maps
            for name, part in self.share(inputs).items():
                self.add(name, inputs.layer, part)
            k = turn(inputs.k, by)
            if s.first_pass == "exact":
                self.put("k", self.slot(inputs), k)
                self.put("v", self.slot(inputs), inputs.v)
            return causal_attention(turn(inputs.q, by), k, inputs.v, self.scale)

        hidden = model(tokens, exact)
        latents = {name: self.buffers[name][:, :, : tokens.shape[1]] for name in ("latent_k", "latent_v")}
        if s.rank_rope is not None:
            for layer in range(self.num_layers):
                self.put("latent_k", layer, self.turn_rotary(latents["latent_k"][layer], positions))
        if s.full_memory:
            for slot, (k, v) in self.rebuild_all(maps, latents, by):
                self.put("k", slot, k)
                self.put("v", slot, v)
        if s.passes == 1:
            return hidden

        def through_latents(inputs: Inputs) -> Tensor:
            mine = {name: latents[name][inputs.layer] for name in latents}
            if s.rank_rope is not None:
                query, _ = self.absorbed_query(inputs, positions)
                mixed = causal_attention(query, mine["latent_k"], mine["latent_v"], self.scale)
                return self.absorbed_output(inputs, mixed, torch.ones_like(mixed[..., :1]))
            k, v = self.rebuilt(inputs.maps, inputs.loop, mine, by, inputs.q.dtype)
            return causal_attention(turn(inputs.q, by), k, v, self.scale)

        return model(tokens, through_latents)

    def read_token(self, model: Model, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        s, by, visible, new = self.scheme, angles(positions, self.frequencies()), self.visible(), self.new_token()
        capacity = torch.arange(visible.shape[1], device=tokens.device)[None]
        past_by, maps = angles(capacity, self.frequencies()), {}

        def first(inputs: Inputs) -> Tensor:
            maps[inputs.layer], slot = inputs.maps, self.slot(inputs)
            for name, part in self.share(inputs).items():
                new[name][inputs.layer] += part[:, 0]
            if s.first_pass == "exact":
                new["k"][slot], new["v"][slot] = turn(inputs.k, by)[:, 0], inputs.v[:, 0]
            if s.keeps_all:
                return self.attend_exactly(inputs, by, visible, self.buffers["k"][slot], self.buffers["v"][slot])
            return through_latents(inputs, None)

        def second(inputs: Inputs) -> Tensor:
            own = {name: new[name][inputs.layer, :, None] for name in ("latent_k", "latent_v")}
            return through_latents(inputs, own)

        def through_latents(inputs: Inputs, own: dict[str, Tensor] | None) -> Tensor:
            """Reads the past's latents, and the token's `own`, or (None) its own keys and values exactly."""
            past = {name: self.buffers[name][inputs.layer] for name in ("latent_k", "latent_v")}
            if s.rank_rope is not None:
                return self.read_absorbed(inputs, by, positions, past, own, visible)
            past_k, past_v = self.rebuilt(inputs.maps, inputs.loop, past, past_by, inputs.q.dtype)
            k, v = turn(inputs.k, by), inputs.v
            if own is not None:
                k, v = self.rebuilt(inputs.maps, inputs.loop, own, by, inputs.q.dtype)
            q = turn(inputs.q, by)
            before, itself = joint_softmax(self.scale, scores(q, past_k, visible), scores(q, k))
            return (weighted(before, past_v) + weighted(itself, v)).to(inputs.q.dtype)

        hidden = model(tokens, first)
        if s.rank_rope is not None:
            new["latent_k"] = torch.stack([self.turn_rotary(k[:, None], positions)[:, 0] for k in new["latent_k"]])
        if s.full_memory:
            latents = {name: new[name][:, :, None] for name in ("latent_k", "latent_v")}
            for slot, (k, v) in self.rebuild_all(maps, latents, by):
                new["k"][slot], new["v"][slot] = k[:, 0], v[:, 0]
        return (hidden if s.passes == 1 else model(tokens, second)), new

    # The absorbed mode: queries and outputs are mapped instead of keys and values, and a small rotary key has the
    # position.

    def turn_rotary(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Stored keys [B, S, N, rk + rr] with their rotary part turned: pair p has frequency p mod (dh/2)."""
        rank = self.scheme.rank_rope or 0
        latent, rotary = keys.split([keys.shape[-1] - rank, rank], dim=-1)
        pairs = torch.arange(rank // 2, device=keys.device) % (self.size // 2)
        return torch.cat([latent, turn(rotary, angles(positions, self.frequencies()[pairs]))], dim=-1)

    def absorbed_query(self, inputs: Inputs, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A query of the stored keys [B, S, H, rk + rr], and one of a key or mean without position [B, S, H, dh]."""
        content, maps = inputs.q, inputs.maps
        if self.scheme.query_adapter:
            content = torch.einsum("bshe,hef->bshf", content, maps.query_adapter[inputs.loop])
        up = per_head(self.part(maps, "k", inputs.loop).up, content.shape[2])
        rotary = torch.einsum("bshe,her->bshr", inputs.q, maps.rope_query[inputs.loop])
        query = torch.cat([torch.einsum("bshe,hre->bshr", content, up), rotary], dim=-1)
        return self.turn_rotary(query, positions), content

    def absorbed_output(self, inputs: Inputs, mixed: Tensor, weight: Tensor) -> Tensor:
        """Heads' output from their sum of value latents [B, S, H, rv], which have `weight` [B, S, H, 1] in all."""
        part = self.part(inputs.maps, "v", inputs.loop)
        up, mean = (per_head(x, mixed.shape[2]).to(mixed.dtype) for x in (part.up, part.mean))
        return (torch.einsum("bshr,hre->bshe", mixed, up) + weight * mean).to(inputs.q.dtype)

    def read_absorbed(
        self,
        inputs: Inputs,
        by: Angles,
        positions: Tensor,
        past: Mapping[str, Tensor],
        own: Mapping[str, Tensor] | None,
        visible: Tensor,
    ) -> Tensor:
        query, content = self.absorbed_query(inputs, positions)
        before = scores(query, past["latent_k"], visible)
        if own is not None:
            before, itself = joint_softmax(self.scale, before, scores(query, own["latent_k"]))
            mixed = weighted(before, past["latent_v"]) + weighted(itself, own["latent_v"])
            return self.absorbed_output(inputs, mixed, torch.ones_like(mixed[..., :1]))
        # The mean's part of the score is the same for all stored tokens; it weighs them against the exact one.
        mean = self.part(inputs.maps, "k", inputs.loop).mean
        before = before + scores(content, mean.expand(content.shape[0], 1, -1, -1))
        exact = scores(turn(inputs.q, by), turn(inputs.k, by))
        before, itself = joint_softmax(self.scale, before, exact)
        weight = before.sum(-1).transpose(1, 2)[..., None]
        out = self.absorbed_output(inputs, weighted(before, past["latent_v"]), weight)
        return out + weighted(itself, inputs.v).to(out.dtype)


def per_head(x: Tensor, heads: int) -> Tensor:
    """Maps [G, ...] of the key-value head of every query head, [H, ...]."""
    return x.repeat_interleave(heads // x.shape[0], dim=0)
