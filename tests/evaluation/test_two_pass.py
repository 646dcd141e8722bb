"""Passes against decoding (table 5): nothing apart where theory says so, closer with every repetition, and mistakes."""

import numpy as np
import pytest

import hla_jax
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.evaluation import two_pass
from hla_jax.evaluation.estimates import Estimate
from hla_jax.evaluation.two_pass import Agreement
from tests.tiny import random_hla, tiny_config, tiny_params, tiny_tokens

CONFIG = tiny_config(num_layers=1)
PROMPT, WINDOW = 6, 2

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_a_repetition_reproduces_two_windows_and_tokens():
    """A response of 2 (W + 1) tokens: every procedure is closer to decoding than the one before, the last equals it."""
    model = hla_jax.Model(CONFIG, tiny_params(CONFIG, "float64"), random_hla(CONFIG, WINDOW, "float64"))
    rows = tiny_tokens(CONFIG, 2, PROMPT + 2 * (WINDOW + 1))
    found = two_pass.agreement_with_decoding(model, model.attention, rows, PROMPT, (0, 1))
    assert list(found) == ["single exact pass", "two passes", "1 repetition"]
    kl = [one.kl.mean for one in found.values()]
    assert kl[0] > kl[1] > 1e-9
    assert abs(kl[2]) < 1e-12
    assert abs(found["1 repetition"].cross_entropy_change.mean) < 1e-10
    assert abs(found["single exact pass"].cross_entropy_change.mean) > 1e-6
    assert found["two passes"].kl.sequences == 2


def test_the_table_is_in_1e4_nats():
    agreement = lambda kl, stderr: Agreement(Estimate(kl, stderr, 2), Estimate(0.0, None, 2))
    lines = two_pass.markdown(
        {
            "float32": {"two passes": agreement(3.4e-4, 1.2e-5)},
            "bfloat16": {"two passes": agreement(5.8e-4, None)},
        }
    ).splitlines()
    assert lines[0] == "| KL from decoding, 1e-4 nats | float32 | bfloat16 |"
    assert lines[2] == "| two passes | 3.4 ± 0.12 | 5.8 |"


def test_mistakes_are_named():
    model = hla_jax.Model(CONFIG, {}, Attention(FullCache()))
    rows = np.zeros((1, 8), np.int32)
    with pytest.raises(TypeError, match="defined for HLA, found FullCache"):
        two_pass.agreement_with_decoding(model, model.attention, rows, 2)
    with pytest.raises(ValueError, match=r"prompt_length must be in 1 .. 6 for sequences of 8 tokens, found 7"):
        two_pass.agreement_with_decoding(model, random_hla(CONFIG, 1), rows, 7)
