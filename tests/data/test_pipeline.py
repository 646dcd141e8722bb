"""All kinds of sources in one mixture, packed and shifted, stopped and resumed."""

import itertools
import json

import numpy as np

from hla_jax.data import standard_library
from hla_jax.data.packing import BatchConfig, Batches
from hla_jax.data.positions import ShiftConfig, ShiftedPositions
from hla_jax.data.sources import open_documents
from hla_jax.data.streams import Indexed, Mixture, Shard, Shuffled


def build(path: str, process: int):
    library = list(itertools.islice(standard_library.documents("train"), 20))
    sources = [
        Shuffled(open_documents(path), block=4, seed=1),
        Indexed(library.__getitem__, len(library), seed=2),
        Indexed(lambda i: f"{i} + {i} = {2 * i}"),
    ]
    documents = Shard(Mixture(sources, (3, 2, 1), seed=3), process, 2)
    config = BatchConfig(batch_size=2, length=64, min_tokens=4, max_tokens=500)
    batches = Batches(documents, lambda text: list(text.encode()), config, vocab_size=256)
    return ShiftedPositions(batches, ShiftConfig(), seed=4)


def test_a_mixture_of_all_sources_resumes_exactly(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"document number {i} " * 5}) + "\n" for i in range(11)))
    for process in (0, 1):
        stream = build(str(path), process)
        list(itertools.islice(stream, 13))
        resumed = build(str(path), process)
        resumed.set_state(json.loads(json.dumps(stream.get_state())))
        for expected, batch in itertools.islice(zip(stream, resumed), 13):
            for name, array in expected.items():
                assert array.shape == (2, 64)
                np.testing.assert_array_equal(batch[name], array)
