"""Packed batches: every token once, documents apart, exact resumption; shifted positions as properties."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hla_jax.data.packing import BatchConfig, Batches, Lanes, Parts, tokenize_with
from hla_jax.data.positions import ShiftConfig, ShiftedPositions, shift
from hla_jax.data.streams import DataError, Indexed, Shard


def tokenize(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def documents(lengths: list[int], epochs: bool = False):
    """Document i has lengths[i] tokens 100 i + 1, 100 i + 2, ..."""
    return Indexed(
        lambda i: " ".join(str(100 * i + j + 1) for j in range(lengths[i])), len(lengths), seed=3 if epochs else None
    )


def sequences(batches) -> list[list[int]]:
    """The sequences in all batches; checks on the way that segments are contiguous and positions count from 0."""
    found = []
    for batch in batches:
        assert all(array.dtype == np.int32 for array in batch.values())
        for tokens, segments, positions in zip(batch["tokens"], batch["segments"], batch["positions"]):
            kept = segments > 0
            assert not tokens[~kept].any()
            assert not positions[~kept].any()
            assert np.all(np.diff(segments[kept]) >= 0)
            assert not np.any(kept[1:] & ~kept[:-1])  # padding only at the end
            for segment in range(1, segments.max() + 1):
                here = segments == segment
                assert here.any()
                np.testing.assert_array_equal(positions[here], np.arange(here.sum()))
                found.append(tokens[here].tolist())
    return found


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    rows=st.integers(1, 3),
    length=st.integers(4, 12),
    min_tokens=st.integers(1, 4),
    max_tokens=st.none() | st.integers(4, 20),
    pack=st.booleans(),
)
def test_every_token_is_packed_once(lengths, rows, length, min_tokens, max_tokens, pack):
    config = BatchConfig(rows, length, min_tokens, max_tokens, pack)
    batches = list(Batches(documents(lengths), tokenize, config))
    expected = []
    for i, n in enumerate(lengths):
        document = [100 * i + j + 1 for j in range(n)][:max_tokens]
        expected += [document[j : j + length] for j in range(0, len(document), length)]
    assert sorted(sequences(batches)) == sorted(e for e in expected if len(e) >= min_tokens)
    assert all(batch["tokens"].shape == (rows, length) for batch in batches)
    if not pack:
        assert all(batch["segments"].max() == 1 for batch in batches)


def test_packing_fills_the_first_row_with_room():
    (batch,) = Batches(documents([3, 4, 2, 1]), tokenize, BatchConfig(batch_size=2, length=6))
    np.testing.assert_array_equal(batch["segments"], [[1, 1, 1, 2, 2, 3], [1, 1, 1, 1, 0, 0]])


@settings(max_examples=30, deadline=None)
@given(before=st.integers(0, 12), pack=st.booleans())
def test_resumes_with_the_same_batches(before, pack):
    def build():
        config = BatchConfig(2, 8, min_tokens=2, pack=pack)
        batches = Batches(documents([5, 40, 3, 9, 1, 17], epochs=True), tokenize, config)
        return ShiftedPositions(batches, ShiftConfig(max_distance=1000), seed=5)

    stream = build()
    list(itertools.islice(stream, before))
    state = json.loads(json.dumps(stream.get_state()))
    resumed = build()
    resumed.set_state(state)
    for expected, batch in itertools.islice(zip(stream, resumed), 10):
        for name in ("tokens", "segments", "positions"):
            np.testing.assert_array_equal(batch[name], expected[name])


def in_lanes(process, rows=4, lanes=4):
    def lane(number, count):
        mine = Shard(documents([5, 3, 7, 2, 4, 6, 1], epochs=True), number, count)
        config = BatchConfig(rows // count, 8)
        other = Batches(documents([3], epochs=True), tokenize, config)
        return Parts({"short": Batches(mine, tokenize, config), "other": other})

    return Lanes(lane, lanes, process)


def test_any_number_of_processes_reads_the_same_rows():
    """Four lanes in one process, in two, and in four that go on where the two stopped."""
    alone, pair = in_lanes((0, 1)), [in_lanes((index, 2)) for index in range(2)]
    join = lambda parts: np.concatenate([part["short"]["tokens"] for part in parts])
    for _ in range(3):
        np.testing.assert_array_equal(join([next(alone)]), join([next(one) for one in pair]))
    position = {"lanes": {}}
    for one in pair:
        position["lanes"] |= json.loads(json.dumps(one.get_state()))["lanes"]
    four = [in_lanes((index, 4)) for index in range(4)]
    for one in four:
        one.set_state(position)
    for _ in range(3):
        np.testing.assert_array_equal(join([next(alone)]), join([next(one) for one in four]))
    with pytest.raises(DataError, match="multiple of the 3 processes"):
        in_lanes((0, 3))
    with pytest.raises(DataError, match="position is of lanes 0, 1; this run has 2"):
        in_lanes((1, 2)).set_state(pair[0].get_state())


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused():
    with pytest.raises(DataError, match="from 1 to 3, but the model's vocabulary has 3"):
        next(Batches(documents([3]), tokenize, BatchConfig(1, 8), vocab_size=3))


def test_only_too_short_documents_do_not_hang():
    with pytest.raises(DataError, match="less than min_tokens=4"):
        next(Batches(documents([1, 2], epochs=True), tokenize, BatchConfig(1, 8, min_tokens=4)))


@pytest.mark.parametrize("kwargs", [{"batch_size": 0, "length": 4}, {"batch_size": 1, "length": 4, "min_tokens": 5}])
def test_impossible_shapes_are_refused(kwargs):
    with pytest.raises(DataError, match="got"):
        BatchConfig(**kwargs)


def test_tokenizer_ends_documents_once():
    class Tokenizer:
        eos_token_id = 9

        def __call__(self, text, add_special_tokens, verbose):
            assert not add_special_tokens
            return {"input_ids": tokenize(text)}

    encode = tokenize_with(Tokenizer())
    assert [list(encode(text)) for text in ("1 2", "1 9", "")] == [[1, 2, 9], [1, 9], [9]]


def _segments(lengths: list[int], padding: int):
    segments = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)] + [np.zeros(padding)]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(padding)]).astype(np.int32)
    return segments[None], positions[None]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    padding=st.integers(0, 5),
    max_distance=st.integers(1, 500),
    max_chunks=st.integers(2, 6),
)
def test_shifted_positions(seed, lengths, padding, max_distance, max_chunks):
    segments, positions = _segments(lengths, padding)
    config = ShiftConfig(fraction=1.0, max_chunks=max_chunks, max_distance=max_distance)
    shifted = shift(np.random.default_rng(seed), segments, positions, config)
    assert shifted.dtype == np.int32
    np.testing.assert_array_equal(shift(np.random.default_rng(seed), segments, positions, config), shifted)
    np.testing.assert_array_equal(shifted[segments == 0], positions[segments == 0])
    for segment, n in enumerate(lengths, start=1):
        moved = shifted[segments == segment]
        assert moved[0] == 0
        steps = np.diff(moved)
        assert np.all(steps >= 1)
        assert np.sum(steps > 1) <= max_chunks - 1
        assert moved[-1] <= max(max_distance, n - 1)


def test_the_fraction_of_shifted_documents_and_the_reach():
    segments, positions = _segments([50] * 400, 0)
    config = ShiftConfig(fraction=0.75, max_distance=16_384)
    shifted = shift(np.random.default_rng(0), segments, positions, config)
    last = np.array([shifted[segments == i][-1] for i in range(1, 401)])
    assert abs(np.mean(last > 49) - 0.75) < 0.1  # more than four standard deviations
    assert last.max() > 15_000
    unshifted = shift(np.random.default_rng(0), segments, positions, ShiftConfig(fraction=0.0))
    np.testing.assert_array_equal(unshifted, positions)
