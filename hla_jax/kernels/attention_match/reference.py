"""How far hybrid latent attention is from exact attention in one layer and loop, by the direct formula (HLA, Eq. 5).

Shapes: B sequences, Q queries, S tokens, H query heads, G key-value heads, dh head size, d hidden size; rk and rv of
the latent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hla_jax.kernels.attention_match import Fitted, Fixed

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Match(NamedTuple):
    """Sums over the counted queries: KL in nats averaged over heads, and the relative squared error of the layer's
    output.
    """

    kl: Float[Array, ""]
    error: Float[Array, ""]


def attention_match(
    fitted: Fitted, fixed: Fixed, index: Int[Array, "B Q"], counted: Float[Array, "B Q"], window: int
) -> Match:
    """Compares both attentions for the queries at tokens `index`, weighting each by `counted`.

    KL(exact || hybrid) runs over all tokens a query sees; |o_hat - o|^2 / |o|^2 compares the outputs after `o_proj`.
    """
    tokens = jnp.arange(fixed.k.shape[1])
    distance = index[:, None, :, None] - tokens
    visible = (distance >= 0) & (
        jnp.take_along_axis(fixed.segments, index, 1)[:, None, :, None] == fixed.segments[:, None, None]
    )
    far = distance > window
    scale = fixed.q.shape[-1] ** -0.5
    wide = jnp.promote_types(fixed.q.dtype, jnp.float32)
    batch, queries, heads, size = fixed.q.shape
    groups = fixed.k.shape[2]
    grouped = fixed.q.reshape(batch, queries, groups, heads // groups, size)
    exact = (
        jnp.einsum("bqgme,bkge->bgmqk", grouped, fixed.k, preferred_element_type=wide).reshape(
            batch, heads, queries, -1
        )
        * scale
    )
    latent = jnp.einsum("bqhr,bkr->bhqk", fitted.q, fitted.k, preferred_element_type=wide) * scale
    exact = jnp.where(visible, exact, -jnp.inf)
    hybrid = jnp.where(far, jnp.where(visible, latent, -jnp.inf), exact)
    exact_lse, hybrid_lse = (jax.nn.logsumexp(scores, axis=-1, keepdims=True) for scores in (exact, hybrid))
    a, a_hat = jnp.exp(exact - exact_lse), jnp.exp(hybrid - hybrid_lse)
    # Scores of the window are the same on both sides, so only the latent's differ in the sum over a (log a - log
    # a_hat).
    apart = jnp.where(far & visible, exact - hybrid, 0)
    kl = jnp.sum(a * apart, axis=-1) + (hybrid_lse - exact_lse)[..., 0]

    def values(weights: Float[Array, "B H Q S"]) -> Float[Array, "B Q H dh"]:
        grouped = weights.reshape(batch, groups, heads // groups, queries, -1)
        return jnp.einsum("bgmqk,bkge->bqgme", grouped, fixed.v, preferred_element_type=wide).reshape(
            batch, queries, heads, size
        )

    out = values(a)
    from_latent = jnp.einsum(
        "bhqk,bkr,hre->bqhe", jnp.where(far, a_hat, 0), fitted.v, fitted.read, preferred_element_type=wide
    )
    out_hat = from_latent + values(jnp.where(far, 0, a_hat))
    error = relative_error(out_hat, out, fixed.o_proj)
    return Match(jnp.sum(jnp.mean(kl, axis=1) * counted), jnp.sum(error * counted))


def relative_error(
    out_hat: Float[Array, "B Q H dh"], out: Float[Array, "B Q H dh"], o_proj: Float[Array, "d Hdh"]
) -> Float[Array, "B Q"]:
    """|P (o_hat - o)|^2 / |P o|^2 of each query."""
    project = lambda o: jnp.einsum("bqi,di->bqd", o.reshape(*o.shape[:2], -1), o_proj.astype(o.dtype))
    return jnp.sum(jnp.square(project(out_hat - out)), -1) / (jnp.sum(jnp.square(project(out)), -1) + 1e-12)
