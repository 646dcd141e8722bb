"""Every scheme against the logits of an independent float64 oracle, teacher-forced token by token through the cache."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.attention.shared import SharedLoop
from hla_jax.generation.generate import decode_forced
from hla_jax.model import Model
from tiny import GOLDEN_MODELS, TOLERANCE, golden

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize(
    "scheme",
    [
        "full",
        "shared",
        "hla_random",
        "hla_random_w0",
        "lla_latent_second_pass",
        "lla_latent_first_pass",
        "lla_exact_first_pass",
    ],
)
@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_teacher_forced_logits(name, scheme, dtype):
    g = golden(name, dtype)
    attention = {
        "full": Attention(FullCache()),
        "shared": Attention(SharedLoop(g.hla.window)),
        "hla_random": Attention(g.hla, g.maps),
        "hla_random_w0": Attention(dataclasses.replace(g.hla, window=0), g.maps),
        "lla_latent_second_pass": Attention(g.lla, g.lla_maps),
        "lla_latent_first_pass": Attention(dataclasses.replace(g.lla, single_pass=True), g.lla_maps),
        "lla_exact_first_pass": Attention(dataclasses.replace(g.lla, first_pass="exact"), g.lla_maps),
    }[scheme]
    tokens = jnp.asarray(g.codecs["input_ids"])[None]
    logits = decode_forced(Model(g.config, g.params, attention), tokens, g.prompt_length)
    np.testing.assert_allclose(logits[0], g.codecs[f"logits_{scheme}"], atol=TOLERANCE[dtype], rtol=0)
