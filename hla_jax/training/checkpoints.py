"""Checkpoints of a training run: trainable parameters, optimizer, step, random key, and the position of the data.

Orbax writes them, in the background and atomically: a checkpoint is complete or absent. What orbax does not do is here:
it would cast a leaf to the dtype that is asked for without a word, stop at a damaged checkpoint, and not notice a
changed number at all. So shapes and dtypes are compared before reading, and a checksum of every leaf after.
"""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from hla_jax import compat

if TYPE_CHECKING:
    from jaxtyping import PyTree, UInt32

TrainingState = TypeVar("TrainingState", bound=Any)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or does not fit the run that it should continue."""


class Checkpoints:
    """The checkpoints in a directory, one a step.

    Args:
      directory: where they are; made if absent.
      keep: the newest so many stay.
      best_metric: the checkpoint with the smallest value of this metric stays too.
    """

    def __init__(self, directory: pathlib.Path, keep: int, best_metric: str | None = None):
        self.directory = directory.absolute()
        self._keep, self._best_metric = keep, best_metric
        self._saving: Any = None
        self._open()

    def _open(self) -> None:
        policies = ocp.training.preservation_policies
        preserve: Any = policies.LatestN(self._keep)
        if self._best_metric is not None:
            best = policies.BestN(
                get_metric_fn=lambda metrics: metrics[self._best_metric],
                reverse=True,
                n=1,
                keep_checkpoints_without_metrics=False,
            )
            preserve = policies.AnyPreservationPolicy([preserve, best])
        self._checkpointer = ocp.training.Checkpointer(
            self.directory, preservation_policy=preserve, cleanup_tmp_directories=True
        )
        compat.without_preemption(self._checkpointer)

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        self.wait()
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def describe_last(self) -> str:
        """The newest complete checkpoint in words, for messages."""
        steps = [int(path.name) for path in self.directory.iterdir() if path.name.isdigit()]
        if not steps:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is {self.directory / str(max(steps))}"

    def save(
        self, step: int, state: PyTree, data: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Starts to write a checkpoint; the arrays may be overwritten as soon as this returns.

        Args:
          step: its number.
          state: a pytree of arrays (typed random keys included).
          data: this process's position in the data, JSON values.
          metrics: compared by `best_metric`.

        Raises:
          CheckpointError: this checkpoint, or the one before, cannot be written.
        """
        self.wait()
        leaves = {name: _as_array(leaf) for name, leaf in _named_leaves(state).items()}
        checksums = {name: int(value) for name, value in _checksums(leaves).items()}
        scored = None if metrics is None or self._best_metric not in metrics else dict(metrics)
        try:
            self._saving = self._checkpointer.save_checkpointables_async(
                step,
                {"state": leaves},
                force=True,
                metrics=scored,
                custom_metadata={"data": _gather(data), "checksums": checksums},
            )
        except Exception as error:
            raise self._cannot_write(error) from error

    def wait(self) -> None:
        """Returns when the last checkpoint is complete. Raises `CheckpointError` if it could not be written."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.result()
            except Exception as error:
                raise self._cannot_write(error) from error

    def _cannot_write(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.directory}: cannot write a checkpoint ({error}); {self.describe_last()}")

    def restore(self, like: TrainingState) -> tuple[TrainingState, dict[str, Any]] | None:
        """The newest checkpoint that can be read: (state, position of the data), or None where there is no checkpoint.

        A damaged one is named in a warning, moved out of the way (to `damaged-STEP`), and the one before it is used.

        Args:
          like: a state of the expected structure, shapes, dtypes and shardings.

        Raises:
          CheckpointError: the checkpoint's leaves differ from those of `like`, it was written by another number of
            processes, or all checkpoints are damaged.
        """
        steps = self.steps
        for step in reversed(steps):
            try:
                metadata = self._checkpointer.checkpointables_metadata(step)
                saved, written = dict(metadata.metadata["state"]), metadata.custom_metadata
                positions, checksums = written["data"], written["checksums"]
            except Exception as error:
                self._set_aside(step, error)
                continue
            self._check(step, saved, like)
            in_lanes = all("lanes" in position for position in positions)
            if len(positions) != jax.process_count() and not in_lanes:
                raise CheckpointError(
                    f"{self.directory / str(step)}: was written by {len(positions)} processes, each at its position "
                    f"in the data; this run has {jax.process_count()}"
                )
            # Lanes find their own positions among those of all processes, however many there are now.
            position = _all_lanes(positions) if in_lanes else positions[jax.process_index()]
            try:
                return self._read(step, like, checksums), position
            except Exception as error:
                self._set_aside(step, error)
        if steps:
            raise CheckpointError(f"{self.directory}: all checkpoints (steps {steps}) are damaged")
        return None

    def restore_best(self, like: TrainingState) -> tuple[TrainingState, float]:
        """The checkpoint with the smallest `best_metric`, and that; the newest and infinity where none was scored.

        Raises:
          CheckpointError: it is damaged or does not fit `like`, or there is none.
        """
        self.wait()
        reached = {
            one.step: one.metrics[self._best_metric]
            for one in self._checkpointer.checkpoints
            if one.metrics and self._best_metric in one.metrics
        }
        step = min(reached, key=reached.__getitem__) if reached else max(self.steps, default=0)
        try:
            metadata = self._checkpointer.checkpointables_metadata(step)
            saved, checksums = dict(metadata.metadata["state"]), metadata.custom_metadata["checksums"]
        except Exception as error:
            raise CheckpointError(f"{self.directory / str(step)}: cannot be read: {error}") from error
        self._check(step, saved, like)
        return self._read(step, like, checksums), reached.get(step, float("inf"))

    def _check(self, step: int, saved: Mapping[str, Any], like: PyTree) -> None:
        expected = {name: _as_array(leaf) for name, leaf in _named_leaves(like).items()}
        where = self.directory / str(step)
        if saved.keys() != expected.keys():
            missing, unknown = sorted(expected.keys() - saved.keys()), sorted(saved.keys() - expected.keys())
            raise CheckpointError(f"{where}: lacks {missing or 'nothing'}, and has unexpected {unknown or 'nothing'}")
        for name, leaf in expected.items():
            found = saved[name]
            if tuple(found.shape) != leaf.shape or found.dtype != leaf.dtype:
                raise CheckpointError(
                    f"{where}: {name}: expected {leaf.dtype}{list(leaf.shape)}, found {found.dtype}{list(found.shape)}"
                )

    def _read(self, step: int, like: TrainingState, checksums: Mapping[str, int]) -> TrainingState:
        named = _named_leaves(like)
        arrays = {name: _as_array(leaf) for name, leaf in named.items()}
        abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in arrays.items()}
        restored = self._checkpointer.load_checkpointables(step, {"state": abstract})["state"]
        for name, value in _checksums(restored).items():
            if int(value) != checksums[name]:
                raise CheckpointError(f"{name}: checksum {int(value)}, expected {checksums[name]}")
        leaves = [_like(leaf, restored[name]) for name, leaf in named.items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _set_aside(self, step: int, error: Exception) -> None:
        damaged = self.directory / str(step)
        warnings.warn(f"{damaged}: this checkpoint is damaged ({error}); using the one before it", stacklevel=3)
        self._checkpointer.close()
        if jax.process_index() == 0:
            damaged.rename(self.directory / f"damaged-{step}")
        multihost_utils.sync_global_devices("damaged checkpoint set aside")
        self._open()

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()


def _all_lanes(positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"lanes": {number: state for position in positions for number, state in position["lanes"].items()}}


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(tree)}


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_array(leaf: Any) -> Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like(leaf: Any, array: Array) -> Array:
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array


@jax.jit
def _checksums(leaves: Mapping[str, Array]) -> dict[str, UInt32[Array, ""]]:
    """Per leaf, the sum modulo 2^32 of its bits times odd weights: no change of a single number leaves it as it was.

    Computed where the arrays are, so that sharded leaves need no gathering.
    """

    def checksum(x: Array) -> UInt32[Array, ""]:
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
        index = jnp.zeros((), jnp.uint32)
        for axis, size in enumerate(bits.shape):
            index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)

    return {name: checksum(jnp.asarray(leaf)) for name, leaf in leaves.items()}


def _gather(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The positions of all processes: packing makes each read on at its own pace."""
    if jax.process_count() == 1:
        return [dict(data)]
    text = np.frombuffer(json.dumps(data).encode(), np.uint8)
    longest = int(np.max(multihost_utils.process_allgather(np.array(len(text)))))
    padded = multihost_utils.process_allgather(np.pad(text, (0, longest - len(text)), constant_values=ord(" ")))
    return [json.loads(bytes(row)) for row in padded]
