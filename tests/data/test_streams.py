"""Streams are deterministic, resume exactly from their position, and split among processes without overlap or loss."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hla_jax.data.streams import DataError, Indexed, Mixture, Shard, Shuffled, Stream


def _letters(letter: str, length: int | None = None) -> Stream[str]:
    return Indexed(lambda i: f"{letter}{i}", length, seed=None if length is None else 7)


BUILDERS = {
    "endless": lambda: _letters("a"),
    "epochs": lambda: _letters("a", 5),
    "mixture": lambda: Mixture([_letters("a"), _letters("b", 4)], (3, 2), seed=1),
    "shuffled": lambda: Shuffled(_letters("a"), block=6, seed=1),
    "shard": lambda: Shard(_letters("a"), index=1, count=3),
    "all": lambda: Shard(Shuffled(Mixture([_letters("a", 3), _letters("b")], (1, 4), seed=2), block=4, seed=3), 0, 2),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@settings(max_examples=15, deadline=None)
@given(before=st.integers(0, 30))
def test_resumes_exactly(build, before):
    stream = build()
    list(itertools.islice(stream, before))
    state = json.loads(json.dumps(stream.get_state()))
    expected = list(itertools.islice(stream, 25))
    resumed = build()
    next(resumed)  # a used stream can be moved too
    resumed.set_state(state)
    assert list(itertools.islice(resumed, 25)) == expected


def test_an_epoch_holds_every_element_once_and_epochs_differ():
    stream = _letters("a", 50)
    first, second = (list(itertools.islice(stream, 50)) for _ in range(2))
    assert set(first) == set(second) == {f"a{i}" for i in range(50)}
    assert first != second


def test_mixture_follows_its_weights_and_its_seed():
    def draw(seed: int) -> list[str]:
        return list(itertools.islice(Mixture([_letters("a"), _letters("b"), _letters("c")], (3, 2, 0), seed), 2000))

    counts = Counter(element[0] for element in draw(0))
    assert counts["c"] == 0
    assert abs(counts["a"] - 1200) < 100  # five standard deviations of a binomial are 110
    assert draw(0) == draw(0) != draw(1)


def test_shuffled_keeps_the_elements_of_a_block_together():
    shuffled = list(Shuffled(Indexed(int, length=10), block=4, seed=0))
    assert [sorted(shuffled[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert shuffled != sorted(shuffled)


def test_shards_are_disjoint_and_complete():
    shards = [list(Shard(Indexed(int, length=11), index, count=3)) for index in range(3)]
    assert sorted(itertools.chain(*shards)) == list(range(11))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Indexed(int, length=0), "at least one element"),
        (lambda: Mixture([_letters("a")], (1, 2), 0), "one weight per stream"),
        (lambda: Mixture([_letters("a")], (0,), 0), "not all zero"),
        (lambda: Shard(_letters("a"), 2, 2), "index 2, count 2"),
        (lambda: Shuffled(_letters("a"), 0, 0), "got 0"),
        (lambda: BUILDERS["mixture"]().set_state({"drawn": 0, "streams": []}), "position is of 0 streams"),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(DataError, match=message):
        build()
