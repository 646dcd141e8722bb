"""Conversations become tokens, masks and packed batches: token by token on small files, and one clear error a fault."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import hla_jax
from hla_jax.data import supervised
from hla_jax.data.streams import DataError, Indexed
from hla_jax.data.supervised import ChatBatches, ChatSource, Messages, PackedConversations, Pairs, Verified
from hla_jax.tokenizer import CHATML_TEMPLATE, load_tokenizer

END, START, STOP = 0, 1, 2  # <|endoftext|>, <|im_start|>, <|im_end|>
STOPS = (END, STOP)
TURNS = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "plum,fox\n<"},
    {"role": "assistant", "content": "fox,plum"},
    {"role": "user", "content": "elm?"},
    {"role": "assistant", "content": "no\nnever"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(hla_jax.NANO)


def conversation(*contents):
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(("user", "assistant")), contents)]


def written_by_assistant(tokenizer, tokens):
    """Walks over the tokens: behind an assistant's header, up to and with the token that ends its turn."""
    header = [START, *tokenizer.encode("assistant\n", add_special_tokens=False)]
    mask, inside = [], False
    for index, token in enumerate(tokens):
        mask.append(inside)
        if inside and token == STOP:
            inside = False
        elif list(tokens[index + 1 - len(header) : index + 1]) == header:
            inside = True
    return mask


def test_every_turn_of_the_assistant_counts_and_nothing_else(tokenizer):
    example = supervised.encode(tokenizer, TURNS, STOPS)
    whole = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(example.tokens) == whole.removesuffix("\n")
    assert example.response.tolist() == written_by_assistant(tokenizer, example.tokens)
    assert tokenizer.decode(example.tokens[example.response]) == "fox,plum<|im_end|>no\nnever<|im_end|>"
    # What stands before a response is what generation is given.
    first = int(example.response.argmax())
    prompt = tokenizer.apply_chat_template(TURNS[:2], add_generation_prompt=True, return_dict=False)
    assert example.tokens[:first].tolist() == prompt


def test_messages_after_the_last_answer_are_left_out(tokenizer):
    with_question = [*TURNS, {"role": "user", "content": "why?"}]
    expected, found = (supervised.encode(tokenizer, one, STOPS) for one in (TURNS, with_question))
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_without_a_template_it_is_chatml(tokenizer):
    bare = load_tokenizer(hla_jax.NANO)
    bare.chat_template = None
    expected, found = (supervised.encode(one, TURNS, STOPS) for one in (tokenizer, bare))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.response, expected.response)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # Forgets what was thought once the turn is past.
        (
            CHATML_TEMPLATE.replace(
                "message['content']",
                "('...' if message['role'] == 'assistant' and not loop.last else message['content'])",
            ),
            "message 5: the chat template renders what comes before it differently",
        ),
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
    ],
)
def test_templates_that_cannot_be_masked(template, message):
    tokenizer = load_tokenizer(hla_jax.NANO)
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        supervised.encode(tokenizer, TURNS, STOPS)


def test_a_tokenizer_without_template_and_turn_tokens():
    class Bare:
        chat_template = None

        def get_vocab(self):
            return {"a": 0}

    with pytest.raises(DataError, match=r"no chat template, and lacks ChatML's <\|im_start\|>, <\|im_end\|>"):
        supervised.encode(Bare(), TURNS, STOPS)


def first_of(path, kind="messages", **columns):
    source = ChatSource(str(path), kind=kind, held_out=0, **columns)
    return next(supervised.conversations((source,), None, False, 0))


def test_files_of_every_kind(tmp_path):
    rows = [{"messages": TURNS, "source": "x"}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for suffix in ("jsonl", "json", "parquet"):
        assert first_of(tmp_path / f"a.{suffix}") == TURNS
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"question": "hi", "answer": "ho"}) + "\n")
    assert first_of(tmp_path / "pairs.jsonl", "pairs", prompt="question", response="answer") == conversation("hi", "ho")


