"""The PyTorch model as transformers drives it, on a golden checkpoint with each cache."""

# ruff: noqa: E402 (the imports below need torch)

import pytest

torch = pytest.importorskip("torch", reason="the PyTorch model needs torch, which hla_jax itself does not")

from transformers import DynamicCache

from hla_jax.serving.torch import looped_cache
from hla_jax.serving.torch.looped_model import CACHE_NAME
from serving.torch_cases import MODELS, PROMPTS, forced, golden_directory, left_padded

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(params=MODELS)
def tiny(request, tmp_path):
    directory = golden_directory("ouro-tiny-gqa", request.param, tmp_path / "model")
    model = MODELS[request.param].from_pretrained(directory, dtype=torch.float64)
    model.generation_config.eos_token_id = None
    return model


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
    given = {CACHE_NAME: first[CACHE_NAME]}
    joined = tiny.generate(torch.cat([prompt, more], dim=1), max_new_tokens=5, do_sample=False, **given)
    cache, token, new = tiny(prompt)[CACHE_NAME], more, []
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
    """A seed decides them, and each is drawn from its own sequence's distribution."""
    monkeypatch.setattr(looped_cache, "GROWTH", 4)
    how = dict(max_new_tokens=10, do_sample=True, top_k=3, num_return_sequences=2, pad_token_id=0)

    def sample(seed):
        torch.manual_seed(seed)
        return tiny.generate(**left_padded(PROMPTS), **how)

    out = sample(0)
    assert out.shape == (6, 9 + 10)
    assert torch.equal(out, sample(0))
    assert not torch.equal(out, sample(1))
    assert any(not torch.equal(out[row], out[row + 1]) for row in (0, 2, 4))
    for row in range(6):
        prompt, new = PROMPTS[row // 2], out[row, -10:].tolist()
        best = forced(tiny, [prompt + new[:-1]], len(prompt))[0, -10:].argsort(-1)[:, -3:]
        assert all(token in three for token, three in zip(new, best, strict=True))


def test_eos_ends_a_row(tiny):
    """Rows that are over are padded while the others go on."""
    free = tiny.generate(**left_padded(PROMPTS), max_new_tokens=6, do_sample=False)[:, -6:]
    stop = free[1, 2].item()
    out = tiny.generate(
        **left_padded(PROMPTS),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=tiny.config.vocab_size - 1,
    )[:, 9:]
    for row in range(len(PROMPTS)):
        expected = free[row].tolist()
        if stop in expected:
            end = expected.index(stop) + 1
            expected[end:] = [tiny.config.vocab_size - 1] * (6 - end)
        assert out[row].tolist() == expected[: out.shape[1]]


def test_gradients(tiny):
    """The loss reaches weights and maps; without gradients the logits are the same."""
    tokens = torch.tensor([PROMPTS[0]])
    out = tiny(tokens, labels=tokens, use_cache=False)
    assert CACHE_NAME not in out
    out.loss.backward()
    assert tiny.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    if tiny.config.scheme.name == "lla":
        assert tiny.model.layers[0].self_attn.lla.k_up.grad.abs().sum() > 0
    with torch.inference_mode():
        torch.testing.assert_close(tiny(tokens).logits, out.logits.detach())


@torch.no_grad()
def test_logits_of_some_tokens(tiny):
    tokens = torch.tensor([PROMPTS[0]])
    whole = tiny(tokens).logits
    torch.testing.assert_close(tiny(tokens, logits_to_keep=2).logits, whole[:, -2:])
    torch.testing.assert_close(tiny(tokens, logits_to_keep=torch.tensor([0, 5])).logits, whole[:, [0, 5]])
    assert torch.equal(tiny(tokens, return_dict=False)[0], whole)


@torch.no_grad()
def test_bad_calls_are_named(tiny):
    tokens = torch.tensor([PROMPTS[0]] * 2)
    mask = torch.ones_like(tokens)
    half = torch.tensor([[1], [0]])
    cases = [
        (dict(attention_mask=mask[:, 1:]), "attention_mask must be"),
        (dict(attention_mask=mask * half), "has no token"),
        (dict(position_ids=torch.arange(9)[None] + 1), "position_ids must count"),
        (dict(cache=DynamicCache()), r"needs its own cache, model\.new_cache\(\); found DynamicCache"),
        (dict(output_attentions=True), "output_attentions"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            tiny(tokens, **options)
    with pytest.raises(ValueError, match="not inputs_embeds"):
        tiny(inputs_embeds=torch.zeros(1, 2, 64))
    cache = tiny(tokens)[CACHE_NAME]
    with pytest.raises(ValueError, match="padding is allowed in the first call only"):
        tiny(tokens, cache=cache, attention_mask=torch.cat([mask, mask * half], dim=1))
    with pytest.raises(NotImplementedError, match="assisted generation"):
        cache.crop(1)
    with pytest.raises(NotImplementedError, match="only the model fills"):
        cache.update(tokens, tokens, 0)


def test_bad_requests_are_named(tiny):
    tokens = torch.tensor([PROMPTS[0]] * 2)
    mask = torch.ones_like(tokens)
    for options, message in (
        (dict(attention_mask=torch.tensor([[1] * 9, [1] * 8 + [0]])), 'padding_side="left"'),
        (dict(attention_mask=mask, cache_implementation="static"), "'static': this model has its own cache"),
        (dict(attention_mask=mask, use_cache=False), "use_cache=False"),
        (dict(attention_mask=mask, prefill_chunk_size=4), "one exact pass"),
        (dict(attention_mask=mask, prompt_lookup_num_tokens=2), "assisted generation is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny.generate(tokens, max_new_tokens=2, **options)
    with pytest.raises(ValueError, match="inputs_embeds"):
        tiny.generate(inputs_embeds=torch.zeros(1, 2, 64, dtype=torch.float64), max_new_tokens=2)
