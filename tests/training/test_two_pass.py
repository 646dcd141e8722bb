"""Two-pass fine-tuning against sequential decoding, and against the same procedure token by token, in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.attention import parallel
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.attention.shared import SharedLoop
from hla_jax.generation import decode
from hla_jax.models import layers
from hla_jax.training import two_pass
from hla_jax.training.optimizer import OptimizerConfig, adamw
from hla_jax.training.step import init, make_step
from tests.tiny import random_hla, tiny_config, tiny_params, tiny_tokens

TOKENS = 12
PROMPTS = (1, 3, 4)  # tokens of the prompt, row by row
CONFIG = tiny_config()

pytestmark = pytest.mark.usefixtures("x64", "quick_compile")


def setting(window: int) -> tuple[dict, Attention, jax.Array]:
    """Parameters, HLA and tokens."""
    tokens = tiny_tokens(CONFIG, len(PROMPTS), TOKENS)
    return tiny_params(CONFIG, "float64"), random_hla(CONFIG, window, "float64"), tokens


def response_of(prompts: tuple[int, ...], tokens: int = TOKENS) -> jax.Array:
    return jnp.arange(tokens)[None] >= jnp.asarray(prompts)[:, None]


@jax.jit(static_argnames=("config", "steps"))
def decoded(params, config, attention, tokens, prompts, steps):
    """Logits after each token: prompts in one exact pass, the rest one by one through the cache. After `steps` tokens
    of a response, nothing that means anything.
    """
    rows, length = jnp.arange(tokens.shape[0])[:, None], tokens.shape[1]
    hidden, cache = decode.prefill_hidden(params, config, attention, tokens, prompts, length + steps)
    at = prompts[:, None] + jnp.arange(steps)
    after_each, _ = decode.forced(params, config, attention, cache, tokens[rows, jnp.minimum(at, length - 1)])
    return layers.logits(params, hidden).at[rows, at].set(after_each, mode="drop")


@jax.jit(static_argnames=("config", "repetitions"))
def passes(params, config, attention, tokens, response, repetitions):
    """Logits after the passes of training."""
    hidden = two_pass.two_pass_hidden(
        params, attention.params, attention.scheme, config, tokens, response, repetitions=repetitions
    )
    return layers.logits(params, hidden)


@pytest.mark.long
@pytest.mark.parametrize("window", [0, 2, 20])
def test_every_pass_makes_a_window_and_a_token_exact(window):
    """ceil(m / (W+1)) passes under the decoding rule reproduce m response tokens, and no fewer do: where the prompt is
    longer than the window, the token behind the exact ones reads a latent that is not decoding's yet.
    """
    params, attention, tokens = setting(window)
    prompts = jnp.asarray(PROMPTS)
    longest = TOKENS - min(PROMPTS)
    expected = decoded(params, CONFIG, attention, tokens, prompts, longest)
    needed = -(-longest // (window + 1))
    for under_rule in sorted({1, 2, needed} & set(range(1, needed + 1))):
        found = passes(params, CONFIG, attention, tokens, response_of(PROMPTS), under_rule - 1)
        apart = np.max(np.abs(found - expected), axis=-1)
        for row, prompt in enumerate(PROMPTS):
            exact = prompt + under_rule * (window + 1)
            assert np.all(apart[row, :exact] < 1e-10)
            assert exact >= TOKENS or prompt <= window or apart[row, exact] > 1e-6


def test_without_a_prompt_the_first_token_is_the_prompt():
    params, attention, tokens = setting(2)
    of = lambda prompt: passes(params, CONFIG, attention, tokens, response_of((prompt,) * len(PROMPTS)), 0)
    np.testing.assert_allclose(of(0), of(1), atol=1e-12)


@pytest.mark.long
def test_faults_do_not_reproduce_decoding(monkeypatch):
    """A window off by one, prompts under the decoding rule, and latents of pass one in the place of a repetition's."""
    params, attention, tokens = setting(2)
    expected = decoded(params, CONFIG, attention, tokens, jnp.asarray(PROMPTS), TOKENS - 1)
    response = response_of(PROMPTS)

    def apart(attention: Attention, response: jax.Array, repetitions: int) -> float:
        found = passes(params, CONFIG, attention, tokens, response, repetitions)
        compared = jnp.arange(TOKENS) < jnp.asarray(PROMPTS)[:, None] + 3 * (repetitions + 1)
        return float(jnp.max(jnp.abs(found - expected) * compared[..., None]))

    assert apart(attention, response, 1) < 1e-10
    for window in (1, 3):
        wrong = Attention(dataclasses.replace(attention.scheme, window=window), attention.params)
        assert apart(wrong, response, 0) > 1e-6
    assert apart(attention, jnp.ones_like(response), 0) > 1e-6
    monkeypatch.setattr(two_pass, "with_gradient_of", lambda value, first: first)
    passes.clear_cache()
    assert apart(attention, response, 1) > 1e-6
    passes.clear_cache()