def test_openr1s_first_verified_solution_is_the_answer():
    row = {"problem": "1+1", "generations": ["3", "2", "two"], "correctness_math_verify": [False, True, True]}
    assert Verified()(row) == conversation("1+1", "2")
    assert Verified()(row | {"correctness_math_verify": None}) is None
    assert Verified().columns == ("problem", "generations", "correctness_math_verify")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "text"}, r"'messages': expected a list of \{role, content\}, found 'text'"),
        ({"messages": []}, "found \\[\\]"),
        ({"other": 1}, "expected a list of .*, found nothing"),
        ({"messages": ["hi"]}, r"message 1: expected \{role, content\}, found 'hi'"),
        ({"messages": [{"role": "user"}]}, "message 1, 'content': expected text, found nothing"),
        ({"messages": [{"role": 3, "content": "a"}]}, "message 1, 'role': expected text, found 3"),
        ({"messages": conversation("hi")}, "expected a message of the role 'assistant', found user"),
    ],
)
def test_malformed_rows_name_file_row_and_key(tmp_path, row, message):
    good = {"messages": conversation("hi", "ho")}
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (good, good, row, good)))
    with pytest.raises(DataError, match=rf"chat\.jsonl, row 3: .*{message}"):
        first_of(path)


def test_other_faults_of_files(tmp_path):
    (tmp_path / "half.jsonl").write_text('{"messages": [')
    with pytest.raises(DataError, match=r"half\.jsonl: cannot be read"):
        first_of(tmp_path / "half.jsonl")
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match="has no column 'messages'; its columns are 'prompt'"):
        first_of(tmp_path / "other.jsonl")
    with pytest.raises(DataError, match="'response': expected text, found 3"):
        Pairs()({"prompt": "a", "response": 3})
    with pytest.raises(DataError, match="expected text, found nothing"):
        Messages()({"messages": [{"role": "assistant", "content": None}]})


def test_plan_holds_every_example_once_in_the_shortest_row_it_fits():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 65, 300).tolist()
    config = ChatBatches(tokens=256, lengths=(16, 32, 64))
    planned = supervised.plan(sizes, config, rng)
    placed = [index for _, rows in planned for row in rows for index in row]
    assert sorted(placed) == list(range(300))
    used = 0
    for length, rows in planned:
        assert len(rows) == 256 // length
        for row in rows:
            assert sum(sizes[index] for index in row) <= length
            used += sum(sizes[index] for index in row)
    assert used == sum(sizes)
    assert sum(not all(rows) for _, rows in planned) <= 1, "one batch at most is filled up with padding"
    assert {length for length, _ in planned} == {16, 32, 64}
    # An example is in a longer row than it needs only where those of its length did not fill a batch.
    for shorter in (16, 32):
        rows = [row for length, rows in planned if length > shorter for row in rows]
        assert sum(sizes[index] for row in rows for index in row if sizes[index] <= shorter) < 256


def test_batches_mix_short_and_long_examples():
    """Packing goes by size; batches must not."""
    sizes = [3] * 60 + [30] * 60
    planned = supervised.plan(sizes, ChatBatches(tokens=256, lengths=(32,)), np.random.default_rng(0))
    shortest = [min(sizes[index] for row in rows for index in row) for _, rows in planned]
    longest = [max(sizes[index] for row in rows for index in row) for _, rows in planned]
    assert set(longest) == {30}
    assert shortest.count(3) > len(planned) / 3


def packed(tokenizer, config, stream=None, **options):
    texts = lambda index: conversation(f"{index}" * (1 + index % 7), "ab " * (index % 11))
    stream = Indexed(texts, 64, seed=3) if stream is None else stream
    return PackedConversations(stream, tokenizer, STOPS, config, 1024, **options)


def test_batches_hold_the_conversations_apart(tokenizer):
    config = ChatBatches(tokens=512, lengths=(64, 128), block=64)
    batches = packed(tokenizer, config)
    found = []
    while batches.counts["conversations"] <= 64:
        batch = next(batches)
        rows, length = batch["tokens"].shape
        assert rows * length == 512
        for row in range(rows):
            for segment in range(1, batch["segments"][row].max() + 1):
                mine = batch["segments"][row] == segment
                tokens = batch["tokens"][row, mine]
                assert tokens[0] == START
                assert tokens[-1] == STOP
                assert batch["response"][row, mine].tolist() == written_by_assistant(tokenizer, tokens)
                found.append(tokenizer.decode(tokens))
            padding = batch["segments"][row] == 0
            assert not batch["tokens"][row, padding].any()
            assert not batch["response"][row, padding].any()
    assert len(set(found[:64])) == 64
    assert any(text.count("<|im_start|>") == 3 for text in found)  # the default system message among them


