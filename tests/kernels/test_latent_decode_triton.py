"""The Triton kernels of `latent_decode` without a GPU: in Triton's interpreter against float64, through the real
compiler for A100 and H100, and from JAX down to the custom call. bfloat16 is only compiled: the interpreter multiplies
it wrongly.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from kernels import latent_cases
from kernels.run_triton_interpreter import CASES, FAULTS, ONLY_FAULTS, SCALE

HERE = pathlib.Path(__file__).parent
TOLERANCES = {"float32": (2e-5, 2e-5), "float16": (4e-3, 4e-3)}  # absolute, relative

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="there is no triton")
needs_torch = pytest.mark.skipif(
    not importlib.util.find_spec("torch"), reason="Triton's interpreter takes PyTorch tensors, and there is no torch"
)


def disagreement(found: dict[str, np.ndarray], name: str, inputs: dict) -> str | None:
    try:
        check(found, name, inputs)
    except AssertionError as error:
        return str(error)
    return None


def check(found: dict[str, np.ndarray], name: str, inputs: dict) -> None:
    q, stored, window, rotation = latent_cases.make(**inputs)
    got = tuple(found.get(f"{name}/{i}") for i in range(3))
    assert got[2].dtype == np.float32
    assert all(x is None or x.dtype == stored.keys.dtype for x in got[:2])
    want = latent_cases.oracle(q, stored, SCALE, window, rotation)
    latent_cases.agree(got, want, *TOLERANCES[inputs.get("dtype", "float32")])


@pytest.mark.long
@needs_triton
@needs_torch
def test_interpreted_equals_the_oracle_and_planted_faults_are_seen(tmp_path):
    """One test: the interpreter takes half a minute, which every worker would spend."""
    out = tmp_path / "out.npz"
    command = [sys.executable, str(HERE / "run_triton_interpreter.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found, cases = dict(np.load(out)), CASES | ONLY_FAULTS
    problems = {name: disagreement(found, name, case.inputs) for name, case in cases.items()}
    assert problems == dict.fromkeys(cases)
    seen = {name for name, fault in FAULTS.items() if disagreement(found, name, cases[fault.case].inputs)}
    assert seen == set(FAULTS)


# Ouro-1.4B and 2.6B have the same heads. Both loops of HLA, the full cache (its window is the current token), and LLA
# with absorbed maps, for all heads together and head by head.
OURO = dict(batch=1, heads=16, latent_heads=1, pages=1, page=65536, kv_heads=16, head_size=128)
PAGED = dict(pages=4096, page=64, columns=1024)
SHAPES = {
    "HLA": OURO | dict(rank_k=512, rank_v=512, window=128),
    "HLA paged": OURO | PAGED | dict(rank_k=512, rank_v=512, window=128),
    "HLA loop 1": OURO | dict(rank_k=256, rank_v=256, window=128),
    "full": OURO | dict(latent_heads=16, rank_k=128, rank_v=128, window=0),
    "absorbed": OURO | dict(rank_k=512 + 64, rank_v=512, window=0),
    "absorbed heads": OURO | dict(latent_heads=16, rank_k=32 + 16, rank_v=32, window=0),
    # Huginn has 55 heads of 96.
    "HLA Huginn": OURO | dict(rank_k=512, rank_v=512, window=128, heads=55, kv_heads=55, head_size=96),
    "HLA float32": OURO | dict(rank_k=512, rank_v=512, window=128, itemsize=4),
}
SHARED = {80: 166_912, 90: 232_448}
"""Bytes of shared memory that a program may have. Neither Triton nor XLA complains about more."""

INTEGERS = ("slot", "lengths", "tables", "near_slot", "filled")
FLOATS = ("cos", "sin", "latents", "exacts", "lses", "lse")


@pytest.mark.long
@needs_triton
@pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="compilers run a minute: in the kernels' environment, see the README"
)
@pytest.mark.parametrize("architecture", SHARED)
@pytest.mark.parametrize("name", SHAPES)
def test_compiles_without_spills_and_fits(name, architecture):
    from hla_jax.kernels.latent_decode import triton_kernels

    shapes = triton_kernels.Shapes(**SHAPES[name])
    cut = triton_kernels.geometry(shapes, processors=108 if architecture == 80 else 132)
    half = 0 if shapes.latent_heads > 1 else 64
    for kernel, launch in (
        (triton_kernels.attend_parts, triton_kernels.attend_launch(shapes, cut, 0.1, half)),
        (triton_kernels.merge_parts, triton_kernels.merge_launch(shapes, cut)),
    ):
        used = resources(kernel, launch, "fp32" if shapes.itemsize == 4 else "bf16", architecture)
        print(f"{name:15} sm_{architecture} {kernel.__name__:12} grid {launch.grid} {launch.options} {used}")
        assert used["stack"] == used["local"] == 0, "registers are spilled"
        assert used["shared"] <= SHARED[architecture]
        assert kernel is triton_kernels.merge_parts or used["copies"] > 0, "the cache is not fetched ahead"


def resources(kernel, launch, dtype: str, architecture: int) -> dict[str, int]:
    """Registers of a thread, bytes, and asynchronous copies in the code."""
    import triton
    from triton.backends.compiler import GPUTarget

    pointer = lambda name: "*i32" if name in INTEGERS else "*fp32" if name in FLOATS else f"*{dtype}"
    signature = {name: "constexpr" if name in launch.constants else pointer(name) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    source = triton.compiler.ASTSource(kernel, signature, launch.constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)
    dump = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([dump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    number = lambda word: int(re.search(rf"{word}:(\d+)", usage)[1])
    return dict(
        registers=number("REG"),
        stack=number("STACK"),
        local=number("LOCAL"),
        shared=compiled.metadata.shared,
        copies=compiled.asm["ptx"].count("cp.async.cg"),
    )


LOWER = """
import json, sys
import jax, jax.numpy as jnp, jaxlib.gpu_triton as native

