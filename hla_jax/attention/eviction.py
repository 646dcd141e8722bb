"""Token eviction around any scheme: the first tokens and the most recent ones stay, at their original positions.

Attention sinks and a sliding window (StreamingLLM, arXiv:2309.17453) over whatever the scheme stores of a token: memory
no longer grows with the sequence. A prompt is read exactly and in full before its tokens are evicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from hla_jax.attention.scheme import Cache, Eviction, Maps, Scheme, SchemeError, Shape, Transform
from hla_jax.config import ModelConfig

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class Evicted(Scheme):
    """The cache of `scheme` with `budget` slots a sequence: `first` tokens, and a ring of the most recent ones.

    A new token reads the stored tokens j < first and j >= i - (budget - first), and itself.

    Attributes:
      scheme: whose cache it is. Its exact window has slots of its own, which the budget does not count.
      budget: most tokens stored of a sequence.
      first: how many of them are the sequence's first.
    """

    scheme: Scheme
    budget: int
    first: int = 4

    @property
    def interchange(self) -> str:  # type: ignore[override]
        """The scheme's own: eviction adds no maps."""
        return self.scheme.interchange

    def check(self, config: ModelConfig) -> None:
        if isinstance(self.scheme, Evicted):
            raise SchemeError("Evicted wraps a scheme that keeps every token, found another Evicted")
        if self.first < 0:
            raise SchemeError(f"first must be at least 0, found {self.first}")
        if self.budget <= self.first:
            raise SchemeError(f"budget must be more than the {self.first} first tokens, found {self.budget}")
        self.scheme.check(config)

    def with_loops(self, loops: int) -> Evicted:
        return dataclasses.replace(self, scheme=self.scheme.with_loops(loops))

    def map_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        return self.scheme.map_shapes(config)

    def token_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        return self.scheme.token_shapes(config)

    @property
    def passes(self) -> int:
        return self.scheme.passes

    def reads(self, config: ModelConfig) -> dict[str, float]:
        return self.scheme.reads(config)

    def window_tokens(self) -> int:
        return self.scheme.window_tokens()

    def cache_shapes(
        self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike
    ) -> dict[str, jax.ShapeDtypeStruct]:
        return self.scheme.cache_shapes(config, batch, min(capacity, self.budget), dtype)

    def init_cache(self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike) -> Cache:
        return self._evicting(super().init_cache(config, batch, capacity, dtype))

    def fill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        return self._read_then_evict(self.scheme.fill, config, maps, cache, tokens, lengths)

    def prefill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform:
        return self._read_then_evict(self.scheme.prefill, config, maps, cache, tokens, lengths)

    def decode(self, config: ModelConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        return self.scheme.decode(config, maps, cache, implementation)

    def reread(self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        """Reads a cache of all tokens; a mask hides those that would be gone."""
        return self.scheme.reread(config, maps, self._evicting(cache), tokens)

    def swapped(self, config: ModelConfig, maps: Maps, batch: int, tokens: int, dtype: DTypeLike) -> Transform:
        everything = self.scheme.init_cache(config, batch, tokens, dtype)
        exact = self.scheme.fill(config, maps, everything, tokens, jnp.full(batch, tokens, jnp.int32))
        return exact.then(lambda cache: self.reread(config, maps, cache, tokens))

    def _evicting(self, cache: Cache) -> Cache:
        return dataclasses.replace(cache, eviction=Eviction(self.first, self.budget))

    def _read_then_evict(
        self,
        read: Callable[..., Transform],
        config: ModelConfig,
        maps: Maps,
        cache: Cache,
        tokens: int,
        lengths: Int[Array, " B"],
    ) -> Transform:
        """`read`, the scheme's way to take in a prompt, and then the ring of what it stored.

        A prompt that fits is stored in place. A longer one needs buffers of its own length for the while, since the
        scheme may read it twice.
        """
        grown = self.token_shapes(config)
        capacity = min(cache.buffers[name].shape[2] for name in grown)
        if tokens <= capacity:
            return read(config, maps, cache, tokens, lengths).then(self._evicting)
        buffers = dict(cache.buffers)
        for name in grown:
            slots, batch, _, *rest = buffers[name].shape
            buffers[name] = jnp.zeros((slots, batch, tokens, *rest), buffers[name].dtype)

        def evict(everything: Cache) -> Cache:
            kept = self._evicting(everything)
            # Slots that a short prompt leaves empty take any token.
            token = jnp.maximum(kept.positions(capacity), 0)

            def ring(buffer: Array) -> Array:
                return jnp.take_along_axis(buffer, token.reshape(1, *token.shape, *[1] * (buffer.ndim - 3)), axis=2)

            return dataclasses.replace(kept, buffers=kept.buffers | {name: ring(kept.buffers[name]) for name in grown})

        return read(config, maps, Cache(buffers, cache.lengths), tokens, lengths).then(evict)
