"""Uptraining (HLA, section 4.1): fit the maps of every layer to the exact attention, on the reference's own hidden states.

One exact pass stores the attention inputs h [T, L, B, S, d] of a micro-batch; each layer is then fitted locally, so no gradient crosses
layers, and the pretrained weights get none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hla_jax.attention.capture import attention_inputs
from hla_jax.attention.full import rotate_qk
from hla_jax.attention.hla import HLA
from hla_jax.config import OuroConfig
from hla_jax.kernels.attention_match import Fitted, Fixed
from hla_jax.kernels.attention_match.blockwise import attention_match
from hla_jax.models import ouro
from hla_jax.models.layers import accumulation_dtype
from hla_jax.models.ouro import LayerInputs

Maps = dict[str, Array]


class Divergence(NamedTuple):
    """Distance of the attention from the exact one, averaged over layers, tokens and heads, for every loop."""

    kl: Float[Array, " T"]
    """KL(exact || HLA) in nats."""
    error: Float[Array, " T"]
    """Relative squared error of the attention output after o_proj."""


def loss_and_gradient(
    scheme: HLA,
    config: OuroConfig,
    maps: Maps,
    params: ouro.Params,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"],
) -> tuple[Float[Array, ""], Divergence, Maps]:
    """The loss of Eq. 5 averaged over layers and loops, its two terms by loop, and its gradient in the maps.

    Tokens of segment 0 are padding and do not count. With shifted positions the reference runs at the same shifted positions; the
    window goes by index.
    """
    fit = jax.value_and_grad(functools.partial(layer_divergence, scheme, config), has_aux=True)
    (losses, divergences), gradients = _each_layer(fit, config, maps, params, tokens, positions, segments)
    average = lambda x: jnp.mean(x, axis=0)
    gradients = jax.tree.map(lambda g: g / config.num_layers, gradients)
    return average(losses), jax.tree.map(average, divergences), gradients


def divergence(
    scheme: HLA,
    config: OuroConfig,
    maps: Maps,
    params: ouro.Params,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"],
) -> Divergence:
    """The two terms of the loss by loop, without the gradient."""
    fit = functools.partial(layer_divergence, scheme, config)
    _, divergences = _each_layer(fit, config, maps, params, tokens, positions, segments)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), divergences)


def _each_layer(fit: Callable[..., Any], config: OuroConfig, maps: Maps, params: ouro.Params, tokens, positions, segments) -> Any:
    h = attention_inputs(params, config, tokens, positions, segments)
    counted = (segments > 0).astype(accumulation_dtype(h.dtype))
    counted = counted / jnp.maximum(jnp.sum(counted), 1)
    one_layer = lambda layer: fit(*layer, positions, segments, counted)
    return jax.lax.map(one_layer, (maps, params["layers"], jnp.moveaxis(h, 1, 0)))


def layer_divergence(
    scheme: HLA,
    config: OuroConfig,
    maps: Maps,
    p: ouro.Params,
    h: Float[Array, "T B S d"],
    positions: Int[Array, "B S"],
    segments: Int[Array, "B S"],
    counted: Float[Array, "B S"],
) -> tuple[Float[Array, ""], Divergence]:
    """Loss and divergence of one layer, from its attention inputs at every loop. `counted` weighs the tokens and sums to 1."""
    index = jnp.broadcast_to(jnp.arange(h.shape[2]), h.shape[1:3])
    # The scheme's functions index maps by layer: give them a stack of one.
    stacked = {name: value[None] for name, value in maps.items()}
    layer_inputs = lambda h, loop: LayerInputs(h, *ouro.project(p, config, h), loop, jnp.zeros((), jnp.int32))

    def match(inputs: LayerInputs, query: Array, latent_k: Array, latent_v: Array, read: Array):
        q, k = rotate_qk(config, inputs, positions)
        fitted = Fitted(query, latent_k, latent_v, read)
        fixed = Fixed(q, k, inputs.v, p["o_proj"], segments)
        return attention_match(fitted, fixed, index, counted, scheme.window)

    def write(total: tuple[Array, Array], loop_h: tuple[Array, Array]):
        parts = scheme.write_rest(stacked, layer_inputs(loop_h[1], loop_h[0]))
        return jax.tree.map(jnp.add, total, parts), None

    def fit_rest(_, loop_h: tuple[Array, Array]):
        inputs = layer_inputs(loop_h[1], loop_h[0])
        query = scheme.query_rest(config, stacked, inputs, positions)
        return None, match(inputs, query, *latent, maps["read_o"][loop_h[0] - 1])

    first = layer_inputs(h[0], jnp.zeros((), jnp.int32))
    query = scheme.query_first(config, stacked, first, positions)
    first_loss, first_match = match(first, query, *scheme.write_first(config, stacked, first, positions), maps["read_o1"])

    rest = (jnp.arange(1, config.num_loops), h[1:])
    wide = jnp.promote_types(h.dtype, maps["write_k"].dtype)
    zeros = (jnp.zeros((*h.shape[1:3], scheme.rank_k), wide), jnp.zeros((*h.shape[1:3], scheme.rank_v), wide))
    (latent_k, latent_v), _ = jax.lax.scan(write, zeros, rest)
    latent = scheme.rotate_main(config, latent_k[:, :, None], positions)[:, :, 0], latent_v
    _, (rest_loss, rest_match) = jax.lax.scan(fit_rest, None, rest)

    loss = (first_loss + jnp.sum(rest_loss)) / config.num_loops
    by_loop = jax.tree.map(lambda one, others: jnp.concatenate([one[None], others]), first_match, rest_match)
    return loss, Divergence(by_loop.kl, by_loop.error)
