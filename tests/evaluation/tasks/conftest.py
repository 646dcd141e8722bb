"""The small data folder, and the embedded model's tokenizer."""

import pathlib

import pytest
from transformers import PreTrainedTokenizerBase

import hla_jax
from evaluation.tasks import benchmarks
from hla_jax.evaluation.task import Options
from hla_jax.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> pathlib.Path:
    return benchmarks.write(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture
def options(data) -> Options:
    return Options(data=data)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(hla_jax.NANO)
