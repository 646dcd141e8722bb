"""The TPU kernels of `attention_match`: interpreted, against the direct formula in float64, with planted faults that
must be found; and compiled by the TPU's own compiler.
"""

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from hla_jax.kernels.attention_match import Fitted, Fixed, api, pallas_tpu, reference

Operands = tuple[Fitted, Fixed, Any, Any]
WINDOW = 5
SMALL = functools.partial(pallas_tpu.attention_match, block_queries=16, block_keys=16)


def operands(queries: int = 20, heads: int = 3, groups: int = 1, tokens: int = 45, dtype: str = "float32") -> Operands:
    """Two rows in segments of uneven length, the second one padded; queries are any tokens in any order."""
    rng = np.random.default_rng(0)
    draw = lambda *shape, scale=1.0: np.asarray(jnp.asarray(scale * rng.normal(size=shape), dtype))
    index = np.stack([rng.permutation(tokens)[:queries] for _ in range(2)]).astype(np.int32)
    place = np.arange(tokens)
    segments = np.stack([1 + (place > 12), np.where(place < tokens - 7, 1 + (place > 30), 0)]).astype(np.int32)
    counted = (np.take_along_axis(segments, index, 1) > 0).astype(np.float32) / queries
    fitted = Fitted(
        draw(2, queries, heads, 12), draw(2, tokens, 12), draw(2, tokens, 10), draw(heads, 10, 8, scale=0.3)
    )
    k, v = draw(2, tokens, groups, 8), draw(2, tokens, groups, 8)
    return fitted, Fixed(draw(2, queries, heads, 8), k, v, draw(14, heads * 8), segments), index, counted


def of_kernels(window: int, interpret: Any = True, **sizes: Any) -> Any:
    """Loss, terms, and gradient."""
    loss = jax.jit(jax.value_and_grad(functools.partial(SMALL, window=window, interpret=interpret), has_aux=True))
    return loss(*jax.tree.map(jnp.asarray, operands(**sizes)))


@functools.cache
def of_reference(window: int, **sizes: Any) -> Any:
    """The same in float64."""

    def loss(*operands: Any) -> Any:
        match = reference.attention_match(*operands, window)
        return match.kl + match.error, match

    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(x) if x.dtype == np.int32 else jnp.asarray(x, jnp.float64)
        return jax.tree.map(
            np.asarray, jax.jit(jax.value_and_grad(loss, has_aux=True))(*jax.tree.map(wide, operands(**sizes)))
        )


def compare(found: Any, expected: Any, tolerance: float) -> None:
    """Within `tolerance` of each array's largest number."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one = np.asarray(one, np.float64)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max() + 1e-12)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("sizes", "window", "dtype", "tolerance"),
    [
        ({}, WINDOW, "float32", 3e-6),
        ({"heads": 4, "groups": 2, "queries": 45}, 0, "float32", 3e-6),
        ({}, WINDOW, "bfloat16", 2e-2),
    ],
    ids=["queries", "no-window", "bfloat16"],
)
def test_equals_the_reference_in_float64(sizes: dict[str, int], window: int, dtype: str, tolerance: float) -> None:
    compare(of_kernels(window, **sizes, dtype=dtype), of_reference(window, **sizes, dtype=dtype), tolerance)


@pytest.mark.usefixtures("quick_compile")
def test_a_window_beyond_all_tokens_leaves_no_difference_and_no_gradient() -> None:
    (loss, _), gradient = of_kernels(1000, heads=1, tokens=30)
    assert abs(loss) < 1e-6
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), gradient)


@pytest.mark.long
@pytest.mark.usefixtures("quick_compile")
def test_a_simulated_tpu_finds_no_race_and_nothing_uninitialised() -> None:
    """Vector memory starts as NaN there, and blocks come and go as on the chip."""
    sizes = {"queries": 17, "heads": 1, "tokens": 30}
    found = of_kernels(WINDOW, pltpu.InterpretParams(detect_races=True), **sizes)
    compare(found, of_reference(WINDOW, **sizes), 3e-6)


def window_off_by_one(masks: Callable[..., Any], options: Any, *rest: Any) -> Any:
    return masks(options._replace(window=options.window + 1), *rest)


def nothing_rescaled(softmax: Callable[..., Any], *arguments: Any) -> Any:
    weights, keep = softmax(*arguments)
    return weights, jnp.ones_like(keep)


def window_independent_of_the_latent(sums: Callable[..., Any], *arguments: Any) -> Any:
    found = sums(*arguments)
    return found._replace(window=jax.lax.stop_gradient(found.window))


def a_block_too_few(last_far: Callable[..., Any], *arguments: Any) -> Any:
    return last_far(*arguments) - 1


@pytest.mark.long
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_masks", window_off_by_one),
        ("_online_softmax", nothing_rescaled),
        ("_sums", window_independent_of_the_latent),
        ("_last_far", a_block_too_few),
    ],
)
def test_a_fault_is_found(name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_tpu, name, functools.partial(fault, getattr(pallas_tpu, name)))
    found, expected = of_kernels(WINDOW), of_reference(WINDOW, dtype="float32")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(found, expected, 1e-3)


def test_the_kernel_is_for_a_tpu_and_two_types() -> None:
    assert api.choose() == ("blockwise", "no kernel for a cpu")
    with pytest.raises(ValueError, match="runs on a tpu"):
        api.choose("pallas_tpu")
    with pytest.raises(ValueError, match="no implementation 'palas'"):
        api.choose("palas")
    fitted, fixed, *rest = jax.tree.map(jnp.asarray, operands())
    expected = reference.attention_match(fitted, fixed, *rest, WINDOW)
    for name in ("reference", None):
        loss, match = api.attention_match(fitted, fixed, *rest, WINDOW, implementation=name)
        np.testing.assert_allclose(loss, sum(expected), rtol=1e-5)
        np.testing.assert_allclose(match, expected, rtol=1e-5)


GENERATIONS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs the TPU compiler: pip install "jax[tpu]"'
)
H, DH, RANK, HIDDEN = 16, 128, 512, 2048
"""Ouro-1.4B's layer, with a window of 128."""


