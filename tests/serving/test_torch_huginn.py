"""Huginn in PyTorch: against golden values of the public code, and against JAX through every cache that it has."""

# ruff: noqa: E402 (the imports below need torch)

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the PyTorch model needs torch, which hla_jax itself does not")

from safetensors.torch import load_file, save_file

import hla_jax
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.generation.generate import decode_forced
from hla_jax.model import Model, load
from hla_jax.models import huginn
from hla_jax.serving.export import export
from hla_jax.serving.torch.looped_model import CACHE_NAME
from hla_jax.serving.torch.modeling_huginn import RavenForCausalLM, RavenHLAForCausalLM, RavenLLAForCausalLM
from hla_jax.serving.torch.modeling_ouro import OuroForCausalLM
from hla_jax.serving.torch.state_huginn import drawn
from serving.torch_cases import forced, from_directory, left_padded
from tiny import GOLDEN, random_maps, tiny_huginn, tiny_params, tiny_tokens

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread", "own_modules")]

HUGINN = GOLDEN / "huginn-tiny"
PROMPTS = [[5, 9, 101, 31, 7, 7, 12, 90, 41], [3, 100], [17, 150, 8, 8, 61]]
FLOAT32 = 2e-5
"""The public code rotates in float32, its golden values are float64 otherwise."""
SIZES = tiny_huginn(num_loops=3, num_prelude=2, num_coda=1, initial_state="zeros")
SCHEMES = (
    FullCache(),
    HLA(16, 8, 8, 3, pair_frequency=(1, 0, 2, 3, 0, 1, 3, 2)),
    LLA(9, 7, fold_heads=True, first_pass="exact"),
    LLA(9, 7, full_memory=True),
    LLA(6, 5, rank_rope=4),
)


@torch.no_grad()
@pytest.mark.parametrize("state", ["given", "zero"])
def test_agrees_with_the_public_code(state):
    values = load_file(HUGINN / "golden.safetensors")
    model = RavenForCausalLM.from_pretrained(HUGINN, dtype=torch.float64)
    initial = values["input_states"] if state == "given" else "zeros"
    logits = model(values["input_ids"].long(), initial_state=initial).logits
    np.testing.assert_allclose(logits, values[f"logits_{state}_state"], atol=FLOAT32, rtol=0)


@torch.no_grad()
def test_faults_are_seen():
    """What the golden values would catch: each part's order, and another number of steps."""
    values = load_file(HUGINN / "golden.safetensors")
    tokens, expected = values["input_ids"].long(), values["logits_zero_state"]
    far = lambda model, **how: (model(tokens, initial_state="zeros", **how).logits - expected).abs().max() > 1e-3

    def changed(change):
        model = RavenForCausalLM.from_pretrained(HUGINN, dtype=torch.float64)
        change(model.transformer)
        return model

    swapped = lambda x, count: torch.cat(x.chunk(count)[::-1])
    assert far(changed(lambda t: None), num_steps=5)
    assert far(changed(lambda t: t.core_block[0].attn.qk_bias.copy_(t.core_block[0].attn.qk_bias.flip(0))))
    assert far(changed(lambda t: t.coda[0].mlp.fc.weight.copy_(swapped(t.coda[0].mlp.fc.weight, 2))))
    assert far(changed(lambda t: t.adapter.weight.copy_(t.adapter.weight.roll(60, 1))))


@torch.no_grad()
def test_decoding_with_the_full_cache_is_the_parallel_pass():
    """States given for each token of each call."""
    values = load_file(HUGINN / "golden.safetensors")
    tokens, states = values["input_ids"].long(), values["input_states"]
    model = RavenForCausalLM.from_pretrained(HUGINN, dtype=torch.float64)
    first = model(tokens[:, :6], initial_state=states[:, :6])
    rest = model(tokens[:, 6:], cache=first[CACHE_NAME], initial_state=states[:, 6:])
    logits = torch.cat([first.logits, rest.logits], dim=1)
    np.testing.assert_allclose(logits, values["logits_given_state"], atol=FLOAT32, rtol=0)


@pytest.mark.usefixtures("quick_compile", "x64")
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_scheme_agrees_with_jax(scheme, tmp_path):
    params, tokens = tiny_params(SIZES, "float64"), tiny_tokens(SIZES, 2, 12)
    model = Model(SIZES, params, random_maps(scheme, SIZES, "float64"))
    export(model, None, tmp_path / "out", torch_code=True)
    theirs = from_directory(tmp_path / "out", torch.float64)
    ours = np.asarray(decode_forced(model, tokens, 5))
    np.testing.assert_allclose(forced(theirs, tokens, 5), ours, atol=1e-9, rtol=0)
    if scheme == FullCache():
        exact = np.asarray(hla_jax.forward(model, tokens))
        np.testing.assert_allclose(ours, exact, atol=1e-9, rtol=0)


