"""A step of uptraining at true size, through the real compiler of devices that are not there: memory and work.

See `offline.py` for what must be installed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from hla_jax import sharding
from hla_jax.attention.hla import HLA
from hla_jax.config import ModelConfig
from hla_jax.evaluation import offline
from hla_jax.models import weights
from hla_jax.training import uptrain
from hla_jax.training.optimizer import adamw
from hla_jax.training.step import init, make_step
from hla_jax.training.uptrain import UptrainConfig


@dataclasses.dataclass(frozen=True)
class Plan:
    """A compiled step.

    Attributes:
      arguments: bytes on one device of base weights, maps, optimizer and batch.
      temporary: bytes on one device besides.
      flops: of all devices together, in matrix products and kernels.
      tokens: of a batch.
      too_large: what the compiler says where the step does not fit; `temporary` is then what it names, or 0.
    """

    arguments: int
    temporary: int
    flops: int
    tokens: int
    too_large: str | None = None

    @property
    def total(self) -> int:
        """Bytes on one device."""
        return self.arguments + self.temporary


def plan(config: ModelConfig, scheme: HLA, phase: UptrainConfig, mesh: Mesh, dtype: DTypeLike = "bfloat16") -> Plan:
    """Compiles the step of a phase for the mesh's devices. Raises `ConfigError` where its rows do not split."""
    optimizer = adamw(phase.optimizer)
    placed_maps = sharding.maps(scheme.map_shapes(config), scheme.map_axes(), config.num_layers, mesh)
    maps = {
        name: jax.ShapeDtypeStruct((config.num_layers, *shape), jnp.float32)
        for name, shape in scheme.map_shapes(config).items()
    }
    state = jax.eval_shape(lambda maps: init(maps, optimizer, 0), maps)
    shardings = sharding.like(state, maps, placed_maps, mesh)
    params = _placed(weights.abstract_params(config, dtype), weights.shardings(config, mesh))
    lengths = {uptrain.SHORT: phase.batches.length, uptrain.LONG: phase.long.length if phase.long else 0}
    batch: Any = {
        name: {
            field: jax.ShapeDtypeStruct(
                (rows, lengths[name]), jnp.int32, sharding=sharding.named(("batch", None), (rows, lengths[name]), mesh)
            )
            for field in ("tokens", "segments", "positions")
        }
        for name, rows in phase.rows().items()
    }
    device = mesh.devices.flat[0]
    with jax.set_mesh(mesh):
        step: Any = make_step(uptrain.parts(scheme, config, phase, mesh), optimizer, shardings=shardings)
        traced = step.trace(_placed(state, shardings), batch, params)
        work = flops(traced.jaxpr.jaxpr)
        lowered = traced.lower(lowering_platforms=(offline.platform(device),))
    tokens = sum(rows * lengths[name] for name, rows in phase.rows().items())
    held = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves((_placed(state, shardings), batch, params))
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = re.search(r"Used ([\d.]+)G of", str(error))
        temporary = int(float(used[1]) * 2**30) - held if used else 0
        return Plan(held, temporary, work, tokens, str(error).splitlines()[0])
    return Plan(memory.argument_size_in_bytes, memory.temp_size_in_bytes, work, tokens)


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def flops(program: Any, times: int = 1) -> int:
    """Floating-point operations of the matrix products and kernels of a jaxpr, loops counted as often as they run."""
    total = 0
    for equation in program.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            ((over, _), _) = parameters["dimension_numbers"]
            shared = math.prod(equation.invars[0].aval.shape[axis] for axis in over)
            total += times * 2 * shared * math.prod(equation.outvars[0].aval.shape)
        elif name == "pallas_call":
            total += times * parameters["cost_estimate"].flops
        else:
            inside = times * parameters["length"] if name == "scan" else times
            if name == "shard_map":
                inside = times * math.prod(
                    size for axis, size in parameters["mesh"].shape.items() if axis in parameters["newly_manual_axes"]
                )
            branches = [flops(inner, inside) for inner in _jaxprs(parameters)]
            # Of a conditional one branch runs.
            total += max(branches, default=0) if name == "cond" else sum(branches)
    return total


def _jaxprs(parameters: dict[str, Any]) -> list[Any]:
    found = []
    for value in parameters.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns"):
                found.append(one)
            elif hasattr(one, "jaxpr") and hasattr(one.jaxpr, "eqns"):
                found.append(one.jaxpr)
    return found
