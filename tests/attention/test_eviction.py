"""Eviction: bytes, what stays and at which positions, against an oracle written out in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import naive
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention, Cache, Eviction, Scheme, SchemeError
from hla_jax.attention.shared import SharedLoop
from hla_jax.config import OURO_1P4B
from hla_jax.generation import decode
from hla_jax.generation.generate import decode_forced, generate
from hla_jax.model import Model, forward_swapped
from tiny import random_hla, tiny_config, tiny_params, tiny_tokens

pytestmark = pytest.mark.usefixtures("quick_compile")

KIB, MIB = 1 << 10, 1 << 20
CONFIG = tiny_config()
BUDGET, FIRST, NEW = 5, 2, 6
# Longer than the budget, shorter than the first tokens it keeps, and one more than the budget.
LENGTHS = np.array([9, 1, 6])


def stays(i: int, j: int) -> bool:
    """Whether token i still finds token j."""
    return j < FIRST or i - j <= BUDGET - FIRST


def random_lla() -> Attention:
    """LLA whose maps lose a lot."""
    scheme, rng = LLA(8, 12), np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.normal(size=(CONFIG.num_layers, *shape)) / 24**0.5)
    return Attention(scheme, {name: draw(shape) for name, shape in scheme.map_shapes(CONFIG).items()})


SCHEMES = {
    "full": (lambda: Attention(FullCache()), naive.Store),
    "shared, window": (lambda: Attention(SharedLoop(2)), naive.SharedStore),
    "hla, window": (lambda: random_hla(CONFIG, 2, "float64"), naive.LatentStore),
    "hla, window past the budget": (lambda: random_hla(CONFIG, 4, "float64"), naive.LatentStore),
    "lla": (random_lla, naive.TrajectoryStore),
}


def evicted(attention: Attention, budget: int = BUDGET, first: int = FIRST) -> Attention:
    return dataclasses.replace(attention, scheme=Evicted(attention.scheme, budget, first))


def setting() -> tuple[dict, jax.Array, jax.Array]:
    """Parameters, right-padded prompts, and the tokens that follow each of them."""
    tokens = tiny_tokens(CONFIG, 3, LENGTHS.max() + NEW)
    new = jnp.stack([row[length : length + NEW] for row, length in zip(tokens, LENGTHS, strict=True)])
    return tiny_params(CONFIG, "float64"), tokens, new


def decoded(
    params: dict, attention: Attention, tokens: jax.Array, new: jax.Array, fault=lambda cache: cache
) -> jax.Array:
    """Logits after each prompt and each of the tokens that follow it, [B, NEW + 1, V]."""
    prompts, capacity = tokens[:, : LENGTHS.max()], tokens.shape[1]
    after_prompt, cache = decode.prefill(params, CONFIG, attention, prompts, jnp.asarray(LENGTHS), capacity)
    rest, cache = decode.forced(params, CONFIG, attention, fault(cache), new)
    assert cache.lengths.tolist() == (LENGTHS + NEW).tolist()
    return jnp.concatenate([after_prompt[:, None], rest], axis=1)


def oracle(
    params: dict, attention: Attention, store: type[naive.Store], tokens: jax.Array, visible: naive.Visible = stays
) -> np.ndarray:
    """The same, token by token in numpy."""
    window, passes = attention.scheme.window_tokens(), 2 if isinstance(attention.scheme, LLA) else 1
    run = lambda row, length: naive.decode(
        params, CONFIG, store(CONFIG, attention.params), row, length, visible, window, passes
    )
    return np.stack(
        [run(row[: length + NEW], length)[length - 1 :] for row, length in zip(tokens, LENGTHS, strict=True)]
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_decoding_reads_the_tokens_that_stay(name, x64):
    make, store = SCHEMES[name]
    attention, (params, tokens, new) = make(), setting()
    expected = oracle(params, attention, store, tokens)
    found = decoded(params, evicted(attention), tokens, new)
    np.testing.assert_allclose(found, expected, atol=1e-10, rtol=0)


def test_planted_faults_show(x64):
    """A ring turned by one slot, one more token or one less, and another start."""
    attention, (params, tokens, new) = random_lla(), setting()

    def turned(cache: Cache) -> Cache:
        roll = lambda x: jnp.concatenate([x[:, :, :FIRST], jnp.roll(x[:, :, FIRST:], 1, axis=2)], axis=2)
        return dataclasses.replace(cache, buffers={name: roll(x) for name, x in cache.buffers.items()})

    wrong = {
        "turned ring": oracle(params, attention, naive.TrajectoryStore, tokens)
        - decoded(params, evicted(attention), tokens, new, turned)
    }
    right = decoded(params, evicted(attention), tokens, new)
    for name, budget, first in (("one more", BUDGET + 1, FIRST), ("one less", BUDGET - 1, FIRST), ("start", BUDGET, 1)):
        other = lambda i, j, budget=budget, first=first: j < first or i - j <= budget - first
        wrong[name] = oracle(params, attention, naive.TrajectoryStore, tokens, other) - right
    for name, difference in wrong.items():
        assert np.abs(difference[:, 1:]).max() > 1e-3, name


@pytest.mark.long
@pytest.mark.parametrize("name", ["full", "shared, window", "hla, window", "lla"])
def test_a_budget_for_everything_changes_nothing(name, x64):
    attention, (params, tokens, new) = SCHEMES[name][0](), setting()
    generous = evicted(attention, tokens.shape[1])
    everything = decoded(params, generous, tokens, new)
    np.testing.assert_allclose(everything, decoded(params, attention, tokens, new), rtol=0, atol=1e-12)


def test_swapping_is_decoding_of_a_full_cache_from_the_start(x64):
    """While a prompt fits in the ring, eviction has not hidden anything from its tokens."""
    params, tokens, _ = setting()
    model, attention = Model(CONFIG, params), evicted(Attention(FullCache()))
    swapped = forward_swapped(model, tokens, attention)
    np.testing.assert_allclose(swapped, decode_forced(model, tokens, BUDGET - FIRST, attention), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["shared, window", "hla, window past the budget", "lla"])
def test_swapping_reads_the_tokens_that_stay(name, x64):
    """An exact pass stores the tokens, and each token of the second one finds what would be left of them."""
    make, store = SCHEMES[name]
    attention, (params, tokens, _) = make(), setting()
    found = forward_swapped(Model(CONFIG, params), tokens[:1], evicted(attention))
    window = -1 if name == "lla" else attention.scheme.window_tokens()
    expected = naive.swapped(params, CONFIG, store(CONFIG, attention.params), tokens[0], stays, window)
    np.testing.assert_allclose(found[0], expected, atol=1e-10, rtol=0)


def test_generation_goes_around_the_ring():
    """Greedy tokens of several dispatches are those that the same cache gives when it is fed with them."""
    model, attention = Model(CONFIG, tiny_params(CONFIG)), evicted(Attention(FullCache()))
    prompt = [3, 1, 4, 1, 5, 9, 2]
    (made,) = generate(model, [prompt], 12, attention, tokens_per_dispatch=5)
    logits = decode_forced(model, jnp.asarray([prompt + made.tokens]), len(prompt), attention)
    assert made.tokens == np.argmax(logits[0, len(prompt) - 1 : -1], axis=-1).tolist()


def test_what_stays_after_every_token():
    """Positions of the ring's slots against a list that tokens are pushed into."""
    eviction = Eviction(FIRST, BUDGET)
    slots: list[int] = []
    for token in range(3 * BUDGET):
        cache = Cache({}, jnp.asarray([token]), eviction)
        kept = np.asarray(cache.positions(BUDGET))[0, : len(slots)]
        assert sorted(slots) == sorted(kept.tolist())
        slots = [j for j in [*slots, token] if j < FIRST or token - j < BUDGET - FIRST]


