"""The PyTorch model against an independent float64 oracle, against JAX from exports of the trained model, and in
`generate` as transformers drives it.
"""

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
from transformers import AutoModelForCausalLM, DynamicCache, dynamic_module_utils

import hla_jax
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention
from hla_jax.generation import decode
from hla_jax.generation.generate import decode_forced, pad
from hla_jax.model import Model, load
from hla_jax.serving import torch_ouro
from hla_jax.serving.export import export
from tiny import GOLDEN, GOLDEN_MODELS, full_rank_hla, random_maps, tiny_config, tiny_params, tiny_tokens

TEXTS = [
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / 2\n",
    "The cache of a looped model holds keys and values of every loop, so it is as many times as large as a plain one.",
    "import os\nimport pathlib\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "A short one",
]
TRAINED = {
    "full": None,
    "hla": HLA(rank_k=128, rank_v=128, rank_loop1=64, window=16),
    "lla": LLA(rank_k=24, rank_v=40),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that wait for each other cost more than these sizes compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def modules(tmp_path_factory, monkeypatch):
    """Code of loaded directories goes to a temporary folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.getbasetemp() / "modules"))


@pytest.fixture(scope="module")
def trained():
    return load(hla_jax.NANO, dtype="float32")


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """name -> (model with its attention, directory), made when first asked for."""
    made = {}

    def get(name):
        if name not in made:
            sequences = [trained.tokenizer.encode(text) for text in TEXTS]
            attention = hla_jax.calibrate(trained, TRAINED[name], sequences) if TRAINED[name] else trained.attention
            directory = tmp_path_factory.mktemp("exports") / name
            export(trained, attention, directory, torch_code=True)
            made[name] = dataclasses.replace(trained, attention=attention), directory
        return made[name]

    return get


def from_directory(directory, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=dtype)


def left_padded(prompts):
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


@torch.no_grad()
def forced(model, tokens, prompt_length):
    """Logits [B, S, V]: a prompt, and the rest one by one through the cache."""
    tokens = torch.tensor(np.asarray(tokens)).long()
    prompt = model(tokens[:, :prompt_length])
    rest = model(tokens[:, prompt_length:], cache=prompt[torch_ouro.CACHE_NAME])
    return torch.cat([prompt.logits, rest.logits], dim=1).numpy()


# Against the oracle.


def golden_directory(name, entry, maps, directory):
    """A golden checkpoint with a scheme's entry and maps, as an export would write it."""
    directory.mkdir()
    config = json.loads((GOLDEN / name / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | entry))
    tensors = load_file(GOLDEN / name / "model.safetensors")
    save_file(tensors | (load_file(GOLDEN / name / maps) if maps else {}), directory / "model.safetensors")
    return directory


def golden_error(name, scheme, directory, **changes):
    """Largest difference from the oracle's teacher-forced logits, with changes of the scheme's entry."""
    about = json.loads((GOLDEN / name / "golden_codecs.json").read_text())
    kind = scheme[:3]
    entry, maps, model = {}, None, torch_ouro.OuroForCausalLM
    if kind == "hla":
        entry, maps, model = {"hla_config": about["hla"] | changes}, "hla_random", torch_ouro.OuroHLAForCausalLM
    elif kind == "lla":
        entry, maps, model = {"lla_config": about["lla"] | changes}, "lla_svd", torch_ouro.OuroLLAForCausalLM
    golden_directory(name, entry, maps and f"{maps}.safetensors", directory)
    values = load_file(GOLDEN / name / "golden_codecs.safetensors")
    tokens, truth = values["input_ids"][None], values[f"logits_{scheme}"].numpy()
    model = model.from_pretrained(directory, dtype=torch.float64)
    return np.abs(forced(model, tokens, about["prompt_length"])[0] - truth).max()


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


# Against JAX.


@pytest.mark.parametrize("name", TRAINED)
def test_same_greedy_tokens_and_logits_as_jax(name, exported):
    """Prompts of different lengths in one batch, and 64 tokens after each: four times the window."""
    model, directory = exported(name)
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    prompts = [ids[0], ids[1], ids[2][:17], ids[3]]
    assert len(set(map(len, prompts))) == len(prompts)
    theirs = from_directory(directory)
    theirs.generation_config.eos_token_id = None
    out = theirs.generate(
        **left_padded(prompts), max_new_tokens=64, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    new = out.sequences[:, -64:].numpy()
    logits = torch.stack(out.logits, dim=1).numpy()

    tokens, lengths = pad(prompts, max(map(len, prompts)))
    first, cache = decode.prefill(
        model.params, model.config, model.attention, tokens, lengths, tokens.shape[1] + new.shape[1]
    )
    rest, _ = decode.forced(model.params, model.config, model.attention, cache, jnp.asarray(new[:, :-1]))
    ours = np.concatenate([np.asarray(first)[:, None], np.asarray(rest)], axis=1)
    np.testing.assert_allclose(logits, ours, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(ours.argmax(-1), new)


def test_jax_generates_what_torch_generates(exported):
    model, directory = exported("hla")
    prompts = [model.tokenizer.encode(text) for text in TEXTS[2:]]
    ours = hla_jax.generate(model, prompts, 64, stop_tokens=())
    theirs = from_directory(directory)
    theirs.generation_config.eos_token_id = None
    out = theirs.generate(**left_padded(prompts), max_new_tokens=64, do_sample=False)
    assert [generation.tokens for generation in ours] == out[:, -64:].tolist()


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


def test_what_torch_saves_jax_loads(exported, tmp_path):
    model, directory = exported("hla")
    from_directory(directory).save_pretrained(tmp_path / "saved")
    found = load(tmp_path / "saved", dtype="float32")
    assert found.config == model.config
    assert found.attention.scheme == model.attention.scheme
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(same, (found.params, found.attention.params), (model.params, dict(model.attention.params)))


# As transformers drives it, on the golden checkpoint.


@pytest.fixture(params=["full", "hla", "lla"])
def tiny(request, tmp_path):
    about = json.loads((GOLDEN / "ouro-tiny-gqa" / "golden_codecs.json").read_text())
    entry = {f"{request.param}_config": about[request.param]} if request.param in about else {}
    maps = {"hla": "hla_random.safetensors", "lla": "lla_svd.safetensors"}.get(request.param)
    directory = golden_directory("ouro-tiny-gqa", entry, maps, tmp_path / "model")
    kinds = {"full": "Ouro", "hla": "OuroHLA", "lla": "OuroLLA"}
    model = getattr(torch_ouro, f"{kinds[request.param]}ForCausalLM").from_pretrained(directory, dtype=torch.float64)
    model.generation_config.eos_token_id = None
    return model


PROMPTS = [[5, 9, 200, 31, 7, 7, 12, 90, 41], [3, 100], [17, 250, 8, 8, 61]]


def test_padding_does_not_matter(tiny):
    """Each row of a batch is what it is alone, whichever side its padding is on."""
    batch = left_padded(PROMPTS)
    together = tiny.generate(**batch, max_new_tokens=6, do_sample=False)[:, -6:]
    alone = [tiny.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, -6:] for prompt in PROMPTS]
    assert together.tolist() == [row.tolist() for row in alone]
    left = tiny(**batch).logits
    right = tiny(**{name: torch.flip(value, [1]) for name, value in batch.items()}).logits
    for row, prompt in enumerate(PROMPTS):
        mine = tiny(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(left[row, -len(prompt) :], mine)
        backwards = tiny(torch.tensor([prompt[::-1]])).logits[0]
        torch.testing.assert_close(right[row, : len(prompt)], backwards)


def test_continuing_a_cache_is_decoding(tiny):
    """A conversation goes on: tokens given to `generate` with the cache are decoded after it."""
    prompt, more = torch.tensor([PROMPTS[0]]), torch.tensor([[44, 2, 2, 130]])
    first = tiny(prompt)
    name = torch_ouro.CACHE_NAME
    joined = tiny.generate(torch.cat([prompt, more], dim=1), max_new_tokens=5, do_sample=False, **{name: first[name]})
    by_hand = tiny(prompt)
    cache, token, new = by_hand[name], more, []
    for _ in range(5):
        token = tiny(token, cache=cache).logits[:, -1:].argmax(-1)
        new.append(token.item())
    assert joined[0, -5:].tolist() == new


def test_beams(tiny):
    """The score of the best sequence is its own, by teacher forcing: the cache follows its beam."""
    out = tiny.generate(
        **left_padded(PROMPTS),
        max_new_tokens=8,
        num_beams=3,
        length_penalty=0.0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for row, prompt in enumerate(PROMPTS):
        new = out.sequences[row, -8:].tolist()
        logits = forced(tiny, [prompt + new[:-1]], len(prompt))[0, -8:]
        score = torch.log_softmax(torch.tensor(logits), dim=-1)[range(8), new].sum()
        torch.testing.assert_close(out.sequences_scores[row], score, check_dtype=False, atol=1e-4, rtol=0)


def test_several_samples_from_a_growing_cache(tiny, monkeypatch):
    monkeypatch.setattr(torch_ouro, "_GROWTH", 4)
    out = tiny.generate(
        **left_padded(PROMPTS), max_new_tokens=10, do_sample=True, num_return_sequences=2, pad_token_id=0
    )
    assert out.shape == (6, 9 + 10)
    new = out[2, 9:].tolist()
    assert len(set(new)) > 1


def test_the_loss_reaches_maps(tiny):
    tokens = torch.tensor([PROMPTS[0]])
    tiny(tokens, labels=tokens, use_cache=False).loss.backward()
    assert tiny.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    if isinstance(tiny, torch_ouro.OuroLLAForCausalLM):
        assert tiny.model.layers[0].self_attn.lla.k_up.grad.abs().sum() > 0


@torch.no_grad()
def test_bad_requests_are_named(tiny):
    tokens = torch.tensor([PROMPTS[0]] * 2)
    mask = torch.ones_like(tokens)
    cases = [
        (dict(attention_mask=mask[:, 1:]), "attention_mask must be"),
        (dict(attention_mask=mask * torch.tensor([[1], [0]])), "has no token"),
        (dict(position_ids=torch.arange(9)[None] + 1), "position_ids must count"),
        (dict(cache=DynamicCache()), r"needs its own cache, model\.new_cache\(\); found DynamicCache"),
        (dict(output_attentions=True), "output_attentions"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            tiny(tokens, **options)
    with pytest.raises(ValueError, match="not inputs_embeds"):
        tiny(inputs_embeds=torch.zeros(1, 2, 64))
    cache = tiny(tokens)[torch_ouro.CACHE_NAME]
    with pytest.raises(ValueError, match="padding is allowed in the first call only"):
        tiny(tokens, cache=cache, attention_mask=torch.cat([mask, mask * torch.tensor([[1], [0]])], dim=1))
    with pytest.raises(NotImplementedError, match="assisted generation"):
        cache.crop(1)
    for options, message in (
        (dict(attention_mask=torch.tensor([[1] * 9, [1] * 8 + [0]])), 'padding_side="left"'),
        (dict(attention_mask=mask, cache_implementation="static"), "'static': Ouro has its own cache"),
        (dict(attention_mask=mask, use_cache=False), "use_cache=False"),
        (dict(attention_mask=mask, prefill_chunk_size=4), "one exact pass"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.generate(tokens, max_new_tokens=2, **options)


# Files.


def hla_directory(tmp_path):
    about = json.loads((GOLDEN / "ouro-tiny" / "golden_codecs.json").read_text())
    return golden_directory("ouro-tiny", {"hla_config": about["hla"]}, "hla_random.safetensors", tmp_path / "model")


def change_config(directory, change):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("hla_config"), "has the cache scheme HLA, but the entries are those of FullCache"),
        (lambda c: c.update(lla_config={"rank_k": 3, "rank_v": 3}), "expected one scheme, found hla_config and lla"),
        (lambda c: c.update(hla_config=3), "hla_config must be an object, found 3"),
        (lambda c: c["hla_config"].pop("window"), r"hla_config: missing \['window'\]; its fields are"),
        (lambda c: c["hla_config"].update(gate=1), r"hla_config: unknown \['gate'\]"),
        (lambda c: c["hla_config"].update(window="5"), "hla_config: window must be int, found '5'"),
        (lambda c: c["hla_config"].update(rank_k=20), "rank_k must be a multiple of head_dim 16, found 20"),
        (lambda c: c["hla_config"].update(pair_frequency=[0]), "pair_frequency must be 16 indices of the 8 freq"),
        (
            lambda c: c.update(eviction_config={"budget": 9, "first": 2}),
            "eviction_config is a scheme that only hla_jax runs",
        ),
        (lambda c: c.pop("total_ut_steps"), "missing keys total_ut_steps"),
        (lambda c: c.pop("rope_theta"), r"expected one rope_theta, found \[\]"),
        (lambda c: c.update(rope_scaling={"rope_type": "yarn"}), "rope_scaling must be None"),
    ],
)
def test_a_wrong_config_is_named(tmp_path, change, message):
    directory = hla_directory(tmp_path)
    change_config(directory, change)
    with pytest.raises(ValueError, match=message):
        torch_ouro.OuroHLAForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("model.layers.1.self_attn.hla.read_o1", "missing"),
        ("model.layers.2.mlp.up_proj.weight", "missing"),
        ("model.layers.0.self_attn.hla.read_x", "unknown"),
        ("model.layers.0.self_attn.lla.k_up", "unknown"),
    ],
)
def test_missing_and_unknown_tensors_are_named(tmp_path, name, problem):
    directory = hla_directory(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors = (
        tensors | {name: torch.zeros(2)} if problem == "unknown" else {k: tensors[k] for k in tensors.keys() - {name}}
    )
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{directory}.*: {problem} tensors {name}"):
        torch_ouro.OuroHLAForCausalLM.from_pretrained(directory)


@pytest.fixture
def golden_base(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(GOLDEN / "ouro-tiny", base, ignore=lambda *_: {"golden.safetensors", "golden_codecs.safetensors"})
    for name in ("hla_random.safetensors", "lla_svd.safetensors"):
        (base / name).unlink()
    return base


def test_maps_only_directories_find_their_base(golden_base, tmp_path):
    model = load(golden_base, dtype="float32")
    attention = random_maps(HLA(32, 24, 16, 5), model.config)
    export(model, attention, tmp_path / "whole", torch_code=True)
    export(model, attention, tmp_path / "maps", maps_only=True, torch_code=True)
    tokens = torch.tensor([PROMPTS[0]])
    found = from_directory(tmp_path / "maps")
    assert type(found).__name__ == "OuroHLAForCausalLM"
    whole = from_directory(tmp_path / "whole")
    np.testing.assert_allclose(forced(found, tokens, 4), forced(whole, tokens, 4), atol=1e-4)

    stored = load_file(tmp_path / "maps" / "model.safetensors")
    name = "model.layers.1.self_attn.hla.write_k"
    save_file({k: stored[k] for k in stored.keys() - {name}}, tmp_path / "maps" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"maps: model\.safetensors: missing tensors {name}"):
        from_directory(tmp_path / "maps")
    save_file(stored | {name: stored[name][:, 1:].contiguous()}, tmp_path / "maps" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} must be \[3, 32, 64\], found \[3, 31, 64\]"):
        from_directory(tmp_path / "maps")
    save_file(stored, tmp_path / "maps" / "model.safetensors")

    tensors = load_file(golden_base / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, golden_base / "model.safetensors")
    with pytest.raises(ValueError, match=r"another base model .* expected sha256 \w{64}, found \w{64}"):
        from_directory(tmp_path / "maps")
    shutil.rmtree(golden_base)
    with pytest.raises(ValueError, match="base_model not found"):
        from_directory(tmp_path / "maps")


def test_sharded_and_tied_models_load(tmp_path):
    """Files of a sharded export, and a head that is the embedding."""
    config = tiny_config(tie_word_embeddings=True)
    params = tiny_params(config)
    params.pop("lm_head", None)
    export(Model(config, params), Attention(hla_jax.FullCache()), tmp_path / "tied", torch_code=True)
    whole = from_directory(tmp_path / "tied")
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    again = torch_ouro.OuroForCausalLM.from_pretrained(tmp_path / "sharded", dtype=torch.float32)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    np.testing.assert_allclose(forced(again, tokens, 3), forced(whole, tokens, 3), atol=1e-4)
