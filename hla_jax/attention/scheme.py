"""The contract of a cache scheme.

A scheme is a frozen dataclass of static sizes. For a model's config it declares the maps it adds to every layer and the
buffers of its cache, and it turns them into attention: a `Transform` of stages for `models.looped.run`, the state they
carry, and a `finish` that makes of that state the next cache, or another pass over the same tokens. Nothing else in the
package knows what a cache contains.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from hla_jax.config import ModelConfig
from hla_jax.kernels.latent_decode import Stored
from hla_jax.models import looped
from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.stages import Attend, LayerInputs, Params, Stage

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Maps = Mapping[str, Array]
Shape = tuple[int, ...]
Made = TypeVar("Made")


class SchemeError(ValueError):
    """A scheme's sizes do not fit the model; the message says which rule they break."""


class Eviction(NamedTuple):
    """Which tokens stay: the first ones, and the most recent ones up to `budget` in all."""

    first: int
    budget: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Buffers of a scheme for a batch of sequences, and how many tokens each sequence has stored.

    Token p lies in slot p. With `eviction`, buffers of `budget` slots are a ring behind the first tokens.
    """

    buffers: dict[str, Array]
    lengths: Int[Array, " B"]
    eviction: Eviction | None = dataclasses.field(default=None, metadata={"static": True})

    def positions(self, capacity: int) -> Int[Array, "#B C"]:
        """Position of the token in each slot; slots that were never filled have any."""
        slots = jnp.arange(capacity)[None]
        if self.eviction is None or capacity < self.eviction.budget:
            return slots
        first, last = self.eviction.first, self.lengths[:, None] - 1
        return jnp.where(slots < first, slots, last - (last - slots) % (capacity - first))

    def past(self, capacity: int, window: int = 0) -> tuple[Int[Array, " B"], Bool[Array, "B C"] | None]:
        """What a new token reads beyond its window: the first slots of its sequence, and which of them (None: all)."""
        if self.eviction is None or capacity < self.eviction.budget:
            return jnp.maximum(self.lengths - window, 0), None
        beyond = self.positions(capacity) < self.lengths[:, None] - window
        return jnp.minimum(self.lengths, capacity), beyond if window else None

    def stored(self, keys: str, values: str, window: int = 0) -> Stored:
        """What a new token reads beyond its window, of the first slot of two buffers; a layer puts its own slot in."""
        lengths, visible = self.past(self.buffers[keys].shape[2], window)
        slot = jnp.zeros((), jnp.int32)
        return Stored(self.buffers[keys], self.buffers[values], slot, once(lengths), visible=visible)

    def store(self, new: dict[str, Array]) -> Cache:
        """The cache with one more token a sequence: what `new_token` was filled with. A window is a ring of its own.

        A decode step only reads the cache until its last loop is over, and then stores its token here, once: XLA copies
        a buffer that is read and written in turns inside a loop.
        """
        rows, position = jnp.arange(self.lengths.shape[0]), self.lengths

        def put(name: str, buffer: Array) -> Array:
            first = self.eviction.first if self.eviction and not name.startswith("window") else 0
            ring = first + (position - first) % max(buffer.shape[2] - first, 1)
            return buffer.at[:, rows, jnp.where(position < first, position, ring)].set(new[name].astype(buffer.dtype))

        buffers = {name: put(name, buffer) for name, buffer in self.buffers.items()}
        return dataclasses.replace(self, buffers=buffers, lengths=position + 1)


class Transform(NamedTuple, Generic[Made]):
    """Attention of one forward pass: stages and their state for `models.looped.run`, and what the last state makes: the
    next cache, or one more pass over the same tokens, whose hidden states then count.
    """

    stages: Sequence[Stage]
    state: Any
    finish: Callable[[Any], Made]
    outer: Attend | None = None
    """Of the layers outside of the loops, see `attention.outer`."""

    def then(self, following: Callable[[Cache], Any]) -> Transform:
        """This transform with a finish that hands the cache of its last pass on."""

        def finish(state: Any) -> Any:
            made: Any = self.finish(state)
            return made.then(following) if isinstance(made, Transform) else following(made)

        return self._replace(finish=finish)


def run_passes(
    params: Params, config: ModelConfig, tokens: Int[Array, "B S"], transform: Transform
) -> tuple[Float[Array, "B S d"], Cache]:
    """Runs a transform and those that follow from it. Returns the last pass's hidden states, and the cache."""
    hidden, state = looped.run(params, config, tokens, transform.stages, transform.state, transform.outer)
    result = transform.finish(state)
    return (hidden, result) if isinstance(result, Cache) else run_passes(params, config, tokens, result)


