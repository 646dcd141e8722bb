"""Tokens of different numbers of steps in one cache, and maps for another number of steps than they were made for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import naive
from hla_jax.attention import steps as steps_module
from hla_jax.attention.baselines import HeadLatent
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention, SchemeError, loops_of_maps
from hla_jax.attention.shared import SharedLoop
from hla_jax.attention.steps import for_steps
from hla_jax.generation import decode
from hla_jax.generation.generate import generate
from hla_jax.model import Model
from tiny import random_maps, tiny_config, tiny_huginn, tiny_params, tiny_tokens

CONFIG = tiny_huginn(num_layers=1, num_coda=1)
STEPS = CONFIG.num_loops


def latest(params: dict, tokens: list[int], steps: list[int]) -> np.ndarray:
    """Logits [S, V] where token i runs `steps[i]` steps, and step s reads of a token its step s, or its last one."""
    store = naive.Store(CONFIG)
    logits = []
    for i, token in enumerate(tokens):

        def attend(loop, layer, h, q, k, v, i=i):
            store.note(i, loop, layer, h, k, v)
            step = lambda j: loop if loop == naive.OUTER else min(loop, steps[j] - 1)
            return naive.attend([store.exact(i, j, step(j), layer, q) for j in range(i + 1)])

        logits.append(naive.forward(params, CONFIG.with_steps(steps[i]), token, attend))
    return np.stack(logits)


@pytest.mark.long
def test_a_token_of_few_steps_is_read_at_its_last_one(x64, quick_compile):
    params, tokens, prompt = tiny_params(CONFIG, "float64"), tiny_tokens(CONFIG, 1, 7), 3
    steps, attention = [2, 2, 2, 5, 5, 3, 3], Attention(FullCache(5))
    run = lambda start, cache: decode.forced(
        params, CONFIG.with_steps(steps[start]), attention, cache, tokens[:, start : start + 2]
    )
    first, cache = decode.prefill(
        params, CONFIG.with_steps(2), attention, tokens[:, :prompt], jnp.asarray([prompt]), tokens.shape[1]
    )
    many, cache = run(3, cache)
    few, _ = run(5, cache)
    expected = latest(params, tokens[0].tolist(), steps)
    np.testing.assert_allclose(np.concatenate([first, many[0], few[0]]), expected[prompt - 1 :], atol=1e-10, rtol=0)
    every = latest(params, tokens[0].tolist(), [5] * 7)
    assert np.abs(every - expected)[prompt:].max() > 1e-3


@pytest.mark.parametrize(
    ("scheme", "num_steps", "prompt_steps"), [(FullCache(), 4, 2), (Evicted(FullCache(), 64), 2, 3)]
)
def test_generating_with_other_steps_than_the_prompt(scheme, num_steps, prompt_steps, quick_compile):
    params, prompt = tiny_params(CONFIG), tiny_tokens(CONFIG, 1, 5)[0].tolist()
    model, attention = Model(CONFIG, params), Attention(scheme)
    (found,) = generate(model, prompt, 4, attention, num_steps=num_steps, prompt_steps=prompt_steps)
    tokens = list(prompt)
    for _ in range(4):
        steps = [prompt_steps] * len(prompt) + [num_steps] * (len(tokens) - len(prompt))
        tokens.append(int(latest(params, tokens, steps)[-1].argmax()))
    assert found.tokens == tokens[len(prompt) :]


# Maps for another number of steps.

SCHEMES = {
    "hla": (HLA(8, 6, 8, 1), naive.LatentStore),
    "lla": (LLA(5, 7), naive.TrajectoryStore),
    "lla-2d": (LLA(9, 11, fold_heads=True), naive.FoldedStore),
    "absorbed": (LLA(5, 7, rank_rope=4, query_adapter=True), naive.AbsorbedStore),
}


def decoded(params: dict, store: naive.Store, steps: int, scheme) -> np.ndarray:
    """Logits of the oracle for a model of so many steps."""
    tokens = np.asarray(tiny_tokens(CONFIG, 1, 6)[0])
    return naive.decode(
        params, CONFIG.with_steps(steps), store, tokens, 3, window=scheme.window_tokens(), passes=scheme.passes
    )


def by_the_rule(kind: type[naive.Store], steps: int) -> type[naive.Store]:
    """A store for all the steps of its maps that is told of `steps`: it takes the missing ones to be like the last, and
    reads later ones like its own last. Exact reads are of each step's own.
    """

    class Store(kind):
        def note(self, i, loop, layer, h, k, v):
            self.own = getattr(self, "own", {}) | {(i, loop, layer): (k, v)}
            if loop < STEPS:
                super().note(i, loop, layer, h, k, v)
            if loop == steps - 1:
                for missing in range(steps, STEPS):
                    super().note(i, missing, layer, h, k, v)

        def read(self, i, j, loop, layer, q):
            return super().read(i, j, min(loop, STEPS - 1), layer, q)

        def exact(self, i, j, loop, layer, q):
            return self.match(q, i, j, *self.own[j, loop, layer])

    return Store


@pytest.mark.parametrize("name", SCHEMES)
def test_missing_steps_are_like_the_last_and_later_ones_read_like_it(name, x64):
    (scheme, kind), params = SCHEMES[name], tiny_params(CONFIG, "float64")
    attention = random_maps(scheme, CONFIG, "float64")
    logits = {}
    for steps in (2, 3, 6):
        adapted = for_steps(attention, CONFIG, steps)
        logits[steps] = decoded(params, kind(CONFIG.with_steps(steps), adapted.params), steps, scheme)
        maps = dict(attention.params)
        for mean in ("k_mean", "v_mean"):
            if mean in maps:  # the missing steps' means are the last one's
                shape = CONFIG.num_layers, CONFIG.num_kv_heads, STEPS, CONFIG.head_dim
                at = np.minimum(np.arange(STEPS), steps - 1)
                maps[mean] = np.asarray(maps[mean]).reshape(shape)[:, :, at].reshape(maps[mean].shape)
        expected = decoded(params, by_the_rule(kind, steps)(CONFIG, maps), steps, scheme)
        np.testing.assert_allclose(logits[steps], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", SCHEMES)
def test_states_that_stand_still_lose_nothing(name, x64, monkeypatch):
    """An adapter that takes no notice of the state makes all steps alike. With readers that are alike, too, it does not
    matter how many of them run.
    """
    (scheme, kind), params = SCHEMES[name], tiny_params(CONFIG, "float64")
    params["adapter"] = params["adapter"].at[:, : CONFIG.hidden_size].set(0)
    attention = random_maps(scheme, CONFIG, "float64")
    alike = {name: x for name, x in attention.params.items() if not name.startswith("write")}
    for name, x in alike.items():
        if name in ("read_q", "read_o", "rope_query", "query_adapter"):
            alike[name] = jnp.broadcast_to(x[:, :1], x.shape)
        elif name.endswith(("up", "mean")):
            leading = (-1, CONFIG.num_kv_heads, STEPS, CONFIG.head_dim)
            steps = x.reshape(leading)
            alike[name] = jnp.broadcast_to(steps[:, :, :1], steps.shape).reshape(x.shape)
    attention = dataclasses.replace(attention, params=attention.params | alike)
    expected = decoded(params, kind(CONFIG, attention.params), STEPS, scheme)
    for steps in (2, 3, 6):
        adapted = for_steps(attention, CONFIG, steps)
        found = decoded(params, kind(CONFIG.with_steps(steps), adapted.params), steps, scheme)
        np.testing.assert_allclose(found, expected, atol=1e-10, rtol=0)
    # Planted fault: the missing steps' writers are left out.
    cut = lambda x, axis, count: jax.lax.slice_in_dim(x, 0, count, axis=axis)
    monkeypatch.setattr(steps_module, "_written", cut)
    wrong = kind(CONFIG.with_steps(2), for_steps(attention, CONFIG, 2).params)
    assert np.abs(decoded(params, wrong, 2, scheme) - expected).max() > 1e-3


@pytest.mark.parametrize("name", SCHEMES)
def test_the_same_number_of_steps_changes_nothing(name):
    attention = random_maps(SCHEMES[name][0], CONFIG)
    assert loops_of_maps(attention.scheme, CONFIG.with_steps(9), attention.params) == STEPS
    assert for_steps(attention, CONFIG, STEPS) is attention
    assert for_steps(attention, CONFIG.with_steps(9), STEPS) is attention
    around = dataclasses.replace(attention, scheme=Evicted(attention.scheme, 8))
    fewer, more = (for_steps(one, CONFIG, 2) for one in (attention, around))
    assert more.scheme == around.scheme
    jax.tree.map(np.testing.assert_array_equal, fewer.params, more.params)


def test_generating_adapts_the_maps(quick_compile):
    params, prompt = tiny_params(CONFIG), tiny_tokens(CONFIG, 1, 5)[0].tolist()
    attention = random_maps(SCHEMES["hla"][0], CONFIG)
    (found,) = generate(Model(CONFIG, params), prompt, 3, attention, num_steps=3)
    adapted, tokens = for_steps(attention, CONFIG, 3), list(prompt)
    for _ in range(3):
        store = naive.LatentStore(CONFIG.with_steps(3), adapted.params)
        logits = naive.decode(params, CONFIG.with_steps(3), store, np.asarray(tokens), len(prompt), window=1)
        tokens.append(int(logits[-1].argmax()))
    assert found.tokens == tokens[len(prompt) :]


def test_what_does_not_fit_is_refused():
    config, params = CONFIG, tiny_params(CONFIG)
    model, tokens = Model(config, params), tiny_tokens(config, 1, 4)
    hla, head = (random_maps(scheme, config) for scheme in (HLA(8, 6, 8, 1), HeadLatent(3, 3)))
    fill = lambda config, attention: decode.prefill(params, config, attention, tokens, jnp.asarray([4]), 6)
    with pytest.raises(SchemeError, match="the maps are for 4 loops and the model runs 3: calibrate for 3, or see"):
        fill(config.with_steps(3), hla)
    with pytest.raises(SchemeError, match=r"hla.write_k must be \[1, 3, 16, 24\], found \[1, 3, 8, 24\]"):
        fill(config, dataclasses.replace(hla, scheme=HLA(16, 6, 8, 1)))
    with pytest.raises(SchemeError, match=r"no rule for HeadLatent .* calibrate for 2 steps, or take HLA or LLA"):
        for_steps(head, config, 2)
    with pytest.raises(SchemeError, match="HLA needs at least 2 loops"):
        for_steps(hla, config, 1)
    with pytest.raises(SchemeError, match="HLA keeps tokens of one number of loops only; FullCache mixes them"):
        generate(model, [1, 2], 1, hla, prompt_steps=2)
    with pytest.raises(SchemeError, match="loops must be at least 4, the model's; found 3"):
        fill(config, Attention(FullCache(3)))
    ouro = tiny_config()
    with pytest.raises(ValueError, match="num_steps and prompt_steps are options of Huginn"):
        generate(Model(ouro, tiny_params(ouro)), [1, 2], 1, num_steps=2)


@pytest.mark.parametrize(
    ("scheme", "name", "slots"), [(FullCache(), "k", 3), (SharedLoop(2), "window_k", 3), (FullCache(6), "k", 6)]
)
def test_a_cache_of_another_number_of_steps_is_refused(scheme, name, slots):
    cache = FullCache(5).init_cache(CONFIG, 1, 4, jnp.float32)
    if scheme.window_tokens():
        cache = scheme.init_cache(CONFIG, 1, 4, jnp.float32)
    outer = {f"outer_{name}": jnp.zeros((CONFIG.outer_layers, 1, 4, 16)) for name in ("k", "v")}
    cache = dataclasses.replace(cache, buffers=cache.buffers | outer)
    step = lambda cache: decode.step(
        tiny_params(CONFIG), CONFIG.with_steps(3), Attention(scheme), cache, jnp.zeros(1, jnp.int32)
    )
    with pytest.raises(SchemeError, match=f"{name} of the cache must have {slots} slots for 3 loops, found"):
        jax.eval_shape(step, cache)
