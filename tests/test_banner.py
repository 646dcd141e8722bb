"""The banner names devices, mesh, precision, attention and versions, with the reasons."""

import jax

from hla_jax.banner import banner


def test_banner():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    given = {"dtype": "bfloat16", "dtype_reason": "as stored", "attention": "jnp", "attention_reason": "no kernel here"}
    text = banner("uptrain nano", mesh=mesh, **given)
    for part in (
        "== uptrain nano ==",
        "cpu",
        f"data={jax.device_count()}",
        "bfloat16: as stored",
        "jnp: no kernel here",
        jax.__version__,
    ):
        assert part in text
    assert "none: one device" in banner("x", **given)
