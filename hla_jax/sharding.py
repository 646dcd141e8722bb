"""Where everything lies on a mesh of devices: one table from the logical axes of arrays to the axes of the mesh.

    mesh = sharding.make_mesh(fsdp=8, sequence=2)
    with jax.set_mesh(mesh):
        ...                      # what is traced here is spread as the table says

The mesh has four axes: `data` (each part has its own rows of a batch, and a copy of everything else), `fsdp` (rows too,
and weights, maps and optimizer are in parts that are gathered layer by layer), `tensor` (heads and the MLP), and
`sequence` (the tokens of a row, for documents too long for one device). Axes of size 1 change nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from hla_jax.config import ConfigError

MESH_AXES = ("data", "fsdp", "tensor", "sequence")

Rules = Mapping[str, str | tuple[str, ...]]
Axes = Sequence[str | None]

RULES: Rules = {
    # Batches and what is computed from them.
    "batch": ("data", "fsdp"),
    "tokens": "sequence",
    "queries": "sequence",
    "captured": "tensor",  # hidden size of the hidden states that are kept for all loops and layers
    # Base weights.
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "embed": "fsdp",
    # Maps, beside "heads" and "embed"; the optimizer's moments lie as the maps do.
    "rank": "fsdp",
}
"""Logical axis -> axes of the mesh. An axis that is not here is whole on every device."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes; one of them may be -1: all devices that are left."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def make(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh, over all devices by default. Raises `ConfigError` where sizes and devices do not fit."""
        devices = jax.devices() if devices is None else devices
        sizes = [getattr(self, axis) for axis in MESH_AXES]
        known = math.prod(size for size in sizes if size != -1)
        if sizes.count(-1) > 1 or known < 1 or len(devices) % known:
            raise ConfigError(f"mesh {self}: does not divide {len(devices)} devices")
        sizes = [len(devices) // known if size == -1 else size for size in sizes]
        if math.prod(sizes) != len(devices):
            raise ConfigError(
                f"mesh {self}: is of {math.prod(sizes)} devices, found {len(devices)}; one axis may be -1"
            )
        # `jax.make_mesh` would refuse 8 x 2 on the 4 x 4 chips of a v6e-16, though not on those of a v5e-16.
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        # Auto: XLA derives the shardings of what is computed from those that are given. With explicit axes every
        # operation of the models and losses would have to say how its result lies.
        return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def make_mesh(**sizes: int) -> Mesh:
    """`MeshConfig(**sizes).make()`."""
    return MeshConfig(**sizes).make()


def of_job(sizes: MeshConfig | None) -> Mesh | None:
    """The mesh of a training job; None computes on one device, which several processes cannot share."""
    if sizes is None and jax.process_count() > 1:
        raise ConfigError(f"{jax.process_count()} processes need a mesh over their devices: the config has mesh=None")
    return sizes.make() if sizes else None


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """`jax.set_mesh`, or nothing without a mesh."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def spec(
    axes: Axes,
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Rules = RULES,
    units: Mapping[str, int] | None = None,
) -> PartitionSpec:
    """How an array with these logical axes is split.

    A dimension takes those of its mesh axes, in order, that divide it and that no dimension before it took. `units`
    tells how many pieces an axis has that must not be cut, such as heads.
    """
    taken: set[str] = set()
    parts = []
    for axis, size in zip(axes, shape, strict=True):
        pieces = (units or {}).get(axis or "", size)
        part = tuple(name for name in _fitting(axis, pieces, mesh, rules) if name not in taken)
        taken.update(part)
        parts.append(part[0] if len(part) == 1 else part or None)
    return PartitionSpec(*parts)


def _fitting(axis: str | None, size: int, mesh: Mesh | AbstractMesh, rules: Rules) -> list[str]:
    wanted, sizes = rules.get(axis or "", ()), _sizes(mesh)
    fitting = []
    for name in (wanted,) if isinstance(wanted, str) else wanted:
        if name not in sizes:
            continue
        if size % sizes[name]:
            break
        fitting.append(name)
        size //= sizes[name]
    return fitting


