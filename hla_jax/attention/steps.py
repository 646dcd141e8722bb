"""Maps for another number of steps (loops) than they were calibrated for.

Huginn's core runs as often as one likes, and its states approach a fixed point. So, for maps of T steps and a model
that runs r of them:

- r < T: the missing steps are taken to be like the last one that ran. What they would have written of a token is
  written by step r, whose writer is the sum of theirs; the readers of the first r steps stay.
- r > T: the later steps read as step T does, and write nothing.

Both are exact for states that stand still after step min(r, T), and r = T changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import Array

from hla_jax.attention.eviction import Evicted
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention, Maps, Scheme, SchemeError, check_maps, loops_of_maps
from hla_jax.config import ModelConfig


def for_steps(attention: Attention, config: ModelConfig, num_steps: int) -> Attention:
    """The attention for the same model with another number of steps, by the rule above.

    How many steps the maps are for, their shapes tell; `config` may have any number. Schemes without maps stay as they
    are.

    Raises:
      SchemeError: the maps are of another model; the scheme has no rule (one that keeps every step apart), or does not
        fit so few steps.
    """
    scheme, running = attention.scheme, dataclasses.replace(config, num_loops=num_steps)
    scheme.check(running)
    calibrated = loops_of_maps(scheme, config, attention.params)
    if calibrated is None:
        check_maps(scheme, running, attention.params)
    if calibrated in (None, num_steps):
        return attention
    maps, shapes = _by_the_rule(scheme, config, attention.params, num_steps), scheme.map_shapes(running)
    maps = {name: maps[name].reshape(config.num_layers, *shape) for name, shape in shapes.items()}
    return dataclasses.replace(attention, params=maps)


@functools.singledispatch
def _by_the_rule(scheme: Scheme, config: ModelConfig, maps: Maps, steps: int) -> dict[str, Array]:
    """The maps for so many steps, some of their axes perhaps apart."""
    raise SchemeError(
        f"no rule for {type(scheme).__name__} with another number of steps than it was calibrated for: calibrate for "
        f"{steps} steps, or take HLA or LLA"
    )


@_by_the_rule.register(Evicted)
def _of_evicted(scheme: Evicted, config: ModelConfig, maps: Maps, steps: int) -> dict[str, Array]:
    return _by_the_rule(scheme.scheme, config, maps, steps)


@_by_the_rule.register(HLA)
def _of_hla(scheme: HLA, config: ModelConfig, maps: Maps, steps: int) -> dict[str, Array]:
    """Of the main latent's maps, which are those of all steps but the first. What the keys' bias adds to a latent is
    the sum over all steps already.
    """
    main = {name: _written(maps[name], 1, steps - 1) for name in ("write_k", "write_v")}
    main |= {name: _read(maps[name], 1, steps - 1) for name in ("read_q", "read_o")}
    return dict(maps) | main


@_by_the_rule.register(LLA)
def _of_lla(scheme: LLA, config: ModelConfig, maps: Maps, steps: int) -> dict[str, Array]:
    """A trajectory is heads, steps, coordinates. The means of missing steps are taken to be the last one's, like the
    keys and values around them.
    """
    layers, heads, size = config.num_layers, config.num_kv_heads, config.head_dim

    def one(name: str, x: Array) -> Array:
        if name in ("rope_query", "query_adapter"):
            return _read(x, 1, steps)
        if name.endswith("down"):
            return _written(x.reshape(layers, heads, -1, size, x.shape[-1]), 2, steps)
        if name.endswith("mean"):
            return _read(x.reshape(layers, heads, -1, size), 2, steps)
        latents = (x.shape[1], heads) if scheme.fold_heads else (heads, x.shape[2])
        return _read(x.reshape(layers, *latents, -1, size), 3, steps)

    return {name: one(name, x) for name, x in maps.items()}


def _written(x: Array, axis: int, steps: int) -> Array:
    """Writers of so many steps, from those of the steps along an axis."""
    more = steps - x.shape[axis]
    if more > 0:
        return jnp.pad(x, [(0, more if one == axis else 0) for one in range(x.ndim)])
    kept, last = jnp.split(x, [steps - 1], axis=axis)
    return jnp.concatenate([kept, last.sum(axis, keepdims=True)], axis=axis)


def _read(x: Array, axis: int, steps: int) -> Array:
    """Readers of so many steps, from those of the steps along an axis."""
    return jnp.take(x, np.minimum(np.arange(steps), x.shape[axis] - 1), axis=axis)
