"""The loss of uptraining: block by block against the direct formula, and the direct formula against plain softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.kernels.attention_match import Fitted, Fixed, blockwise, reference

B, S, H, G, DH, D, RK, RV, WINDOW = 2, 13, 4, 2, 6, 10, 8, 5, 3


def operands(queries: int = S, ascending: bool = False) -> tuple[Fitted, Fixed, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
    index = np.stack([rng.permutation(S)[:queries] for _ in range(B)])
    index = jnp.asarray(np.sort(index) if ascending else index)
    segments = jnp.asarray([[1] * 6 + [2] * 7, [1] * 10 + [0] * 3])
    counted = (jnp.take_along_axis(segments, index, 1) > 0) / B
    fitted = Fitted(draw(B, queries, H, RK), draw(B, S, RK), draw(B, S, RV), draw(H, RV, DH))
    return (
        fitted,
        Fixed(draw(B, queries, H, DH), draw(B, S, G, DH), draw(B, S, G, DH), draw(D, H * DH), segments),
        index,
        counted,
    )


def test_reference_is_the_definition(x64: None) -> None:
    """KL and output error of two explicit softmax rows, query by query, in numpy."""
    fitted, fixed, index, counted = jax.tree.map(np.asarray, operands())
    kl = error = 0.0
    for b in range(B):
        for n, i in enumerate(index[b]):
            seen = [j for j in range(i + 1) if fixed.segments[b, j] == fixed.segments[b, i]]
            far = np.array([i - j > WINDOW for j in seen])
            outs = []
            for h in range(H):
                exact = np.array([fixed.q[b, n, h] @ fixed.k[b, j, h // 2] for j in seen]) / DH**0.5
                latent = np.array([fitted.q[b, n, h] @ fitted.k[b, j] for j in seen]) / DH**0.5
                a, a_hat = (np.exp(s) / np.exp(s).sum() for s in (exact, np.where(far, latent, exact)))
                kl += counted[b, n] * np.sum(a * np.log(a / a_hat)) / H
                values = fixed.v[b, seen, h // 2]
                from_latent = (a_hat * far) @ fitted.v[b, seen] @ fitted.read[h]
                outs.append((a @ values, from_latent + (a_hat * ~far) @ values))
            o, o_hat = (fixed.o_proj @ np.concatenate(part) for part in zip(*outs, strict=True))
            error += counted[b, n] * np.sum((o_hat - o) ** 2) / np.sum(o**2)
    found = reference.attention_match(*jax.tree.map(jnp.asarray, (fitted, fixed, index, counted)), WINDOW)
    np.testing.assert_allclose(found, (kl, error), rtol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(("queries", "ascending"), [(S, True), (6, False)])
def test_blocks_agree_with_the_reference_in_value_and_gradient(
    queries: int, ascending: bool, x64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted, *rest = operands(queries, ascending)

    def direct(fitted: Fitted) -> jax.Array:
        match = reference.attention_match(fitted, *rest, WINDOW)
        return match.kl + match.error

    expected, gradient = jax.jit(jax.value_and_grad(direct))(fitted)
    monkeypatch.setattr(blockwise, "CPU_BLOCK_NUMBERS", 1)
    monkeypatch.setattr(blockwise, "SMALLEST_BLOCK", 4)
    monkeypatch.setattr(blockwise, "SMALLEST_LENGTH", 4)
    loss = lambda fitted: 3 * blockwise.attention_match(fitted, *rest, WINDOW)[0]
    found, found_gradient = jax.jit(jax.value_and_grad(loss))(fitted)
    np.testing.assert_allclose(found, 3 * expected, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(loss)(fitted), 3 * expected, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 3 * b, rtol=1e-9, atol=1e-12), found_gradient, gradient)


@pytest.mark.long
def test_memory_is_linear_in_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary bytes of value and gradient, as XLA plans them: four times the tokens take four times the memory, not
    sixteen. In a loop, as uptraining has one: jax moves out of it what does not depend on it, for all blocks at once.
    """
    monkeypatch.setattr(blockwise, "CPU_BLOCK_NUMBERS", 1 << 16)

    def temporary_bytes(tokens: int) -> int:
        shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
        fitted = Fitted(shape(1, tokens, 2, 8), shape(1, tokens, 8), shape(1, tokens, 8), shape(2, 8, 8))
        fixed = Fixed(
            shape(1, tokens, 2, 8),
            shape(1, tokens, 2, 8),
            shape(1, tokens, 2, 8),
            shape(16, 16),
            jax.ShapeDtypeStruct((1, tokens), jnp.int32),
        )
        index = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

        def loss(fitted: Fitted, fixed: Fixed, index: jax.Array, counted: jax.Array) -> jax.Array:
            def one(total: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
                scaled = fitted._replace(q=fitted.q * scale), fixed._replace(q=fixed.q * scale)
                return total + blockwise.attention_match(*scaled, index, counted, 4)[0], None

            return jax.lax.scan(one, jnp.zeros(()), jnp.ones(3))[0]

        compiled = jax.jit(jax.grad(loss)).lower(fitted, fixed, index, shape(1, tokens)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary_bytes(1024), temporary_bytes(4096)
    assert large < 5 * small
    assert large < 4 * 4096 * 4096
