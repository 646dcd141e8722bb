"""Local files and hub names become streams of documents, or one clear error."""

import itertools
import json

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet
import pytest

from hla_jax.data.sources import Chat, Text, VerifiedSolutions, open_documents
from hla_jax.data.streams import DataError


class FakeTokenizer:
    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "some.jsonl", [{"text": f"document {i}", "n": i} for i in range(5)])


def test_jsonl_repeats_and_resumes_in_any_epoch(jsonl):
    expected = [f"document {i % 5}" for i in range(20)]
    for before in (0, 1, 5, 7):
        stream = open_documents(jsonl)
        assert list(itertools.islice(stream, before)) == expected[:before]
        resumed = open_documents(jsonl)
        resumed.set_state(json.loads(json.dumps(stream.get_state())))
        # Past the end of the epoch it was resumed in: the next epoch starts at the first row again.
        assert list(itertools.islice(resumed, 12)) == expected[before : before + 12]
        assert list(itertools.islice(stream, 12)) == expected[before : before + 12]


def test_skip_and_take_make_disjoint_parts(jsonl):
    held_out = list(open_documents(jsonl, take=2, repeat=False))
    training = list(open_documents(jsonl, skip=2, repeat=False))
    assert held_out + training == [f"document {i}" for i in range(5)]


def test_folder_of_parquet_with_another_column(tmp_path):
    for i in range(2):
        pa.parquet.write_table(pa.table({"content": [f"{i}a", f"{i}b"]}), tmp_path / f"{i}.parquet")
    assert list(open_documents(str(tmp_path), Text("content"), repeat=False)) == ["0a", "0b", "1a", "1b"]


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "one.txt").write_text("first line\nsecond line\n")
    (tmp_path / "two.txt").write_text("other")
    assert list(open_documents(str(tmp_path), repeat=False)) == ["first line\nsecond line\n", "other"]


def test_chat_uses_the_template(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]
    path = write_jsonl(tmp_path / "chat.jsonl", rows)
    assert list(open_documents(path, Chat(FakeTokenizer()), repeat=False)) == ["<user>hi<assistant>ho"]


def test_verified_solutions_takes_the_first_correct_generation(tmp_path):
    rows = [
        {"problem": "1+1", "generations": ["3", "2", "two"], "correctness_math_verify": [False, True, True]},
        {"problem": "2+2", "generations": ["5"], "correctness_math_verify": [False]},
        {"problem": "3+3", "generations": ["6"], "correctness_math_verify": [True]},
    ]
    path = write_jsonl(tmp_path / "traces.jsonl", rows)
    documents = list(open_documents(path, VerifiedSolutions(FakeTokenizer()), repeat=False))
    assert documents == ["<user>1+1<assistant>2", "<user>3+3<assistant>6"]


def test_errors_say_what_is_wrong(tmp_path, jsonl):
    empty, broken, numbers = tmp_path / "empty.jsonl", tmp_path / "broken.parquet", tmp_path / "numbers.jsonl"
    empty.write_text("")
    broken.write_text("not parquet")
    write_jsonl(numbers, [{"text": 3}])
    write_jsonl(tmp_path / "blank.jsonl", [{"text": ""}, {"text": ""}])
    (tmp_path / "picture.png").write_text("")
    cases = {
        str(tmp_path / "absent.jsonl"): "no such file",
        "no-such-name": "no such file",
        str(empty): "is empty",
        str(broken): "cannot be read",
        str(tmp_path / "picture.png"): "expected files of one kind of .jsonl.*found .png",
        str(tmp_path): "found .jsonl, .parquet",
        str(numbers): "should hold text; found int",
        str(tmp_path / "blank.jsonl"): "no row gives a document",
    }
    for path, message in cases.items():
        with pytest.raises(DataError, match=message):
            next(open_documents(path))
    with pytest.raises(DataError, match="after its first 5 rows: no row gives a document"):
        next(open_documents(jsonl, skip=5))
    with pytest.raises(DataError, match=r"no column 'content'; its columns are 'text', 'n'"):
        open_documents(jsonl, Text("content"))


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(DataError, match=r"owner/name: no such local file.*Name or service not known.*--local-dir"):
        open_documents("owner/name")
