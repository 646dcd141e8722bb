"""Low-bit keys and values: packed bytes, bounds of the error, and decoding against an oracle written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from hla_jax.attention import low_bit
from hla_jax.attention.capture import attention_inputs
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.low_bit import LowBit
from hla_jax.attention.scheme import Attention, Scheme, SchemeError
from hla_jax.calibration.calibrate import calibrate
from hla_jax.calibration.low_bit import GAUSSIAN_STEP
from hla_jax.config import OURO_1P4B
from hla_jax.generation import decode
from hla_jax.model import Model, forward, forward_swapped
from hla_jax.models.stages import LayerInputs
from tiny import tiny_config, tiny_params, tiny_tokens

BITS = (8, 4, 2)
CONFIG = tiny_config()


def random_maps(seed: int = 0) -> dict[str, jax.Array]:
    rng, shape = np.random.default_rng(seed), (CONFIG.num_layers, *LowBit(4).map_shapes(CONFIG)["k_step"])
    return {"k_center": jnp.asarray(rng.normal(size=shape) / 3), "k_step": jnp.asarray(rng.uniform(0.2, 0.7, shape))}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(BITS), st.data())
def test_packed_codes(bits, data):
    """Code i is in byte i // (8 / bits), and comes back."""
    count = 8 // bits
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=3 * count, max_size=3 * count))
    packed = low_bit.pack(jnp.asarray([codes], jnp.uint8), bits)
    assert packed.dtype == jnp.uint8
    assert packed.tolist() == [
        [
            sum(code << bits * place for place, code in enumerate(codes[i : i + count]))
            for i in range(0, 3 * count, count)
        ]
    ]
    assert low_bit.unpack(packed, bits).tolist() == [codes]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(BITS), st.lists(st.floats(-50, 50, width=32), min_size=8, max_size=8), st.floats(0.125, 4))
def test_error_of_quantisation(bits, numbers, step):
    """At most half a step between the levels; beyond them the nearest one."""
    x, low = np.asarray(numbers), -(2**bits - 1) / 2 * step
    codes = low_bit.quantise(jnp.asarray(x, jnp.float32), low, step, bits)
    back = np.asarray(low_bit.dequantise(codes, low, step, bits))
    np.testing.assert_array_less(np.abs(back - np.clip(x, low, -low)), step / 2 * (1 + 1e-4))


@pytest.mark.parametrize("bits", BITS)
def test_values_keep_their_range(bits):
    """A token's values come back to half its own step, whatever their size; equal ones come back as they are."""
    rng, scheme, heads = np.random.default_rng(bits), LowBit(bits), (2, 5, CONFIG.num_kv_heads, CONFIG.head_dim)
    v = (rng.normal(size=heads) * 10.0 ** rng.integers(-2, 3, (*heads[:3], 1))).astype(np.float32)
    v[0, 0] = 0.5
    first, nothing = jnp.zeros((), jnp.int32), jnp.zeros(heads)
    inputs = LayerInputs(nothing, nothing, nothing, jnp.asarray(v), first, first)
    stored = scheme.encode(random_maps(), inputs)
    _, back = scheme.rebuilt(CONFIG, random_maps(), inputs, stored, jnp.arange(5)[None])
    largest, steps = np.abs(v).max(-1, keepdims=True), np.ptp(v, axis=-1, keepdims=True) / (2**bits - 1)
    # Half a step, and what float16 rounds of the scales.
    assert np.all(np.abs(back - v) <= steps / 2 + 2.0**-10 * largest)
    np.testing.assert_array_equal(back[0, 0], 0.5)


@pytest.mark.parametrize("bits", BITS)
def test_step_is_the_best_for_a_gaussian(bits):
    """By numerical integration and a search for the least mean square error."""
    x = np.arange(-8, 8, 2**-11) + 2**-12
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi) * 2**-11
    most = 2**bits - 1

    def error(step: float) -> float:
        level = np.clip(np.floor(x / step) + 0.5, -most / 2, most / 2) * step
        return float(np.sum((x - level) ** 2 * density))

    steps = np.geomspace(8 / most / 8, 8 / most, 60)
    for _ in range(2):
        best = int(np.argmin([error(step) for step in steps]))
        steps = np.linspace(steps[best - 1], steps[best + 1], 60)
    assert GAUSSIAN_STEP[bits] == pytest.approx(steps[30], rel=3e-3)
    assert error(GAUSSIAN_STEP[bits]) == pytest.approx({2: 0.1188, 4: 0.01154, 8: 8.77e-5}[bits], rel=1e-3)


