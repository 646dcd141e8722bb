"""What a scheme says of itself: bytes, shapes, its entry in a config; and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Cache, SchemeError, new_token, put_tokens
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import OURO_1P4B, OURO_2P6B
from tiny import tiny_config

KIB, MIB = 1 << 10, 1 << 20
PAPER = HLA(rank_k=512, rank_v=512, rank_loop1=256, window=128)


@pytest.mark.parametrize(
    ("scheme", "per_token", "per_sequence"),
    [
        (FullCache(), 768 * KIB, 0),
        (PAPER, 72 * KIB, 96 * MIB),
        (SharedLoop(128), 192 * KIB, 96 * MIB),
        (SharedLoop(0), 192 * KIB, 0),
    ],
)
def test_bytes_of_ouro_1p4b(scheme, per_token, per_sequence):
    scheme.check(OURO_1P4B)
    for tokens in (1, 1000, 65536):
        assert scheme.cache_bytes(OURO_1P4B, tokens, jnp.bfloat16) == tokens * per_token + per_sequence
    assert scheme.cache_bytes(OURO_2P6B, 1000, jnp.bfloat16) == 2 * (1000 * per_token + per_sequence)


SIZES = st.builds(
    lambda loops, layers, group, kv_heads, half: tiny_config(
        num_loops=loops, num_layers=layers, num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=2 * half
    ),
    *[st.integers(2, 4), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)],
)


@settings(max_examples=8, deadline=None)
@given(
    SIZES, st.integers(0, 4), st.integers(1, 3), st.integers(1, 5), st.sampled_from(["float32", "bfloat16"]), st.data()
)
def test_bytes_are_what_is_allocated_and_what_the_formulas_say(config, window, batch, capacity, dtype, data):
    loops, layers, kv_heads, size = config.num_loops, config.num_layers, config.num_kv_heads, config.head_dim
    rank_k = size * data.draw(st.integers(1, (loops - 1) * kv_heads))
    rank_v = data.draw(st.integers(1, (loops - 1) * kv_heads * size))
    rank_1 = size * data.draw(st.integers(1, kv_heads))
    ring = 2 * loops * kv_heads * size * window
    numbers = {
        FullCache(): 2 * loops * kv_heads * size * capacity,
        SharedLoop(window): 2 * kv_heads * size * capacity + ring,
        HLA(rank_k, rank_v, rank_1, window): (rank_k + rank_v + 2 * rank_1) * capacity + ring,
    }
    for scheme, expected in numbers.items():
        cache = scheme.init_cache(config, batch, capacity, dtype)
        allocated = sum(buffer.nbytes for buffer in cache.buffers.values())
        assert allocated == batch * scheme.cache_bytes(config, capacity, dtype)
        assert allocated == batch * layers * expected * jnp.dtype(dtype).itemsize
        assert cache.lengths.tolist() == [0] * batch


@pytest.mark.parametrize("scheme", [FullCache(), SharedLoop(3), PAPER, HLA(8, 3, 8, 0, (0, 1, 2, 3), (3, 2, 1, 0))])
def test_config_entry_is_the_scheme(scheme):
    entry = scheme.to_config()
    assert None not in entry.values()
    assert type(scheme).from_config(entry) == scheme


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(window=None), r"hla_config: missing \['window'\]; its fields are \['rank_k'"),
        (dict(rank=3), r"hla_config: unknown \['rank'\]; its fields are \['rank_k'"),
        (dict(window="5"), "hla_config: window must be an integer, found '5'"),
        (dict(rank_k=8.5), "hla_config: rank_k must be an integer, found 8.5"),
        (dict(pair_frequency=[0, "a"]), "hla_config: pair_frequency must be a list of integers"),
    ],
)
def test_malformed_config_entries_are_refused(changes, message):
    entry = {name: value for name, value in (PAPER.to_config() | changes).items() if value is not None}
    with pytest.raises(SchemeError, match=message):
        HLA.from_config(entry)


@pytest.mark.parametrize("scheme", [SharedLoop(-1), dataclasses.replace(PAPER, window=-1)])
def test_a_cache_of_impossible_sizes_is_not_allocated(scheme):
    with pytest.raises(SchemeError, match="window must be at least 0, found -1"):
        scheme.init_cache(OURO_1P4B, 1, 4, jnp.float32)


def test_a_token_is_stored_at_its_position_or_its_slot_of_the_ring():
    buffers = {"plain": jnp.zeros((2, 3, 9, 4)), "window": jnp.zeros((5, 3, 2, 1, 4))}
    new = new_token(buffers)
    assert {name: value.shape for name, value in new.items()} == {"plain": (2, 3, 4), "window": (5, 3, 1, 4)}
    position = np.array([0, 5, 8])
    new = {name: jax.random.normal(jax.random.key(0), value.shape) for name, value in new.items()}
    stored = Cache(buffers, jnp.asarray(position)).store(new).buffers
    for name, slot in (("plain", position), ("window", position % 2)):
        for sequence in range(3):
            np.testing.assert_array_equal(stored[name][:, sequence, slot[sequence]], new[name][:, sequence])
        assert np.count_nonzero(stored[name]) == new[name].size


def test_tokens_of_a_prompt_are_stored_in_one_slot():
    buffer = jnp.zeros((3, 2, 6, 4))
    stored = put_tokens(buffer, 1, jnp.ones((2, 4, 4)))
    assert np.argwhere(np.asarray(stored[..., 0])).tolist() == [[1, b, s] for b in range(2) for s in range(4)]
