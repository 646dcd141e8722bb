"""Sharing between loops: one slot or several, against an oracle written out in numpy, for both families."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import naive
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention, SchemeError
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import OURO_1P4B
from hla_jax.evaluation import cost
from hla_jax.generation import decode
from hla_jax.generation.generate import decode_forced
from hla_jax.model import Model, forward_swapped
from tiny import tiny_config, tiny_huginn, tiny_params, tiny_tokens

LENGTH, PROMPT = 8, 4
CONFIGS = {"ouro": tiny_config(num_loops=4), "huginn": tiny_huginn(num_loops=5, num_coda=1)}


@pytest.fixture
def models(x64, quick_compile):
    return {name: Model(config, tiny_params(config, "float64")) for name, config in CONFIGS.items()}


@pytest.mark.long
@pytest.mark.parametrize(("family", "slots", "window"), [("ouro", 3, 2), ("huginn", 2, 0)])
def test_a_loop_reads_the_last_one_of_its_slot(family, slots, window, models):
    model, tokens = models[family], tiny_tokens(CONFIGS[family], 1, LENGTH)
    oracle = lambda slots: naive.decode(
        model.params, model.config, naive.SharedStore(model.config, slots=slots), tokens[0], PROMPT, window=window
    )
    found = decode_forced(model, tokens, PROMPT, Attention(SharedLoop(window, slots)))[0]
    np.testing.assert_allclose(found, oracle(slots), atol=1e-10, rtol=0)
    assert np.abs(found - oracle(slots - 1)).max() > 1e-3


def test_the_parallel_pass_reads_the_same(models):
    model, tokens = models["huginn"], tiny_tokens(CONFIGS["huginn"], 1, LENGTH)
    store = naive.SharedStore(model.config, slots=2)
    expected = naive.swapped(model.params, model.config, store, tokens[0], lambda i, j: True, 1)
    found = forward_swapped(model, tokens, Attention(SharedLoop(1, 2)))[0]
    np.testing.assert_allclose(found, expected, atol=1e-10, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize(("family", "evicted"), [("huginn", False), ("ouro", True)])
def test_a_slot_for_every_loop_is_the_full_cache(family, evicted, models):
    """In a ragged batch, buffer by buffer."""
    model, config, lengths = models[family], CONFIGS[family], jnp.asarray([6, 3])
    tokens = tiny_tokens(config, 2, LENGTH)
    following = jnp.stack([row[length : length + 2] for row, length in zip(tokens, lengths, strict=True)])

    def run(scheme):
        attention = Attention(Evicted(scheme, 4, 1) if evicted else scheme)
        first, cache = decode.prefill(model.params, config, attention, tokens[:, :6], lengths, LENGTH)
        rest, cache = decode.forced(model.params, config, attention, cache, following)
        return first, rest, cache.buffers

    (first, rest, buffers), (exact_first, exact_rest, exact) = run(SharedLoop(0, config.num_loops)), run(FullCache())
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)
    same(first, exact_first)
    same(rest, exact_rest)
    for name, buffer in buffers.items():
        same(buffer, exact[name.replace("last_", "")])


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_bytes(slots):
    """2 slots G dh numbers a token and layer, and every loop reads one of the slots."""
    scheme, layer = SharedLoop(0, slots), 2 * OURO_1P4B.num_kv_heads * OURO_1P4B.head_dim
    assert scheme.cache_bytes(OURO_1P4B, 1000, jnp.bfloat16) == 1000 * slots * 192 * 1024
    traffic = cost.step_traffic(OURO_1P4B, scheme, 1000, 1, jnp.bfloat16)
    assert traffic.cache == 2 * 1000 * OURO_1P4B.num_layers * OURO_1P4B.num_loops * layer
    config = tiny_config(num_loops=4)
    buffers = SharedLoop(3, slots).init_cache(config, 2, 7, jnp.float32).buffers
    assert sum(x.nbytes for x in buffers.values()) == 2 * SharedLoop(3, slots).cache_bytes(config, 7, jnp.float32)


def test_config_entries():
    """One slot is written as it always was, and entries from before there were slots are read."""
    assert SharedLoop(4).to_config() == {"window": 4}
    assert SharedLoop.from_config({"window": 4}) == SharedLoop(4, 1)
    assert SharedLoop(4, 2).to_config() == {"window": 4, "slots": 2}
    assert SharedLoop.from_config(SharedLoop(4, 2).to_config()) == SharedLoop(4, 2)


@pytest.mark.parametrize("slots", [0, 5])
def test_impossible_numbers_of_slots_are_refused(slots):
    with pytest.raises(SchemeError, match=f"slots must be in 1 .. 4, the model's loops; found {slots}"):
        SharedLoop(0, slots).init_cache(OURO_1P4B, 1, 4, jnp.float32)
