"""The cache of a looped model as transformers drives it, and the full one. `looped_latent_cache.py` has the others.

A cache reads tokens through the model: it hands the model a function that attends, and keeps what the tokens leave. So
the model knows nothing of caches.

Shapes: B sequences, S tokens, C capacity, d hidden size, L layers, T loops, H heads, G key-value heads, N heads of a
buffer, dh head size, r numbers of a head, W window. Loops are counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from .looped_schemes import LoopedConfig, Shape

GROWTH = 128  # tokens that a cache grows by


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
Model = Callable[[Tensor, Attend], Tensor]
"""(tokens [B, S], attention) -> hidden states [B, S, d]."""


class LoopedCache(Cache):
    """Buffers [slots, B, C, heads, numbers] of a batch of sequences; token p of a sequence lies in slot p.

    Padding takes no slot: sequences are moved together before they are read, and their states are put back after.

    Attributes:
      buffers: by name, in the model's dtype.
      lengths: tokens that each sequence has stored, [B].
      columns: tokens seen with padding, which is what transformers calls the sequence length.
    """

    scheme: Any

    def __init__(self, config: LoopedConfig, dtype: torch.dtype):
        super().__init__(layers=[])
        self.config, self.scheme, self.dtype = config, config.scheme, dtype
        self.num_layers, self.num_loops = config.num_hidden_layers, config.total_ut_steps
        self.size, self.scale = config.head_dim, config.head_dim**-0.5
        self.buffers: dict[str, Tensor] = {}
        self.lengths = torch.zeros(0, dtype=torch.long)
        self.columns = 0

    def token_shapes(self) -> dict[str, Shape]:
        """(slots, heads, numbers of a token) of the buffers that grow with the tokens."""
        raise NotImplementedError

    def read_prompt(self, model: Model, tokens: Tensor, positions: Tensor) -> Tensor:
        """Reads right-padded prompts [B, S] into an empty cache. Returns hidden states [B, S, d]."""
        raise NotImplementedError

    def read_token(self, model: Model, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Decodes one token a sequence [B, 1]. Returns hidden states, and what each buffer gets: [slots, B, ...]."""
        raise NotImplementedError

    def read(
        self,
        model: Callable[..., Tensor],
        tokens: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None,
        *given: Tensor,
    ) -> Tensor:
        """Reads tokens [B, S] of which `mask` [B, columns so far + S] marks the real ones; returns states [B, S, d].

        What the model takes of every token besides its id is `given`, [B, S, ...]: `model(tokens, attend, *given)`.

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
        hidden = self._read_prompts(model, tokens, real, given) if empty else self._read_tokens(model, tokens, given)
        self.columns = columns
        return hidden

    def _read_prompts(
        self, model: Callable[..., Tensor], tokens: Tensor, real: Tensor, given: tuple[Tensor, ...]
    ) -> Tensor:
        self.lengths = real.sum(1)
        if bool((self.lengths == 0).any()):
            raise ValueError("a sequence has no token: its row of attention_mask is all zeros")
        for name, (slots, *numbers) in self.token_shapes().items():
            self.buffers[name] = torch.zeros(slots, *tokens.shape, *numbers, dtype=self.dtype, device=tokens.device)
        order = torch.argsort(~real, dim=1, stable=True)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        moved = lambda x, order: x.gather(1, order[:, :, None].expand_as(x))
        run = lambda tokens, attend: model(tokens, attend, *(moved(x, order) for x in given))
        hidden = self.read_prompt(run, tokens.gather(1, order), positions)
        return moved(hidden, order.argsort(1))

    def _read_tokens(self, model: Callable[..., Tensor], tokens: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        hidden = []
        for column in range(tokens.shape[1]):
            at = slice(column, column + 1)
            run = lambda tokens, attend, at=at: model(tokens, attend, *(x[:, at] for x in given))
            state, new = self.read_token(run, tokens[:, at], self.lengths[:, None])
            hidden.append(state)
            self._store(new, self.columns + column + 1)
        return torch.cat(hidden, dim=1)

    def _store(self, new: Mapping[str, Tensor], columns: int) -> None:
        """Appends a token to every sequence; a window's replaces the oldest one of its ring."""
        rows = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        for name, token in new.items():
            buffer, ring = self.buffers[name], name.startswith("window")
            if not ring and buffer.shape[2] < columns:
                buffer = F.pad(buffer, (0, 0, 0, 0, 0, GROWTH))
                self.buffers[name] = buffer
            if buffer.shape[2]:
                buffer[:, rows, self.lengths % buffer.shape[2] if ring else self.lengths] = token.to(buffer.dtype)
        self.lengths = self.lengths + 1

    # For the schemes.

    def frequencies(self) -> Tensor:
        """Rotary frequencies of a head, in radians per position."""
        steps = torch.arange(0, self.size, 2, dtype=wide(self.dtype), device=self.lengths.device)
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

    def attend_exactly(self, inputs: Inputs, by: Angles, visible: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """A new token reads stored keys and values [B, C, G, dh], and its own."""
        q, k = turn(inputs.q, by), turn(inputs.k, by)
        past, own = joint_softmax(self.scale, scores(q, keys, visible), scores(q, k))
        return (weighted(past, values) + weighted(own, inputs.v)).to(inputs.v.dtype)

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
        raise NotImplementedError("only the model fills its cache: it stores more than a layer's keys and values")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("this cache cannot forget tokens, which assisted generation needs")

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


class FullLoopedCache(LoopedCache):
    """Rotated keys and values of every loop and layer."""

    def token_shapes(self) -> dict[str, Shape]:
        shape = self.num_loops * self.num_layers, self.config.num_key_value_heads, self.size
        return {"k": shape, "v": shape}

    def read_prompt(self, model: Model, tokens: Tensor, positions: Tensor) -> Tensor:
        by = angles(positions, self.frequencies())

        def attend(inputs: Inputs) -> Tensor:
            k = turn(inputs.k, by)
            self.put("k", self.slot(inputs), k)
            self.put("v", self.slot(inputs), inputs.v)
            return causal_attention(turn(inputs.q, by), k, inputs.v, self.scale)

        return model(tokens, attend)

    def read_token(self, model: Model, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        by, visible, new = angles(positions, self.frequencies()), self.visible(), self.new_token()

        def attend(inputs: Inputs) -> Tensor:
            slot = self.slot(inputs)
            new["k"][slot], new["v"][slot] = turn(inputs.k, by)[:, 0], inputs.v[:, 0]
            return self.attend_exactly(inputs, by, visible, self.buffers["k"][slot], self.buffers["v"][slot])

        return model(tokens, attend), new