def test_a_resumed_stream_goes_on(tokenizer):
    config = ChatBatches(tokens=256, lengths=(64, 128), block=24)
    whole = packed(tokenizer, config)
    expected = [next(whole) for _ in range(12)]
    for before in (0, 1, 5, 9):
        first = packed(tokenizer, config)
        for _ in range(before):
            next(first)
        resumed = packed(tokenizer, config)
        resumed.set_state(json.loads(json.dumps(first.get_state())))
        for one in expected[before:]:
            np.testing.assert_equal(next(resumed), one)
        assert resumed.counts == whole.counts


def test_processes_share_the_rows_of_every_batch(tokenizer):
    config = ChatBatches(tokens=256, lengths=(64, 128), block=24)
    whole, *parts = (packed(tokenizer, config, process=process) for process in ((0, 1), (0, 2), (1, 2)))
    for _ in range(6):
        expected, *found = (next(stream)["tokens"] for stream in (whole, *parts))
        np.testing.assert_array_equal(np.stack(found, axis=1).reshape(expected.shape), expected)
    with pytest.raises(DataError, match="3 processes cannot share the 4 rows of 64 tokens"):
        packed(tokenizer, config, process=(0, 3))


@pytest.mark.parametrize(("too_long", "counts"), [("drop", (3, 0)), ("cut", (1, 2))])
def test_too_long_conversations(tokenizer, too_long, counts, monkeypatch):
    """Two answers are too long, and one prompt, which leaves nothing to learn."""
    monkeypatch.setattr(supervised, "_GIVE_UP_AFTER", 20)
    texts = [("hi", "ho"), ("hi", "ho " * 50), ("hi", "ho " * 60), ("hi " * 60, "ho")]
    stream = Indexed(lambda index: conversation(*texts[index]), 4)
    batches = packed(tokenizer, ChatBatches(tokens=192, lengths=(48,), too_long=too_long, block=4), stream)
    batch = next(batches)
    assert batches.counts == {"conversations": 4, "dropped": counts[0], "cut": counts[1]}
    assert (batch["segments"] == 1).any(axis=1).sum() == 4 - counts[0]
    with pytest.raises(DataError, match="20 conversations in a row are longer than 8 tokens"):
        next(packed(tokenizer, ChatBatches(tokens=8, lengths=(8,)), Indexed(lambda _: conversation("hi " * 20, "ho"))))


def test_synthetic_conversations(tokenizer):
    source = ChatSource("synthetic", tasks=("reverse",), tokens=(16, 32))
    train, held_out = (supervised.conversations((source,), tokenizer, part, 0) for part in (False, True))
    for stream in (train, held_out):
        system, question, answer = next(stream)
        assert system == {"role": "system", "content": ""}
        words = question["content"].removesuffix("\n<").split(",")
        assert answer["content"] == ",".join(reversed(words))
    assert next(train) != next(held_out)
    stream = supervised.conversations((source,), tokenizer, True, 0)
    examples = supervised.single_rows(stream, tokenizer, STOPS, 3, 48)
    assert [len(one.tokens) <= 48 for one in examples] == [True] * 3
    with pytest.raises(DataError, match="expected 1 held-out conversations of at most 4 tokens, found 0"):
        supervised.single_rows(Indexed(lambda _: conversation("hi", "ho"), 5), tokenizer, STOPS, 1, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ChatBatches(100, (16, 32)), "multiple of every length; 100 is none of 16"),
        (lambda: ChatBatches(64, (32, 16)), "lengths must ascend"),
        (lambda: ChatBatches(64, (16,), block=0), "block must be at least 1"),
        (lambda: ChatSource("synthetic", tasks=("sums",)), "tasks must be of .*; found sums"),
    ],
)
def test_mistakes_in_configs_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
