"""Ouro in PyTorch with the full cache, HLA or LLA: it reads and runs the directories that `hla_jax.export` writes.

The file needs PyTorch, transformers 5 and safetensors only, so an export can bring it along (`torch_code=True`):

    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    model.generate(**tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"), max_new_tokens=64)

It is a reference: plain operations, no kernel, and a decoding step reads whole buffers. A call with an empty cache
reads its tokens as a prompt; later calls decode theirs one by one through the cache, whether sampled or given.

Shapes: B sequences, S tokens, C capacity, V vocabulary, d hidden size, L layers, T loops, H heads, G key-value heads, N
heads of a latent, dh head size, W window; ranks rk, rv, r1 as in `docs/schemes.md`. Loops are counted from 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import cached_file

# transformers 5 began with `past_key_values` and went over to `cache`.
_CACHE = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else None
CACHE_NAME = _CACHE or "past_key_values"

_ELSEWHERE = ("head_latent_config", "layer_latent_config", "low_bit_config", "shared_loop_config", "eviction_config")
_MAP = re.compile(r"model\.layers\.\d+\.self_attn\.(hla|lla|head_latent|layer_latent|low_bit|shared_loop)\.\w+")
_GROWTH = 128  # tokens that a full cache grows by

Shape = tuple[int, ...]


class OuroConfig(PretrainedConfig):
    """Sizes of an Ouro model and of its cache scheme, as in `config.json`. A missing size is an error: the defaults of
    Ouro's public configuration describe another model.
    """

    model_type = "ouro"
    has_no_defaults_at_init = True
    required = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "total_ut_steps"),
        *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
    )

    def __init__(self, **fields: Any):
        # transformers makes empty configs to see what differs from them.
        if fields:
            if missing := [name for name in self.required if fields.get(name) is None]:
                raise ValueError(f"config.json: missing keys {', '.join(missing)}")
            fields["head_dim"] = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
            theta = _rope_theta(fields.pop("rope_theta", None), fields.pop("rope_parameters", None) or {})
            for key, expected in (("hidden_act", "silu"), ("rope_scaling", None), ("use_sliding_window", False)):
                if (found := fields.setdefault(key, expected)) != expected:
                    raise ValueError(f"config.json: {key} must be {expected!r}, found {found!r}")
            del fields["rope_scaling"]
        special = {name: fields.pop(name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        tied = bool(fields.pop("tie_word_embeddings", False))
        super().__init__(**fields)
        for name, value in {**special, "tie_word_embeddings": tied}.items():
            setattr(self, name, value)
        self.use_cache = True
        if fields:
            self.rope_theta = theta
            self.scheme.check(self)

    @property
    def scheme(self) -> FullCache | HLA | LLA:
        """The cache scheme. Raises `ValueError` for an entry that is malformed or of a scheme this file lacks."""
        if found := [name for name in _ELSEWHERE if getattr(self, name, None) is not None]:
            raise ValueError(
                f"config.json: {found[0]} is a scheme that only hla_jax runs; here: hla_config, lla_config"
            )
        kinds = [kind for kind in (HLA, LLA) if getattr(self, f"{kind.name}_config", None) is not None]
        if len(kinds) > 1:
            raise ValueError("config.json: expected one scheme, found hla_config and lla_config")
        if not kinds:
            return FullCache()
        return _from_entry(kinds[0], getattr(self, f"{kinds[0].name}_config"))


def _rope_theta(old: float | None, new: Mapping[str, Any]) -> float:
    if new.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: only unscaled rotary embeddings are supported, found {dict(new)!r}")
    found = {float(theta) for theta in (old, new.get("rope_theta")) if theta is not None}
    if len(found) != 1:
        raise ValueError(f"config.json: expected one rope_theta, found {sorted(found)}")
    return found.pop()


def _from_entry(kind: type, entry: Any) -> Any:
    """A scheme from its entry, with errors that name the key."""
    name = f"config.json: {kind.name}_config"  # type: ignore[attr-defined]
    if not isinstance(entry, dict):
        raise ValueError(f"{name} must be an object, found {entry!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    required = {field for field in fields if fields[field].default is dataclasses.MISSING}
    for problem, names in (("missing", required - entry.keys()), ("unknown", entry.keys() - fields.keys())):
        if names:
            raise ValueError(f"{name}: {problem} {sorted(names)}; its fields are {list(fields)}")
    for field, value in entry.items():
        allowed = {
            "int": (int,),
            "bool": (bool,),
            "str": (str,),
            "int | None": (int, type(None)),
            "list[int] | None": (list, type(None)),
        }[str(fields[field].type)]
        if type(value) not in allowed:
            raise ValueError(f"{name}: {field} must be {fields[field].type}, found {value!r}")
    return kind(**entry)


# Rotation and attention.


class Angles(NamedTuple):
    """By how much each pair of every token's heads is turned: [B, S, N or 1, pairs]."""

    cos: Tensor
    sin: Tensor