@pytest.fixture
def compile_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compiles a function of arrays for a generation of TPUs."""
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", os.environ.get("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"))

    def compiled(generation: str, function: Callable[..., Any], *shapes: Any) -> Any:
        from jax.experimental import topologies

        device = topologies.get_topology_desc(platform="tpu", topology_name=GENERATIONS[generation]).devices[0]
        kind = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
        mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
        here = SingleDeviceSharding(device)
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
        # As training runs; with the tests' exact matrix products it compiles for minutes.
        with jax.sharding.use_abstract_mesh(mesh), jax.default_matmul_precision("default"):
            return jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",)).compile()

    return compiled


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.long
@needs_libtpu
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_kernels_compile(generation: str, compile_for: Callable[..., Any]) -> None:
    """Also in float32, which needs the most vector memory."""
    tokens, queries = 16384, 1024
    options = pallas_tpu.Options(128, DH**-0.5, 512, 512, False)
    int32 = functools.partial(shape, dtype=jnp.int32)
    places = pallas_tpu.Places(int32(1, 1, queries), int32(1, 1, queries), int32(1, tokens, 1))
    float32 = functools.partial(shape, dtype=jnp.float32)
    latent = pallas_tpu.Latent(float32(1, H, queries, RANK), float32(1, tokens, RANK), float32(1, tokens, RANK))
    exact = pallas_tpu.Exact(shape(1, H, queries, DH), shape(1, H, tokens, DH), shape(1, H, tokens, DH))

    def gradient(*operands: Any) -> Any:
        return jax.grad(lambda *xs: sum(map(jnp.sum, pallas_tpu._sums(options, *xs))))(*operands)

    assert compile_for(generation, gradient, latent, exact, places).as_text().count("tpu_custom_call") >= 3


@pytest.mark.long
@needs_libtpu
def test_memory_on_a_tpu_is_linear_in_the_tokens(compile_for: Callable[..., Any]) -> None:
    """Loss and gradient of a layer: no array of queries x tokens. The second shape has four times the scores of the
    first, and the memory is about the same.
    """

    def compiled(tokens: int, queries: int) -> Any:
        fitted = Fitted(shape(1, queries, H, RANK), shape(1, tokens, RANK), shape(1, tokens, RANK), shape(H, RANK, DH))
        k, segments = shape(1, tokens, H, DH), shape(1, tokens, dtype=jnp.int32)
        fixed = Fixed(shape(1, queries, H, DH), k, k, shape(HIDDEN, H * DH), segments)
        index, counted = shape(1, queries, dtype=jnp.int32), shape(1, queries, dtype=jnp.float32)
        loss = lambda *operands: api.attention_match(*operands, 128, implementation="pallas_tpu")
        return compile_for("v5e", jax.value_and_grad(loss, has_aux=True), fitted, fixed, index, counted)

    temporary = lambda found: found.memory_analysis().temp_size_in_bytes
    short, long = compiled(2048, 2048), compiled(16384, 1024)
    assert temporary(short) < 4 * H * 2048 * 2048
    assert temporary(long) < 2 * temporary(short)
    shapes = [dims.split(",") for dims in re.findall(r"\w\[([\d,]+)\]", long.as_text())]
    assert ["1", "16384", "512"] in shapes
    assert not [dims for dims in shapes if {"16384", "1024"} <= set(dims)]
