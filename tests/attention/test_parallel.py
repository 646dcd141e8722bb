"""Attention of many tokens at once against the direct formula in numpy, in one block of queries and in several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.attention import parallel

BATCH, TOKENS, HEADS, KV_HEADS, SIZE, RANK_K, RANK_V = 2, 37, 4, 2, 8, 12, 5


def draw(number: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=shape)


Q, K, V = (
    draw(0, BATCH, TOKENS, HEADS, SIZE),
    draw(1, BATCH, TOKENS, KV_HEADS, SIZE),
    draw(2, BATCH, TOKENS, KV_HEADS, SIZE),
)
SEGMENTS = np.stack([np.arange(TOKENS) // 20, np.arange(TOKENS) // 9])
PROMPTS = np.stack([np.arange(TOKENS) % 20 < 11, np.arange(TOKENS) % 9 < 2])


def direct(scores: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Softmax over what is visible; scores [H, S, S]."""
    weights = np.where(visible, np.exp(scores - scores.max()), 0)
    return weights / weights.sum(-1, keepdims=True)


def repeat(x: np.ndarray) -> np.ndarray:
    """Each key-value head for all query heads of its group: [S, G, r] to [S, H, r]."""
    return np.repeat(x, HEADS // x.shape[1], axis=1)


@pytest.fixture(params=[37, 16], ids=["one block", "three blocks"])
def blocks(request, monkeypatch):
    """Queries per block; 16 does not divide the 37 tokens."""
    monkeypatch.setattr(parallel, "query_block", lambda tokens, numbers_per_query: request.param)


@pytest.mark.parametrize("segments", [None, SEGMENTS])
def test_exact_attention(segments, blocks, x64):
    found = parallel.exact_attention(*map(jnp.asarray, (Q, K, V)), None if segments is None else jnp.asarray(segments))
    for b in range(BATCH):
        visible = np.tril(np.ones((TOKENS, TOKENS), bool))
        if segments is not None:
            visible &= segments[b][:, None] == segments[b][None]
        weights = direct(np.einsum("qhr,khr->hqk", Q[b], repeat(K[b])) / SIZE**0.5, visible)
        np.testing.assert_allclose(found[b], np.einsum("hqk,khr->qhr", weights, repeat(V[b])), atol=1e-12)


@pytest.mark.parametrize(
    ("window", "segments", "exact"),
    [(0, None, None), (6, None, None), (TOKENS, None, None), (0, None, PROMPTS), (6, SEGMENTS, PROMPTS)],
    ids=["no window", "window", "all", "prompts", "window, segments, prompts"],
)
def test_hybrid_attention(window, segments, exact, blocks, x64):
    """Latent scores and values for j < i - W, exact ones from there on, one softmax; the latent store may be longer.
    Tokens of a prompt read exact ones only.
    """
    q_far, k_far, v_far = (
        draw(3, BATCH, TOKENS, HEADS, RANK_K),
        draw(4, BATCH, TOKENS + 3, 1, RANK_K),
        draw(5, BATCH, TOKENS + 3, 1, RANK_V),
    )
    far, near = parallel.hybrid_attention(
        tuple(map(jnp.asarray, (q_far, k_far, v_far))),
        tuple(map(jnp.asarray, (Q, K, V))),
        window,
        None if segments is None else jnp.asarray(segments),
        exact=None if exact is None else jnp.asarray(exact),
    )
    token = np.arange(TOKENS)
    for b in range(BATCH):
        recent = token[:, None] - token[None] <= window
        if exact is not None:
            recent = recent | exact[b][:, None]
        visible = token[:, None] >= token[None]
        if segments is not None:
            visible = visible & (segments[b][:, None] == segments[b][None])
        scores = (
            np.where(
                recent,
                np.einsum("qhr,khr->hqk", Q[b], repeat(K[b])),
                np.einsum("qhr,kr->hqk", q_far[b], k_far[b, :TOKENS, 0]),
            )
            / SIZE**0.5
        )
        weights = direct(scores, visible)
        np.testing.assert_allclose(
            far[b], np.einsum("hqk,kr->qhr", np.where(recent, 0, weights), v_far[b, :TOKENS, 0]), atol=1e-12
        )
        np.testing.assert_allclose(
            near[b], np.einsum("hqk,khr->qhr", np.where(recent, weights, 0), repeat(V[b])), atol=1e-12
        )


def test_blocks_have_the_same_gradient(monkeypatch, x64):
    """Scores of a block are recomputed in the backward pass; padding queries contribute nothing."""
    loss = lambda q, k, v: jnp.sum(parallel.exact_attention(q, k, v) ** 2)
    gradient = lambda: jax.grad(loss, argnums=(0, 1, 2))(*map(jnp.asarray, (Q, K, V)))
    whole = gradient()
    monkeypatch.setattr(parallel, "query_block", lambda tokens, numbers_per_query: 16)
    for one, other in zip(whole, gradient(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-11)


@pytest.mark.parametrize(("tokens", "sequences_times_heads"), [(10, 4), (1024, 16), (16384, 16), (65536, 512)])
def test_block_of_queries_bounds_the_scores(tokens, sequences_times_heads):
    block = parallel.query_block(tokens, sequences_times_heads * tokens)
    assert 1 <= block <= tokens
    assert block * sequences_times_heads * tokens <= 1 << 22 or block == 16
