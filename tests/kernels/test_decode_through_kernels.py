"""Decoding through the TPU's kernel, interpreted, gives what decoding through the reference gives: slots, rotations,
windows and lengths reach the kernel as they should, in every scheme that reads a cache in place.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from hla_jax import LLA, FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.generation import decode
from hla_jax.kernels import implementations
from hla_jax.kernels.latent_decode import pallas_tpu
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
CONFIG = tiny.tiny_config()
SCHEMES = {
    "full": lambda: Attention(FullCache()),
    "hla": lambda: tiny.random_hla(CONFIG, window=4),
    "absorbed, folded": lambda: tiny.random_maps(LLA(9, 14, fold_heads=True, rank_rope=6), CONFIG),
}


def decoded(attention: Attention) -> np.ndarray:
    params = tiny.tiny_params(CONFIG)
    tokens, lengths = tiny.tiny_tokens(CONFIG, 2, 12), jnp.array([9, 3])
    _, cache = decode.prefill(params, CONFIG, attention, tokens[:, :9], lengths, 16)
    logits, _ = decode.forced(params, CONFIG, attention, cache, tokens[:, 9:])
    return np.asarray(logits)


@pytest.fixture
def kernel_calls(monkeypatch):
    """The TPU's kernel in its interpreter, on this machine; how often it was traced."""
    calls = []
    kernel = functools.partial(pallas_tpu.latent_decode, interpret=pltpu.InterpretParams())

    def traced(*args):
        calls.append(args)
        return kernel(*args)

    monkeypatch.setattr(implementations, "platform", lambda: "tpu")
    monkeypatch.setattr(pallas_tpu, "problem", lambda stored, window: None)
    monkeypatch.setattr(pallas_tpu, "latent_decode", traced)
    return calls


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEMES)
def test_decoding_through_the_kernel(name, kernel_calls):
    attention = SCHEMES[name]()
    with jax.default_matmul_precision("highest"):
        through = decoded(dataclasses.replace(attention, implementation="pallas_tpu"))
        assert kernel_calls
        count = len(kernel_calls)
        plain = decoded(dataclasses.replace(attention, implementation="reference"))
    assert len(kernel_calls) == count
    np.testing.assert_allclose(through, plain, atol=1e-4)
