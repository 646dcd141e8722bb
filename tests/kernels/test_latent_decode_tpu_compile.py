"""The TPU kernel through the real compiler, for Ouro's shapes: it compiles, and reads the cache where it lies.

Needs libtpu (`pip install "jax[tpu]"`), no TPU.
"""

import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from hla_jax.kernels.latent_decode import Rotation, Stored, Window, pallas_tpu

# Other tests may have libtpu open.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]

CONTEXT, HEADS, HEAD_DIM, LOOPS = 16384, 16, 128, 4
TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")
CASES = {
    # latent heads, ranks, window, slots of the cache and of the ring, batch
    "HLA, 1.4B": (1, 512, 512, 128, 24, 24 * LOOPS, 1),
    "HLA, 1.4B, 8 sequences": (1, 512, 512, 128, 24, 24 * LOOPS, 8),
    "HLA's first loop, 1.4B": (1, 256, 256, 128, 24, 24 * LOOPS, 8),
    "HLA, 2.6B": (1, 512, 512, 128, 48, 48 * LOOPS, 8),
    # Of the full cache a v5e holds few slots.
    "full cache": (16, 128, 128, 0, 8, 0, 1),
    "full cache, 8 sequences": (16, 128, 128, 0, 2, 0, 8),
    "LLA, folded: 512 + 64, and 64 lanes of zeros": (1, 640, 512, 0, 24, 0, 8),
    "LLA, a latent a head": (16, 48, 32, 0, 24, 0, 8),
}


def device(topology: str):
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def inputs(chip, latent_heads, rank_k, rank_v, window, slots, ring_slots, batch, paged=None, rotated=False):
    spec = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(chip))
    slot, lengths = spec(dtype=jnp.int32), spec(batch, dtype=jnp.int32)
    pages, page = (batch, CONTEXT) if paged is None else (batch * CONTEXT // paged, paged)
    keys, values = (spec(slots, pages, page, latent_heads * rank) for rank in (rank_k, rank_v))
    tables = None if paged is None else spec(batch, CONTEXT // paged, dtype=jnp.int32)
    ring = spec(max(ring_slots, 1), batch, window, HEADS * HEAD_DIM)
    token = spec(batch, HEADS, HEAD_DIM)
    angles = (spec(batch, rank_k // 2, dtype=jnp.float32),) * 2 if rotated else None
    stored = Stored(keys, values, slot, lengths, tables)
    return spec(batch, HEADS, rank_k), stored, Window(token, ring, ring, slot, lengths, token, token), angles


def step(q, stored, window, angles):
    rotation = None if angles is None else Rotation(*angles, HEAD_DIM // 2)
    return pallas_tpu.latent_decode(q, stored, HEAD_DIM**-0.5, window, rotation)


def compiled(chip, function, *arguments):
    kind = AbstractDevice(device_kind=chip.device_kind, num_cores=chip.num_cores, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def size(x) -> int:
    return x.size * x.dtype.itemsize


def check(program, stored: Stored, window: Window) -> None:
    """No copy of a slot, in HBM or in vector memory."""
    batch = stored.lengths.shape[0]
    slot = size(stored.keys) // stored.keys.shape[0]
    asked = (size(stored.keys) + size(stored.values)) // stored.keys.shape[0]
    asked += 2 * size(window.keys) // window.keys.shape[0]
    small = 2**20 * batch  # queries and outputs, and those of two splits
    assert program.memory_analysis().temp_size_in_bytes < min(small, slot / 4)
    assert asked <= program.cost_analysis()["bytes accessed"] < asked + small


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("case", CASES)
def test_compiles_and_copies_nothing(topology, case):
    chip = device(topology)
    arguments = inputs(chip, *CASES[case])
    program = compiled(chip, step, *arguments)
    check(program, *arguments[1:3])
    # One split a core.
    assert (f"f32[2,{CASES[case][-1]},16," in program.as_text()) == (chip.num_cores == 2)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("page", [16, 256])
def test_pages_and_rotation(topology, page):
    chip = device(topology)
    arguments = inputs(chip, *CASES["HLA, 1.4B, 8 sequences"], paged=page, rotated=True)
    check(compiled(chip, step, *arguments), *arguments[1:3])


def test_a_copied_slot_would_be_seen():
    chip = device(TOPOLOGIES[0])

    def copying(q, stored, window, angles):
        slots = [jax.lax.dynamic_index_in_dim(x, stored.slot, keepdims=True) for x in stored[:2]]
        return step(q, stored._replace(keys=slots[0], values=slots[1], slot=jnp.int32(0)), window, angles)

    arguments = inputs(chip, *CASES["HLA, 1.4B"])
    with pytest.raises(AssertionError):
        check(compiled(chip, copying, *arguments), *arguments[1:3])


@pytest.mark.parametrize("odd", [{"rank_k": 576}, {"window": 100}])
def test_what_is_refused_would_be_copied(monkeypatch, odd):
    """If this fails, `problem` refuses too much."""
    monkeypatch.setattr(pallas_tpu, "problem", lambda *_: None)
    chip = device(TOPOLOGIES[0])
    case = {"latent_heads": 1, "rank_k": 512, "rank_v": 512, "window": 128, "slots": 8, "ring_slots": 8, "batch": 8}
    arguments = inputs(chip, **case | odd)
    with pytest.raises(AssertionError):
        check(compiled(chip, step, *arguments), *arguments[1:3])
