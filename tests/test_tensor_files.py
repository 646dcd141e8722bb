"""Safetensors directories: damaged or contradictory files are named, and nothing half written is ever seen."""

import json
import weakref

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hla_jax import tensor_files
from hla_jax.tensor_files import INDEX, SINGLE, PendingTensor, WeightsError, new_directory, open_tensors

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def shards(tmp_path):
    """Two shards and their index."""
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float16)}, tmp_path / A)
    save_file({"c": np.zeros((1, 4), np.float32)}, tmp_path / B)
    write_index(tmp_path, {"a": A, "b": A, "c": B})
    return tmp_path


def write_index(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(path, *parts):
    with pytest.raises(WeightsError) as caught:
        open_tensors(path)
    for part in parts:
        assert part in str(caught.value)


def test_lists_and_reads_shards(shards):
    tensors = open_tensors(shards)
    assert {name: (t.file.name, t.dtype, t.shape) for name, t in tensors.items()} == {
        "a": (A, "F32", (2, 3)),
        "b": (A, "F16", (2,)),
        "c": (B, "F32", (1, 4)),
    }
    np.testing.assert_array_equal(tensors["a"].read(), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(tensors["a"].read((slice(1, 2), slice(None, 2))), [[3, 4]])


@pytest.mark.parametrize("keep", [0, 4, 60, -1], ids=["empty", "no header", "half a header", "last byte lost"])
def test_truncated_file_is_named(shards, keep):
    content = (shards / A).read_bytes()
    (shards / A).write_bytes(content[:keep])
    refused(shards, A, "truncated or corrupt")


def test_corrupt_header_is_named(tmp_path):
    (tmp_path / SINGLE).write_bytes(np.int64(20).tobytes() + b"{" * 20 + b"0" * 40)
    refused(tmp_path, SINGLE, "truncated or corrupt")


def test_tensor_in_two_shards(shards):
    save_file({"c": np.zeros((1, 4), np.float32), "a": np.zeros((2, 3), np.float32)}, shards / B)
    refused(shards, "tensor a is in two shards", A, B)


def test_index_names_a_missing_shard(shards):
    (shards / B).unlink()
    refused(shards, INDEX, "names shard", B, "not in the directory")


def test_index_may_not_leave_the_directory(shards):
    write_index(shards, {"a": A, "b": A, "c": "../other.safetensors"})
    refused(shards, INDEX, "../other.safetensors")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": A, "c": B}, f"tensor b expected in none, found in {A}"),
        ({"a": A, "b": A, "c": B, "d": B}, f"tensor d expected in {B}, found in none"),
        ({"a": B, "b": A, "c": B}, f"tensor a expected in {B}, found in {A}"),
        ({"a": 1}, "weight_map must map"),
        ([], "weight_map must map"),
    ],
)
def test_index_that_contradicts_its_shards(shards, weight_map, message):
    write_index(shards, weight_map)
    refused(shards, INDEX, message)


def test_pickled_weights_are_never_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    refused(tmp_path, "pickled", "convert")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], f"expected {SINGLE} or {INDEX}, found neither"),
        ([A, B], f"has shards but no {INDEX}"),
        ([SINGLE, INDEX], "remove the one that is stale"),
    ],
)
def test_unclear_directories(tmp_path, files, message):
    for file in files:
        (tmp_path / file).touch()
    refused(tmp_path, message)


def test_absent_directory(tmp_path):
    refused(tmp_path / "nowhere", "nowhere: no such directory")


def test_writes_one_shard_at_a_time(tmp_path):
    alive, most = [], 0

    def make():
        nonlocal most
        array = np.ones(100, np.float32)
        alive.append(array.ctypes.data)
        weakref.finalize(array, alive.remove, array.ctypes.data)
        most = max(most, len(alive))
        return array

    tensor_files.write_tensors(tmp_path, {f"t{n}": PendingTensor(400, make) for n in range(6)}, max_shard_bytes=800)
    assert most == 2
    assert len(list(tmp_path.glob("model-0000*-of-00003.safetensors"))) == 3
    assert open_tensors(tmp_path).keys() == {f"t{n}" for n in range(6)}


def test_written_files_say_their_format_and_are_readable_by_all(tmp_path):
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    with new_directory(tmp_path / "d") as partial:
        tensor_files.write_tensors(partial, {"t": tensor_files.pending(turned)})
    np.testing.assert_array_equal(load_file(tmp_path / "d" / SINGLE)["t"], turned)
    with safe_open(tmp_path / "d" / SINGLE, "np") as file:
        assert file.metadata() == {"format": "pt"}
    mode = (tmp_path / "d").stat().st_mode
    assert (tmp_path / "d" / SINGLE).stat().st_mode & 0o666 == mode & 0o666


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail(directory, replace):
        with new_directory(directory, replace) as partial:
            (partial / "half").touch()
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail(tmp_path / "new", replace=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "kept").touch()
    with pytest.raises(RuntimeError, match="stopped"):
        fail(tmp_path / "old", replace=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "kept"]


def test_replaces_only_when_told(tmp_path):
    (tmp_path / "old").mkdir()
    with new_directory(tmp_path / "old"):
        pass  # an empty directory may be filled
    (tmp_path / "old" / "kept").touch()
    with pytest.raises(FileExistsError, match="not empty"), new_directory(tmp_path / "old"):
        pass
    with new_directory(tmp_path / "old", replace=True) as partial:
        (partial / "fresh").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "fresh"]