# The same procedure token by token.


def naive_pass(params, maps, config, tokens, near, read):
    """One pass over one row: every token through all loops and layers before the next one.

    Args:
      near: [S, S], which tokens each token reads exactly.
      read: main latents of all tokens, keys not rotated.

    Returns:
      Hidden states [S, d], and the main latents that the pass wrote.
    """
    size, length, every = config.head_dim, len(tokens), jnp.arange(len(tokens))

    def norm(x, weight):
        return x / jnp.sqrt(jnp.mean(x**2) + config.rms_norm_eps) * weight

    def turned(x, position):
        """x [..., r], as blocks of dh, pairs (f, f + dh/2)."""
        angle = jnp.asarray(position)[..., None] * config.rope_theta ** (-jnp.arange(0, size, 2) / size)
        blocks = x.reshape(*x.shape[:-1], -1, size)
        z = (blocks[..., : size // 2] + 1j * blocks[..., size // 2 :]) * jnp.exp(1j * angle)[..., None, :]
        return jnp.concatenate([z.real, z.imag], axis=-1).reshape(x.shape)

    def one_layer(loop, i, carry, layer):
        memory, x = dict(carry[0]), carry[1]
        p = {name: stacked[layer] for name, stacked in params["layers"].items()}
        h = norm(x, p["input_layernorm"])
        q, k, v = (jnp.reshape(p[name] @ h, (-1, size)) for name in ("q_proj", "k_proj", "v_proj"))
        memory["k"] = memory["k"].at[loop, layer, i].set(k)
        memory["v"] = memory["v"].at[loop, layer, i].set(v)
        mine, at = ("1", layer) if loop == 0 else ("", (layer, loop - 1))
        for part in ("k", "v"):
            written = maps[f"write_{part}{mine}"][at] @ h
            memory[f"c{part}{mine}"] = memory[f"c{part}{mine}"].at[layer, i].add(written)
        source = memory if loop == 0 else read
        latent_k, latent_v = source[f"ck{mine}"][layer], source[f"cv{mine}"][layer]
        keys, values = (jnp.repeat(memory[part][loop, layer], config.heads_per_kv, axis=1) for part in ("k", "v"))
        latent_q = jnp.einsum("he,her->hr", q, maps[f"read_q{mine}"][at])
        exact_scores = jnp.einsum("jhe,he->hj", turned(keys, every[:, None]), turned(q, i))
        latent_scores = jnp.einsum("jr,hr->hj", turned(latent_k, every), turned(latent_q, i))
        scores = jnp.where(near[i], exact_scores, latent_scores) / jnp.sqrt(size)
        weights = jax.nn.softmax(jnp.where(every <= i, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("hj,jhe->he", jnp.where(near[i], weights, 0), values)
        latent = jnp.einsum("hj,jr->hr", jnp.where(near[i], 0, weights), latent_v)
        out = out + jnp.einsum("hr,hre->he", latent, maps[f"read_o{mine}"][at])
        x = x + norm(p["o_proj"] @ out.ravel(), p["input_layernorm_2"])
        h = norm(x, p["post_attention_layernorm"])
        mlp = p["down_proj"] @ (jax.nn.silu(p["gate_proj"] @ h) * (p["up_proj"] @ h))
        return (memory, x + norm(mlp, p["post_attention_layernorm_2"])), None

    def one_token(memory, i):
        x = params["embed_tokens"][tokens[i]]
        for loop in range(config.num_loops):
            layer_of = functools.partial(one_layer, loop, i)
            (memory, x), _ = jax.lax.scan(layer_of, (memory, x), jnp.arange(config.num_layers))
            x = norm(x, params["norm"])
        return memory, x

    slots = config.num_loops, config.num_layers, length
    memory = {name: jnp.zeros((*slots, config.num_kv_heads, size)) for name in ("k", "v")}
    for part in ("k", "v"):
        memory[f"c{part}"] = jnp.zeros((*slots[1:], maps[f"write_{part}"].shape[2]))
        memory[f"c{part}1"] = jnp.zeros((*slots[1:], maps[f"write_{part}1"].shape[1]))
    memory, hidden = jax.lax.scan(one_token, memory, every)
    return hidden, {name: memory[name] for name in ("ck", "cv")}


def naive_loss(trained, config, tokens, prompts, window, repetitions):
    """Of pass one, the repetitions and the last pass, row by row."""
    base, maps = trained["base"], trained["maps"]
    i, j = jnp.arange(TOKENS)[:, None], jnp.arange(TOKENS)[None]

    def row(tokens, prompt):
        def one_pass(latents, number):
            first, main = latents
            near = (number == 0) | (i < prompt) | (i - j <= window)
            hidden, written = naive_pass(base, maps, config, tokens, near, main)
            first = {name: jnp.where(number == 0, written[name], first[name]) for name in first}
            repeated = {name: first[name] + jax.lax.stop_gradient(written[name] - first[name]) for name in first}
            return (first, repeated), hidden

        none = {f"c{part}": jnp.zeros((config.num_layers, TOKENS, maps[f"write_{part}"].shape[2])) for part in "kv"}
        _, hidden = jax.lax.scan(one_pass, (none, none), jnp.arange(repetitions + 2))
        errors = -jax.nn.log_softmax(hidden[-1, :-1] @ base["lm_head"].T)[jnp.arange(TOKENS - 1), tokens[1:]]
        return jnp.sum(jnp.where(jnp.arange(1, TOKENS) >= prompt, errors, 0))

    counted = jnp.sum(TOKENS - jnp.maximum(prompts, 1))
    return jnp.sum(jax.vmap(row)(tokens, prompts)) / counted


def loss_of(scheme, repetitions, params, maps, tokens, response, segments):
    """The loss as a function of what it trains, and what that is."""
    loss = two_pass.make_loss(scheme, CONFIG, repetitions)
    batch = {"tokens": tokens, "response": response, "segments": segments}
    return lambda trained: loss(trained, batch, jax.random.key(0), None), {"base": params, "maps": maps}


def gradient(attention, repetitions, params, *rows):
    """Loss, weight and gradient, compiled anew: a fault may have been planted since the last call."""
    loss, trained = loss_of(attention.scheme, repetitions, params, attention.params, *rows)
    (value, (weight, _)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    return value, weight, grads


def assert_same(found, expected, tolerance=1e-10):
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def farthest(found, expected) -> float:
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected)))


def naive_gradient(attention, params, tokens, prompts, repetitions):
    of = jax.jit(jax.value_and_grad(naive_loss), static_argnums=(1, 4, 5))
    trained = {"base": params, "maps": attention.params}
    return of(trained, CONFIG, tokens, jnp.asarray(prompts), attention.scheme.window, repetitions)


@pytest.mark.long
def test_gradient_is_that_of_the_naive_loop(monkeypatch):
    """With one repetition; and a gradient that leaks through the repetition is another one."""
    params, attention, tokens = setting(1)
    prompts = (0, 4)
    tokens, response = tokens[:2], response_of(prompts)
    expected, expected_grads = naive_gradient(attention, params, tokens, prompts, 1)
    value, weight, grads = gradient(attention, 1, params, tokens, response, jnp.ones_like(tokens))
    np.testing.assert_allclose(value, expected, atol=1e-12)
    assert weight == 2 * TOKENS - 1 - 4
    assert_same(grads, expected_grads)
    assert all(jnp.any(grad != 0) for grad in jax.tree.leaves(grads["maps"]))
    monkeypatch.setattr(jax.lax, "stop_gradient", lambda x: x)
    leaking, _, leaked = gradient(attention, 1, params, tokens, response, jnp.ones_like(tokens))
    np.testing.assert_allclose(leaking, expected, atol=1e-12)
    assert farthest(leaked, expected_grads) > 1e-6


@pytest.mark.long
def test_gradient_is_that_of_decoding_within_a_window_and_a_token():
    """m = W + 1: through the exact prompt, the cache and the window, one token after another."""
    prompt, window = 8, 3
    params, attention, tokens = setting(window)
    prompts = jnp.full(len(PROMPTS), prompt)

    def decoding_loss(trained):
        # The other ways to decode have loops that cannot be differentiated.
        maps = Attention(attention.scheme, trained["maps"], "reference")
        logits = decoded(trained["base"], CONFIG, maps, tokens, prompts, TOKENS - prompt)[:, prompt - 1 : -1]
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, prompt:, None], axis=-1))

    expected, expected_grads = jax.jit(jax.value_and_grad(decoding_loss))({"base": params, "maps": attention.params})
    response = response_of((prompt,) * len(PROMPTS))
    value, _, grads = gradient(attention, 0, params, tokens, response, jnp.ones_like(tokens))
    np.testing.assert_allclose(value, expected, atol=1e-12)
    assert_same(grads, expected_grads)


