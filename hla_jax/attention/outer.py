"""The layers outside of a model's loops (Huginn's prelude and coda): an ordinary cache, beside that of any scheme.

They have one set of keys and values a token, so nothing is to be gained there: the outer layers are a model of one loop
with the full cache. A scheme knows the looped layers only; `whole` puts both together.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
from jax.typing import DTypeLike

from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Cache, Maps, Scheme, Shape, Transform
from hla_jax.config import ModelConfig
from hla_jax.models.stages import Attend, LayerInputs, Stage

if TYPE_CHECKING:
    from jaxtyping import Int

_PREFIX = "outer_"


def whole(config: ModelConfig, scheme: Scheme) -> Scheme:
    """The scheme with all of a model's layers: itself, where every layer is looped."""
    return WithOuter(scheme) if config.outer_layers else scheme


@dataclasses.dataclass(frozen=True)
class WithOuter(Scheme):
    """`scheme`, and 2 G dh numbers a token in each layer outside of the loops, evicted as the scheme evicts."""

    scheme: Scheme

    @property
    def interchange(self) -> str:  # type: ignore[override]
        """The scheme's own: the outer layers have no maps."""
        return self.scheme.interchange

    def check(self, config: ModelConfig) -> None:
        self.scheme.check(config)

    def map_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        return self.scheme.map_shapes(config)

    def map_axes(self) -> dict[str, tuple[str | None, ...]]:
        return self.scheme.map_axes()

    def token_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        return self.scheme.token_shapes(config) | _named(self._outer.token_shapes(_layers(config)))

    def window_tokens(self) -> int:
        return self.scheme.window_tokens()

    def cache_shapes(
        self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike
    ) -> dict[str, jax.ShapeDtypeStruct]:
        outer = self._outer.cache_shapes(_layers(config), batch, capacity, dtype)
        return self.scheme.cache_shapes(config, batch, capacity, dtype) | _named(outer)

    def init_cache(self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike) -> Cache:
        outer = self._outer.init_cache(_layers(config), batch, capacity, dtype)
        return _joined(self.scheme.init_cache(config, batch, capacity, dtype), outer)

    @property
    def passes(self) -> int:
        return self.scheme.passes

    def reads(self, config: ModelConfig) -> dict[str, float]:
        outer = dict.fromkeys(self._outer.reads(_layers(config)), self.passes)
        return self.scheme.reads(config) | _named(outer)

    def fill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        own, outer = _apart(cache)
        layers = self._outer.fill(_layers(config), {}, outer, tokens, lengths)
        return _beside(self.scheme.fill(config, maps, own, tokens, lengths), layers)

    def prefill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform:
        own, outer = _apart(cache)
        layers = self._outer.prefill(_layers(config), {}, outer, tokens, lengths)
        return _beside(self.scheme.prefill(config, maps, own, tokens, lengths), layers)

    def decode(self, config: ModelConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        own, outer = _apart(cache)
        layers = self._outer.decode(_layers(config), {}, outer, implementation)
        return _beside(self.scheme.decode(config, maps, own, implementation), layers)

    def reread(self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        own, outer = _apart(cache)
        layers = self._outer.reread(_layers(config), {}, outer, tokens)
        return _beside(self.scheme.reread(config, maps, own, tokens), layers)

    def swapped(self, config: ModelConfig, maps: Maps, batch: int, tokens: int, dtype: DTypeLike) -> Transform:
        # Both passes read the outer layers exactly and keep nothing of them; the second as far as they would be there.
        empty = FullCache().init_cache(_layers(config), batch, 0, dtype)
        exact, second = (one.reread(_layers(config), {}, empty, tokens) for one in (FullCache(), self._outer))
        return _beside(self.scheme.swapped(config, maps, batch, tokens, dtype), exact, second)

    @property
    def _outer(self) -> Scheme:
        full = FullCache()
        return dataclasses.replace(self.scheme, scheme=full) if isinstance(self.scheme, Evicted) else full


def _layers(config: ModelConfig) -> ModelConfig:
    """The outer layers as a model of one loop."""
    return dataclasses.replace(config, num_layers=config.outer_layers, num_loops=1)


def _beside(looped: Transform, outer: Transform, following: Transform | None = None) -> Transform:
    """Both in one pass, their states side by side. Where more passes follow, each runs the outer layers anew, as
    `following` does or as `outer`: what is kept of them is the last pass's.
    """
    attend = outer.stages[0].attend

    def within(attend: Attend) -> Attend:
        def attend_loop(state: tuple[Any, Any], inputs: LayerInputs) -> tuple[Array, tuple[Any, Any]]:
            out, own = attend(state[0], inputs)
            return out, (own, state[1])

        return attend_loop

    def attend_outer(state: tuple[Any, Any], inputs: LayerInputs) -> tuple[Array, tuple[Any, Any]]:
        out, kept = attend(state[1], inputs)
        return out, (state[0], kept)

    def finish(state: tuple[Any, Any]) -> Cache | Transform:
        made = looped.finish(state[0])
        if isinstance(made, Transform):
            return _beside(made, following or outer)
        return _joined(made, outer.finish(state[1]))

    stages = [Stage(stage.loops, within(stage.attend)) for stage in looped.stages]
    return Transform(stages, (looped.state, outer.state), finish, attend_outer)


def _named(outer: dict[str, Any]) -> dict[str, Any]:
    return {_PREFIX + name: value for name, value in outer.items()}


def _apart(cache: Cache) -> tuple[Cache, Cache]:
    outer = {name: buffer for name, buffer in cache.buffers.items() if name.startswith(_PREFIX)}
    own = {name: buffer for name, buffer in cache.buffers.items() if name not in outer}
    bare = {name.removeprefix(_PREFIX): buffer for name, buffer in outer.items()}
    return dataclasses.replace(cache, buffers=own), dataclasses.replace(cache, buffers=bare)


def _joined(own: Cache, outer: Cache) -> Cache:
    return dataclasses.replace(own, buffers=own.buffers | _named(outer.buffers))