def _sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Of the axes over which arrays can be split: inside of `shard_map` they are split over its own ones already.

    Raises:
      ConfigError: an axis is explicit, as `jax.make_mesh` makes them unless told otherwise.
    """
    if AxisType.Explicit in mesh.axis_types:
        raise ConfigError(
            f"mesh: axes {mesh.axis_names} must be of the type Auto, found {mesh.axis_types}; "
            "hla_jax.sharding.make_mesh(fsdp=...) makes such, or jax.make_mesh(..., axis_types=...)"
        )
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual
    }


def named(axes: Axes, shape: Sequence[int], mesh: Mesh, rules: Rules = RULES) -> NamedSharding:
    """`spec` on a mesh."""
    return NamedSharding(mesh, spec(axes, shape, mesh, rules))


def maps(
    shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, Axes], num_layers: int, mesh: Mesh
) -> dict[str, NamedSharding]:
    """Of the maps of an attention scheme [L, ...], from the shapes and the logical axes of one layer's."""
    return {
        name: named((None, *axes.get(name, (None,) * len(shape))), (num_layers, *shape), mesh)
        for name, shape in shapes.items()
    }


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def current() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh`, if it has one of our axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if any(_sizes(mesh).get(axis, 1) > 1 for axis in MESH_AXES) else None


def parts(axis: str) -> int:
    """Into how many parts the current mesh splits a logical axis that is long enough."""
    mesh, names = current(), RULES[axis]
    names = (names,) if isinstance(names, str) else names
    return 1 if mesh is None else math.prod(_sizes(mesh).get(name, 1) for name in names)


def constrain(x: Array, *axes: str | None) -> Array:
    """Says how an intermediate array lies on the current mesh."""
    mesh = current()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def split(
    function: Callable[..., Any], inputs: Sequence[Axes | None], outputs: Axes, without: Sequence[str] = ()
) -> Callable[..., Any]:
    """`function`, run by each device of the current mesh on its own part of the arrays.

    Args:
      function: of arrays, or pytrees of them.
      inputs: the logical axes of each array among the arguments, in order.
      outputs: the logical axes that all results have. An axis "parts" has one element in the function's result and one
        for each device in the caller's: what the caller sums up.
      without: mesh axes that stay with XLA.
    """
    mesh = current()
    if mesh is None:
        return function

    def call(*arguments: Any) -> Any:
        arrays, structure = jax.tree.flatten(arguments)
        of_arrays = [axes for axes in inputs if axes is not None]
        sizes: dict[str | None, int] = {}
        for axes, x in zip(of_arrays, arrays, strict=True):
            for axis, size in zip(axes, x.shape, strict=True):
                sizes[axis] = math.gcd(sizes.get(axis, 0), size)
        over = {
            axis: tuple(name for name in _fitting(axis, size, mesh, RULES) if name not in without)
            for axis, size in sizes.items()
        }
        over["parts"] = tuple(dict.fromkeys(name for names in over.values() for name in names))
        place = lambda axes: PartitionSpec(*(over[axis] or None for axis in axes))
        return jax.shard_map(
            function,
            in_specs=jax.tree.unflatten(structure, map(place, of_arrays)),
            out_specs=place(outputs),
            axis_names=set(mesh.axis_names) - set(without),
            check_vma=False,
        )(*arguments)

    return call


def like(tree: Any, template: Any, placed: Any, mesh: Mesh) -> Any:
    """Shardings for `tree`, such as a training state: a leaf whose path ends as one of `template`, with its shape, lies
    as that one does in `placed`; every other leaf is whole on every device.
    """
    keys = lambda path: tuple(str(key) for key in path)
    known = {
        keys(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(jax.tree.leaves_with_path(template), jax.tree.leaves(placed), strict=True)
    }

    def place(path: Any, leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            shape, sharding = known.get(keys(path[start:]), (None, None))
            if shape is not None and shape == leaf.shape:
                return sharding
        return replicated(mesh)

    return jax.tree.map_with_path(place, tree)


def row_parts(mesh: Mesh | None) -> int:
    """Into how many parts the rows of a batch are split."""
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in RULES["batch"])


def check_rows(rows: int, what: str, micro_batches: int, mesh: Mesh | None) -> None:
    """Raises `ConfigError` where the rows of a batch ("rows of 64 tokens") do not split evenly."""
    split = row_parts(mesh)
    if rows % (micro_batches * split):
        raise ConfigError(
            f"{rows} {what} in {micro_batches} micro-batches do not split over the mesh's data x fsdp = {split}: rows "
            f"must be a multiple of micro_batches x {split}"
        )


def reader(mesh: Mesh | None) -> tuple[int, int]:
    """(index, count) of the groups of processes that read the same rows of every batch.

    Raises:
      ConfigError: the devices of a process hold other rows than a whole group's.
    """
    if mesh is None:
        return jax.process_index(), jax.process_count()
    held = rows_of_processes(mesh)
    groups = sorted(set(held.values()))
    return groups.index(held[jax.process_index()]), len(groups)


def rows_of_processes(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """Which parts of the rows of a batch the devices of each process hold, by the process's index.

    They need not follow each other: devices lie along an axis as the cables do. Raises `ConfigError` where processes
    share some of their parts but not all.
    """
    parts = row_parts(mesh)
    place = NamedSharding(mesh, PartitionSpec(RULES["batch"])).devices_indices_map((parts,))
    held: dict[int, set[int]] = {}
    device: Any
    for device, (rows,) in place.items():
        held.setdefault(device.process_index, set()).update(range(parts)[rows])
    found = {process: tuple(sorted(rows)) for process, rows in held.items()}
    groups = sorted(set(found.values()))
    if sorted(row for rows in groups for row in rows) != list(range(parts)) or len({*map(len, groups)}) > 1:
        raise ConfigError(f"mesh {dict(mesh.shape)}: processes hold rows {groups} of a batch, which is no partition")
    return found


def put_rows(rows: Any, mesh: Mesh | None) -> Any:
    """A batch whose rows lie over the mesh, from the rows [B / readers, ...] that this process read."""
    if mesh is None:
        return rows
    _, count = reader(mesh)

    def put(x: np.ndarray) -> Array:
        shape = (count * x.shape[0], *x.shape[1:])
        return jax.make_array_from_process_local_data(named(("batch",) + (None,) * (x.ndim - 1), shape, mesh), x, shape)

    return jax.tree.map(put, rows)


def put_shared(batch: Any, mesh: Mesh | None) -> Any:
    """A batch whose rows lie over the mesh, from all its rows, which every process has read."""
    if mesh is None:
        return batch
    rows = lambda x: named(("batch",) + (None,) * (x.ndim - 1), x.shape, mesh)
    return put(batch, jax.tree.map(rows, batch))


def put(tree: Any, shardings: Any) -> Any:
    """Arrays that every process has, each device with its own part."""

    def place(x: Any, sharding: NamedSharding) -> Array:
        if isinstance(x, Array) and x.sharding == sharding:
            return x
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = place(jax.random.key_data(x), NamedSharding(sharding.mesh, PartitionSpec()))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree, shardings)


def on_one_device(tree: Any) -> Any:
    """The same arrays, whole, on the default device."""
    return jax.tree.map(jnp.asarray, to_host(tree))


def to_host(tree: Any) -> Any:
    """Whole arrays in every process's memory."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
