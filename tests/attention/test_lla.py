"""LLA's modes against a naive oracle, against each other, and in bytes; the linear codecs of the other axes alike."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import naive
from hla_jax.attention.baselines import HeadLatent, LayerLatent
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention, Scheme, SchemeError
from hla_jax.config import OURO_1P4B, OURO_2P6B
from hla_jax.generation import decode
from hla_jax.generation.generate import decode_forced
from hla_jax.model import Model, forward_swapped
from tiny import long_cases, random_maps, tiny_config, tiny_params, tiny_tokens

CONFIG = tiny_config()
LENGTH, PROMPT = 11, 4
KIB = 1 << 10


@pytest.fixture
def model(x64, quick_compile):
    return Model(CONFIG, tiny_params(CONFIG, "float64"))


@pytest.fixture
def tokens():
    return tiny_tokens(CONFIG, 3, LENGTH)


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheme", "passes"),
    [
        (LLA(9, 14, rank_rope=6), 2),
        (LLA(9, 14, rank_rope=6, single_pass=True), 1),
        (LLA(9, 14, rank_rope=10, query_adapter=True), 2),
    ],
)
def test_absorbed_decoding_is_the_formula(model, tokens, scheme, passes):
    """The mean's part of the score matters in the first pass only, where the token itself is read exactly."""
    attention = random_maps(scheme, CONFIG, "float64")
    logits = decode_forced(model, tokens[:1], PROMPT, attention)[0]
    store = naive.AbsorbedStore(CONFIG, attention.params)
    expected = naive.decode(model.params, CONFIG, store, tokens[0], PROMPT, passes=passes)
    np.testing.assert_allclose(logits, expected, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    "scheme",
    [
        LLA(9, 14, first_pass="exact"),
        LLA(9, 14, fold_heads=True, first_pass="exact", rank_rope=12),
    ],
)
def test_exact_first_passes_make_decoding_the_parallel_pass(model, tokens, scheme):
    """Then a token's latent is that of the exact pass, however the token was read."""
    attention = random_maps(scheme, CONFIG, "float64")
    parallel = forward_swapped(model, tokens, attention)
    np.testing.assert_allclose(decode_forced(model, tokens, PROMPT, attention), parallel, atol=1e-10)


def test_kept_keys_and_values_are_the_rebuilt_ones(model, tokens):
    rebuilt = random_maps(LLA(9, 14, single_pass=True), CONFIG, "float64")
    kept = Attention(LLA(9, 14, full_memory=True), rebuilt.params)
    expected = decode_forced(model, tokens, PROMPT, rebuilt)
    np.testing.assert_allclose(decode_forced(model, tokens, PROMPT, kept), expected, atol=1e-10)


SCHEMES = (
    LLA(9, 14),
    LLA(9, 14, fold_heads=True),
    LLA(9, 14, rank_rope=4),
    LLA(9, 14, full_memory=True),
    HeadLatent(9, 14),
    LayerLatent(5, 9),
)


