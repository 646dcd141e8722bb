"""On eight (virtual) devices everything lies where the table says, and computes what one device computes."""

import importlib.util
import textwrap

import pytest

from eight_devices import on_eight_devices
from hla_jax import sharding
from hla_jax.evaluation import offline


@pytest.mark.long
def test_the_model_under_tensor_parallelism(tmp_path):
    """Weights over the heads alone, without `jax.set_mesh`: what serving does."""
    on_eight_devices(
        """
        import jax, numpy as np
        import hla_jax
        from hla_jax.models import weights
        from jax.sharding import AxisType
        from tiny import tiny_config, tiny_params, tiny_tokens

        config = tiny_config(num_heads=8, num_kv_heads=8)
        # Larger weights make so much of rounding that calibration finds other directions.
        weights.save_params(tiny_params(config, scale=0.15), config, sys.argv[1])
        mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
        one, many = hla_jax.load(sys.argv[1], "float32"), hla_jax.load(sys.argv[1], "float32", mesh)
        assert many.params["layers"]["q_proj"].addressable_shards[0].data.shape[1] == config.head_dim

        tokens = tiny_tokens(config, 2, 20)

        def everything(model):
            attention = hla_jax.calibrate(model, hla_jax.HLA(16, 16, 8, window=3), np.asarray(tokens))
            return hla_jax.forward(model, tokens), hla_jax.decode_forced(model, tokens, 6, attention)

        same = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
        jax.tree.map(same, everything(many), everything(one))
        """,
        tmp_path / "model",
    )


STEP = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import PartitionSpec as P
    from hla_jax import sharding
    from hla_jax.attention import capture
    from hla_jax.models import weights
    from hla_jax.training import uptrain
    from hla_jax.training.optimizer import OptimizerConfig, adamw
    from hla_jax.training.step import Part, init, init_on, make_step
    from tiny import random_hla, tiny_config, tiny_huginn, tiny_params, tiny_tokens

    ouro = tiny_config(vocab_size=48, num_heads=4, num_kv_heads=2)
    huginn = tiny_huginn(vocab_size=48, hidden_size=32, num_heads=4, num_kv_heads=4, num_loops=3)
    config = huginn if "huginn" in sys.argv else ouro
    params, attention = tiny_params(config), random_hla(config, 3)
    scheme, optimizer = attention.scheme, adamw(OptimizerConfig(1e-2, total_steps=9))
    # Queries are all of the short rows' tokens: random ones are other ones in another row.
    parts = {
        "short": Part(uptrain.make_loss(scheme, config), micro_batches=2),
        "long": Part(uptrain.make_loss(scheme, config, queries=16)),
    }
    parts = {name: part for name, part in parts.items() if name in sys.argv}

    def rows(count, length):
        segments = np.ones((count, length), np.int32)
        segments[0, length // 2 :], segments[1, -3:] = 2, 0
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), segments.shape)
        return {"tokens": np.asarray(tiny_tokens(config, count, length)), "segments": segments, "positions": positions}

    batch = {"short": rows(8, 12), "long": rows(4, 32)}
    batch = {name: batch[name] for name in parts}

    def twice(update, state, batch, params):
        losses = []
        for _ in range(2):
            state, metrics = update(state, batch, params)
            losses.append(jax.device_get(metrics))
        return state, losses

    one, expected = twice(make_step(parts, optimizer), init(attention.params, optimizer, 0), batch, params)

    def on(sizes):
        mesh = sharding.make_mesh(**sizes)
        with jax.set_mesh(mesh):
            placed = sharding.maps(scheme.map_shapes(config), scheme.map_axes(), config.num_layers, mesh)
            state, shardings = init_on(mesh, attention.params, placed, optimizer, 0)
            base = sharding.put(params, weights.shardings(config, mesh))
            mine = sharding.put_rows(batch, mesh)
            state, losses = twice(make_step(parts, optimizer, shardings=shardings), state, mine, base)
        same = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
        jax.tree.map(same, losses, expected)
        jax.tree.map(same, state.params, one.params)
        return mesh, base, state, mine
