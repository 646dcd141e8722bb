"""What a looped stack and its attention tell each other.

Every layer at every loop calls `attend(state, inputs)`, which returns the heads' output and the next state. Consecutive
loops that attend alike form a `Stage`. Layers outside of the loops (Huginn's prelude and coda) have an attention of
their own, `outer`, and share the state.

Shapes: B batch, S tokens, d hidden size, H heads, G key-value heads, dh head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Params = dict[str, Any]


class LayerInputs(NamedTuple):
    """What one layer at one loop hands to its attention. Queries and keys are not rotated yet."""

    h: Float[Array, "B S d"]  # normed
    q: Float[Array, "B S H dh"]
    k: Float[Array, "B S G dh"]
    v: Float[Array, "B S G dh"]
    loop: Int[Array, ""]  # 0 for layers outside of the loops
    layer: Int[Array, ""]  # of the loops; or among those outside of them, prelude first


Attend = Callable[[Any, LayerInputs], tuple[Array, Any]]
"""(state, inputs) -> (heads' output [B, S, H, dh], next state)."""


class Stage(NamedTuple):
    """Consecutive loops (counted from 0) that share one attention function."""

    loops: range
    attend: Attend
