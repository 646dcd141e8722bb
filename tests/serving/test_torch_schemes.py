"""The PyTorch model's caches against an independent float64 oracle, and against JAX where the oracle has no values."""

# ruff: noqa: E402 (the imports below need torch)

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the PyTorch model needs torch, which hla_jax itself does not")

from safetensors.torch import load_file

from hla_jax.attention.lla import LLA
from hla_jax.generation.generate import decode_forced
from hla_jax.model import Model
from hla_jax.serving.export import export
from serving.torch_cases import MODELS, PROMPTS, forced, from_directory, golden_directory
from tiny import GOLDEN, GOLDEN_MODELS, full_rank_hla, random_maps, tiny_config, tiny_params, tiny_tokens

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread", "own_modules")]


def golden_error(name, scheme, directory, **changes):
    """Largest difference from the oracle's teacher-forced logits, with changes of the scheme's entry."""
    kind = scheme[:3] if scheme != "full" else scheme
    golden_directory(name, kind, directory, **changes)
    values = load_file(GOLDEN / name / "golden_codecs.safetensors")
    tokens, truth = values["input_ids"][None], values[f"logits_{scheme}"].numpy()
    prompt_length = json.loads((GOLDEN / name / "golden_codecs.json").read_text())["prompt_length"]
    model = MODELS[kind].from_pretrained(directory, dtype=torch.float64)
    return np.abs(forced(model, tokens, prompt_length)[0] - truth).max()


@pytest.mark.parametrize("name", GOLDEN_MODELS)
@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        ("full", {}),
        ("hla_random", {}),
        ("hla_random_w0", {"window": 0}),
        ("lla_latent_second_pass", {}),
        ("lla_exact_first_pass", {"first_pass": "exact"}),
        ("lla_latent_first_pass", {"single_pass": True}),
        ("lla_latent_first_pass", {"full_memory": True}),
    ],
)
def test_agrees_with_the_oracle(name, scheme, changes, tmp_path):
    assert golden_error(name, scheme, tmp_path / "model", **changes) < 1e-11


@pytest.mark.parametrize(
    ("scheme", "fault"),
    [
        ("hla_random", {"window": 4}),
        ("hla_random", {"window": 6}),
        ("hla_random", {"pair_frequency": [1, 0, *range(2, 8), *range(8)]}),
        ("lla_latent_second_pass", {"single_pass": True}),
        ("lla_latent_second_pass", {"first_pass": "exact"}),
        ("lla_latent_first_pass", {}),
    ],
)
def test_a_fault_is_seen(scheme, fault, tmp_path):
    assert golden_error("ouro-tiny", scheme, tmp_path / "model", **fault) > 1e-2


def every_variant(config, params):
    shuffled = full_rank_hla(config, params, 3, shuffle=0)
    schemes = (
        LLA(9, 7, fold_heads=True),
        LLA(6, 5, rank_rope=4),
        LLA(9, 7, fold_heads=True, rank_rope=6, query_adapter=True),
        LLA(6, 5, rank_rope=4, first_pass="exact"),
    )
    return [shuffled, *(random_maps(scheme, config, "float64") for scheme in schemes)]


@pytest.mark.usefixtures("quick_compile", "x64")
def test_other_variants_agree_with_jax(tmp_path):
    """Grouped queries; pairs of shuffled frequencies, folded heads, absorbed maps."""
    config = tiny_config()
    params = tiny_params(config, "float64")
    tokens = tiny_tokens(config, 2, 12)
    for number, attention in enumerate(every_variant(config, params)):
        model = Model(config, params, attention)
        export(model, None, tmp_path / str(number), torch_code=True)
        ours = np.asarray(decode_forced(model, tokens, 5))
        theirs = forced(from_directory(tmp_path / str(number), torch.float64), tokens, 5)
        np.testing.assert_allclose(theirs, ours, atol=1e-9, rtol=0, err_msg=str(attention.scheme))


@pytest.mark.parametrize("kind", MODELS)
def test_half_precision_is_stored_and_close(kind, tmp_path):
    """bfloat16 weights and buffers, float32 logits."""
    directory = golden_directory("ouro-tiny-gqa", kind, tmp_path / "model")
    half, exact = (MODELS[kind].from_pretrained(directory, dtype=dtype) for dtype in (torch.bfloat16, torch.float64))
    cache = half.new_cache()
    half(torch.tensor(PROMPTS[:1]), cache=cache)
    assert {buffer.dtype for buffer in cache.buffers.values()} == {torch.bfloat16}
    found, truth = (forced(model, PROMPTS[:1], 4) for model in (half, exact))
    assert found.dtype == np.float32
    assert np.sqrt(np.mean((found - truth) ** 2)) < 0.1 * truth.std()
