"""The mathematics of one transformer layer, as pure functions: norm, rotation, projections, gated MLP.

Weights keep the Hugging Face layout [out, in]. Shapes: B batch, S tokens, d hidden size, N heads, dh head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.config import ModelConfig
from hla_jax.models.stages import Params

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Tokens whose MLP is computed at once: bounds the [B, S, intermediate] temporaries of a long prompt.
MLP_BLOCK = 2048


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float32, or float64 for float64 inputs: what norms, softmax and sums are computed in."""
    return jnp.promote_types(dtype, jnp.float32)


def rms_norm(x: Float[Array, "... d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "... d"]:
    """Root-mean-square norm: normalised in float32, cast back, then scaled, in the order of the reference."""
    wide = x.astype(accumulation_dtype(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight


def linear(x: Float[Array, "... i"], weight: Float[Array, "o i"]) -> Float[Array, "... o"]:
    """x W^T for a weight in Hugging Face layout."""
    return jnp.einsum("...i,oi->...o", x, weight)


def inverse_frequencies(head_dim: int, theta: float, dtype: jnp.dtype = jnp.float32) -> Float[Array, " half"]:
    """Rotary frequencies theta^(-2f / head_dim) in radians per position, f = 0 .. head_dim/2 - 1."""
    return theta ** (-jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)


def rotate(
    x: Float[Array, "B S N dh"],
    positions: Int[Array, "B S"],
    frequencies: Float[Array, "#N half"] | Float[Array, " half"],
) -> Float[Array, "B S N dh"]:
    """Half-split rotary embedding: pair f is coordinates (f, f + dh/2), turned by position * frequency.

    Args:
      x: heads, or the blocks of a latent.
      positions: of each token.
      frequencies: one per pair; a leading axis gives every head (every block of a latent) its own.
    """
    return turn(x, angles(positions, frequencies, accumulation_dtype(x.dtype)))


class Angles(NamedTuple):
    """By how much each pair of every token's heads is turned."""

    cos: Float[Array, "B S #N half"]
    sin: Float[Array, "B S #N half"]


def angles(
    positions: Int[Array, "B S"], frequencies: Float[Array, "#N half"] | Float[Array, " half"], dtype: jnp.dtype
) -> Angles:
    """Angles of a rotary embedding, see `rotate`."""
    turns = positions[:, :, None, None].astype(dtype) * jnp.atleast_2d(frequencies).astype(dtype)
    return Angles(jnp.cos(turns), jnp.sin(turns))


def turn(x: Float[Array, "B S N dh"], by: Angles) -> Float[Array, "B S N dh"]:
    """Half-split rotary embedding by given angles."""
    first, second = jnp.split(x.astype(accumulation_dtype(x.dtype)), 2, axis=-1)
    turned = [first * by.cos - second * by.sin, second * by.cos + first * by.sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def project(
    p: Params, config: ModelConfig, h: Float[Array, "B S d"]
) -> tuple[Float[Array, "B S H dh"], Float[Array, "B S G dh"], Float[Array, "B S G dh"]]:
    """Queries, keys and values of one layer (`p` without the layer axis), before rotation."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    split = lambda x: x.reshape(*x.shape[:-1], -1, config.head_dim)
    if "qkv_proj" in p:
        q, k, v = jnp.split(split(linear(h, p["qkv_proj"])), (heads, heads + kv_heads), axis=2)
    else:
        q, k, v = (split(linear(h, p[name])) for name in ("q_proj", "k_proj", "v_proj"))
    if config.qk_bias:
        q, k = q + split(p["q_bias"]), k + split(p["k_bias"])
    return q, k, v


def gate_up(p: Params, h: Float[Array, "B S d"]) -> tuple[Float[Array, "B S f"], Float[Array, "B S f"]]:
    """Gate, before its nonlinearity, and what it gates, in the MLP of one layer."""
    if "gate_up_proj" in p:
        gate, up = jnp.split(linear(h, p["gate_up_proj"]), 2, axis=-1)
        return gate, up
    return linear(h, p["gate_proj"]), linear(h, p["up_proj"])


def gated_mlp(p: Params, x: Float[Array, "B S d"]) -> Float[Array, "B S d"]:
    """SwiGLU: down(silu(gate x) * up x), in blocks of tokens so that long prompts hold no [B, S, f] array."""

    def mlp(block: Float[Array, "B s d"]) -> Float[Array, "B s d"]:
        gate, up = gate_up(p, block)
        return linear(jax.nn.silu(gate) * up, p["down_proj"])

    return in_blocks(mlp, x, MLP_BLOCK)


def in_blocks(
    function: Callable[[Float[Array, "B s d"]], Float[Array, "B s e"]], x: Float[Array, "B S d"], size: int
) -> Float[Array, "B S e"]:
    """Applies a token-wise function to blocks of at most `size` tokens, one after another."""
    tokens = x.shape[1]
    if tokens <= size:
        return function(x)
    blocks = -(-tokens // size)
    padded = jnp.pad(x, ((0, 0), (0, blocks * size - tokens), (0, 0)))
    # Block i takes tokens i, i + blocks, ...: where a mesh splits the tokens, every device has its share of each block.
    out = jax.lax.map(function, jnp.moveaxis(padded.reshape(x.shape[0], size, blocks, -1), 2, 0))
    return jnp.moveaxis(out, 0, 2).reshape(x.shape[0], blocks * size, -1)[:, :tokens]


def logits(params: Params, hidden: Float[Array, "... d"]) -> Float[Array, "... V"]:
    """Next-token logits in float32 (float64 for a float64 model); tied models use the embedding."""
    head = params.get("lm_head", params["embed_tokens"])
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=accumulation_dtype(hidden.dtype))