@pytest.mark.parametrize(("bits", "kib"), [(8, 390), (4, 198), (2, 102)])
def test_bytes(bits, kib):
    """Of 768 KiB a token in the full cache: 384, 192 or 96 of codes, and 6 of the values' scales."""
    scheme = LowBit(bits)
    assert scheme.cache_bytes(OURO_1P4B, 1000, jnp.bfloat16) == 1000 * kib * 1024
    cache = scheme.init_cache(CONFIG, 2, 7, jnp.float32)
    allocated = sum(buffer.nbytes for buffer in cache.buffers.values())
    loops, layers, heads, size = CONFIG.num_loops, CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim
    assert allocated == 2 * 7 * layers * (2 * loops * heads * size * bits // 8 + 2 * 2 * loops * heads)
    assert allocated == 2 * scheme.cache_bytes(CONFIG, 7, jnp.float32)


LENGTHS, NEW = np.array([9, 1, 6]), 5


@pytest.mark.parametrize(
    ("scheme", "budget", "first"), [(LowBit(2), 99, 0), (LowBit(4), 99, 0), (Evicted(LowBit(4), 5, 2), 5, 2)]
)
def test_decoding_reads_rebuilt_tokens(scheme, budget, first, quick_compile, x64):
    """A ragged batch against the oracle of each sequence alone: neither the batch nor the padding matters."""
    params, tokens = tiny_params(CONFIG, "float64"), tiny_tokens(CONFIG, 3, LENGTHS.max() + NEW)
    attention = Attention(scheme, random_maps())
    new = jnp.stack([row[length : length + NEW] for row, length in zip(tokens, LENGTHS, strict=True)])
    prompts = tokens[:, : LENGTHS.max()]
    after_prompt, cache = decode.prefill(params, CONFIG, attention, prompts, jnp.asarray(LENGTHS), tokens.shape[1])
    rest, _ = decode.forced(params, CONFIG, attention, cache, new)
    found = jnp.concatenate([after_prompt[:, None], rest], axis=1)
    bits = (scheme.scheme if isinstance(scheme, Evicted) else scheme).bits
    stays = lambda i, j: j < first or i - j <= budget - first
    for row, length in enumerate(LENGTHS):
        store = naive.LowBitStore(CONFIG, attention.params, bits)
        expected = naive.decode(params, CONFIG, store, tokens[row, : length + NEW], length, stays)
        np.testing.assert_allclose(found[row], expected[length - 1 :], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("budget", "first"), [(99, 0), (5, 2)])
def test_swapping_reads_rebuilt_tokens(budget, first, quick_compile, x64):
    params, tokens = tiny_params(CONFIG, "float64"), tiny_tokens(CONFIG, 1, 12)
    attention = Attention(Evicted(LowBit(2), budget, first), random_maps())
    store = naive.LowBitStore(CONFIG, attention.params, 2)
    stays = lambda i, j: j < first or i - j <= budget - first
    expected = naive.swapped(params, CONFIG, store, tokens[0], stays, 0)
    found = forward_swapped(Model(CONFIG, params), tokens, attention)
    np.testing.assert_allclose(found[0], expected, atol=1e-10, rtol=0)


@pytest.mark.long
def test_more_bits_are_closer_to_exact(quick_compile):
    """With calibrated keys, on random weights, which amplify errors from loop to loop."""
    model, tokens = Model(CONFIG, tiny_params(CONFIG)), tiny_tokens(CONFIG, 4, 16)
    exact = forward(model, tokens)
    error = {}
    for bits in BITS:
        attention = calibrate(model, LowBit(bits), np.asarray(tokens))
        error[bits] = float(jnp.sqrt(jnp.mean((forward_swapped(model, tokens, attention) - exact) ** 2)) / exact.std())
    assert error[8] < 0.05
    assert 4 * error[8] < error[4] < error[2] / 2


@pytest.mark.parametrize("scheme", [LowBit(4), Evicted(LowBit(4), 8)])
def test_calibration_measures_channels(scheme: Scheme, x64):
    """Mean and standard deviation of the keys over the tokens that count, in a batch of two lengths."""
    params, rows = tiny_params(CONFIG, "float64"), np.asarray(tiny_tokens(CONFIG, 2, 11))
    sequences = [rows[0].tolist(), rows[1, :7].tolist()]
    found = calibrate(Model(CONFIG, params), scheme, sequences, "float64").params
    one = lambda row: attention_inputs(params, CONFIG, jnp.asarray([row]), jnp.arange(len(row))[None])[:, :, 0]
    h = jnp.concatenate([one(row) for row in sequences], axis=2)
    keys = np.einsum("tlsd,lod->ltso", h, params["layers"]["k_proj"])
    keys = keys.reshape(*keys.shape[:3], CONFIG.num_kv_heads, CONFIG.head_dim)
    np.testing.assert_allclose(found["k_center"], keys.mean(axis=2), atol=1e-12)
    np.testing.assert_allclose(found["k_step"], GAUSSIAN_STEP[4] * keys.std(axis=2), atol=1e-10)


@pytest.mark.parametrize(
    ("bits", "size", "message"),
    [
        (3, 8, "bits must be 8, 4 or 2, found 3"),
        (16, 8, "bits must be 8, 4 or 2, found 16"),
        (2, 6, "head_dim must be a multiple of 4, the codes of 2 bits in a byte; found 6"),
    ],
)
def test_impossible_sizes_are_refused(bits, size, message):
    with pytest.raises(SchemeError, match=message):
        LowBit(bits).check(tiny_config(head_dim=size))
