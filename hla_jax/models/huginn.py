"""Huginn: a prelude, a core that is looped for as many steps as one likes, and a coda (arXiv:2502.05171).

The core starts from a state of its own and is given the prelude's output at every step. `models.looped` runs it; what
the Hugging Face files lay out otherwise (joined projections, interleaved rotary pairs) is settled when they are read,
see `models.packed`. Shapes: B batch, S tokens, d hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from hla_jax.config import HuginnConfig
from hla_jax.models import layers
from hla_jax.models.stages import Attend, LayerInputs, Params

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def initial_state(config: HuginnConfig, tokens: Int[Array, "B S"], dtype: DTypeLike) -> Float[Array, "B S d"]:
    """The state that the first step of every token starts from.

    Random ones are normal, cut at three standard deviations, and drawn for each token id from one seed: so they do not
    depend on the batch, nor on where a prompt ends and decoding begins. Always drawn in float32 and by Threefry, they
    are the same whatever jax's settings, and in PyTorch (`serving/torch/state_huginn.py`).
    """
    shape = (*tokens.shape, config.hidden_size)
    if config.initial_state == "zeros":
        return jnp.zeros(shape, dtype)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0, impl="threefry2x32"), tokens.reshape(-1))
    draw = jax.vmap(lambda key: jax.random.truncated_normal(key, -3, 3, (config.hidden_size,), jnp.float32))
    scale = config.state_std * config.hidden_size**0.5
    return (scale * draw(keys)).reshape(shape).astype(dtype)


# What `looped.run` asks of a family.


def begin(
    params: Params,
    config: HuginnConfig,
    embedded: Float[Array, "B S d"],
    state: Any,
    outer: Attend,
    initial: Float[Array, "B S d"],
) -> tuple[Float[Array, "B S d"], Float[Array, "B S d"], Any]:
    """The initial state, what the prelude makes of the embeddings for every step, and the attention's state."""
    e, state = _outer_layers(
        params["prelude"], config, embedded * jnp.asarray(config.hidden_size**0.5, embedded.dtype), state, outer, 0
    )
    return initial.astype(e.dtype), e, state


def enter_loop(params: Params, x: Float[Array, "B S d"], given: Float[Array, "B S d"]) -> Float[Array, "B S d"]:
    """The adapter joins the state and the prelude's output."""
    return layers.linear(jnp.concatenate([x, given], axis=-1), params["adapter"])


def layer(
    p: Params, config: HuginnConfig, x: Array, state: Any, attend: Attend, loop: Array, number: Array
) -> tuple[Array, Any]:
    """Norms before attention and MLP, and after each has been added."""
    eps = config.rms_norm_eps
    h = layers.rms_norm(x, p["norm_1"], eps)
    heads, state = attend(state, LayerInputs(h, *layers.project(p, config, h), loop, number))
    x = layers.rms_norm(x + layers.linear(heads.reshape(*x.shape[:2], -1), p["o_proj"]), p["norm_2"], eps)
    return layers.rms_norm(x + layers.gated_mlp(p, layers.rms_norm(x, p["norm_3"], eps)), p["norm_4"], eps), state


def leave_loop(params: Params, config: HuginnConfig, x: Float[Array, "B S d"]) -> Float[Array, "B S d"]:
    """The state goes to the next step as it is."""
    return x


def end(
    params: Params, config: HuginnConfig, x: Float[Array, "B S d"], state: Any, outer: Attend
) -> tuple[Float[Array, "B S d"], Any]:
    """One norm before the coda and, the same, after it."""
    x = layers.rms_norm(x, params["norm"], config.rms_norm_eps)
    x, state = _outer_layers(params["coda"], config, x, state, outer, config.num_prelude)
    return layers.rms_norm(x, params["norm"], config.rms_norm_eps), state


def _outer_layers(
    stack: Params, config: HuginnConfig, x: Array, state: Any, outer: Attend, first: int
) -> tuple[Array, Any]:
    def one_layer(carry: Any, p: Params) -> tuple[Any, None]:
        x, state, number = carry
        x, state = layer(p, config, x, state, outer, jnp.zeros((), jnp.int32), number)
        return (x, state, number + 1), None

    (x, state, _), _ = jax.lax.scan(one_layer, (x, state, jnp.asarray(first, jnp.int32)), stack)
    return x, state