def angles(positions: Tensor, frequencies: Tensor) -> Angles:
    """Angles at positions [B, S] of pairs with these frequencies, [pairs] or [N, pairs]."""
    turns = positions[:, :, None, None].to(frequencies.dtype) * torch.atleast_2d(frequencies)
    return Angles(turns.cos(), turns.sin())


def turn(x: Tensor, by: Angles) -> Tensor:
    """Half-split rotary embedding of heads [B, S, N, r]: pair p is coordinates (p, p + r/2)."""
    first, second = x.to(by.cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * by.cos - second * by.sin, second * by.cos + first * by.sin], dim=-1).to(x.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64: what norms, softmax and sums are computed in."""
    return torch.promote_types(dtype, torch.float32)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of all tokens at once, [B, S, H, rv]. Padding on the right is never seen by a token."""
    k, v = (per_query(x, q.shape[2]).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, scale=scale)
    return out.transpose(1, 2)


def per_query(x: Tensor, heads: int) -> Tensor:
    """The key-value head of every query head, [B, S, H, r]."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def scores(q: Tensor, k: Tensor, visible: Tensor | None = None) -> Tensor:
    """Products of one token's queries [B, 1, H, r] with keys [B, C, N, r], of which `visible` [B, C] count."""
    wider = wide(q.dtype)
    out = torch.einsum("bqhr,bchr->bhqc", q.to(wider), per_query(k, q.shape[2]).to(wider))
    return out if visible is None else out.masked_fill(~visible[:, None, None], -torch.inf)


def joint_softmax(scale: float, *parts: Tensor) -> tuple[Tensor, ...]:
    """One softmax over several sets of keys, as the weights of each."""
    weights = torch.softmax(torch.cat(parts, dim=-1) * scale, dim=-1)
    return weights.split([part.shape[-1] for part in parts], dim=-1)


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """Sum of values [B, C, N, r] by weights [B, H, 1, C]: [B, 1, H, r], in the weights' dtype."""
    return torch.einsum("bhqc,bchr->bqhr", weights, per_query(v, weights.shape[1]).to(weights.dtype))


class Inputs(NamedTuple):
    """What a layer at a loop hands to attention. Queries and keys are not rotated yet."""

    h: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    loop: int
    layer: int
    maps: Any


Attend = Callable[[Inputs], Tensor]


# Caches. A scheme makes a cache; a cache reads tokens through the model.


class OuroCache(Cache):
    """Buffers [slots, B, C, heads, numbers] of a batch of sequences; token p of a sequence lies in slot p.

    Padding takes no slot: sequences are moved together before they are read, and their states are put back after.

    Attributes:
      buffers: by name.
      lengths: tokens that each sequence has stored, [B].
      columns: tokens seen with padding, which is what transformers calls the sequence length.
    """

    def __init__(self, config: OuroConfig, scheme: Any):
        super().__init__(layers=[])
        self.config, self.scheme = config, scheme
        self.num_layers, self.num_loops = config.num_hidden_layers, config.total_ut_steps
        self.size, self.scale = config.head_dim, config.head_dim**-0.5
        self.buffers: dict[str, Tensor] = {}
        self.lengths = torch.zeros(0, dtype=torch.long)
        self.columns = 0

    def token_shapes(self) -> dict[str, Shape]:
        """(slots, heads, numbers of a token) of the buffers that grow with the tokens."""
        raise NotImplementedError

    def read_prompt(self, model: OuroModel, tokens: Tensor, positions: Tensor) -> Tensor:
        """Reads right-padded prompts [B, S] into an empty cache. Returns hidden states [B, S, d]."""
        raise NotImplementedError

    def read_token(self, model: OuroModel, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Decodes one token a sequence [B, 1]. Returns hidden states, and what each buffer gets: [slots, B, ...]."""
        raise NotImplementedError

    def read(self, model: OuroModel, tokens: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """Reads tokens [B, S] of which `mask` [B, columns so far + S] marks the real ones; returns states [B, S, d].

        Raises:
          ValueError: the mask or the positions do not fit, or there is padding after the first call.
        """
        columns = self.columns + tokens.shape[1]
        if mask is None:
            mask = tokens.new_ones(tokens.shape[0], columns)
        if mask.shape != (tokens.shape[0], columns):
            raise ValueError(
                f"attention_mask must be [{tokens.shape[0]}, {columns}], one entry for each token so far; "
                f"found {list(mask.shape)}"
            )
        real = mask[:, self.columns :].bool()
        empty = self.columns == 0
        expected = real.long().cumsum(1) - 1 + (0 if empty else self.lengths[:, None])
        if position_ids is not None and bool(((position_ids != expected) & real).any()):
            raise ValueError("position_ids must count each sequence's own tokens from 0, padding left out")
        if not empty and not bool(real.all()):
            raise ValueError("padding is allowed in the first call only: give every sequence the same new tokens")
        hidden = self._read_prompts(model, tokens, real) if empty else self._read_tokens(model, tokens)
        self.columns = columns
        return hidden

    def _read_prompts(self, model: OuroModel, tokens: Tensor, real: Tensor) -> Tensor:
        self.lengths = real.sum(1)
        if bool((self.lengths == 0).any()):
            raise ValueError("a sequence has no token: its row of attention_mask is all zeros")
        weight = model.embed_tokens.weight
        for name, (slots, *numbers) in self.token_shapes().items():
            self.buffers[name] = weight.new_zeros(slots, *tokens.shape, *numbers)
        order = torch.argsort(~real, dim=1, stable=True)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = self.read_prompt(model, tokens.gather(1, order), positions)
        return hidden.gather(1, order.argsort(1)[:, :, None].expand_as(hidden))

    def _read_tokens(self, model: OuroModel, tokens: Tensor) -> Tensor:
        hidden = []
        for column in range(tokens.shape[1]):
            state, new = self.read_token(model, tokens[:, column : column + 1], self.lengths[:, None])
            hidden.append(state)
            self._store(new, self.columns + column + 1)
        return torch.cat(hidden, dim=1)

    def _store(self, new: Mapping[str, Tensor], columns: int) -> None:
        """Appends a token to every sequence; a window's replaces the oldest one of its ring."""
        rows = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        for name, token in new.items():
            buffer, ring = self.buffers[name], name.startswith("window")
            if not ring and buffer.shape[2] < columns:
                buffer = F.pad(buffer, (0, 0, 0, 0, 0, _GROWTH))
                self.buffers[name] = buffer
            if buffer.shape[2]:
                buffer[:, rows, self.lengths % buffer.shape[2] if ring else self.lengths] = token.to(buffer.dtype)
        self.lengths = self.lengths + 1

    # For the schemes.

    def frequencies(self) -> Tensor:
        """Rotary frequencies of a head, in radians per position."""
        dtype = wide(next(iter(self.buffers.values())).dtype)
        steps = torch.arange(0, self.size, 2, dtype=dtype, device=self.lengths.device)
        return self.config.rope_theta ** (-steps / self.size)

    def slot(self, inputs: Inputs) -> int:
        """Slot of a layer at a loop where every loop has its own."""
        return inputs.loop * self.num_layers + inputs.layer

    def visible(self, window: int = 0) -> Tensor:
        """Which slots hold tokens before the window, [B, C]."""
        capacity = max(buffer.shape[2] for name, buffer in self.buffers.items() if not name.startswith("window"))
        return torch.arange(capacity, device=self.lengths.device) < self.lengths[:, None] - window

    def new_token(self) -> dict[str, Tensor]:
        """Zeros for what one token adds, in float32 or wider: [slots, B, heads, numbers]."""
        like = {name: self.buffers[name][:, :, 0] for name in self.token_shapes()}
        return {name: torch.zeros_like(buffer, dtype=wide(buffer.dtype)) for name, buffer in like.items()}

    def put(self, name: str, slot: int, value: Tensor) -> None:
        """Writes a prompt's [B, S, heads, numbers]."""
        self.buffers[name][slot, :, : value.shape[1]] = value.to(self.buffers[name].dtype)

    def add(self, name: str, slot: int, value: Tensor) -> None:
        self.put(name, slot, self.buffers[name][slot, :, : value.shape[1]] + value)

    def attend_exactly(self, inputs: Inputs, by: Angles, visible: Tensor) -> Tensor:
        """A new token reads stored keys and values, and its own."""
        q, k, slot = turn(inputs.q, by), turn(inputs.k, by), self.slot(inputs)
        past, own = joint_softmax(self.scale, scores(q, self.buffers["k"][slot], visible), scores(q, k))
        return (weighted(past, self.buffers["v"][slot]) + weighted(own, inputs.v)).to(inputs.v.dtype)

    # For transformers.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("only the model fills an Ouro cache: it stores more than a layer's keys and values")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("an Ouro cache cannot forget tokens, which assisted generation needs")

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        return [False]

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_initialized(self) -> bool:
        return self.columns > 0

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0] if self.columns else -1

    def reset(self) -> None:
        self.buffers, self.columns = {}, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        indices = indices.to(self.lengths.device)
        self.buffers = {name: buffer.index_select(1, indices) for name, buffer in self.buffers.items()}
        self.lengths = self.lengths.index_select(0, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))