calls = []

class Kernel:
    def __init__(self, name, warps, clusters, shared, *_):
        self.name, self.shared = name, shared

class Call:
    def __init__(self, kernel, x, y, z, parameters):
        calls.append(dict(kernel=kernel.name, grid=[x, y, z], parameters=len(parameters), shared=kernel.shared))
    def to_proto(self, *_):
        return b""

# The part of jax-triton that comes with jax's GPU wheels: it only packs the launch.
native.TritonKernel, native.TritonKernelCall = Kernel, Call
native.create_array_parameter = native.create_scalar_parameter = lambda *args: args
native.get_compute_capability, native.get_serialized_metadata = lambda device: 90, None

from hla_jax.kernels.latent_decode import Rotation, Stored, Window, api

paged = sys.argv[1] == "paged"
bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
cache = bf16(24, 4096, 64, 512) if paged else bf16(24, 2, 65536, 512)
stored = Stored(cache, cache, int32(), int32(2), int32(2, 1024) if paged else None)
ring = bf16(96, 2, 128, 2048)
window = Window(bf16(2, 16, 128), ring, ring, int32(), int32(2), bf16(2, 16, 128), bf16(2, 16, 128))
angles = jax.ShapeDtypeStruct((2, 256), jnp.float32)

def step(q, stored, window, cos, sin):
    return api.latent_decode(q, stored, 0.1, window, Rotation(cos, sin, 64))

device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
axes = (jax.sharding.AxisType.Auto,)
mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=axes, abstract_device=device)
with jax.sharding.use_abstract_mesh(mesh):
    lowered = jax.jit(step).trace(bf16(2, 16, 512), stored, window, angles, angles).lower(lowering_platforms=("cuda",))
print(json.dumps(dict(calls=calls, text=lowered.as_text())))
"""


@pytest.mark.long
@needs_triton
@pytest.mark.skipif(not importlib.util.find_spec("jax_triton"), reason="there is no jax-triton")
@pytest.mark.parametrize("mode", ["paged", "one page a sequence"])
def test_lowers_to_two_calls_on_the_whole_cache(mode):
    """No GPU is needed to lower, but for the packing of the launch, which is stood in for."""
    command = [sys.executable, "-c", LOWER, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert [(call["kernel"], call["grid"]) for call in result["calls"]] == [
        ("attend_parts", [2, 16 + 132, 1]),
        ("merge_parts", [2, 16, (512 + 128) // 64]),
    ]
    assert [call["parameters"] for call in result["calls"]] == [18, 6]
    body = result["text"].split("func.func public @main(")[1]
    operations = re.findall(r"^ +%\S+ = ([\w.]+)", body, re.MULTILINE)
    assert operations == ["stablehlo.custom_call"] * 2, "something is done before or between the kernels"
    shape = "24x4096x64x512" if mode == "paged" else "24x2x65536x512"
    arguments = re.findall(rf"(%arg\d+): tensor<{shape}xbf16>", body)
    first = re.search(r"custom_call @\w+\(([^)]*)\)", body)[1].split(", ")
    assert first[1:3] == arguments, "the cache is an operand as it is"
