"""The PyTorch model and JAX on exports of the trained model: what one generates, the other would have generated."""

# ruff: noqa: E402 (the imports below need torch)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the PyTorch model needs torch, which hla_jax itself does not")

import hla_jax
from hla_jax.generation import decode
from hla_jax.generation.generate import pad
from hla_jax.serving.export import export
from serving.torch_cases import from_directory, left_padded
from trained import SCHEMES

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread", "own_modules", "quick_compile")]

TEXTS = [
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / 2\n",
    "The cache of a looped model holds keys and values of every loop, so it is as many times as large as a plain one.",
    "import os\nimport pathlib\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "amber472\nplum81\n?amber",
]
NEW = 64
"""Tokens after each prompt: four times the window."""


@pytest.mark.parametrize("name", SCHEMES)
def test_both_generate_the_same(name, trained_model, tmp_path):
    """Prompts of different lengths in one batch. One test a scheme, because its maps are trained first."""
    model = trained_model(name)
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    prompts = [ids[0], ids[1], ids[2][:17], ids[3]]
    assert len(set(map(len, prompts))) == len(prompts)
    export(model, None, tmp_path / name, torch_code=True)
    theirs = from_directory(tmp_path / name)

    theirs.generation_config.eos_token_id = None
    how = dict(max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True)
    out = theirs.generate(**left_padded(prompts), **how)
    new = out.sequences[:, -NEW:].numpy()
    ours = logits_after(model, prompts, new)
    np.testing.assert_allclose(torch.stack(out.logits, dim=1).numpy(), ours, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(ours.argmax(-1), new)

    generated = hla_jax.generate(model, prompts, NEW, stop_tokens=())
    assert [generation.tokens for generation in generated] == new.tolist()

    theirs.save_pretrained(tmp_path / "saved")
    found = hla_jax.load(tmp_path / "saved", dtype="float32")
    assert found.config == model.config
    assert found.attention.scheme == model.attention.scheme
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(same, (found.params, found.attention.params), (model.params, dict(model.attention.params)))


def logits_after(model, prompts, new):
    """JAX's logits [B, NEW, V] of tokens that somebody else chose, by teacher forcing."""
    tokens, lengths = pad(prompts, max(map(len, prompts)))
    capacity = tokens.shape[1] + new.shape[1]
    first, cache = decode.prefill(model.params, model.config, model.attention, tokens, lengths, capacity)
    rest, _ = decode.forced(model.params, model.config, model.attention, cache, jnp.asarray(new[:, :-1]))
    return np.concatenate([np.asarray(first)[:, None], np.asarray(rest)], axis=1)
