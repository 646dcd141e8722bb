"""Settings and fixtures of all tests: CPU unless told otherwise, exact matrix products, and a way to run in float64."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Every compiled program maps memory, and a process may have 65,530 mappings: the whole suite has more."""
    yield
    jax.clear_caches()


@pytest.fixture
def x64():
    """Runs one test with 64-bit types; everything it computes with must be made inside it."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=[pytest.param("float32", marks=pytest.mark.long), "float64"])
def dtype(request):
    """Runs a test once in each precision, with 64-bit types on for float64."""
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@pytest.fixture
def quick_compile():
    """Compiles without most of XLA's optimisations, a quarter sooner: where a test compiles much."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