def test_random_states_are_those_of_jax():
    """The same numbers up to float32's rounding, whatever jax's precision."""
    tokens = np.array([[0, 1, 2, 65535], [40000, 7, 7, 65509]])
    config = dataclasses.replace(hla_jax.config.HUGINN_3P5B, hidden_size=5280)
    ours = np.asarray(huginn.initial_state(config, jnp.asarray(tokens, jnp.int32), jnp.float32))
    theirs = drawn(torch.tensor(tokens), 5280).numpy()
    np.testing.assert_allclose(theirs, ours, atol=1e-5, rtol=0)
    assert np.abs(ours).max() <= 3 * (2 / 5) ** 0.5 + 1e-6
    assert not np.array_equal(ours[0, 0], ours[0, 1])
    with jax.enable_x64(True):
        wide = huginn.initial_state(config, jnp.asarray(tokens, jnp.int32), jnp.float64)
        np.testing.assert_array_equal(np.asarray(wide, np.float32), ours)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("scheme", [FullCache(), HLA(24, 18, 12, 3), LLA(12, 16)], ids=str)
def test_both_generate_the_same(scheme, tmp_path):
    """Greedy tokens of prompts of different lengths in one batch, from random states, and back to JAX."""
    model = load(HUGINN, dtype="float32")
    model = dataclasses.replace(model, attention=random_maps(scheme, model.config))
    export(model, None, tmp_path / "out", torch_code=True)
    theirs = from_directory(tmp_path / "out")
    out = theirs.generate(**left_padded(PROMPTS), max_new_tokens=12, do_sample=False)[:, -12:]
    ours = hla_jax.generate(model, PROMPTS, 12, stop_tokens=())
    assert [generation.tokens for generation in ours] == out.tolist()
    tokens = jnp.asarray([[*PROMPTS[0], *ours[0].tokens]])
    np.testing.assert_allclose(
        forced(theirs, tokens, 9), np.asarray(decode_forced(model, tokens, 9)), atol=2e-3
    )  # random maps make much of rounding

    theirs.save_pretrained(tmp_path / "saved")
    found = load(tmp_path / "saved", dtype=None)
    assert (found.config, found.attention.scheme) == (model.config, scheme)
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(same, (found.params, dict(found.attention.params)), (model.params, dict(model.attention.params)))
    again = from_directory(tmp_path / "saved")
    assert type(again).__name__ == type(theirs).__name__
    assert torch.equal(again(torch.tensor(PROMPTS[:1])).logits, theirs(torch.tensor(PROMPTS[:1])).logits)


def test_any_number_of_steps():
    """With the full cache: a call, a cache, or `generate`."""
    model = RavenForCausalLM.from_pretrained(HUGINN, dtype=torch.float32)
    ours = load(HUGINN, dtype="float32")
    how = dict(max_new_tokens=5, do_sample=False, initial_state="zeros")
    tokens = {}
    for steps in (2, 9):
        tokens[steps] = model.generate(**left_padded(PROMPTS[:1]), num_steps=steps, **how)[0, 9:].tolist()
        config = dataclasses.replace(ours.config.with_steps(steps), initial_state="zeros")
        generation = hla_jax.generate(dataclasses.replace(ours, config=config), PROMPTS[:1], 5, stop_tokens=())
        assert tokens[steps] == generation[0].tokens
    assert model.new_cache(9).num_loops == 9
    assert model.config.mean_recurrence == 6


