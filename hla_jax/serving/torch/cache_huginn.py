"""Caches of Huginn: each scheme's for the looped layers, and beside it an ordinary one for prelude and coda.

Shapes as in `looped_cache.py`; P layers outside of the loops.
"""

from __future__ import annotations

from torch import Tensor

from .looped_cache import (
    Attend,
    FullLoopedCache,
    Inputs,
    LoopedCache,
    Model,
    angles,
    causal_attention,
    turn,
)
from .looped_latent_cache import HLACache, LLACache
from .looped_schemes import Shape

OUTER = -1
"""The loop of layers outside of the loops."""


class WithOuter(LoopedCache):
    """Rotated keys and values of prelude and coda. A pass that a scheme runs again fills them again."""

    def token_shapes(self) -> dict[str, Shape]:
        shape = self.config.outer_layers, self.config.num_key_value_heads, self.size
        return super().token_shapes() | {"outer_k": shape, "outer_v": shape}

    def read_prompt(self, model: Model, tokens: Tensor, positions: Tensor) -> Tensor:
        by = angles(positions, self.frequencies())

        def attend_outer(inputs: Inputs) -> Tensor:
            k = turn(inputs.k, by)
            self.put("outer_k", inputs.layer, k)
            self.put("outer_v", inputs.layer, inputs.v)
            return causal_attention(turn(inputs.q, by), k, inputs.v, self.scale)

        return super().read_prompt(beside(model, attend_outer), tokens, positions)

    def read_token(self, model: Model, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        by, visible = angles(positions, self.frequencies()), self.visible()
        outer = {name: token for name, token in self.new_token().items() if name.startswith("outer")}

        def attend_outer(inputs: Inputs) -> Tensor:
            layer = inputs.layer
            outer["outer_k"][layer], outer["outer_v"][layer] = turn(inputs.k, by)[:, 0], inputs.v[:, 0]
            stored = self.buffers["outer_k"][layer], self.buffers["outer_v"][layer]
            return self.attend_exactly(inputs, by, visible, *stored)

        hidden, new = super().read_token(beside(model, attend_outer), tokens, positions)
        return hidden, new | outer


def beside(model: Model, outer: Attend) -> Model:
    """A model whose layers outside of the loops attend by `outer`."""

    def run(tokens: Tensor, attend: Attend) -> Tensor:
        return model(tokens, lambda inputs: (outer if inputs.loop == OUTER else attend)(inputs))

    return run


class FullHuginnCache(WithOuter, FullLoopedCache):
    pass


class HLAHuginnCache(WithOuter, HLACache):
    pass


class LLAHuginnCache(WithOuter, LLACache):
    pass
