"""Answers under teacher forcing: counted by hand, and the same in parallel, through caches, and by greedy decoding."""

import jax
import numpy as np
import pytest

import hla_jax
from hla_jax.evaluation import answers
from hla_jax.training.two_pass import exact_hidden
from tests.tiny import random_hla, tiny_config, tiny_params

CONFIG = tiny_config(num_layers=1)
LENGTHS, STARTS = (9, 12, 7), (4, 3, 5)

pytestmark = pytest.mark.usefixtures("quick_compile")


def rows():
    """Three rows; an answer goes from each row's start to its end."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, 12)).astype(np.int32)
    index = np.arange(12)[None]
    segments = (index < np.asarray(LENGTHS)[:, None]).astype(np.int32)
    response = (index >= np.asarray(STARTS)[:, None]).astype(np.int32) * segments
    return {"tokens": tokens * segments, "segments": segments, "response": response}


def test_answers_are_counted_one_by_one():
    """Two answers in the first row, of which the second has a wrong token; none of the padding counts."""
    asked = {
        "tokens": np.zeros((2, 8), np.int32),
        "segments": np.asarray([[1] * 7 + [0], [1] * 4 + [0] * 4], np.int32),
        "response": np.asarray([[0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0, 0]], np.int32),
    }
    errors = np.asarray([[1, 2, 9, 9, 3, 6, 9, 9], [9, 4, 8, 9, 9, 9, 9, 9]], np.float32)
    likely = np.asarray([[1, 1, 0, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]], np.float32)
    found = answers.score(asked, errors, likely)
    np.testing.assert_allclose(found.cross_entropy, [3, 6])
    np.testing.assert_allclose(found.right, [0.5, 1])


@pytest.mark.long
def test_through_a_cache_that_loses_nothing_it_is_the_parallel_pass():
    """HLA within its window; without a window it differs. Batches do not divide the rows."""
    params, asked = tiny_params(CONFIG), rows()
    hidden = jax.jit(lambda part: exact_hidden(params, CONFIG, part["tokens"], part["segments"]))
    expected = answers.in_parallel(params, asked, hidden, batch_size=2)
    decoded = lambda attention: answers.decoded(params, CONFIG, attention, asked, np.asarray(STARTS), batch_size=2)
    found = decoded(random_hla(CONFIG, 12))
    np.testing.assert_allclose(found.cross_entropy, expected.cross_entropy, rtol=1e-4)
    np.testing.assert_array_equal(found.right, expected.right)
    assert np.abs(decoded(random_hla(CONFIG, 0)).cross_entropy - expected.cross_entropy).max() > 1e-3


@pytest.mark.long
def test_right_is_what_greedy_decoding_gives():
    model = hla_jax.Model(CONFIG, tiny_params(CONFIG), random_hla(CONFIG, 0))
    asked = rows()
    for row, (start, end) in enumerate(zip(STARTS, LENGTHS)):
        prompt = asked["tokens"][row, :start].tolist()
        (made,) = hla_jax.generate(model, [prompt], end - start, stop_tokens=())
        asked["tokens"][row, start:end] = made.tokens
    found = answers.decoded(model.params, CONFIG, model.attention, asked, np.asarray(STARTS), batch_size=2)
    np.testing.assert_array_equal(found.right, 1)
    asked["tokens"][1, LENGTHS[1] - 1] += 1
    found = answers.decoded(model.params, CONFIG, model.attention, asked, np.asarray(STARTS), batch_size=2)
    np.testing.assert_array_equal(found.right, [1, 0, 1])
