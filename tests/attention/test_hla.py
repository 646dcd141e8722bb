"""HLA: identities with exact attention, the rotation of latents, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hla_jax.attention.hla import HLA, rotate_latent
from hla_jax.attention.scheme import SchemeError
from hla_jax.generation import decode
from hla_jax.generation.generate import decode_forced
from hla_jax.model import Model, forward, forward_swapped
from hla_jax.models.layers import inverse_frequencies, rotate
from tiny import full_rank_hla, random_hla, tiny_config, tiny_params, tiny_tokens

LENGTH, PROMPT = 14, 5


pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize(("loops", "kv_heads", "shuffle"), [(2, 4, None), (3, 2, 3), (4, 1, 3)])
def test_full_rank_without_window_is_exact_attention(loops, kv_heads, shuffle, x64):
    config = tiny_config(num_loops=loops, num_kv_heads=kv_heads)
    params = tiny_params(config, "float64")
    model, tokens = Model(config, params), tiny_tokens(config, 2, LENGTH)
    exact, attention = forward(model, tokens), full_rank_hla(config, params, 0, shuffle)
    np.testing.assert_allclose(decode_forced(model, tokens, PROMPT, attention), exact, atol=1e-10, rtol=0)
    np.testing.assert_allclose(forward_swapped(model, tokens, attention), exact, atol=1e-10, rtol=0)


def test_wrong_maps_show(x64):
    """The identity is sensitive: maps of another pair order, loop or head change the logits far beyond its
    tolerance.
    """
    config = tiny_config()
    params = tiny_params(config, "float64")
    model, tokens = Model(config, params), tiny_tokens(config, 2, LENGTH)
    exact, attention = forward(model, tokens), full_rank_hla(config, params, 0, 3)
    other_order = full_rank_hla(config, params, 0).params
    faults = {"write_k": other_order["write_k"]} | {
        name: jnp.roll(attention.params[name], 1, axis=1)
        for name in ("write_v", "read_q", "read_o", "write_k1", "read_o1")
    }
    for name, wrong in faults.items():
        faulty = dataclasses.replace(attention, params=attention.params | {name: wrong})
        assert np.abs(decode_forced(model, tokens, PROMPT, faulty) - exact).max() > 1e-3, name


@pytest.mark.parametrize("window", [3, 11])
def test_decoding_is_prefilling(window, x64):
    """With maps that lose nothing, tokens decoded one by one leave what a prefill of all of them stores, and give the
    logits of exact attention, for a window shorter and longer than the prompt."""
    config = tiny_config()
    params = tiny_params(config, "float64")
    attention, tokens = full_rank_hla(config, params, window, 5), tiny_tokens(config, 2, LENGTH)
    fill = lambda length: decode.prefill(params, config, attention, tokens[:, :length], jnp.full(2, length), LENGTH)[1]
    logits, stepped = decode.forced(params, config, attention, fill(PROMPT), tokens[:, PROMPT:])
    at_once = fill(LENGTH)
    assert stepped.lengths.tolist() == at_once.lengths.tolist() == [LENGTH, LENGTH]
    assert stepped.buffers.keys() == at_once.buffers.keys()
    for name, buffer in stepped.buffers.items():
        np.testing.assert_allclose(buffer, at_once.buffers[name], atol=1e-10, rtol=0, err_msg=name)
    exact = forward(Model(config, params), tokens)[:, PROMPT:]
    np.testing.assert_allclose(logits, exact, atol=1e-10, rtol=0)
    if window < PROMPT:  # Planted faults: a ring turned by one slot, a latent stored at the wrong token.
        for name, axis in (("window_k", 2), ("latent_v", 2), ("latent_k1", 2)):
            cache = fill(PROMPT)
            faulty = dataclasses.replace(cache, buffers=cache.buffers | {name: jnp.roll(cache.buffers[name], 1, axis)})
            wrong, _ = decode.forced(params, config, attention, faulty, tokens[:, PROMPT:])
            assert np.abs(wrong - exact).max() > 1e-3, name


def test_window_of_the_whole_sequence_is_exact_attention(x64):
    config = tiny_config()
    model, tokens = Model(config, tiny_params(config, "float64")), tiny_tokens(config, 2, LENGTH)
    exact, attention = forward(model, tokens), random_hla(config, LENGTH, "float64")
    np.testing.assert_allclose(decode_forced(model, tokens, PROMPT, attention), exact, atol=1e-10, rtol=0)
    np.testing.assert_allclose(forward_swapped(model, tokens, attention), exact, atol=1e-10, rtol=0)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(0, 1000), st.booleans())
def test_latent_rotation_is_that_of_its_pairs(x64, pair_frequency, position, override):
    """Pair p = b dh/2 + s sits at coordinates (b dh + s, b dh + dh/2 + s), and turns by its own frequency."""
    config, half = tiny_config(head_dim=8), 4
    x = np.random.default_rng(0).normal(size=(1, 1, 3, 16))
    turned = np.asarray(
        rotate_latent(config, jnp.asarray(x), jnp.full((1, 1), position), tuple(pair_frequency) if override else None)
    )
    for p in range(8):
        s = p % half
        first, second = p // half * 2 * half + s, p // half * 2 * half + half + s
        angle = position * config.rope_theta ** (-(pair_frequency[p] if override else s) / half)
        z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)
        np.testing.assert_allclose(turned[..., first] + 1j * turned[..., second], z, atol=1e-9)


def test_latent_blocks_rotate_like_heads():
    config = tiny_config()
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 2 * config.head_dim))
    positions = jnp.arange(10).reshape(2, 5)
    heads = rotate(
        x.reshape(2, 5, 6, config.head_dim), positions, inverse_frequencies(config.head_dim, config.rope_theta)
    )
    np.testing.assert_array_equal(rotate_latent(config, x, positions, None), heads.reshape(x.shape))


GOOD = HLA(rank_k=16, rank_v=10, rank_loop1=8, window=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(window=-1), "window must be at least 0, found -1"),
        (dict(rank_k=12), "rank_k must be a positive multiple of head_dim 8.*found 12"),
        (dict(rank_k=0), "rank_k must be a positive multiple of head_dim 8.*found 0"),
        (dict(rank_k=40), "rank_k must be at most 32, the full rank.*found 40"),
        (dict(rank_loop1=4), "rank_loop1 must be a positive multiple of head_dim 8.*found 4"),
        (dict(rank_loop1=24), "rank_loop1 must be at most 16.*found 24"),
        (dict(rank_v=0), "rank_v must be in 1 .. 32.*found 0"),
        (dict(rank_v=33), "rank_v must be in 1 .. 32.*loops 2 .. 3; found 33"),
        (dict(pair_frequency=(0, 1, 2)), "pair_frequency must have one entry per latent pair, 8; found 3"),
        (
            dict(pair_frequency=(0, 1, 2, 3, 0, 1, 2, 4)),
            "pair_frequency must index the 4 rotary frequencies, found 0 .. 4",
        ),
        (
            dict(pair_frequency=(-1, 1, 2, 3, 0, 1, 2, 3)),
            "pair_frequency must index the 4 rotary frequencies, found -1 .. 3",
        ),
        (
            dict(pair_frequency=(0, 0, 0, 0, 0, 1, 2, 3)),
            "pair_frequency gives one frequency 5 pairs, more than the 4 key pairs it has",
        ),
        (dict(pair_frequency_loop1=(0,)), "pair_frequency_loop1 must have one entry per latent pair, 4; found 1"),
        (
            dict(pair_frequency_loop1=(3, 3, 3, 1)),
            "pair_frequency_loop1 gives one frequency 3 pairs, more than the 2 key pairs",
        ),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    GOOD.check(tiny_config())
    with pytest.raises(SchemeError, match=message):
        dataclasses.replace(GOOD, **changes).check(tiny_config())


def test_one_loop_is_refused():
    with pytest.raises(SchemeError, match=r"HLA needs at least 2 loops.*the model has 1"):
        GOOD.check(tiny_config(num_loops=1))
