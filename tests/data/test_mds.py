"""MDS shards, written here byte by byte as their format says: every token arrives, and each fault is one error."""

import dataclasses
import itertools
import json
import struct

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import hla_jax
from configs.ouro_1p4b_hla import PHASE_2, PROLONG
from hla_jax.data import pipeline
from hla_jax.data.mds import Shards, open_token_documents
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import Source
from hla_jax.data.streams import DataError
from hla_jax.tokenizer import TokenizerError, load_tokenizer, tokenizer_of

COLUMNS = {"domain": "str", "indices": "ndarray:uint32", "input_ids": "ndarray:uint32", "length": "int"}


def array(values) -> bytes:
    """An array with its shape: two or more axes have their sizes in 2 bytes, as the format allows."""
    values = np.asarray(values, np.uint32)
    width, code = (1, "B") if max(values.shape) < 256 else (2, "H")
    return struct.pack(f"<B{values.ndim}{code}", values.ndim << 2 | (width - 1), *values.shape) + values.tobytes()


def sample(ids, indices) -> bytes:
    free = [b"book", array(indices), array(ids)]
    return struct.pack("<3I", *map(len, free)) + b"".join(free) + struct.pack("<q", len(ids))


def write(folder, shards) -> None:
    """`shards` is a list of lists of (ids, indices)."""
    folder.mkdir(parents=True)
    entries = []
    for number, rows in enumerate(shards):
        samples, header = [sample(*row) for row in rows], b"{}"
        first = 4 * (len(rows) + 2) + len(header)
        offsets = list(itertools.accumulate(map(len, samples), initial=first))
        name = f"shard.{number:05d}.mds"
        content = struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + header + b"".join(samples)
        (folder / name).write_bytes(content)
        columns = {
            "column_names": list(COLUMNS),
            "column_encodings": list(COLUMNS.values()),
            "column_sizes": [None, None, None, 8],
        }
        raw = {"basename": name, "bytes": len(content), "hashes": {}}
        entries.append({"format": "mds", "samples": len(rows), "raw_data": raw, "zip_data": None, **columns})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(hla_jax.NANO)


TEXTS = [f"Chapter {n}.  It was said , once , that 's {n} times {n} is {n * n}." for n in range(7)]