def test_padding_and_beams():
    """Each row of a batch is what it is alone; a beam's cache follows it."""
    model = RavenForCausalLM.from_pretrained(HUGINN, dtype=torch.float64)
    how = dict(max_new_tokens=6, do_sample=False)
    together = model.generate(**left_padded(PROMPTS), **how)[:, -6:]
    alone = [model.generate(torch.tensor([prompt]), **how)[0, -6:] for prompt in PROMPTS]
    assert together.tolist() == [row.tolist() for row in alone]
    left = left_padded(PROMPTS)
    right = {name: torch.flip(value, [1]) for name, value in left.items()}
    states = torch.randn(*left["input_ids"].shape, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one = model(**left, initial_state=states).logits
        for row, prompt in enumerate(PROMPTS):
            mine = model(torch.tensor([prompt]), initial_state=states[row : row + 1, -len(prompt) :]).logits[0]
            torch.testing.assert_close(one[row, -len(prompt) :], mine)
            backwards = model(torch.tensor([prompt[::-1]])).logits[0]
            torch.testing.assert_close(model(**right).logits[row, : len(prompt)], backwards)
    out = model.generate(
        **left, num_beams=3, length_penalty=0.0, output_scores=True, return_dict_in_generate=True, **how
    )
    for row, prompt in enumerate(PROMPTS):
        new = out.sequences[row, -6:].tolist()
        logits = forced(model, [prompt + new[:-1]], len(prompt))[0, -6:]
        score = torch.log_softmax(torch.tensor(logits), dim=-1)[range(6), new].sum()
        torch.testing.assert_close(out.sequences_scores[row], score, check_dtype=False, atol=1e-4, rtol=0)


@torch.no_grad()
def test_bad_calls_are_named(tmp_path):
    model, tokens = RavenForCausalLM.from_pretrained(HUGINN), torch.tensor(PROMPTS[:1])
    cache = model(tokens, num_steps=4)[CACHE_NAME]
    for options, message in (
        (dict(cache=cache, num_steps=5), "num_steps must be the cache's, 4; found 5"),
        (dict(num_steps=0), "num_steps must be at least 1, found 0"),
        (dict(initial_state="ones"), r'initial_state must be "random", "zeros" or states \[1, 9, 60\], found \'ones\''),
        (dict(initial_state=torch.zeros(1, 8, 60)), r"initial_state must be \[1, 9, 60\], found \[1, 8, 60\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, **options)
    mine = load(HUGINN, dtype="float32")
    export(mine, random_maps(HLA(24, 18, 12, 3), mine.config), tmp_path / "hla")
    with pytest.raises(ValueError, match="num_steps must be 6, which the maps of HLA are for; found 4"):
        RavenHLAForCausalLM.from_pretrained(tmp_path / "hla")(tokens, num_steps=4)
    ouro = OuroForCausalLM.from_pretrained(GOLDEN / "ouro-tiny")
    for option in (dict(num_steps=3), dict(initial_state="zeros")):
        with pytest.raises(ValueError, match="is an option of Huginn"):
            ouro(tokens, **option)


@torch.no_grad()
def test_files_as_published_and_maps_apart(tmp_path):
    """A head beside tied embeddings and a rotary buffer, as in the hub's files; maps that name their base."""
    base = tmp_path / "base"
    base.mkdir()
    shutil.copyfile(HUGINN / "config.json", base / "config.json")
    tensors = load_file(HUGINN / "model.safetensors")
    head = tensors["transformer.wte.weight"].clone()
    save_file(tensors | {"lm_head.weight": head, "freqs_cis": torch.zeros(1, 8, 1, 6, 2)}, base / "model.safetensors")
    tokens = torch.tensor(PROMPTS[:1])
    published, plain = RavenForCausalLM.from_pretrained(base), RavenForCausalLM.from_pretrained(HUGINN)
    assert torch.equal(published(tokens).logits, plain(tokens).logits)
    assert published.lm_head.weight is published.transformer.wte.weight

    model = load(base, dtype="float32")
    attention = random_maps(LLA(12, 16), model.config)
    export(model, attention, tmp_path / "whole")
    export(model, attention, tmp_path / "maps", maps_only=True, torch_code=True)
    found, whole = from_directory(tmp_path / "maps"), RavenLLAForCausalLM.from_pretrained(tmp_path / "whole")
    assert type(found).__name__ == "RavenLLAForCausalLM"
    np.testing.assert_allclose(forced(found, tokens, 4), forced(whole, tokens, 4), atol=1e-4)
    save_file(tensors | {"transformer.ln_f.weight": head[0] + 1}, base / "model.safetensors")
    with pytest.raises(ValueError, match=r"another base model .* expected sha256 \w{64}, found \w{64}"):
        from_directory(tmp_path / "maps")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(n_heads=None), "missing keys n_heads"),
        (dict(injection_type="add"), "injection_type must be 'linear', found 'add'"),
        (dict(state_init="normal"), r"state_init must be one of \['like-init', 'zero'\], found 'normal'"),
        (dict(head_dim=10), "n_heads times head_dim must be n_embd"),
        (dict(low_bit_config={"bits": 4}), "low_bit_config is a scheme that only hla_jax runs"),
        (dict(hla_config={"rank_k": 20, "rank_v": 6, "rank_loop1": 12, "window": 3}), "multiple of head_dim 12"),
        (dict(lla_config={"rank_k": 3, "rank_v": 3}), r"missing tensors transformer\.core_block\.0\.attn\.lla"),
        (dict(n_layers_in_coda=2), r"missing tensors transformer\.coda\.1"),
    ],
)
def test_a_wrong_directory_is_named(change, message, tmp_path):
    config = json.loads((HUGINN / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copyfile(HUGINN / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        RavenForCausalLM.from_pretrained(tmp_path)


def test_gradients_and_half_precision(tmp_path):
    model, tokens = RavenForCausalLM.from_pretrained(HUGINN, dtype=torch.float32), torch.tensor(PROMPTS[:1])
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    assert model.transformer.core_block[0].attn.Wqkv.weight.grad.abs().sum() > 0
    half = RavenForCausalLM.from_pretrained(HUGINN, dtype=torch.bfloat16)
    cache = half.new_cache()
    with torch.no_grad():
        found, truth = half(tokens, cache=cache).logits, model(tokens).logits
    assert {buffer.dtype for buffer in cache.buffers.values()} == {torch.bfloat16}
    assert found.dtype == torch.float32
    assert (found - truth).square().mean().sqrt() < 0.15 * truth.std()
