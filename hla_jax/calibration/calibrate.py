"""Closed-form initialisation of a scheme's maps from calibration sequences."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from hla_jax import sharding
from hla_jax.attention.codec import Codec
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.hla import HLA
from hla_jax.attention.low_bit import LowBit
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.calibration import moments, principal
from hla_jax.calibration.codec import codec_maps
from hla_jax.calibration.low_bit import channel_maps
from hla_jax.calibration.moments import KeyMoments, Sequences, ValueMoments
from hla_jax.calibration.principal import leading_eigenvectors, value_directions
from hla_jax.config import ModelConfig
from hla_jax.model import Model
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def calibrate(
    model: Model, scheme: Scheme, sequences: Sequence[Sequence[int]] | Int[np.ndarray, "N S"], dtype: str = "float32"
) -> Attention:
    """Fits a scheme's maps in closed form to the keys and values that the exact model produces on `sequences`.

    Args:
      model: the exact model.
      scheme: sizes; a scheme without maps needs no data and is returned as it is.
      sequences: token ids, one list a sequence (the papers use 128 and 255 sequences).
      dtype: of the maps.

    Raises:
      SchemeError: the scheme's sizes do not fit the model.
      ValueError: no sequences, or an empty one.
    """
    scheme.check(model.config)
    if not scheme.map_shapes(model.config):
        return Attention(scheme)
    layers = principal_maps(scheme, model.params, model.config, Sequences.of(sequences))
    maps = [{name: value.astype(dtype) for name, value in layer.items()} for layer in layers]
    return Attention(scheme, {name: jnp.asarray(np.stack([layer[name] for layer in maps])) for name in maps[0]})


@functools.singledispatch
def principal_maps(
    scheme: Scheme, params: Params, config: ModelConfig, sequences: Sequences
) -> Iterator[dict[str, Float[np.ndarray, "..."]]]:
    """The initialisation of one scheme, layer by layer. Raises `TypeError` for a scheme that has none."""
    raise TypeError(f"no closed-form initialisation for {type(scheme).__name__}")


principal_maps.register(Codec, codec_maps)
principal_maps.register(LowBit, channel_maps)


@principal_maps.register(Evicted)
def evicted_maps(
    scheme: Evicted, params: Params, config: ModelConfig, sequences: Sequences
) -> Iterator[dict[str, Float[np.ndarray, "..."]]]:
    """Those of the scheme that it wraps."""
    return principal_maps(scheme.scheme, params, config, sequences)


@principal_maps.register(HLA)
def hla_maps(
    scheme: HLA, params: Params, config: ModelConfig, sequences: Sequences
) -> Iterator[dict[str, Float[np.ndarray, "..."]]]:
    """Principal components of keys per rotary frequency and of concatenated values (HLA, Appendix A)."""
    rest, first = range(1, config.num_loops), range(1)
    width = config.num_kv_heads * config.head_dim
    formed = [loops for loops in (rest, first) if len(loops) * width <= principal.LARGEST_MOMENT]
    measures: list[moments.Measure] = [KeyMoments(config, rest), KeyMoments(config, first)]
    measures += [ValueMoments(config, loops) for loops in formed]
    rest_keys, first_keys, *of_values = moments.measure(params, config, sequences, measures)
    values = dict(zip(formed, of_values, strict=True))
    directions = functools.partial(value_directions, params, config, sequences)
    rest_values = directions(rest, scheme.rank_v, values.get(rest))
    first_values = directions(first, scheme.rank_loop1, values.get(first))
    rest_pairs = pair_frequencies(config, scheme.rank_k, scheme.pair_frequency)
    first_pairs = pair_frequencies(config, scheme.rank_loop1, scheme.pair_frequency_loop1)
    for layer in range(config.num_layers):
        k_proj, v_proj = (
            np.asarray(sharding.to_host(params["layers"][name][layer]), np.float64) for name in ("k_proj", "v_proj")
        )
        if config.qk_bias:  # the keys are linear in the attention input and a one
            bias = np.asarray(sharding.to_host(params["layers"]["k_bias"][layer]), np.float64)
            k_proj = np.concatenate([k_proj, bias[:, None]], axis=1)
        write_k, read_q = key_maps(config, rest_keys[layer], k_proj, rest_pairs)
        write_k1, read_q1 = key_maps(config, first_keys[layer], k_proj, first_pairs)
        of_ones = {}
        if config.qk_bias:
            of_ones = {"bias_k": write_k[..., -1].sum(0), "bias_k1": write_k1[0, :, -1]}
            write_k, write_k1 = write_k[..., :-1], write_k1[..., :-1]
        write_v, read_o = value_maps(config, rest_values[layer], v_proj)
        write_v1, read_o1 = value_maps(config, first_values[layer], v_proj)
        yield {
            "write_k": write_k,
            "write_v": write_v,
            "read_q": read_q,
            "read_o": read_o,
            "write_k1": write_k1[0],
            "write_v1": write_v1[0],
            "read_q1": read_q1[0],
            "read_o1": read_o1[0],
            **of_ones,
        }


def pair_frequencies(config: ModelConfig, rank: int, chosen: tuple[int, ...] | None) -> Int[np.ndarray, " pairs"]:
    """Frequency index of every latent pair: the chosen one, or round-robin."""
    return np.arange(rank // 2) % (config.head_dim // 2) if chosen is None else np.asarray(chosen)


def key_maps(
    config: ModelConfig,
    moment: Float[np.ndarray, "F P P"],
    k_proj: Float[np.ndarray, "Gdh d"],
    pairs: Int[np.ndarray, " pairs"],
) -> tuple[Float[np.ndarray, "t r d"], Float[np.ndarray, "t H dh r"]]:
    """Writer and reader of a key latent: M_f, the leading eigenvectors of each frequency's moment, on both sides (HLA,
    Eq. 7).

    The P directions of a frequency are its key pairs in the order loop, head; t loops share the latent.
    """
    half, heads = config.head_dim // 2, config.num_kv_heads
    loops, rank = moment.shape[1] // heads, 2 * len(pairs)
    rows = k_proj.reshape(heads, 2, half, -1)
    write = np.zeros((loops, rank, rows.shape[-1]))
    read = np.zeros((loops, heads, config.head_dim, rank))
    for frequency in np.unique(pairs):
        mine = np.flatnonzero(pairs == frequency)
        directions = leading_eigenvectors(moment[frequency], len(mine)).reshape(loops, heads, -1)
        for coordinate in range(2):
            # Pair p sits in block p // half, its two coordinates half a block apart.
            place = mine // half * config.head_dim + coordinate * half + mine % half
            write[:, place] = np.einsum("tgm,gd->tmd", directions, rows[:, coordinate, frequency])
            read[:, :, coordinate * half + frequency, place] = directions
    return write, np.repeat(read, config.heads_per_kv, axis=1)


def value_maps(
    config: ModelConfig, directions: Float[np.ndarray, "D r"], v_proj: Float[np.ndarray, "Gdh d"]
) -> tuple[Float[np.ndarray, "t r d"], Float[np.ndarray, "t H r dh"]]:
    """Writer and reader of a value latent: the directions' block of each loop and head, on both sides (HLA, Appendix
    A).
    """
    blocks = directions.reshape(-1, config.num_kv_heads, config.head_dim, directions.shape[-1])
    by_head = v_proj.reshape(config.num_kv_heads, config.head_dim, -1)
    write = np.einsum("tger,ged->trd", blocks, by_head, optimize=True)  # as one matrix product
    return write, np.repeat(np.swapaxes(blocks, 2, 3), config.heads_per_kv, axis=1)