@pytest.fixture
def folder(tmp_path, tokenizer):
    """Three shards, five samples; the second sample holds three documents, two of them whole texts."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    whole = lambda n: (ids[n], [[0, len(ids[n])]])
    ends = list(itertools.accumulate(map(len, ids[1:4])))
    several = (ids[1] + ids[2] + ids[3], list(zip([0, *ends], ends)))
    write(tmp_path / "book", [[whole(0), several], [whole(4)], [whole(5), (ids[6] * 60, [[0, len(ids[6]) * 60]])]])
    return tmp_path


def test_every_token_arrives(folder, tokenizer):
    shards = Shards("here", lambda name: folder / "book" / name)
    assert len(shards) == 5
    np.testing.assert_array_equal(shards[1]["indices"].shape, (3, 2))
    found = list(itertools.islice(open_token_documents(str(folder), "book", tokenizer), 7))
    assert found == [*TEXTS[:6], TEXTS[6] * 60], "spaces before commas stay"
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [token for text in found for token in encode(text)] == np.concatenate(
        [shards[n]["input_ids"] for n in range(5)]
    ).tolist()


def test_it_repeats_resumes_and_holds_out(folder, tokenizer):
    opened = lambda **part: open_token_documents(str(folder), "book", tokenizer, **part)
    expected = list(itertools.islice(opened(), 20))
    assert expected[7:14] == expected[:7]
    for before in range(0, 9):
        stream, resumed = opened(), opened()
        list(itertools.islice(stream, before))
        resumed.set_state(json.loads(json.dumps(stream.get_state())))
        assert list(itertools.islice(resumed, 9)) == expected[before : before + 9]
    assert set(itertools.islice(opened(take=2), 8)) == set(TEXTS[:4])
    assert set(itertools.islice(opened(skip=2), 8)) == {TEXTS[4], TEXTS[5], TEXTS[6] * 60}
    with pytest.raises(DataError, match="5 samples, none is left after the first 5"):
        opened(skip=5)


def test_a_source_of_a_mixture_in_windows(folder, tokenizer):
    source = Source(str(folder), name="book", ids_of=str(hla_jax.NANO), held_out=1)
    shape = BatchConfig(2, 256, min_tokens=256, pack=False)
    rows = pipeline.batches((source,), tokenizer, shape, None, 1024, seed=0)
    ids = tokenizer(TEXTS[6] * 60, add_special_tokens=False)["input_ids"]
    batch = next(rows)
    np.testing.assert_array_equal(batch["tokens"], [ids[:256], ids[256:512]])
    assert (batch["segments"] == 1).all()


def test_the_papers_mixtures_from_local_copies(tmp_path, tokenizer):
    """Every named source of the paper's recipe, as a folder whose files have the hub's columns."""
    lines = lambda tag, count: " ".join(f"{tag} {n} is {n * n} ." for n in range(count))
    math, web, books = (tmp_path / name for name in ("math", "web", "long"))
    for folder in (math, web):
        folder.mkdir()
    # The second row has no solution that was verified, the third's second one is.
    verified = [[True, False], [False, False], [False, True], None]
    solutions = [[lines(f"solution {row}{n}", 9) for n in (0, 1)] for row in range(4)]
    same = ["x"] * 4
    openr1 = {
        "problem": [f"problem {row}" for row in range(4)],
        **dict.fromkeys(("solution", "answer", "problem_type", "question_type", "source", "uuid"), same),
        "is_reasoning_complete": [[True, True]] * 4,
        "generations": solutions,
        "correctness_math_verify": verified,
        "correctness_llama": [None, [True, True], None, None],
        "finish_reasons": [None] * 4,
        "correctness_count": [1, 0, 1, 0],
        "messages": [[{"content": "never read", "role": "user"}]] * 4,
    }
    pa.parquet.write_table(pa.table(openr1), math / "train-00000-of-00001.parquet")
    fineweb = {
        "text": [lines(f"web {row}", 9) for row in range(4)],
        **dict.fromkeys(("id", "dump", "url", "file_path", "language"), same),
        "language_score": [0.9] * 4,
        "token_count": [9] * 4,
        "score": [3.1] * 4,
        "int_score": [3] * 4,
    }
    pa.parquet.write_table(pa.table(fineweb), web / "000_00000.parquet")
    for name in ("book-65536", "thestackv1_concat_by_repo-65536"):
        ids = [tokenizer(lines(f"{name} {row}", 60), add_special_tokens=False)["input_ids"] for row in range(3)]
        write(books / name, [[(row, [[0, len(row)]]) for row in ids]])

    local = {"open-r1/OpenR1-Math-220k": math, "HuggingFaceFW/fineweb-edu": web, PROLONG: books}

    def moved(source: Source) -> Source:
        ids_of = source.ids_of and str(hla_jax.NANO)
        return dataclasses.replace(source, path=str(local[source.path]), ids_of=ids_of, held_out=0)

    def read(sources: tuple[Source, ...], shape: BatchConfig, count: int) -> str:
        rows = pipeline.batches(tuple(map(moved, sources)), tokenizer, shape, None, 1024, seed=0)
        batches = list(itertools.islice(rows, count))
        return "\n".join(tokenizer.decode(row[row > 0]) for batch in batches for row in batch["tokens"])

    short = read(PHASE_2.sources, dataclasses.replace(PHASE_2.batches, batch_size=4), 8)
    for row, n in ((0, 0), (2, 1)):
        assert solutions[row][n] in short
        assert f"problem {row}" in short
    assert all(text in short for text in fineweb["text"])
    for absent in (solutions[0][1], solutions[2][0], "problem 1", "problem 3", "never read"):
        assert absent not in short
    long = read(PHASE_2.long.sources, dataclasses.replace(PHASE_2.long.shape(2), length=512, min_tokens=512), 8)
    assert "book-65536 0" in long
    assert "thestackv1_concat_by_repo-65536 0" in long


def test_faults_are_named(folder, tokenizer, monkeypatch):
    book = folder / "book"
    opened = lambda: open_token_documents(str(folder), "book", tokenizer)
    shard = book / "shard.00000.mds"
    content = shard.read_bytes()
    for damage, message in (
        (content[:-9], "shard.00000.mds: sample 1: damaged"),
        (struct.pack("<I", 3) + content[4:], "holds 3 samples, the index says 2"),
    ):
        shard.write_bytes(damage)
        with pytest.raises(DataError, match=message):
            list(itertools.islice(opened(), 2))
    shard.unlink()
    with pytest.raises(DataError, match=r"shard.00000.mds: cannot be read"):
        opened()
    index = json.loads((book / "index.json").read_text())
    index["shards"][0]["zip_data"] = {"basename": "shard.00000.mds.zstd"}
    (book / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"it is compressed: unpack shard.00000.mds.zstd beside it"):
        opened()
    (book / "index.json").write_text("{}")
    with pytest.raises(DataError, match="is not an index of MDS shards"):
        opened()

    def unreachable(*args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    absent = r"^princeton-nlp/prolong-data-64K: no such local folder, and the hub does not give book-65536/index.json"
    with pytest.raises(DataError, match=absent + r".*--include 'book-65536/\*'"):
        open_token_documents("princeton-nlp/prolong-data-64K", "book-65536", tokenizer)
    with pytest.raises(TokenizerError, match="owner/name: no such directory, and as a hub id"):
        tokenizer_of("owner/name")