class Scheme(abc.ABC):
    """What every cache scheme provides. Implementations are frozen dataclasses, hashable and static under `jax.jit`."""

    interchange: ClassVar[str]
    """Name of the scheme's maps and config entry in a checkpoint (`<attention>.<name>.*`, `<name>_config`)."""

    def check(self, config: ModelConfig) -> None:  # noqa: B027 (most schemes fit every model)
        """Raises `SchemeError` if the sizes do not fit the model."""

    def map_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """Shape of every map of one layer; stacked over layers in `Attention.params`."""
        return {}

    def map_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes (`sharding.RULES`) of the maps of one layer that are spread over a mesh."""
        return {}

    @abc.abstractmethod
    def token_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """Buffers that grow with the tokens: name to (slots, numbers of a token), around the [B, C] axes."""

    def window_tokens(self) -> int:
        """Recent tokens kept exactly, in every loop."""
        return 0

    def with_loops(self, loops: int) -> Scheme:
        """The same for tokens that do not all run the same number of loops, but at most `loops` each. Raises
        `SchemeError` for a scheme that cannot keep such tokens together.
        """
        raise SchemeError(f"{type(self).__name__} keeps tokens of one number of loops only; FullCache mixes them")

    def cache_shapes(
        self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Every buffer: [slots, B, C, numbers] for what grows with the tokens, [T L, B, W, G dh] for the window."""
        shapes = {name: (slots, batch, capacity, *rest) for name, (slots, *rest) in self.token_shapes(config).items()}
        if window := self.window_tokens():
            slots, width = config.num_loops * config.num_layers, config.num_kv_heads * config.head_dim
            shapes |= dict.fromkeys(("window_k", "window_v"), (slots, batch, window, width))
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}

    def init_cache(self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike) -> Cache:
        """An empty cache for `capacity` tokens a sequence."""
        self.check(config)
        shapes = self.cache_shapes(config, batch, capacity, dtype)
        buffers = {name: jnp.zeros(buffer.shape, buffer.dtype) for name, buffer in shapes.items()}
        return Cache(buffers, jnp.zeros(batch, jnp.int32))

    @property
    def passes(self) -> int:
        """How many times a decoding step runs the model."""
        return 1

    def reads(self, config: ModelConfig) -> dict[str, float]:
        """How many times a decoding step reads each buffer; a fraction where a step reads only a part of it."""
        return dict.fromkeys(self.cache_shapes(config, 1, 1, jnp.float32), 1)

    def cache_bytes(self, config: ModelConfig, tokens: int, dtype: DTypeLike) -> int:
        """Bytes of one sequence's cache at a capacity of `tokens`."""
        buffers = self.cache_shapes(config, 1, tokens, dtype).values()
        return sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in buffers)

    @abc.abstractmethod
    def fill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform[Cache]:
        """Attention of one exact pass over `tokens` right-padded tokens that fills an empty cache."""

    def prefill(
        self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int, lengths: Int[Array, " B"]
    ) -> Transform:
        """Attention of the prompt, which fills an empty cache: exact, unless the scheme says otherwise."""
        return self.fill(config, maps, cache, tokens, lengths)

    @abc.abstractmethod
    def decode(self, config: ModelConfig, maps: Maps, cache: Cache, implementation: str | None = None) -> Transform:
        """Attention of one new token per sequence, at position `cache.lengths`.

        `implementation` is that of `kernels.latent_decode`; None goes by platform.
        """

    @abc.abstractmethod
    def reread(self, config: ModelConfig, maps: Maps, cache: Cache, tokens: int) -> Transform:
        """Attention of a parallel pass under the decoding rule, reading from a cache that holds all `tokens` tokens in
        order what decoding reads from the cache. Gradients reach the maps and the cache.
        """

    def swapped(self, config: ModelConfig, maps: Maps, batch: int, tokens: int, dtype: DTypeLike) -> Transform:
        """An exact pass that fills a cache, and then `reread`."""
        cache = self.init_cache(config, batch, tokens, dtype)
        exact = self.fill(config, maps, cache, tokens, jnp.full(batch, tokens, jnp.int32))
        return exact.then(lambda cache: self.reread(config, maps, cache, tokens))

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
        hints = typing.get_type_hints(cls)
        for name, value in entry.items():
            allowed = _json_types(hints[name])
            if type(value) not in allowed or (isinstance(value, list) and any(type(x) is not int for x in value)):
                expected = " or ".join(_JSON_NAMES[kind] for kind in allowed)
                raise SchemeError(f"{cls.interchange}_config: {name} must be {expected}, found {value!r}")
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})


_JSON_NAMES = {int: "an integer", bool: "true or false", str: "a string", list: "a list of integers"}


