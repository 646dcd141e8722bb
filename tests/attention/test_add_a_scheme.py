"""The example of docs/add_a_scheme.md keeps the contract that the built-in schemes keep, and a broken one does not."""

import dataclasses
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import naive
from docs import loop_mean
from docs.loop_mean import LoopMean
from hla_jax.attention import registry
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.calibration.calibrate import calibrate
from hla_jax.generation import decode
from hla_jax.model import Model, forward_swapped, load
from hla_jax.serving.export import export
from hla_jax.training import distill
from tiny import random_maps, tiny_config, tiny_params, tiny_tokens

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = tiny_config()
NUMBERS = 2 * CONFIG.num_kv_heads * CONFIG.head_dim
# Shorter than the window, and longer than it by several tokens, with padding behind.
WINDOW, LENGTHS, NEW = 2, np.array([1, 7, 5]), 4


class MeanStore(naive.Store):
    """Weighted means over the loops of what the oracle noted."""

    def rebuilt(self, j, loop, layer):
        k, v = (np.stack(one) for one in zip(*(self.kv[j, t, layer] for t in range(self.config.num_loops))))
        weigh = lambda x, name: np.einsum("tge,tg->ge", x, self.maps[name][layer])
        return weigh(k, "weight_k"), weigh(v, "weight_v")


def check_bytes(scheme: Scheme, batch: int, capacity: int) -> None:
    """The cache that is allocated has the bytes that the scheme says."""
    cache = scheme.init_cache(CONFIG, batch, capacity, "bfloat16")
    assert sum(buffer.nbytes for buffer in cache.buffers.values()) == batch * scheme.cache_bytes(
        CONFIG, capacity, jnp.dtype("bfloat16")
    )


def check_decoding(attention: Attention, store: type[naive.Store]) -> None:
    """Prompts of several lengths in one batch, then tokens through the cache: what the oracle gives of each alone."""
    params, tokens = tiny_params(CONFIG, "float64"), tiny_tokens(CONFIG, 3, LENGTHS.max() + NEW)
    new = jnp.stack([row[length : length + NEW] for row, length in zip(tokens, LENGTHS)])
    prompts = tokens[:, : LENGTHS.max()]
    first, cache = decode.prefill(params, CONFIG, attention, prompts, jnp.asarray(LENGTHS), tokens.shape[1])
    rest, _ = decode.forced(params, CONFIG, attention, cache, new)
    for number, (row, length) in enumerate(zip(tokens, LENGTHS)):
        oracle = store(CONFIG, attention.params)
        expected = naive.decode(params, CONFIG, oracle, row[: length + NEW], length, window=WINDOW)
        np.testing.assert_allclose(first[number], expected[length - 1], atol=1e-9, rtol=0)
        np.testing.assert_allclose(rest[number], expected[length:], atol=1e-9, rtol=0)


def check_parallel_pass(attention: Attention, store: type[naive.Store]) -> None:
    """Every token reads the past as it is stored, in one pass."""
    params, tokens = tiny_params(CONFIG, "float64"), tiny_tokens(CONFIG, 2, 9)
    found = forward_swapped(Model(CONFIG, params), tokens, attention)
    for number, row in enumerate(tokens):
        expected = naive.swapped(params, CONFIG, store(CONFIG, attention.params), row, lambda i, j: True, WINDOW)
        np.testing.assert_allclose(found[number], expected, atol=1e-9, rtol=0)


def test_contract(x64):
    attention = random_maps(LoopMean(WINDOW), CONFIG, "float64")
    check_bytes(attention.scheme, batch=3, capacity=5)
    check_decoding(attention, MeanStore)
    check_parallel_pass(attention, MeanStore)


def test_bytes_of_the_example():
    scheme = LoopMean(WINDOW)
    numbers = CONFIG.num_layers * (5 * NUMBERS + WINDOW * CONFIG.num_loops * NUMBERS)
    assert scheme.cache_bytes(CONFIG, 5, jnp.dtype("bfloat16")) == 2 * numbers
    check_bytes(Evicted(scheme, budget=4, first=1), batch=2, capacity=9)


class Unweighted(LoopMean):
    """Forgets the weights of values."""

    def parts(self, maps, inputs, k):
        return super().parts(maps | {"weight_v": jnp.ones_like(maps["weight_v"])}, inputs, k)


class OneTooFar(LoopMean):
    """Reads one token more exactly than its window has."""

    def reread(self, config, maps, cache, tokens):
        return LoopMean(self.window + 1).reread(config, maps, cache, tokens)


@pytest.mark.parametrize("broken", [Unweighted, OneTooFar])
def test_a_broken_scheme_does_not_keep_it(broken, x64):
    attention = random_maps(LoopMean(WINDOW), CONFIG, "float64")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_parallel_pass(dataclasses.replace(attention, scheme=broken(WINDOW)), MeanStore)


def test_the_example_calibrates_distils_and_comes_back_from_an_export(tmp_path):
    config = tiny_config(num_layers=1, num_loops=2)
    model, tokens = Model(config, tiny_params(config)), tiny_tokens(config, 1, 6)
    attention = calibrate(model, LoopMean(WINDOW), tokens)
    assert {name: stack.shape for name, stack in attention.params.items()} == dict.fromkeys(
        ("weight_k", "weight_v"), (1, 2, 2)
    )
    counted = jnp.ones(tokens.shape, bool)
    kl = lambda maps: distill.divergence(attention.scheme, config, maps, model.params, tokens, counted)[0]
    assert all(np.all(np.abs(slope) > 0) for slope in jax.jit(jax.grad(kl))(attention.params).values())
    export(model, attention, tmp_path / "out")
    found = load(tmp_path / "out", dtype=None).attention
    assert found.scheme == LoopMean(WINDOW)
    for name, stack in attention.params.items():
        np.testing.assert_array_equal(found.params[name], stack, strict=True)


def test_a_name_has_one_scheme():
    with pytest.raises(ValueError, match=r"scheme 'hla' is already that of hla_jax\.attention\.hla\.HLA"):
        registry.register(type("Other", (Scheme,), {"interchange": "hla"}))
    importlib.reload(sys.modules[loop_mean.__name__])
    assert registry.SCHEMES["loop_mean"].__qualname__ == "LoopMean"
