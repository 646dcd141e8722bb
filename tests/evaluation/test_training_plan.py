"""Operations are counted as often as they run: against formulas, without compiling anything."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from hla_jax import sharding
from hla_jax.attention.full import exact_stages
from hla_jax.evaluation.training_plan import flops
from hla_jax.models import looped, weights
from hla_jax.training import uptrain
from hla_jax.training.optimizer import OptimizerConfig, adamw
from hla_jax.training.step import init, make_step
from tiny import random_hla, tiny_config

CONFIG = tiny_config()


def count(function, *arguments) -> int:
    return flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def forward(params, tokens):
    stages = exact_stages(CONFIG, jnp.arange(tokens.shape[1])[None])
    return looped.run(params, CONFIG, tokens, stages, None)[0]


def expected_forward(rows: int, length: int) -> int:
    d, f, heads, groups, size = 24, 32, 4, 2, 8
    matrices = 2 * d * size * (heads + groups + groups + heads) + 2 * 3 * d * f
    attention = 2 * 2 * heads * size * length
    return 3 * 2 * rows * length * (matrices + attention)  # loops x layers


def abstract(rows: int, length: int):
    return weights.abstract_params(CONFIG, "float32"), jax.ShapeDtypeStruct((rows, length), jnp.int32)


def test_a_forward_pass():
    assert count(forward, *abstract(2, 16)) == expected_forward(2, 16)


def test_loops_conditionals_and_gradients():
    x = jnp.ones((4, 8))
    product = lambda y, _: (y @ jnp.ones((8, 8)), None)
    assert count(lambda x: jax.lax.scan(product, x, length=5)[0], x) == 5 * 2 * 4 * 8 * 8
    one = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: (x @ x.T).sum(), lambda x: x.sum(), x)
    assert count(one, x) == 2 * 4 * 4 * 8
    assert count(jax.grad(lambda w: (x @ w).sum()), jnp.ones((8, 3))) == 2 * 2 * 4 * 8 * 3


def test_a_mesh_shares_the_work():
    """Parts of all devices together are the whole."""
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((2, 2, 2), sharding.MESH_AXES[1:], axis_types=(AxisType.Auto,) * 3)
    ):
        assert count(forward, *abstract(2, 16)) == expected_forward(2, 16)


def test_a_step():
    """Micro-batches do the same work in all; a step does more than its forward pass."""
    attention, (params, _) = random_hla(CONFIG, 3), abstract(1, 1)
    optimizer = adamw(OptimizerConfig(1e-3, total_steps=3))
    state = jax.eval_shape(lambda maps: init(maps, optimizer, 0), attention.params)
    batch = {name: jax.ShapeDtypeStruct((2, 16), jnp.int32) for name in ("tokens", "segments", "positions")}

    def work(micro_batches: int) -> int:
        step = make_step(uptrain.make_loss(attention.scheme, CONFIG), optimizer, micro_batches)
        return flops(step.trace(state, batch, params).jaxpr.jaxpr)

    assert work(1) == work(2)
    assert 1.5 * expected_forward(2, 16) < work(1) < 6 * expected_forward(2, 16)