@pytest.mark.long
def test_packed_examples_do_not_see_each_other(monkeypatch):
    """Two examples and padding in one row against a row for each, and the fault of ignoring segments."""
    params, attention, _ = setting(1)
    tokens = tiny_tokens(CONFIG, 1, 14)
    segments = jnp.asarray([[1] * 5 + [2] * 7 + [0] * 2])
    response = jnp.asarray([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]], bool)
    value, weight, grads = gradient(attention, 0, params, tokens, response, segments)
    apart = lambda x: jnp.stack([jnp.pad(x[0, :5], (0, 2)), x[0, 5:12]])
    expected, expected_weight, expected_grads = gradient(
        attention, 0, params, apart(tokens), apart(response), apart(segments)
    )
    assert weight == expected_weight == 9
    np.testing.assert_allclose(value, expected, atol=1e-12)
    assert_same(grads, expected_grads)
    seeing = parallel.causal_mask
    monkeypatch.setattr(
        parallel, "causal_mask", lambda index, tokens, segments, *rest: seeing(index, tokens, None, *rest)
    )
    loss, trained = loss_of(attention.scheme, 0, params, attention.params, tokens, response, segments)
    assert abs(jax.jit(loss)(trained)[0] - expected) > 1e-6


def test_what_counts():
    """Every token of a response but those without one before them in their segment; nothing of the padding."""
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0, 0]])
    response = jnp.asarray([[1, 0, 1, 1, 1, 1, 1]], bool)
    assert two_pass.predicted(response, segments).tolist() == [[False, True, False, True, False, False, False]]
    assert two_pass.predicted(response).tolist() == [[False, True, True, True, True, True, False]]
    assert two_pass.segment_positions(segments, segments).tolist() == [[0, 1, 2, 0, 1, 0, 1]]