def _json_types(hint: Any) -> list[type]:
    """JSON's types of a field: those of the alternatives of a union; tuples of integers are lists."""
    union = isinstance(hint, types.UnionType)
    kinds = [typing.get_origin(kind) or kind for kind in (typing.get_args(hint) if union else (hint,))]
    return [list if kind is tuple else kind for kind in kinds if kind is not type(None)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attention:
    """A scheme together with its maps, stacked over layers: name -> [L, ...]."""

    scheme: Scheme = dataclasses.field(metadata={"static": True})
    params: dict[str, Array] = dataclasses.field(default_factory=dict)
    implementation: str | None = dataclasses.field(default=None, metadata={"static": True})
    """Of decoding's `kernels.latent_decode`: "reference", "pallas_tpu" or "triton_gpu"; None goes by platform."""


def check_maps(scheme: Scheme, config: ModelConfig, maps: Maps) -> None:
    """Raises `SchemeError` if the scheme does not fit the model, or maps are not those of the scheme for it, or of
    another number of its loops: XLA would read beyond their end without a word.
    """
    scheme.check(config)
    expected, found = _stacked_shapes(scheme, config), {name: tuple(x.shape) for name, x in maps.items()}
    for name, shape in expected.items():
        if found.get(name) == shape:
            continue
        if (loops := loops_of_maps(scheme, config, maps)) is not None:
            raise SchemeError(
                f"the maps are for {loops} loops and the model runs {config.num_loops}: calibrate for "
                f"{config.num_loops}, or see attention.steps.for_steps"
            )
        raise SchemeError(f"{scheme.interchange}.{name} must be {list(shape)}, found {list(found.get(name, ()))}")


def loops_of_maps(scheme: Scheme, config: ModelConfig, maps: Maps) -> int | None:
    """How many loops of the model the maps are for, by their shapes; None if they fit no number of them, or any."""
    shapes = lambda loops: _stacked_shapes(scheme, dataclasses.replace(config, num_loops=loops))
    found, one, two = {name: tuple(x.shape) for name, x in maps.items()}, shapes(1), shapes(2)
    for name, few in one.items():
        for size, first, second in zip(found.get(name, ()), few, two[name], strict=False):
            if first != second:  # sizes grow evenly with the loops
                loops = 1 + (size - first) // (second - first)
                return loops if loops > 0 and shapes(loops).items() <= found.items() else None
    return None


def _stacked_shapes(scheme: Scheme, config: ModelConfig) -> dict[str, Shape]:
    return {name: (config.num_layers, *shape) for name, shape in scheme.map_shapes(config).items()}


def check_cache(scheme: Scheme, config: ModelConfig, cache: Cache) -> None:
    """Raises `SchemeError` if a cache has not the slots of the scheme for this model."""
    for name, shape in scheme.cache_shapes(config, 1, 1, jnp.float32).items():
        if (found := cache.buffers[name].shape[0]) != shape.shape[0]:
            raise SchemeError(
                f"{name} of the cache must have {shape.shape[0]} slots for {config.num_loops} loops, found {found}: it "
                "was filled by another number of loops"
            )


def put_tokens(buffer: Array, slot: Array | int, value: Array) -> Array:
    """Writes `value` [B, S, ...] to the first S tokens of `buffer[slot]` [B, C, ...], in place when the buffer is
    donated.
    """
    value = value.astype(buffer.dtype)
    zero = jnp.zeros((), jnp.int32)
    starts = (jnp.asarray(slot, jnp.int32), *[zero] * (buffer.ndim - 1))
    return jax.lax.dynamic_update_slice(buffer, value[None], starts)


def new_token(buffers: dict[str, Array]) -> dict[str, Array]:
    """Zeros for what one new token adds to a cache: [slots, B, ...] for each buffer [slots, B, C, ...], numbers with a
    fraction in float32 or wider.
    """

    def zeros(buffer: Array) -> Array:
        dtype = buffer.dtype if jnp.issubdtype(buffer.dtype, jnp.integer) else accumulation_dtype(buffer.dtype)
        return jnp.zeros(buffer.shape[:2] + buffer.shape[3:], dtype)

    return {name: zeros(buffer) for name, buffer in buffers.items()}


def once(x: Any) -> Any:
    """`x`, computed before the loops and layers that read it: XLA would move what is cheap into every layer, and a GPU
    launch it each time.
    """
    return jax.lax.optimization_barrier(x)


def merge_heads(x: Float[Array, "... N r"]) -> Float[Array, "... Nr"]:
    """A token's heads side by side, as buffers keep them."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def split_heads(x: Float[Array, "... Nr"], heads: int) -> Float[Array, "... N r"]:
    """The inverse of `merge_heads`."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def slot_of(config: ModelConfig, inputs: LayerInputs) -> Int[Array, ""]:
    """Slot of a layer at a loop in buffers that keep every loop's own entries: t * L + l."""
    return inputs.loop * config.num_layers + inputs.layer
