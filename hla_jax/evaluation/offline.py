"""A decoding step through the real compiler of a TPU or GPU that is not there: its memory, and what it launches.

A TPU needs libtpu (`pip install "jax[tpu]"`). A GPU needs jax's CUDA plugin, a ptxas that knows Triton's PTX version
and a text file with XLA's description of the card (`GpuTargetConfigProto`; the XLA project keeps one for every card).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding
from jax.typing import DTypeLike

from hla_jax import compat
from hla_jax.attention.outer import whole
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.config import ModelConfig
from hla_jax.generation import decode
from hla_jax.models import looped, weights


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled decoding step.

    Attributes:
      temporary: bytes besides weights, maps and cache.
      cache: bytes of the cache, which is updated in place.
      launches: the kernels of one layer, for the loops of each stage: their names in the compiled program.
      copied: copies of a buffer of the cache, or of a slot of one, and their bytes.
    """

    temporary: int
    cache: int
    launches: list[list[str]]
    copied: dict[str, int]


def tpu(topology: str) -> jax.Device:
    """A device of a TPU topology such as "v5e:2x2"."""
    return tpus(topology)[0]


def tpus(topology: str) -> list[jax.Device]:
    """All devices of a TPU topology."""
    # Another process may have libtpu open.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def gpu(target: str | os.PathLike[str], capability: int) -> jax.Device:
    """The GPU that a description stands for, and its compute capability times 10."""
    compat.pretend_compute_capability(capability)
    description = pathlib.Path(target).read_text(encoding="utf-8")
    return topologies.get_topology_desc(
        platform="cuda", topology_name="one", target_config=description, topology="1x1x1"
    ).devices[0]


def compile_step(
    config: ModelConfig, scheme: Scheme, device: jax.Device, context: int, batch: int = 1, dtype: DTypeLike = "bfloat16"
) -> Step:
    """Compiles one decoding step of `batch` sequences with room for `context` tokens each."""
    here = SingleDeviceSharding(device)
    place = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)
    params = place(jax.eval_shape(looped.for_decoding, weights.abstract_params(config, dtype)))
    shapes = {name: (config.num_layers, *shape) for name, shape in scheme.map_shapes(config).items()}
    maps = place({name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape in shapes.items()})
    cache = place(jax.eval_shape(lambda: whole(config, scheme).init_cache(config, batch, context, dtype)))
    tokens = place(jax.ShapeDtypeStruct((batch,), jnp.int32))
    step = jax.jit(
        lambda params, attention, cache, tokens: decode.step(params, config, attention, cache, tokens),
        donate_argnums=2,
        compiler_options=decode.READ_WEIGHTS_IN_PLACE,
    )
    with jax.sharding.use_abstract_mesh(_abstract(device)):
        traced = step.trace(params, Attention(scheme, maps), cache, tokens)
        program = traced.lower(lowering_platforms=(platform(device),)).compile()
    text = program.as_text()
    slots = {buffer.shape[1:] for buffer in cache.buffers.values()}
    return Step(
        program.memory_analysis().temp_size_in_bytes,
        batch * whole(config, scheme).cache_bytes(config, context, dtype),
        launches(text),
        copies(text, slots),
    )


def launches(program: str) -> list[list[str]]:
    """What each innermost loop of a compiled program launches, of loops that launch a kernel of ours: its layers."""
    bodies = set(re.findall(r"\bbody=%?([\w.\-]+)", program))
    found = []
    for name, lines in computations(program).items():
        if name not in bodies or any("body=" in line for line in lines):
            continue
        kernels = [instruction.name for line in lines if (instruction := parse(line)) and instruction.launched]
        if any("custom_call_target=" in line for line in lines):
            found.append(kernels)
    return found


def copies(program: str, slots: Collection[tuple[int, ...]]) -> dict[str, int]:
    """Copies and slices of arrays that end in one of these shapes: name and bytes."""
    ends = tuple(f",{','.join(map(str, slot))}]" for slot in slots)
    made = ("copy", "copy-start", "dynamic-slice", "slice")
    found = {}
    for name, lines in computations(program).items():
        if "fused" in name:  # what a fusion does inside is never stored
            continue
        for line in lines:
            instruction = parse(line)
            if instruction is None or "update" in instruction.name:
                continue
            moved = instruction.operation in made or "slice_fusion" in instruction.name
            if moved and any(end in instruction.type for end in ends):
                found[instruction.name] = instruction.bytes
    return found


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a compiled program."""

    name: str
    type: str
    operation: str
    bytes: int

    @property
    def launched(self) -> bool:
        """Whether a device runs something for it. The second half of a copy or of an asynchronous call does not."""
        own = ("fusion", "custom-call", "copy", "convolution", "dot")
        return self.operation in own or self.operation.endswith("-start")


_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}


def parse(line: str) -> Instruction | None:
    """The instruction of a line; None where it has none."""
    match = _LINE.match(line)
    if match is None:
        return None
    size = 0
    for dtype, dimensions in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", match[2]):
        numbers = 1
        for dimension in filter(None, dimensions.split(",")):
            numbers *= int(dimension)
        size += numbers * _SIZES.get(dtype, 0)
    return Instruction(match[1], match[2], match[3], size)


def computations(program: str) -> dict[str, list[str]]:
    """The lines of every computation of a compiled program."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = found.setdefault(start[1], [])
        else:
            lines.append(line)
    return found


def platform(device: jax.Device) -> str:
    return device.platform if device.platform in ("tpu", "cpu") else "cuda"


def _abstract(device: Any) -> AbstractMesh:
    kind = AbstractDevice(
        device_kind=device.device_kind,
        num_cores=getattr(device, "num_cores", None),
        platform="tpu" if device.platform == "tpu" else "gpu",
    )
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
