"""Decoding through the cache: ragged batches, dispatches, and a compiled step that copies no cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from docs.loop_mean import LoopMean
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.low_bit import LowBit
from hla_jax.attention.scheme import Attention
from hla_jax.attention.shared import SharedLoop
from hla_jax.generation import decode
from hla_jax.generation.sampling import Sampling, request_keys
from hla_jax.model import Model, forward
from hla_jax.models import weights
from tiny import long_cases, random_hla, tiny_config, tiny_params, tiny_tokens

CAPACITY, NEW = 13, 4
LENGTHS = jnp.asarray([9, 2, 6])


def attention_of(name: str, config, dtype: str) -> Attention:
    return {
        "full": Attention(FullCache()),
        "hla": random_hla(config, 3, dtype),
    }[name]


@pytest.mark.parametrize("scheme", ["hla", *long_cases("full")])
def test_a_request_does_not_depend_on_its_batch(scheme, quick_compile, x64):
    """Prompts of different lengths, in one batch and each alone: the same logits, whatever the padding holds."""
    config = tiny_config()
    params, tokens = tiny_params(config, "float64"), tiny_tokens(config, 3, CAPACITY)
    attention = attention_of(scheme, config, "float64")
    new = jnp.stack([row[length : length + NEW] for row, length in zip(tokens, LENGTHS)])

    def run(rows: jax.Array, lengths: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        prompts = rows[:, :9]
        first, cache = decode.prefill(params, config, attention, prompts, lengths, CAPACITY)
        rest, cache = decode.forced(params, config, attention, cache, new)
        np.testing.assert_array_equal(cache.lengths, lengths + NEW)
        return jnp.concatenate([first[:, None], rest], axis=1)

    together = run(tokens, LENGTHS, new)
    for row in range(3):
        padding = jnp.where(jnp.arange(CAPACITY) < LENGTHS[row], tokens[row], 1)
        alone = run(padding[None], LENGTHS[row : row + 1], new[row : row + 1])[0]
        np.testing.assert_allclose(together[row], alone, atol=1e-10, rtol=0)
    if scheme == "full":
        exact = forward(Model(config, params), tokens)
        for row, length in enumerate(LENGTHS):
            np.testing.assert_allclose(together[row], exact[row, length - 1 : length + NEW], atol=1e-10, rtol=0)


@pytest.mark.long
def test_many_dispatches_equal_one(quick_compile):
    """Requests stop by their limits or a stop token; finished ones stay in the batch and change nothing."""
    config = tiny_config()
    params, attention, sampling = tiny_params(config), random_hla(config, 3), Sampling(1.0, top_k=20)
    keys, limit = request_keys(jnp.arange(3)), jnp.asarray([7, 3, 12])
    prompts = tiny_tokens(config, 3, 9)

    def run(count: int, stop: list[int]) -> np.ndarray:
        logits, cache = decode.prefill(params, config, attention, prompts, LENGTHS, 32)
        progress = decode.start(logits, cache, sampling, keys, jnp.asarray(stop, jnp.int32))
        out = [progress.token[:, None]]
        for _ in range(-(-12 // count)):
            tokens, progress = decode.advance(
                params, config, attention, progress, sampling, keys, jnp.asarray(stop, jnp.int32), limit, count
            )
            out.append(tokens)
        return np.concatenate(out, axis=1)

    one = run(12, [-5])
    assert [(row >= 0).sum() for row in one] == [7, 3, 12]
    assert all((row[:length] >= 0).all() for row, length in zip(one, (7, 3, 12), strict=True))
    several = run(4, [-5])
    for row, other in zip(one, several, strict=True):
        assert row[row >= 0].tolist() == other[other >= 0].tolist()
    stopped = run(4, [int(one[2, 5])])[2]
    cut = one[2].tolist().index(one[2, 5])
    assert stopped[stopped >= 0].tolist() == one[2, : cut + 1].tolist()


def test_a_prompt_longer_than_the_cache_is_refused():
    config = tiny_config()
    with pytest.raises(ValueError, match="the cache holds 8 tokens a sequence, the prompts have 9"):
        decode.prefill(tiny_params(config), config, Attention(FullCache()), tiny_tokens(config, 3, 9), LENGTHS, 8)


SCHEMES = [
    FullCache(),
    SharedLoop(64),
    HLA(24, 8, 8, 64),
    LLA(16, 16),
    LowBit(4),
    Evicted(HLA(24, 8, 8, 64), 1024),
    LoopMean(64),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: type(scheme).__name__)
def test_the_compiled_step_copies_no_cache(scheme):
    """24 layers: the cache is aliased, and everything temporary fits in two layers' slices of it."""
    config, batch, capacity = tiny_config(num_layers=24, num_loops=4, num_kv_heads=4), 2, 2048
    shapes = scheme.map_shapes(config).items()
    maps = {name: jax.ShapeDtypeStruct((config.num_layers, *shape), jnp.float32) for name, shape in shapes}
    attention = Attention(scheme, maps)
    params = weights.abstract_params(config, "float32")
    cache = jax.eval_shape(lambda: scheme.init_cache(config, batch, capacity, jnp.float32))
    numbers = jax.ShapeDtypeStruct((batch,), jnp.int32)
    progress = decode.Progress(cache, numbers, numbers, jax.ShapeDtypeStruct((batch,), bool))
    keys = jax.eval_shape(lambda: request_keys(jnp.zeros(batch, jnp.uint32)))
    stop = jax.ShapeDtypeStruct((1,), jnp.int32)
    step = decode.advance.lower(params, config, attention, progress, Sampling(), keys, stop, numbers, 8).compile()
    memory, cache_bytes = step.memory_analysis(), batch * scheme.cache_bytes(config, capacity, jnp.float32)
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes <= 2 * cache_bytes / config.num_layers
