"""Checkpoints come back to the bit, or one clear error; a damaged one is set aside."""

import json
import pathlib
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from hla_jax.training.checkpoints import CheckpointError, Checkpoints, _checksums


def make_state(seed: int = 0):
    a, b = jax.random.split(jax.random.key(seed))
    return {
        "params": {"w": jax.random.normal(a, (300, 70)), "half": jax.random.normal(b, (5,), jnp.bfloat16)},
        "step": jnp.int32(16_777_217),  # the first integer that float32 does not hold
        "rng": jax.random.key(seed + 7),
        "moments": (jnp.zeros(3), jnp.ones((2, 2))),
    }


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert x.dtype == y.dtype
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def write(directory: pathlib.Path, steps, **options) -> Checkpoints:
    checkpoints = Checkpoints(directory, keep=options.pop("keep", 5), **options)
    for step in steps:
        checkpoints.save(step, make_state(step), {"read": [step, {"offset": None}]})
    checkpoints.close()
    return Checkpoints(directory, keep=5)


def test_nothing_there_is_a_fresh_start(tmp_path):
    assert Checkpoints(tmp_path / "new", keep=1).restore(make_state()) is None


def test_restores_the_newest_to_the_bit(tmp_path):
    state, data = write(tmp_path, [1, 20, 3]).restore(make_state())
    assert_same(state, make_state(20))
    assert data == {"read": [20, {"offset": None}]}
    # The restored key is a working key of the same kind.
    np.testing.assert_array_equal(jax.random.normal(state["rng"]), jax.random.normal(make_state(20)["rng"]))


def test_keeps_the_newest_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, best_metric="kl")
    for step, kl in enumerate([0.5, 0.1, 0.3, None, 0.4], start=1):
        checkpoints.save(step, make_state(), {}, None if kl is None else {"kl": kl, "other": -float(step)})
    assert checkpoints.steps == [2, 4, 5]


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in range(1, 6):
        x = jnp.full((400, 1000), step, jnp.float32)
        checkpoints.save(step, {"x": x}, {})
        for _ in range(5):
            x = overwrite(x)
        x.block_until_ready()
    for step in range(5, 0, -1):
        state, _ = checkpoints.restore({"x": jnp.zeros((400, 1000))})
        np.testing.assert_array_equal(state["x"], np.full((400, 1000), step, np.float32))
        checkpoints.close()
        (tmp_path / str(step)).rename(tmp_path / f"moved-{step}")
        checkpoints = Checkpoints(tmp_path, keep=9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": jnp.float32(0)}, r"step: expected float32\[\], found int32\[\]"),
        ({"params": {"w": jnp.zeros((300, 70), jnp.bfloat16)}}, r"params.w: expected bfloat16.*, found float32"),
        ({"params": {"w": jnp.zeros((70, 300))}}, r"params.w: expected float32\[70, 300\], found float32\[300, 70\]"),
        ({"more": jnp.zeros(1)}, r"lacks \['more'\], and has unexpected nothing"),
        ({"moments": (jnp.zeros(3),)}, r"lacks nothing, and has unexpected \['moments.1'\]"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path, change, message):
    like = make_state()
    like = like | {"params": like["params"] | change.pop("params", {})} | change
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path, [4]).restore(like)


def _truncate(checkpoint: pathlib.Path) -> None:
    for path in checkpoint.rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-200])


def _flip(checkpoint: pathlib.Path) -> None:
    largest = max(checkpoint.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x55
    largest.write_bytes(bytes(content))


def test_checksums_see_any_changed_number():
    leaves = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4, jnp.bfloat16), "c": jnp.array([True, False])}
    before = _checksums(leaves)
    changes = {"a": leaves["a"][:, ::-1], "b": leaves["b"].at[2].set(1.0078125), "c": leaves["c"][::-1]}
    for name, changed in changes.items():
        assert _checksums({name: changed})[name] != before[name]


def _lose_manifest(checkpoint: pathlib.Path) -> None:
    (checkpoint / "state" / "manifest.ocdbt").unlink()


def _lose_metadata(checkpoint: pathlib.Path) -> None:
    (checkpoint / "state" / "_METADATA").unlink()


def _lose_position(checkpoint: pathlib.Path) -> None:
    (checkpoint / "_CHECKPOINT_METADATA").write_text("{")


@pytest.mark.parametrize("damage", [_truncate, _flip, _lose_manifest, _lose_metadata, _lose_position])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(tmp_path, damage):
    checkpoints = write(tmp_path, [1, 2, 3])
    damage(tmp_path / "3")
    with pytest.warns(UserWarning, match=f"{tmp_path}/3: this checkpoint is damaged.*the one before"):
        state, data = checkpoints.restore(make_state())
    assert_same(state, make_state(2))
    assert data["read"][0] == 2
    assert (tmp_path / "damaged-3").is_dir()
    checkpoints.save(3, make_state(3), {})  # the run reaches step 3 again
    state, _ = checkpoints.restore(make_state())
    assert_same(state, make_state(3))


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path):
    checkpoints = write(tmp_path, [1, 2])
    for step in "12":
        _lose_manifest(tmp_path / step)
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(CheckpointError, match=r"all checkpoints \(steps \[1, 2\]\) are damaged"),
    ):
        checkpoints.restore(make_state())


def test_another_number_of_processes_is_refused(tmp_path):
    checkpoints = write(tmp_path, [1])
    path = tmp_path / "1" / "_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    metadata["custom_metadata"]["data"].append({})
    path.write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"written by 2 processes.*this run has 1"):
        Checkpoints(tmp_path, keep=5).restore(make_state())
    checkpoints.close()


def test_what_cannot_be_written_loses_nothing(tmp_path):
    """The system refuses to write more than a few bytes to any file, as a full disk does."""
    checkpoints = write(tmp_path, [1])

    def save_and_wait(checkpoints):
        checkpoints.save(2, make_state(2), {})
        checkpoints.wait()

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"cannot write a checkpoint.*last good checkpoint is {tmp_path}/1"):
            save_and_wait(checkpoints)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = Checkpoints(tmp_path, keep=5)  # the run is started again, and there is room
    assert_same(again.restore(make_state())[0], make_state(1))
    again.save(2, make_state(2), {})
    assert again.steps == [1, 2]
    assert_same(again.restore(make_state())[0], make_state(2))


def test_saving_asks_nobody_whether_to_stop(tmp_path, monkeypatch):
    """The loop does, with a count of its own; see `compat.without_preemption`."""
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(3, make_state(), {})
    assert checkpoints.steps == [3]
    checkpoints.close()
    assert asked == []
