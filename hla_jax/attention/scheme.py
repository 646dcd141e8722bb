"""The contract of a cache scheme.

A scheme is a frozen dataclass of static sizes. For a model's config it declares the maps it adds to every layer and the
buffers of
its cache, and it turns them into attention: a `Transform` of stages for `models.ouro.run` together with the state they
  carry and a
`finish` that makes the next cache of that state. Nothing else in the package knows what a cache contains.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from hla_jax.config import OuroConfig
from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.ouro import LayerInputs, Stage

if TYPE_CHECKING:
    from jaxtyping import Int

Maps = Mapping[str, Array]
Shape = tuple[int, ...]


class SchemeError(ValueError):
    """A scheme's sizes do not fit the model; the message says which rule they break."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Buffers of a scheme for a batch of sequences, and how many tokens each sequence has stored."""

    buffers: dict[str, Array]
    lengths: Int[Array, " B"]


class Transform(NamedTuple):
    """Attention of one forward pass: stages and their state for `models.ouro.run`, and the cache that the last state
    makes.
    """

    stages: Sequence[Stage]
    state: Any
    finish: Callable[[Any], Cache]


class Scheme(abc.ABC):
    """What every cache scheme provides. Implementations are frozen dataclasses, hashable and static under `jax.jit`."""

    interchange: ClassVar[str | None] = None
    """Name of the scheme's maps and config entry in a checkpoint (`self_attn.<name>.*`, `<name>_config`); None if it
    has no maps.
    """

    def check(self, config: OuroConfig) -> None:  # noqa: B027 (most schemes fit every model)
        """Raises `SchemeError` if the sizes do not fit the model."""

    def map_shapes(self, config: OuroConfig) -> dict[str, Shape]:
        """Shape of every map of one layer; stacked over layers in `Attention.params`."""
        return {}

    @abc.abstractmethod
    def token_shapes(self, config: OuroConfig) -> dict[str, Shape]:
        """Buffers that grow with the tokens: name to (leading..., trailing...) around the [B, C] axes, see
        `cache_shapes`.
        """

    def window_tokens(self) -> int:
        """Recent tokens kept exactly, in every loop."""
        return 0

    def cache_shapes(self, config: OuroConfig, batch: int, capacity: int) -> dict[str, Shape]:
        """Shape of every buffer: [slots, B, C, ...] for what grows with the tokens, [T L, B, W, G, dh] for the
        window.
        """
        shapes = {name: (slots, batch, capacity, *rest) for name, (slots, *rest) in self.token_shapes(config).items()}
        if self.window_tokens():
            window = (
                config.num_loops * config.num_layers,
                batch,
                self.window_tokens(),
                config.num_kv_heads,
                config.head_dim,
            )
            shapes |= {"window_k": window, "window_v": window}
        return shapes

    def init_cache(self, config: OuroConfig, batch: int, capacity: int, dtype: DTypeLike) -> Cache:
        """An empty cache for `capacity` tokens a sequence."""
        self.check(config)
        shapes = self.cache_shapes(config, batch, capacity)
        return Cache({name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}, jnp.zeros(batch, jnp.int32))

    def cache_bytes(self, config: OuroConfig, tokens: int, dtype: DTypeLike) -> int:
        """Bytes of one sequence's cache at a capacity of `tokens`."""
        numbers = sum(math.prod(shape) for shape in self.cache_shapes(config, 1, tokens).values())
        return numbers * jnp.dtype(dtype).itemsize

    @abc.abstractmethod
    def prefill(
        self, config: OuroConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform:
        """Attention of the prompt: one exact pass over `tokens` right-padded tokens that fills an empty cache."""

    @abc.abstractmethod
    def decode(self, config: OuroConfig, maps: Maps, cache: Cache) -> Transform:
        """Attention of one new token per sequence, at position `cache.lengths`."""

    @abc.abstractmethod
    def swapped(self, config: OuroConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        """Attention of a parallel pass under the decoding rule, reading from a prefilled cache what decoding reads from
        the cache.
        """

    def to_config(self) -> dict[str, Any]:
        """The entry `<interchange>_config` of an exported `config.json`: the fields that are set."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
            if value is not None
        }

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> Scheme:
        """The inverse of `to_config`. Raises `SchemeError` for fields that are missing, unknown or of another type."""
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        for problem, names in (("missing", required - entry.keys()), ("unknown", entry.keys() - fields.keys())):
            if names:
                raise SchemeError(f"{cls.interchange}_config: {problem} {sorted(names)}; its fields are {list(fields)}")
        for name, value in entry.items():
            numbers = value if isinstance(value, list) else [value]
            if (isinstance(value, list) and name in required) or any(type(number) is not int for number in numbers):
                expected = "an integer" if name in required else "a list of integers"
                raise SchemeError(f"{cls.interchange}_config: {name} must be {expected}, found {value!r}")
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attention:
    """A scheme together with its maps, stacked over layers: name -> [L, ...]."""

    scheme: Scheme = dataclasses.field(metadata={"static": True})
    params: dict[str, Array] = dataclasses.field(default_factory=dict)


def put_tokens(buffer: Array, slot: Array | int, value: Array) -> Array:
    """Writes `value` [B, S, ...] to the first S tokens of `buffer[slot]` [B, C, ...], in place when the buffer is
    donated.
    """
    value = value.astype(buffer.dtype)
    zero = jnp.zeros((), jnp.int32)
    starts = (jnp.asarray(slot, jnp.int32), *[zero] * (buffer.ndim - 1))
    return jax.lax.dynamic_update_slice(buffer, value[None], starts)


def new_token(buffers: dict[str, Array]) -> dict[str, Array]:
    """Zeros for what one new token adds to a cache: [slots, B, ...] in float32 or wider for each buffer [slots, B, C,
    ...].
    """
    shape = lambda buffer: buffer.shape[:2] + buffer.shape[3:]
    return {name: jnp.zeros(shape(buffer), accumulation_dtype(buffer.dtype)) for name, buffer in buffers.items()}


def store_token(buffers: dict[str, Array], new: dict[str, Array], position: Int[Array, " B"]) -> dict[str, Array]:
    """Writes what `new_token` was filled with at each sequence's `position`; in a ring of W tokens that is slot
    `position` mod W.

    A decode step only reads the cache until its last loop is over, and then stores its token here, once: XLA copies a
    buffer that is read and written in turns inside a loop.
    """
    put = lambda buffer, value: buffer.at[:, jnp.arange(position.shape[0]), position % buffer.shape[2]].set(
        value.astype(buffer.dtype)
    )
    return {name: put(buffer, new[name]) for name, buffer in buffers.items()}


def slot_of(config: OuroConfig, inputs: LayerInputs) -> Int[Array, ""]:
    """Slot of a layer at a loop in buffers that keep every loop's own entries: t * L + l."""
    return inputs.loop * config.num_layers + inputs.layer
