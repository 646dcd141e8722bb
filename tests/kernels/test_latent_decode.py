"""The reference of `latent_decode` against the oracle, the merge by log-sum-exp, and the choice by platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hla_jax.kernels import implementations
from hla_jax.kernels.latent_decode import api, blockwise, reference
from kernels import latent_cases as cases

SCALE = 0.3


@pytest.mark.long
@pytest.mark.usefixtures("x64")
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    latent_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 0, 3]),
    lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    paged=st.booleans(),
    rotation=st.booleans(),
    data=st.data(),
)
def test_equals_the_oracle(latent_heads, window, lengths, paged, rotation, data):
    filled = None if window is None else [data.draw(st.integers(0, window)) for _ in lengths]
    q, *rest = cases.make(
        3, 4, latent_heads, 8, 5, 4 if paged else 9, lengths, window, 2, 6, paged, "float64", 1, rotation, filled=filled
    )
    stored, recent, turn = rest
    want = cases.oracle(q, stored, SCALE, recent, turn)
    for block in (None, 2, 4):
        with pytest.MonkeyPatch.context() as patch:
            if block is not None:
                patch.setattr(blockwise, "SMALLEST_BLOCK", block)
                patch.setattr(blockwise, "BLOCK_NUMBERS", 1)
            plain = reference if block is None else blockwise
            got = plain.latent_decode(q, stored, SCALE, recent, turn)
        # Angles are float32.
        cases.agree(got, want, 1e-6 if rotation else 1e-12, 0)


@pytest.mark.parametrize("plain", [reference, blockwise])
def test_nothing_stored_gives_zeros_and_no_weight(plain):
    q, stored, *_ = cases.make(3, page=9, lengths=[0, 4, 0], window=None)
    out, near, lse = plain.latent_decode(q, stored, SCALE)
    assert near is None
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_array_equal(np.isneginf(lse), [[True] * 4, [False] * 4, [True] * 4])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("cut", [1, 5])
def test_parts_merge_by_log_sum_exp(cut):
    """Attention over a split store is the average of the parts' outputs, weighted by exp(log-sum-exp)."""
    q, stored, *_ = cases.make(3, page=9, lengths=[9, 5, 2], window=None, dtype="float64", spoil=False)
    lengths = stored.lengths

    def attend(part: slice, count: jax.Array):
        some = stored._replace(keys=stored.keys[:, :, part], values=stored.values[:, :, part], lengths=count)
        return reference.latent_decode(q, some, SCALE)

    whole, _, lse = attend(slice(None), lengths)
    head, _, lse_head = attend(slice(0, cut), jnp.minimum(lengths, cut))
    tail, _, lse_tail = attend(slice(cut, None), jnp.maximum(lengths - cut, 0))
    np.testing.assert_allclose(np.logaddexp(lse_head, lse_tail), lse, atol=1e-12)
    merged = head * np.exp(lse_head - lse)[..., None] + tail * np.exp(lse_tail - lse)[..., None]
    np.testing.assert_allclose(merged, whole, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("latent_heads", [1, 4])
def test_sequences_are_read_one_by_one_or_together(monkeypatch, platform, latent_heads):
    """A CPU reads them one by one, so that none changes what another gets, to the last bit.
    Elsewhere all are read as far as the longest.
    """
    for name, value in (("SMALLEST_BLOCK", 4), ("BLOCK_NUMBERS", 1), ("_BLOCK_OF_ALL", 1)):
        monkeypatch.setattr(blockwise, name, value)
    monkeypatch.setattr(implementations, "platform", lambda: platform)
    lengths = [3, 16, 0, 9]
    q, stored, window, _ = cases.make(4, latent_heads=latent_heads, page=16, lengths=lengths, dtype="float64")
    got = blockwise.latent_decode(q, stored, SCALE, window)
    cases.agree(got, cases.oracle(q, stored, SCALE, window), 1e-12, 0)
    if platform == "cpu":
        shorter = stored._replace(lengths=jnp.array([3, 1, 5, 9]))
        for one, other in zip(got, blockwise.latent_decode(q, shorter, SCALE, window), strict=True):
            np.testing.assert_array_equal(one[jnp.array([0, 3])], other[jnp.array([0, 3])])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("plain", [reference, blockwise])
def test_masked_tokens_are_not_read(plain):
    """A mask that hides the first tokens is a cache without them."""
    q, stored, *_ = cases.make(2, page=9, lengths=[9, 6], window=None, dtype="float64")
    hidden = stored._replace(visible=jnp.arange(9)[None] >= jnp.array([[2], [5]]))
    got = plain.latent_decode(q, hidden, SCALE)
    for b, (start, end) in enumerate(((2, 9), (5, 6))):
        alone = stored._replace(
            keys=stored.keys[:, b : b + 1, start:end],
            values=stored.values[:, b : b + 1, start:end],
            lengths=jnp.array([end - start]),
        )
        for one, other in zip(got, reference.latent_decode(q[b : b + 1], alone, SCALE), strict=True):
            if one is not None:
                np.testing.assert_allclose(one[b], other[0], atol=1e-12)


def test_the_platform_decides():
    assert api.choose() == ("blockwise", f"no kernel for a {jax.default_backend()}")
    assert api.choose("reference")[0] == "reference"


def test_a_name_fails_loudly():
    with pytest.raises(ValueError, match=r"no implementation 'cuda'; there are .*pallas_tpu"):
        api.choose("cuda")
    with pytest.raises(ValueError, match="pallas_tpu runs on a tpu, this is a cpu"):
        api.choose("pallas_tpu")


def test_a_kernel_that_cannot_take_the_inputs_is_not_chosen(monkeypatch):
    monkeypatch.setattr(implementations, "platform", lambda: "gpu")
    _, stored, *_ = cases.make()
    assert api.choose(None, stored)[0] == "triton_gpu"
    for odd, problem in (
        (stored._replace(visible=jnp.ones((2, 16), bool)), "masked"),
        (stored._replace(keys=stored.keys.astype(jnp.float16)), "the cache is float16"),
    ):
        assert api.choose(None, odd)[0] == "blockwise"
        with pytest.raises(ValueError, match=problem):
            api.choose("triton_gpu", odd)
