"""The table of axes: what is split, and what is left whole. `test_mesh.py` runs on devices."""

import types

import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from hla_jax import sharding
from hla_jax.config import ConfigError
from hla_jax.sharding import MeshConfig, spec
from tiny import auto_mesh

MESH = auto_mesh(2, 4, 2, 2, axes=sharding.MESH_AXES)


def test_every_rule_names_axes_of_the_mesh():
    for axes in sharding.RULES.values():
        assert set([axes] if isinstance(axes, str) else axes) <= set(sharding.MESH_AXES)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("batch", None), (16, 5), PartitionSpec(("data", "fsdp"), None)),
        (("batch", None), (2, 5), PartitionSpec("data", None)),  # two rows: the first of its axes alone
        (("batch", None), (3, 5), PartitionSpec(None, None)),
        (("vocab", "embed"), (6, 8), PartitionSpec("tensor", "fsdp")),
        (("vocab", "embed"), (7, 6), PartitionSpec(None, None)),  # sizes that do not divide stay whole
        (
            (None, "batch", "tokens", "captured"),
            (3, 8, 4, 4),
            PartitionSpec(None, ("data", "fsdp"), "sequence", "tensor"),
        ),
        (("embed", "rank"), (8, 8), PartitionSpec("fsdp", None)),  # an axis of the mesh splits one dimension
    ],
)
def test_spec(axes, shape, expected):
    assert spec(axes, shape, MESH) == expected


def test_a_head_is_never_cut():
    assert spec(("heads",), (24,), MESH, units={"heads": 3}) == PartitionSpec(None)


def test_another_mesh_has_the_axes_it_has():
    assert spec(("batch", "heads"), (4, 4), auto_mesh(2, axes=["tensor"])) == PartitionSpec(None, "tensor")


def test_a_mesh_that_does_not_fit_is_refused():
    for sizes in ({"fsdp": 3}, {"data": -1, "fsdp": -1}, {"tensor": 0}):
        with pytest.raises(ConfigError, match="mesh MeshConfig"):
            MeshConfig(**sizes).make([types.SimpleNamespace()] * 4)
    assert dict(MeshConfig(fsdp=-1).make().shape) == {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}


def test_a_mesh_of_explicit_axes_is_refused():
    explicit = AbstractMesh((2,), ("fsdp",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ConfigError, match=r"must be of the type Auto, found .*Explicit"):
        spec(("embed",), (4,), explicit)


def test_without_a_mesh_nothing_is_split():
    assert sharding.current() is None
    assert sharding.parts("batch") == sharding.row_parts(None) == 1
    function = lambda x: x
    assert sharding.split(function, [("batch",)], ("batch",)) is function