class FullOuroCache(OuroCache):
    """Rotated keys and values of every loop and layer."""

    def token_shapes(self) -> dict[str, Shape]:
        shape = self.num_loops * self.num_layers, self.config.num_key_value_heads, self.size
        return {"k": shape, "v": shape}

    def read_prompt(self, model: OuroModel, tokens: Tensor, positions: Tensor) -> Tensor:
        by = angles(positions, self.frequencies())

        def attend(inputs: Inputs) -> Tensor:
            k = turn(inputs.k, by)
            self.put("k", self.slot(inputs), k)
            self.put("v", self.slot(inputs), inputs.v)
            return causal_attention(turn(inputs.q, by), k, inputs.v, self.scale)

        return model(tokens, attend)

    def read_token(self, model: OuroModel, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        by, visible, new = angles(positions, self.frequencies()), self.visible(), self.new_token()

        def attend(inputs: Inputs) -> Tensor:
            new["k"][self.slot(inputs)], new["v"][self.slot(inputs)] = turn(inputs.k, by)[:, 0], inputs.v[:, 0]
            return self.attend_exactly(inputs, by, visible)

        return model(tokens, attend), new


class HLACache(OuroCache):
    """A main latent that loops 1 .. T-1 read, a loop-0 latent, and exact keys and values of the last W tokens."""

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
        if inputs.loop == 0:
            return {"latent_k1": F.linear(h, maps.write_k1), "latent_v1": F.linear(h, maps.write_v1)}
        at = inputs.loop - 1
        return {"latent_k": F.linear(h, maps.write_k[at]), "latent_v": F.linear(h, maps.write_v[at])}

    def read_prompt(self, model: OuroModel, tokens: Tensor, positions: Tensor) -> Tensor:
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

    def read_token(self, model: OuroModel, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
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


class LLACache(OuroCache):
    """Latents of each token's keys and values over the loops, a head each or one of all (`fold_heads`)."""

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
        self, model: OuroModel, latents: Mapping[str, Tensor], by: Angles
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Rebuilt keys and values of every slot, from latents [L, B, C, N, r]."""
        for slot in range(self.num_loops * self.num_layers):
            loop, layer = divmod(slot, self.num_layers)
            mine = {name: latents[name][layer] for name in ("latent_k", "latent_v")}
            yield slot, self.rebuilt(model.layers[layer].self_attn.maps, loop, mine, by, model.norm.weight.dtype)

    def read_prompt(self, model: OuroModel, tokens: Tensor, positions: Tensor) -> Tensor:
        s, by = self.scheme, angles(positions, self.frequencies())

        def exact(inputs: Inputs) -> Tensor:
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
            for slot, (k, v) in self.rebuild_all(model, latents, by):
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

    def read_token(self, model: OuroModel, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        s, by, visible, new = self.scheme, angles(positions, self.frequencies()), self.visible(), self.new_token()
        capacity = torch.arange(visible.shape[1], device=tokens.device)[None]
        past_by = angles(capacity, self.frequencies())

        def first(inputs: Inputs) -> Tensor:
            for name, part in self.share(inputs).items():
                new[name][inputs.layer] += part[:, 0]
            if s.first_pass == "exact":
                new["k"][self.slot(inputs)], new["v"][self.slot(inputs)] = turn(inputs.k, by)[:, 0], inputs.v[:, 0]
            return self.attend_exactly(inputs, by, visible) if s.keeps_all else through_latents(inputs, None)

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
            for slot, (k, v) in self.rebuild_all(model, latents, by):
                new["k"][slot], new["v"][slot] = k[:, 0], v[:, 0]
        return (hidden if s.passes == 1 else model(tokens, second)), new

    # The absorbed mode: queries and outputs are mapped instead of keys and values, and a small rotary key has the
    # position.

    def turn_rotary(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Stored keys [B, S, N, rk + rr] with their rotary part turned: pair p has frequency p mod (dh/2)."""
        latent, rotary = keys.split([keys.shape[-1] - self.scheme.rank_rope, self.scheme.rank_rope], dim=-1)
        pairs = torch.arange(self.scheme.rank_rope // 2, device=keys.device) % (self.size // 2)
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


# Schemes: the fields of their entries in config.json, and the maps that they add to a layer.


@dataclasses.dataclass(frozen=True)
class FullCache:
    """Exact keys and values of every loop."""

    name: ClassVar[str] = "full"
    cache: ClassVar[type[OuroCache]] = FullOuroCache

    def check(self, config: OuroConfig) -> None:
        pass

    def map_shapes(self, config: OuroConfig) -> dict[str, Shape]:
        return {}


@dataclasses.dataclass(frozen=True)
class HLA:
    """Hybrid Latent Attention, `hla_config`."""

    name: ClassVar[str] = "hla"
    cache: ClassVar[type[OuroCache]] = HLACache

    rank_k: int
    rank_v: int
    rank_loop1: int
    window: int
    pair_frequency: list[int] | None = None
    pair_frequency_loop1: list[int] | None = None

    def check(self, config: OuroConfig) -> None:
        size, loops = config.head_dim, config.total_ut_steps
        if loops < 2:
            raise ValueError(f"config.json: HLA needs at least 2 loops, found total_ut_steps {loops}")
        if self.window < 0 or self.rank_v < 1:
            raise ValueError("config.json: hla_config: window must be at least 0, and rank_v at least 1")
        for name, rank, pairs_name, pairs in (
            ("rank_k", self.rank_k, "pair_frequency", self.pair_frequency),
            ("rank_loop1", self.rank_loop1, "pair_frequency_loop1", self.pair_frequency_loop1),
        ):
            if rank < size or rank % size:
                raise ValueError(f"config.json: hla_config: {name} must be a multiple of head_dim {size}, found {rank}")
            if pairs is not None and (len(pairs) != rank // 2 or min(pairs) < 0 or max(pairs) >= size // 2):
                raise ValueError(
                    f"config.json: hla_config: {pairs_name} must be {rank // 2} indices of the {size // 2} frequencies"
                )

    def map_shapes(self, config: OuroConfig) -> dict[str, Shape]:
        rest, heads = config.total_ut_steps - 1, config.num_attention_heads
        size, d = config.head_dim, config.hidden_size
        return {
            "write_k": (rest, self.rank_k, d),
            "write_v": (rest, self.rank_v, d),
            "write_k1": (self.rank_loop1, d),
            "write_v1": (self.rank_loop1, d),
            "read_q": (rest, heads, size, self.rank_k),
            "read_o": (rest, heads, self.rank_v, size),
            "read_q1": (heads, size, self.rank_loop1),
            "read_o1": (heads, self.rank_loop1, size),
        }


@dataclasses.dataclass(frozen=True)
class LLA:
    """Looped Latent Attention, `lla_config`."""

    name: ClassVar[str] = "lla"
    cache: ClassVar[type[OuroCache]] = LLACache

    rank_k: int
    rank_v: int
    fold_heads: bool = False
    first_pass: str = "latent"
    single_pass: bool = False
    full_memory: bool = False
    rank_rope: int | None = None
    query_adapter: bool = False

    @property
    def keeps_all(self) -> bool:
        """Whether the first pass reads keys and values kept beside the latents: exact ones, or rebuilt ones."""
        return self.first_pass == "exact" or self.full_memory

    @property
    def passes(self) -> int:
        """Runs of the model for a token."""
        return 1 if self.single_pass or self.full_memory else 2

    def check(self, config: OuroConfig) -> None:
        size = self.trajectory(config)
        if not (1 <= self.rank_k <= size and 1 <= self.rank_v <= size):
            raise ValueError(
                f"config.json: lla_config: ranks must be in 1 .. {size}, found {self.rank_k} and {self.rank_v}"
            )
        if self.first_pass not in ("latent", "exact"):
            raise ValueError(
                f'config.json: lla_config: first_pass must be "latent" or "exact", found {self.first_pass!r}'
            )
        if self.full_memory and (self.first_pass == "exact" or self.rank_rope is not None):
            raise ValueError('config.json: lla_config: full_memory excludes first_pass "exact" and rank_rope')
        if self.query_adapter and self.rank_rope is None:
            raise ValueError("config.json: lla_config: query_adapter needs rank_rope")
        if self.rank_rope is not None and (self.rank_rope % 2 or not 2 <= self.rank_rope <= size):
            raise ValueError(f"config.json: lla_config: rank_rope must be even and in 2 .. {size}")

    def trajectory(self, config: OuroConfig) -> int:
        """Numbers that one latent stands for."""
        return config.total_ut_steps * config.head_dim * (config.num_key_value_heads if self.fold_heads else 1)

    def map_shapes(self, config: OuroConfig) -> dict[str, Shape]:
        leading = () if self.fold_heads else (config.num_key_value_heads,)
        size = self.trajectory(config)
        shapes: dict[str, Shape] = {}
        for name, rank in (("k", self.rank_k), ("v", self.rank_v)):
            shapes |= {f"{name}_down": (*leading, size, rank), f"{name}_up": (*leading, rank, size)}
            shapes |= {f"{name}_mean": (*leading, size)}
        if self.rank_rope is not None:
            query = config.total_ut_steps, config.num_attention_heads, config.head_dim
            shapes |= {"rope_down": (*leading, size, self.rank_rope), "rope_query": (*query, self.rank_rope)}
            if self.query_adapter:
                shapes |= {"query_adapter": (*query, config.head_dim)}
        return shapes


# The model.


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wider = x.to(wide(x.dtype))
        return self.weight * (wider * torch.rsqrt(wider.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Maps(nn.Module):
    """A scheme's maps of one layer."""

    def __init__(self, shapes: Mapping[str, Shape]):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


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


class OuroForCausalLM(PreTrainedModel, GenerationMixin):
    """Ouro with the full cache; the subclasses have the latent ones."""

    config_class = OuroConfig
    base_model_prefix = "model"
    scheme: type = FullCache
    _no_split_modules = ["OuroLayer"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_missing = [_MAP.pattern]  # noqa: RUF012 (`from_pretrained` looks at maps itself)

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        self._check_scheme(config)
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Maps):
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    @classmethod
    def _check_scheme(cls, config: OuroConfig) -> None:
        if not isinstance(config.scheme, cls.scheme):
            raise ValueError(
                f"config.json: {cls.__name__} has the cache scheme {cls.scheme.__name__}, but the entries are those of "
                f"{type(config.scheme).__name__}"
            )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **options: Any
    ) -> Any:
        """As in transformers, with maps-only directories read together with their base.

        Raises:
          ValueError: tensors are missing or unknown, or the base is not the model that the maps were fitted to.
        """
        source, report = pretrained_model_name_or_path, options.pop("output_loading_info", False)
        hub = ("revision", "cache_dir", "token", "local_files_only")
        where = {name: options[name] for name in hub if name in options}
        if not isinstance(config, OuroConfig):
            config = cls.config_class.from_pretrained(source if config is None else config, **where)
        cls._check_scheme(config)
        files = _tensor_files(source, **where)
        expected = {
            f"model.layers.{layer}.self_attn.{config.scheme.name}.{name}"
            for layer in range(config.num_hidden_layers)
            for name in config.scheme.map_shapes(config)
        }
        maps = {name: file for file in files for name in _header(file)[0] if _MAP.fullmatch(name)}
        _refuse(f"{source}: {', '.join(file.name for file in files)}", expected - maps.keys(), maps.keys() - expected)
        base, entry = source, getattr(config, "base_model", None)
        if entry is not None:
            base = _checked_base(source, entry)
            options = {name: option for name, option in options.items() if name != "revision"}
            del config.base_model
        model, info = super().from_pretrained(base, *args, config=config, output_loading_info=True, **options)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        # A base that is an export itself may have maps of its own, which do not count.
        unknown = {name for name in info["unexpected_keys"] if entry is None or not _MAP.fullmatch(name)}
        _refuse(str(base), set(info["missing_keys"]) - tied, unknown)
        if entry is not None:
            parameters = dict(model.named_parameters())
            for name, file in maps.items():
                with safe_open(file, "pt") as tensors, torch.no_grad():
                    stored = tensors.get_tensor(name)
                    if stored.shape != parameters[name].shape:
                        raise ValueError(
                            f"{file}: {name} must be {list(parameters[name].shape)}, found {list(stored.shape)}"
                        )
                    parameters[name].copy_(stored)
        return (model, info) if report else model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: OuroCache | None = None,
        past_key_values: OuroCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits of tokens [B, S]: of prompts with an empty cache, else decoded one by one after what the cache holds.

        Args:
          input_ids: token ids; with a cache, the new ones only.
          attention_mask: [B, tokens so far], 0 for padding, which may be on either side of a prompt.
          position_ids: optional, and checked: every sequence counts its own tokens from 0.
          cache: from an earlier call, or `new_cache()`; `past_key_values` is its older name.
          labels: [B, S] for a loss.
          use_cache: whether to return the cache; true by default.
          logits_to_keep: the last so many tokens' logits, or those of some indices; 0 is all.

        Raises:
          ValueError: something of this cannot be done; the message says what.
        """
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ValueError("Ouro's second passes read tokens again: give input_ids, not inputs_embeds")
        if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            raise ValueError(
                "output_attentions and output_hidden_states are not supported: they differ from loop to loop"
            )
        cache = past_key_values if cache is None else cache
        if cache is None:
            cache = self.new_cache()
        elif not isinstance(cache, self.config.scheme.cache):
            raise ValueError(f"this model needs its own cache, model.new_cache(); found {type(cache).__name__}")
        hidden = cache.read(self.model, input_ids, attention_mask, position_ids)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        logits = logits.to(wide(logits.dtype))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        returned: Any = {CACHE_NAME: cache} if use_cache or use_cache is None else {}
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **returned)
        return out.to_tuple() if return_dict is False else out

    def new_cache(self) -> OuroCache:
        """An empty cache."""
        return self.config.scheme.cache(self.config, self.config.scheme)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        """Where `generate` makes its cache."""
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError('generate needs padding on the left: make the tokenizer pad with padding_side="left"')
        if generation_config.cache_implementation is not None:
            raise ValueError(f"cache_implementation {generation_config.cache_implementation!r}: Ouro has its own cache")
        if getattr(generation_config, "prefill_chunk_size", None) is not None:
            raise ValueError("prefill_chunk_size: a prompt is read in one exact pass")
        if generation_config.use_cache is False:
            raise ValueError("use_cache=False would read every token as a prompt; the cache scheme is what decodes")
        if model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = self.new_cache()


class OuroHLAForCausalLM(OuroForCausalLM):
    """Ouro with Hybrid Latent Attention."""

    scheme = HLA


class OuroLLAForCausalLM(OuroForCausalLM):
    """Ouro with Looped Latent Attention."""

    scheme = LLA


# Files.


def _refuse(where: str, missing: set[str], unknown: set[str]) -> None:
    for problem, names in (("missing", missing), ("unknown", unknown)):
        if names:
            first = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{where}: {problem} tensors {first}{more}")


def _tensor_files(source: Any, **where: Any) -> list[pathlib.Path]:
    """The safetensors files of a directory or hub repository."""
    index = cached_file(source, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False, **where)
    names = ["model.safetensors"]
    if index is not None:
        names = sorted(set(json.loads(pathlib.Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    return [pathlib.Path(str(cached_file(source, name, **where))) for name in names]


def _header(file: pathlib.Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of its tensors, and where their bytes begin."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def fingerprint(files: list[pathlib.Path]) -> str:
    """Identity of a model's own tensors: the SHA-256 of one JSON line a tensor, sorted by name, maps left out."""
    lines = {}
    for file in files:
        header, start = _header(file)
        with file.open("rb") as stream:
            for name, about in header.items():
                if not _MAP.fullmatch(name):
                    begin, end = about["data_offsets"]
                    stream.seek(start + begin)
                    digest = hashlib.sha256(stream.read(end - begin)).hexdigest()
                    lines[name] = json.dumps([name, about["dtype"], about["shape"], digest], separators=(",", ":"))
    return hashlib.sha256("".join(f"{lines[name]}\n" for name in sorted(lines)).encode()).hexdigest()


def _checked_base(source: Any, entry: Any) -> str:
    """The path or hub id of the model that a maps-only directory belongs to, once its tensors are known to be its."""
    base = entry.get("id", entry.get("path")) if isinstance(entry, dict) else None
    if not isinstance(base, str) or not isinstance(entry.get("sha256"), str):
        raise ValueError(f"{source}: config.json: base_model must have id or path, and sha256; found {entry!r}")
    try:
        files = _tensor_files(base)
    except OSError as error:
        raise ValueError(f"{source}: config.json: base_model not found: {error}") from None
    if (found := fingerprint(files)) != entry["sha256"]:
        raise ValueError(
            f"{source}: these maps belong to another base model than {base}: "
            f"expected sha256 {entry['sha256']}, found {found}"
        )
    return base
