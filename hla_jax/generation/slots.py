"""The engine's slots as the devices hold them: one cache of any scheme with a row a slot, and what decoding needs of
the request in each.

With a model whose parameters are spread over a mesh that has an axis "data", the slots are spread over that axis (axis
1 of every buffer, axis 0 of everything else). Each device, or group of devices that share the weights, decodes its own
slots, and reads its share of a batch of prompts, without a word to the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hla_jax.attention.outer import whole
from hla_jax.attention.scheme import Attention, Cache
from hla_jax.config import ModelConfig
from hla_jax.generation import decode
from hla_jax.generation.generate import capacity_bucket, pad
from hla_jax.generation.sampling import BatchSampling
from hla_jax.model import Model
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Int, Key

AXIS = "data"
_WHOLE = PartitionSpec()


class Settings(NamedTuple):
    """What `decode.advance` needs to know of the requests in the slots."""

    sampling: BatchSampling
    keys: Key[Array, " B"]
    stop: Int[Array, "B E"]
    limit: Int[Array, " B"]


def groups(model: Model) -> int:
    """Over how many devices, or groups of them, the slots are spread."""
    mesh = _mesh(model.params)
    return mesh.shape[AXIS] if mesh else 1


def whole_groups(model: Model, count: int) -> int:
    """`count`, rounded up to a multiple of the groups."""
    return -(-count // groups(model)) * groups(model)


class Slots:
    """`count` slots, all free; a multiple of `groups(model)`. Made anew after an error: it may have lost the cache."""

    def __init__(self, model: Model, attention: Attention, count: int, capacity: int) -> None:
        self._model, self._mesh, self._count = model, _mesh(model.params), count
        self._attention = _on_mesh(attention, self._mesh)
        dtype = model.params["embed_tokens"].dtype

        def empty() -> decode.Progress:
            scheme = whole(model.config, attention.scheme)
            cache = scheme.init_cache(model.config, count, capacity_bucket(capacity), dtype)
            token, made = jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.int32)
            return decode.Progress(cache, token, made, jnp.ones(count, bool))

        if self._mesh is None:
            self.progress = empty()
        else:
            place = lambda spec: NamedSharding(self._mesh, spec)  # type: ignore[arg-type]
            shardings = jax.tree.map(place, _specs(jax.eval_shape(empty)))
            self.progress = jax.jit(empty, out_shardings=shardings)()

    def enter(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        width: int,
        settings: Settings,
        given: Sequence[int],
    ) -> Int[Array, " R"]:
        """Reads prompts into slots. `settings` and `given` (a known first token, or -1) have a row for each prompt, and
        rows for nobody up to a multiple of the groups. Returns the first token of each prompt, without waiting for it.
        """
        rows = len(given)
        tokens, lengths = pad([*prompts, *[[0]] * (rows - len(prompts))], width)
        at = jnp.asarray([*slots, *[self._count] * (rows - len(slots))], jnp.int32)  # rows of no prompt go nowhere
        model = self._model
        read = (model.params, model.config, self._attention, tokens, lengths, width)
        logits, filled = decode.prefill(*read) if self._mesh is None else _prefill(*read, self._mesh)
        new = _start(logits, filled, settings, jnp.asarray(given, jnp.int32)[:, None])
        self.progress = _put(self.progress, new, at, self._mesh)
        return new.token[: len(prompts)]

    def decode(
        self, settings: Settings, count: int, enough: Int[Array, ""], given: Int[Array, "B M"] | None
    ) -> Int[np.ndarray, "B N"]:
        """Decodes up to `count` tokens; see `decode.advance`. `enough` counts in each group by itself."""
        model, rest = self._model, (self.progress, *settings, count, given, enough)
        if self._mesh is None:
            out, self.progress = decode.advance(model.params, model.config, self._attention, *rest)
        else:
            out, self.progress = _advance(model.params, model.config, self._attention, *rest, self._mesh)
        return np.asarray(out)

    def delete(self) -> None:
        """Frees the cache's memory."""
        for leaf in jax.tree.leaves(self.progress):
            if not leaf.is_deleted():
                leaf.delete()


def _mesh(params: Params) -> Mesh | None:
    """The mesh of the parameters, if it has an axis for slots."""
    sharding = params["embed_tokens"].sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.shape.get(AXIS, 1) > 1 else None