def shapes_in(jaxpr):
    """Of all that a program computes, and the programs inside it."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


def test_memory_of_a_step(monkeypatch):
    """No S x S array, no logits of all tokens, and of each layer only what enters it: not the latents of all layers."""
    monkeypatch.setattr(parallel, "query_block", lambda tokens, numbers_per_query: 16)
    config = tiny_config(num_layers=5, vocab_size=131)
    attention, length = random_hla(config, 2, "float64"), 331
    trained = {"base": tiny_params(config, "float64"), "maps": attention.params}
    tokens = jnp.zeros((1, length), jnp.int32)
    batch = {"tokens": tokens, "response": tokens > 0, "segments": tokens + 1}
    loss = two_pass.make_loss(attention.scheme, config, 1)
    program = jax.make_jaxpr(jax.grad(lambda x: loss(x, batch, jax.random.key(0), None), has_aux=True))(trained)
    shapes = set(shapes_in(program.jaxpr))
    assert (config.num_loops - 1, config.num_layers, 1, length, config.hidden_size) in shapes
    for shape in shapes:
        assert shape.count(length) < 2
        assert not {length, config.vocab_size} <= set(shape)
        assert shape.count(config.num_layers) < 2


@pytest.mark.long
def test_a_step_trains_weights_and_maps():
    """And a batch of padding has no gradient."""
    params, attention, tokens = setting(2)
    optimizer = adamw(OptimizerConfig(1e-2, total_steps=4))
    step = make_step(two_pass.make_loss(attention.scheme, CONFIG), optimizer)
    state = init({"base": params, "maps": attention.params}, optimizer, 0)
    batch = {"tokens": tokens, "response": response_of(PROMPTS), "segments": jnp.ones_like(tokens)}
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    assert 0 <= metrics["accuracy"] <= 1
    _, metrics = step(state, batch | {"segments": jnp.zeros_like(tokens)})
    assert metrics["loss"] == metrics["grad_norm"] == 0


def test_full_cache_is_trained_in_one_exact_pass():
    """Its loss is that of HLA with a window that holds everything."""
    params, attention, tokens = setting(TOKENS)
    rows = tokens, response_of(PROMPTS), jnp.ones_like(tokens)
    values = []
    for scheme, maps in ((attention.scheme, attention.params), (FullCache(), {})):
        loss, trained = loss_of(scheme, 0, params, maps, *rows)
        values.append(jax.jit(loss)(trained)[0])
    np.testing.assert_allclose(values[1], values[0], atol=1e-12)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda scheme: two_pass.make_loss(scheme, CONFIG, -1), ValueError, "repetitions must be at least 0"),
        (lambda scheme: two_pass.make_loss(FullCache(), CONFIG, 1), ValueError, "full cache"),
        (lambda scheme: two_pass.make_loss(SharedLoop(2), CONFIG), TypeError, "found SharedLoop"),
        (
            lambda scheme: two_pass.two_pass_hidden(
                {}, {}, scheme, CONFIG, jnp.zeros((2, 5), int), jnp.zeros((2, 4), bool)
            ),
            ValueError,
            r"response must have the shape of tokens, \(2, 5\); found \(2, 4\)",
        ),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make(setting(1)[1].scheme)
