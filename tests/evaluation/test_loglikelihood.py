"""Log-likelihoods against logits that were computed one pair at a time, whatever the batch, for every way to read."""

import numpy as np
import pytest

import hla_jax
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.evaluation import loglikelihood
from hla_jax.evaluation.loglikelihood import Pair, cut_left, encode_pair
from hla_jax.model import NANO, Model
from hla_jax.tokenizer import load_tokenizer
from tiny import random_hla, tiny_config, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = tiny_config()
PARAMS = tiny_params(CONFIG)
HLA = random_hla(CONFIG, 3)
SIZES = ((9, 1), (9, 7), (4, 3), (9, 4), (4, 2))


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    rng = np.random.default_rng(0)
    return [Pair(*(rng.integers(0, 40, size).tolist() for size in sizes)) for sizes in SIZES]


def oracle(pair: Pair, logits) -> tuple[float, bool]:
    """From logits after every token of context and continuation."""
    rows = np.asarray(logits, np.float64)[len(pair.context) - 1 :]
    log = rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) - rows.max(-1, keepdims=True)
    targets = pair.continuation
    likeliest = [int(np.argmax(row)) for row in rows[: len(targets)]]
    return sum(row[token] for row, token in zip(log, targets)), likeliest == targets


@pytest.mark.long
@pytest.mark.parametrize("read", ["full", "decode", "swapped"])
def test_equals_logits_one_by_one_whatever_the_batch(pairs, read):
    attention = Attention(FullCache()) if read == "full" else HLA
    model = Model(CONFIG, PARAMS, attention)

    def logits(pair: Pair) -> np.ndarray:
        tokens = np.zeros((1, 16), int)
        tokens[0, : sum(map(len, pair))] = [*pair.context, *pair.continuation]
        if read == "decode":
            return hla_jax.decode_forced(model, tokens, len(pair.context))[0]
        return (hla_jax.forward if read == "full" else hla_jax.forward_swapped)(model, tokens)[0]

    # The second pair is what greedy decoding gives.
    pair = pairs[1]
    for at in range(len(pair.continuation)):
        likeliest = int(np.argmax(np.asarray(logits(pair))[len(pair.context) - 1 + at]))
        pair.continuation[at] = likeliest
    expected = [oracle(pair, logits(pair)) for pair in pairs]
    assert [greedy for _, greedy in expected][1]
    for batch_size in (1, 3) if read == "decode" else (3,):
        found = loglikelihood.score(
            model, attention, pairs, read="swapped" if read == "swapped" else "decode", batch_size=batch_size
        )
        np.testing.assert_allclose([one.logprob for one in found], [logprob for logprob, _ in expected], rtol=2e-4)
        assert [one.greedy for one in found] == [greedy for _, greedy in expected]


@pytest.mark.long
def test_a_latent_cache_changes_what_is_read_of_a_context():
    """The first token is scored as exactly as the prompt was read; the second is read through the cache."""
    pair = Pair([5, 9, 30, 2, 17, 8, 3, 11], [4, 21])
    model = Model(CONFIG, PARAMS)
    score = lambda attention, pair, **read: (
        loglikelihood.score(model, attention, [pair], batch_size=1, **read)[0].logprob
    )
    first = Pair(pair.context, pair.continuation[:1])
    exact = Attention(FullCache())
    assert score(HLA, first) == pytest.approx(score(exact, first), rel=1e-5)
    assert abs(score(HLA, pair) - score(exact, pair)) > 1e-3
    assert abs(score(HLA, first, read="swapped") - score(exact, first)) > 1e-3


def test_a_pair_is_cut_where_its_context_ends():
    tokenizer = load_tokenizer(NANO)
    pair = encode_pair(tokenizer, 7, "def add(a, b): ", "return a")
    assert tokenizer.decode(pair.context + pair.continuation) == "def add(a, b): return a"
    assert tokenizer.decode(pair.context) == "def add(a, b):"
    assert encode_pair(tokenizer, 7, "", "return").context == [7]
    assert cut_left(Pair([1, 2, 3, 4], [5, 6]), 5) == Pair([1, 2, 3, 4], [5, 6])
    assert cut_left(Pair([1, 2, 3, 4], [5, 6]), 3) == Pair([3, 4], [5, 6])
    with pytest.raises(ValueError, match="a continuation of 4 tokens exceeds the model's 3 positions"):
        cut_left(Pair([1], [2, 3, 4, 5]), 3)
    with pytest.raises(ValueError, match="pair 1 has an empty context or continuation"):
        loglikelihood.score(Model(CONFIG, PARAMS), HLA, [Pair([1], [2]), Pair([1], [])])
    with pytest.raises(ValueError, match="read must be one of decode, swapped, found 'prefill'"):
        loglikelihood.score(Model(CONFIG, PARAMS), HLA, [], read="prefill")