@pytest.mark.parametrize(
    "scheme",
    [LLA(9, 14), *long_cases(LLA(9, 14, rank_rope=4), LLA(9, 14, full_memory=True), LayerLatent(5, 9))],
)
def test_a_request_does_not_depend_on_its_batch(model, tokens, scheme):
    """Prompts of different lengths, in one batch and each alone, whatever the padding holds."""
    attention, new = random_maps(scheme, CONFIG, "float64"), 3
    lengths = jnp.asarray([8, 2, 5])
    following = jnp.stack([row[length : length + new] for row, length in zip(tokens, lengths, strict=True)])

    def run(rows, lengths, following):
        first, cache = decode.prefill(model.params, CONFIG, attention, rows[:, :8], lengths, LENGTH)
        rest, _ = decode.forced(model.params, CONFIG, attention, cache, following)
        return jnp.concatenate([first[:, None], rest], axis=1)

    together = run(tokens, lengths, following)
    for row in range(1, 3):
        padded = jnp.where(jnp.arange(LENGTH) < lengths[row], tokens[row], 1)[None]
        alone = run(padded, lengths[row : row + 1], following[row : row + 1])[0]
        np.testing.assert_allclose(together[row], alone, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("scheme", [LLA(9, 14), HeadLatent(9, 14), HLA(16, 8, 8, 2)])
def test_maps_in_16_bits_are_close(scheme, tokens, quick_compile):
    model = Model(CONFIG, tiny_params(CONFIG))
    wide = random_maps(scheme, CONFIG)
    narrow = Attention(scheme, {name: value.astype(jnp.bfloat16) for name, value in wide.params.items()})
    found, expected = (decode_forced(model, tokens, PROMPT, attention) for attention in (narrow, wide))
    assert found.dtype == jnp.float32
    assert 0 < jnp.mean(jnp.abs(found - expected)) < 0.1


@pytest.mark.parametrize(
    ("scheme", "bytes_per_token"),
    [
        (LLA(96, 160), 192 * KIB),
        (LLA(18, 30), 36 * KIB),
        (LLA(96, 160, fold_heads=True), 12 * KIB),
        (LLA(96, 160, first_pass="exact"), (192 + 768) * KIB),
        (LLA(96, 160, full_memory=True), (192 + 768) * KIB),
        (LLA(96, 160, rank_rope=64), 192 * KIB + 2 * 24 * 16 * 64),
        (LLA(96, 160, fold_heads=True, rank_rope=64), 12 * KIB + 2 * 24 * 64),
        (HeadLatent(384, 640), 192 * KIB),
        (LayerLatent(48, 80, layers=2), 192 * KIB),
        (LayerLatent(96, 160, layers=4), 192 * KIB),
    ],
)
def test_bytes_of_ouro_1p4b(scheme: Scheme, bytes_per_token: int):
    for tokens in (1, 4096):
        assert scheme.cache_bytes(OURO_1P4B, tokens, jnp.bfloat16) == tokens * bytes_per_token
        assert scheme.cache_bytes(OURO_2P6B, tokens, jnp.bfloat16) == 2 * tokens * bytes_per_token


def test_bytes_are_what_is_allocated():
    for scheme in SCHEMES:
        buffers = scheme.init_cache(CONFIG, 3, 5, jnp.float32).buffers.values()
        assert sum(buffer.nbytes for buffer in buffers) == 3 * scheme.cache_bytes(CONFIG, 5, jnp.float32)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (LLA(0, 3), "rank_k must be in 1 .. 24, the numbers that a latent stands for; found 0"),
        (LLA(3, 25), "rank_v must be in 1 .. 24"),
        (LLA(3, 49, fold_heads=True), "rank_v must be in 1 .. 48"),
        (LLA(3, 3, first_pass="none"), 'first_pass must be "latent" or "exact", found \'none\''),
        (LLA(3, 3, first_pass="exact", full_memory=True), "full_memory .* excludes"),
        (LLA(3, 3, rank_rope=3), "rank_rope must be an even number in 2 .. 24, found 3"),
        (LLA(3, 3, query_adapter=True), "query_adapter .* needs rank_rope"),
        (HeadLatent(17, 1), "rank_k must be in 1 .. 16"),
        (LayerLatent(1, 17), "rank_v must be in 1 .. 16"),
        (LayerLatent(1, 1, layers=3), "layers must divide the model's 2, found 3"),
    ],
)
def test_impossible_sizes_are_refused(scheme, message):
    with pytest.raises(SchemeError, match=message):
        scheme.init_cache(CONFIG, 1, 4, jnp.float32)


def test_config_entry_is_the_scheme():
    for scheme in SCHEMES:
        assert type(scheme).from_config(scheme.to_config()) == scheme
    entry = LLA(9, 14).to_config()
    assert {"rank_k": 9, "rank_v": 14, "fold_heads": False, "first_pass": "latent"}.items() <= entry.items()
    with pytest.raises(SchemeError, match="lla_config: fold_heads must be true or false, found 1"):
        LLA.from_config(entry | {"fold_heads": 1})
    with pytest.raises(SchemeError, match="lla_config: first_pass must be a string, found 3"):
        LLA.from_config(entry | {"first_pass": 3})
    assert dataclasses.replace(LLA(9, 14), rank_rope=4).to_config()["rank_rope"] == 4