def _on_mesh(attention: Attention, mesh: Mesh | None) -> Attention:
    """Maps that were fitted on one device, on all of them."""
    if mesh is None or all(leaf.sharding.device_set == set(mesh.devices.flat) for leaf in attention.params.values()):
        return attention
    return dataclasses.replace(attention, params=jax.device_put(attention.params, NamedSharding(mesh, _WHOLE)))


def _specs(tree: Any) -> Any:
    """How the slots of each leaf are spread: buffers of a cache [slots, B, ...] by axis 1, all else by axis 0."""
    return jax.tree.map(lambda leaf: PartitionSpec(None, AXIS) if leaf.ndim > 2 else PartitionSpec(AXIS), tree)


def _in_groups(
    function: Callable[..., Any], mesh: Mesh, weights: tuple[Any, ...], rows: tuple[Any, ...], out: Any
) -> Any:
    """`function(*weights, *rows)`, each group on its own rows; `out` is like its result."""
    out_specs = _specs(out)
    in_specs = (*[_WHOLE] * len(weights), *map(_specs, rows))
    spread = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False
    )
    return spread(*weights, *rows)


@functools.partial(jax.jit, static_argnames=("config", "width", "mesh"))
def _prefill(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    tokens: Int[Array, "R S"],
    lengths: Int[Array, " R"],
    width: int,
    mesh: Mesh,
) -> tuple[Array, Cache]:
    """`decode.prefill`, each group its share of the prompts."""
    read = lambda params, attention, tokens, lengths: decode.prefill(params, config, attention, tokens, lengths, width)
    like = jax.eval_shape(read, params, attention, tokens, lengths)
    return _in_groups(read, mesh, (params, attention), (tokens, lengths), like)


@functools.partial(
    jax.jit,
    static_argnames=("config", "count", "mesh"),
    donate_argnames="progress",
    compiler_options=decode.READ_WEIGHTS_IN_PLACE,
)
def _advance(
    params: Params,
    config: ModelConfig,
    attention: Attention,
    progress: decode.Progress,
    sampling: BatchSampling,
    keys: Key[Array, " B"],
    stop: Int[Array, "B E"],
    limit: Int[Array, " B"],
    count: int,
    given: Int[Array, "B M"] | None,
    enough: Int[Array, ""],
    mesh: Mesh,
) -> tuple[Int[Array, "B N"], decode.Progress]:
    """`decode.advance` of each group's slots."""

    def advance(params, attention, enough, progress, sampling, keys, stop, limit, given):
        # Its own jit has compiler options, which only an outermost one may have.
        inner = decode.advance.__wrapped__  # type: ignore[attr-defined]
        return inner(params, config, attention, progress, sampling, keys, stop, limit, count, given, enough)

    rows = (progress, sampling, keys, stop, limit, given)
    return _in_groups(advance, mesh, (params, attention, enough), rows, (stop, progress))


@jax.jit
def _start(logits: Array, filled: Cache, settings: Settings, given: Int[Array, "R 1"]) -> decode.Progress:
    """Of prompts that were read, with the token after each."""
    return decode.start(logits, filled, settings.sampling, settings.keys, settings.stop, given)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="progress")
def _put(
    progress: decode.Progress, new: decode.Progress, slots: Int[Array, " R"], mesh: Mesh | None
) -> decode.Progress:
    """Puts rows into slots; those beyond the last slot go nowhere. Tokens behind a prompt stay as they were: nothing
    reads them.
    """
    if mesh is None:
        return _put_rows(progress, new, slots)

    def put(new: decode.Progress, slots: Int[Array, " R"], mine: decode.Progress) -> decode.Progress:
        count = mine.token.shape[0]
        own = slots - jax.lax.axis_index(AXIS) * count
        return _put_rows(mine, new, jnp.where(own < 0, count, own))

    return _in_groups(put, mesh, (new, slots), (progress,), progress)


def _put_rows(progress: decode.Progress, new: decode.Progress, slots: Int[Array, " R"]) -> decode.Progress:
    def buffer(all_slots: Array, rows: Array) -> Array:
        return all_slots.at[:, slots, : rows.shape[2]].set(rows.astype(all_slots.dtype), mode="drop")

    put = lambda all_slots, rows: all_slots.at[slots].set(rows, mode="drop")
    buffers = {name: buffer(progress.cache.buffers[name], rows) for name, rows in new.cache.buffers.items()}
    cache = dataclasses.replace(progress.cache, buffers=buffers, lengths=put(progress.cache.lengths, new.cache.lengths))
    return decode.Progress(
        cache, put(progress.token, new.token), put(progress.made, new.made), put(progress.done, new.done)
    )