"""


@pytest.mark.long
def test_an_uptraining_step_on_every_axis():
    """Short rows and long documents; what comes out lies as it went in, and the numbers are one device's."""
    on_eight_devices(
        textwrap.dedent(STEP)
        + textwrap.dedent("""
        mesh, base, state, mine = on({"fsdp": 2, "tensor": 2, "sequence": 2})
        with jax.set_mesh(mesh):
            h = jax.jit(lambda params, batch: capture.attention_inputs(params, config, **batch))(base, mine["long"])
        spec = lambda x: x.sharding.spec
        local = lambda x: x.addressable_shards[0].data.shape
        assert spec(base["layers"]["q_proj"]) == P(None, "tensor", "fsdp")
        assert local(base["layers"]["down_proj"]) == (2, 12, 16)
        assert spec(base["embed_tokens"]) == P("tensor", "fsdp") and spec(base["norm"]) == P(None)
        for maps in (state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
            assert spec(maps["write_k"]) == P(None, None, None, "fsdp")
            assert spec(maps["read_q"]) == P(None, None, "tensor", None, "fsdp")
            assert local(maps["read_o"]) == (2, 2, 2, 4, 8)
        assert all(x.sharding.is_fully_replicated for x in (state.step, state.rng, state.opt_state[1][0].count))
        assert spec(mine["short"]["tokens"])[0] == ("data", "fsdp")
        assert local(h) == (3, 2, 2, 16, 12), "captured states: rows over fsdp, tokens over sequence, sizes over tensor"
    """),
        "short",
        "long",
    )


@pytest.mark.long
def test_an_uptraining_step_of_huginn():
    """Its layers outside of the loops, the adapter and the biases lie on the mesh too."""
    on_eight_devices(
        textwrap.dedent(STEP)
        + textwrap.dedent("""
        _, base, *_ = on({"fsdp": 2, "tensor": 2, "sequence": 2})
        spec = lambda x: x.sharding.spec
        assert spec(base["coda"]["q_proj"]) == P(None, "tensor", "fsdp")
        assert spec(base["layers"]["k_bias"]) == P(None, "tensor")
        assert spec(base["adapter"]) == P("fsdp", None)
    """),
        "huginn",
        "short",
    )


@pytest.mark.long
def test_the_kernel_runs_on_each_devices_part():
    """The TPU kernel, interpreted, under `shard_map`: loss and gradients of one device."""
    on_eight_devices("""
        import jax, jax.numpy as jnp, numpy as np
        from hla_jax import sharding
        from hla_jax.kernels.attention_match import Fitted, Fixed, pallas_tpu, reference

        B, Q, S, H, G, dh, r = 2, 16, 24, 4, 2, 8, 16
        keys = iter(jax.random.split(jax.random.key(0), 20))
        normal = lambda *shape: jax.random.normal(next(keys), shape)
        fitted = Fitted(normal(B, Q, H, r), normal(B, S, r), normal(B, S, r), normal(H, r, dh))
        k, v, segments = normal(B, S, G, dh), normal(B, S, G, dh), jnp.ones((B, S), jnp.int32).at[1, 9:].set(2)
        fixed = Fixed(normal(B, Q, H, dh), k, v, normal(24, H * dh), segments)
        index = jnp.stack([jax.random.permutation(next(keys), S)[:Q] for _ in range(B)])
        counted = jnp.abs(normal(B, Q))

        def direct(fitted):
            match = reference.attention_match(fitted, fixed, index, counted, 3)
            return match.kl + match.error, match

        kernel = lambda fitted: pallas_tpu.attention_match(fitted, fixed, index, counted, 3, interpret=True)
        expected = jax.jit(jax.value_and_grad(direct, has_aux=True))(fitted)
        with jax.set_mesh(sharding.make_mesh(fsdp=2, tensor=2, sequence=2)):
            compiled = jax.jit(jax.value_and_grad(kernel, has_aux=True)).lower(fitted).compile()
            found = compiled(fitted)
        same = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4)
        jax.tree.map(same, found, expected)
    """)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("sizes", [{"fsdp": 16}, {"fsdp": 8, "sequence": 2}, {"fsdp": 8, "tensor": 2}, {"data": 4}])
@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4", "v5p:2x2x4"])
def test_every_host_of_a_tpu_slice_reads_its_share(topology, sizes):
    mesh = sharding.MeshConfig(**{"fsdp": -1} | sizes).make(offline.tpus(topology))
    held = sharding.rows_of_processes(mesh)
    assert sorted(held) == [0, 1, 2, 3]
    assert len({*map(len, held.values())}) == 1
    assert set().union(*held.values()) == set(range(sharding.row_parts(mesh)))
