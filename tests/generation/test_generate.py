"""`generate` and `decode_forced`: golden tokens, ragged and padded batches, seeds, stopping, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention, SchemeError
from hla_jax.generation.generate import capacity_bucket, decode_forced, generate, unpad
from hla_jax.kernels.latent_decode import Stored, pallas_tpu
from hla_jax.model import Model
from tiny import GOLDEN_MODELS, golden, random_hla, tiny_config, tiny_params, tiny_tokens

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = tiny_config()
PROMPTS = [[5, 9, 1, 33, 2], [7], [3, 3, 8, 21, 0, 4, 4, 19]]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, tiny_params(CONFIG), random_hla(CONFIG, 3))


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_golden_greedy_tokens(name, dtype):
    g = golden(name, dtype)
    made = generate(Model(g.config, g.params), g.values["input_ids"], 24, stop_tokens=())
    assert [one.tokens for one in made] == g.values["greedy_24"].tolist()
    assert all(one.finish_reason == "length" and one.text is None for one in made)


def test_one_prompt_many_prompts_and_padding_on_either_side(model):
    made = generate(model, PROMPTS, 6)
    assert [len(one.tokens) for one in made] == [6, 6, 6]
    alone = generate(model, PROMPTS[0], 6)
    assert alone == made[:1]
    width = max(map(len, PROMPTS))
    left = np.array([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    right = np.array([prompt + [0] * (width - len(prompt)) for prompt in PROMPTS])
    lengths = np.array([len(prompt) for prompt in PROMPTS])[:, None]
    assert (
        unpad(left, np.arange(width) >= width - lengths)
        == unpad(right, (np.arange(width) < lengths).astype(int))
        == PROMPTS
    )
    assert generate(model, [np.asarray(prompt) for prompt in PROMPTS], 6) == made
    assert generate(model, jnp.asarray(PROMPTS[0]), 6) == alone


@pytest.mark.long
def test_seeds_are_per_request(model):
    sampled = lambda prompts, seed: [one.tokens for one in generate(model, prompts, 6, temperature=1.0, seed=seed)]
    made = sampled(PROMPTS, 4)
    assert made == sampled(PROMPTS, [4, 5, 6]) == sampled(PROMPTS, np.asarray([4, 5, 6]))
    assert sampled(PROMPTS[::-1], [6, 5, 4]) == made[::-1]
    assert sampled(PROMPTS[1], np.int64(5)) == [made[1]]
    assert sampled(PROMPTS, 70) != made


def test_stop_tokens_and_limits(model):
    long = generate(model, PROMPTS, 6)
    one = generate(model, PROMPTS, 1)
    assert [made.tokens for made in one] == [made.tokens[:1] for made in long]
    stop = long[0].tokens[3]
    first = long[0].tokens.index(stop)
    stopped = generate(model, PROMPTS, 6, stop_tokens=[stop])[0]
    assert stopped.tokens == long[0].tokens[:first]
    assert stopped.finish_reason == "stop"
    # The model's own stop tokens, when none are given.
    own = dataclasses.replace(model, config=dataclasses.replace(CONFIG, eos_token_ids=(stop,)))
    assert generate(own, PROMPTS[0], 6)[0].tokens == stopped.tokens


@pytest.mark.parametrize(
    ("prompts", "new", "options", "message"),
    [
        ([], 4, {}, "no prompts given"),
        ([[1], []], 4, {}, "prompt 1 is empty"),
        ([[1, 40]], 4, {}, "prompt 0 has token id 40, the vocabulary has 40"),
        ([[1, -1]], 4, {}, "prompt 0 has token id -1"),
        ([[1.5, 2.0]], 4, {}, r"prompt 0 must be a text or a list of token ids, found float64\[2\]"),
        ([[1]], 0, {}, "max_new_tokens must be at least 1, found 0"),
        ([[1] * 100], 29, {}, "a prompt of 100 tokens and 29 new ones exceed max_position_embeddings 128"),
        ([[1]], 4, dict(seed=[1, 2]), "found 2 seeds for 1 prompts"),
        ([[1]], 4, dict(seed=-1), r"seeds must be in 0 .. 2\^32 - 1, found -1"),
        ([[1]], 4, dict(top_p=0.0), "top_p must be in"),
        ([[1]], 4, dict(tokens_per_dispatch=0), "tokens_per_dispatch must be at least 1, found 0"),
    ],
)
def test_impossible_requests_are_refused(model, prompts, new, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, new, **options)


def test_schemes_that_do_not_fit_are_refused(model):
    attention = Attention(HLA(4, 8, 8, 2), model.attention.params)
    with pytest.raises(SchemeError, match="rank_k must be a positive multiple of head_dim 8"):
        generate(model, PROMPTS, 4, attention)


@pytest.mark.parametrize("prompt_length", [0, 6])
def test_forced_decoding_needs_a_prompt_inside_the_tokens(model, prompt_length):
    with pytest.raises(ValueError, match=f"prompt_length must be in 1 .. 5, found {prompt_length}"):
        decode_forced(model, tiny_tokens(CONFIG, 1, 5), prompt_length)


def test_forced_decoding_of_a_whole_prompt(model):
    tokens = tiny_tokens(CONFIG, 2, 5)
    assert decode_forced(model, tokens, 5).shape == (2, 5, CONFIG.vocab_size)


@pytest.mark.parametrize("widths", [(2048, 2048), (512, 512), (16 * 96, 16 * 160)])
def test_a_tpu_kernel_takes_every_capacity(widths):
    """Of Ouro-1.4B's full cache, HLA and LLA; rounding adds at most a quarter beyond the first blocks."""
    capacities = {tokens: capacity_bucket(tokens) for tokens in range(1, 9000, 13)}
    assert all(tokens <= capacity <= max(1.25 * tokens + 1, tokens + 127) for tokens, capacity in capacities.items())
    assert all(capacity % 512 == 0 for capacity in capacities.values() if capacity > 2048)
    assert len(set(capacities.values())) < 30
    for capacity in set(capacities.values()):
        buffers = (jax.ShapeDtypeStruct((8, 1, capacity, width), jnp.bfloat16) for width in widths)
        assert pallas_tpu.problem(Stored(*buffers, None, None)) is None, capacity
