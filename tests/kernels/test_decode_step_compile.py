"""A whole decoding step through the TPU's own compiler: no copy of the cache, and no more launches than there were."""

import importlib.util

import jax.numpy as jnp
import pytest

import hla_jax
from hla_jax.config import OURO_1P4B
from hla_jax.evaluation import offline
from hla_jax.kernels.latent_decode import pallas_tpu

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
SCHEMES = {
    "full": (hla_jax.FullCache(), 26),
    "hla": (hla_jax.HLA(512, 512, 256, window=128), 34),
    "absorbed": (hla_jax.LLA(80, 160, rank_rope=16), 72),
}
MIB = 2**20


@pytest.mark.long
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_step_copies_no_cache(name, topology):
    scheme, most = SCHEMES[name]
    # Without its whole vocabulary and all layers the step is the same loops.
    step = offline.compile_step(OURO_1P4B, scheme, offline.tpu(topology), context=4096)
    assert step.copied == {}
    # The relaid maps of absorbed LLA, made once a dispatch.
    assert step.temporary < (160 if name == "absorbed" else 8) * MIB
    assert step.launches
    assert max(map(len, step.launches)) <= most


@pytest.mark.long
@needs_libtpu
def test_a_slot_taken_out_is_found(monkeypatch):
    """A kernel that is handed one slot instead of the whole cache."""
    whole = pallas_tpu.latent_decode

    def sliced(q, stored, *rest):
        keys, values = (buffer[stored.slot][None] for buffer in stored[:2])
        return whole(q, stored._replace(keys=keys, values=values, slot=jnp.zeros((), jnp.int32)), *rest)

    monkeypatch.setattr(pallas_tpu, "latent_decode", sliced)
    step = offline.compile_step(OURO_1P4B, SCHEMES["hla"][0], offline.tpu("v5e:2x2"), context=4096)
    assert step.copied


PROGRAM = """HloModule step

%fused_computation (p.1: bf16[4,64,8]) -> bf16[64,8] {
  %p.1 = bf16[4,64,8]{2,1,0} parameter(0)
  ROOT %dynamic-slice.9 = bf16[1,64,8]{2,1,0} dynamic-slice(%p.1), dynamic_slice_sizes={1,64,8}
}

%layers (arg: (s32[], bf16[4,64,8])) -> (s32[], bf16[4,64,8]) {
  %arg = (s32[], bf16[4,64,8]{2,1,0}) parameter(0)
  %x = bf16[4,64,8]{2,1,0} get-tuple-element(%arg), index=1
  %slice.1 = bf16[1,64,8]{2,1,0:T(8,128)} dynamic-slice(%x), dynamic_slice_sizes={1,64,8}
  %kernel = (f32[2,8]{1,0}, f32[2]{0}) custom-call(%x), custom_call_target="tpu_custom_call"
  %add = f32[8]{0} fusion(%kernel), kind=kLoop, calls=%fused_computation
  %update_slice_fusion = bf16[4,64,8]{2,1,0} fusion(%add), kind=kLoop, calls=%fused_computation
  ROOT %out = (s32[], bf16[4,64,8]{2,1,0}) tuple(%x)
}

%loops (arg.2: (s32[], bf16[4,64,8])) -> (s32[], bf16[4,64,8]) {
  ROOT %inner = (s32[], bf16[4,64,8]{2,1,0}) while(%arg.2), condition=%c, body=%layers
}

ENTRY %main (cache: bf16[4,64,8]) -> bf16[4,64,8] {
  %cache = bf16[4,64,8]{2,1,0} parameter(0)
  %copy.3 = bf16[4,64,8]{2,1,0} copy(%cache)
  %small = bf16[4,8]{1,0} copy(%cache)
  ROOT %outer = (s32[], bf16[4,64,8]{2,1,0}) while(%copy.3), condition=%c, body=%loops
}
"""


def test_a_program_is_read():
    assert offline.launches(PROGRAM) == [["kernel", "add", "update_slice_fusion"]]
    assert offline.copies(PROGRAM, {(64, 8)}) == {"slice.1": 2 * 64 * 8, "copy.3": 2 * 4 * 64 * 8}