def test_bytes_do_not_grow_beyond_the_budget():
    """36 MiB at a million tokens with LLA at 21.3x (LLA, Appendix D)."""
    lla = LLA(18, 30)
    assert FullCache().cache_bytes(OURO_1P4B, 3, jnp.bfloat16) == 64 * lla.cache_bytes(OURO_1P4B, 1, jnp.bfloat16)
    assert Evicted(lla, 1024).cache_bytes(OURO_1P4B, 1 << 20, jnp.bfloat16) == 36 * MIB
    hla = HLA(rank_k=512, rank_v=512, rank_loop1=256, window=128)
    assert Evicted(hla, 1024).cache_bytes(OURO_1P4B, 1 << 20, jnp.bfloat16) == 1024 * 72 * KIB + 96 * MIB
    assert Evicted(hla, 1024).cache_bytes(OURO_1P4B, 10, jnp.bfloat16) == 10 * 72 * KIB + 96 * MIB


@pytest.mark.parametrize("capacity", [3, BUDGET, 12])
@pytest.mark.parametrize("inner", [FullCache(), SharedLoop(7), LLA(8, 12, first_pass="exact")])
def test_bytes_are_what_is_allocated(inner: Scheme, capacity: int):
    scheme = Evicted(inner, BUDGET, FIRST)
    cache = scheme.init_cache(CONFIG, 2, capacity, "bfloat16")
    allocated = sum(buffer.nbytes for buffer in cache.buffers.values())
    assert allocated == 2 * scheme.cache_bytes(CONFIG, capacity, jnp.bfloat16)
    assert allocated == 2 * inner.cache_bytes(CONFIG, min(capacity, BUDGET), jnp.bfloat16)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Evicted(FullCache(), 4), "budget must be more than the 4 first tokens, found 4"),
        (Evicted(FullCache(), 4, -1), "first must be at least 0, found -1"),
        (Evicted(Evicted(FullCache(), 8), 8), "found another Evicted"),
        (Evicted(SharedLoop(-1), 8), "window must be at least 0, found -1"),
    ],
)
def test_impossible_sizes_are_refused(scheme, message):
    with pytest.raises(SchemeError, match=message):
        scheme.init_cache(CONFIG, 1, 4, jnp.float32)
