"""Capacity and speed by cache, with engines made by hand: exports, cells, resuming, the report, mistakes."""

import dataclasses
import os
import signal
import types
from unittest import mock

import pytest

import hla_jax
from evaluation.pool import PAGE, Pool
from hla_jax.config import ConfigError
from hla_jax.evaluation import served
from hla_jax.recipes import serve_capacity
from tiny import GOLDEN, random_maps

JOB = serve_capacity.Job(
    model=str(GOLDEN / "ouro-tiny"),
    caches={"LLA": hla_jax.LLA(rank_k=8, rank_v=8)},
    dtype="float32",
    pool_mib=4,
    contexts=(64, 128),
    rounds=2,
    requests=3,
    prompt=8,
    new=4,
    eager=True,
)


@pytest.fixture
def engines(monkeypatch):
    """Directories that were served, in order; each by a pool of as many pages as its bytes give."""
    served_directories = []

    def server(settings):
        served_directories.append(settings.directory)
        cache = serve_capacity.Served.of(settings.directory)
        token = cache.nbytes(1, settings.dtype) - cache.nbytes(0, settings.dtype)
        return Pool(settings.pool_bytes // (PAGE * token), settings.sequences)

    class Process:
        exitcode = 0

        def __init__(self, target, args):
            self.start = lambda: target(*args)
            self.join = self.terminate = lambda: None

    monkeypatch.setattr(served, "Server", server)
    context = types.SimpleNamespace(Process=Process)
    monkeypatch.setattr(serve_capacity.multiprocessing, "get_context", lambda kind: context)
    return served_directories


def test_a_signal_ends_the_engine_too():
    child = mock.Mock()
    with pytest.raises(SystemExit, match="143"), serve_capacity.ends_with_us(child):
        os.kill(os.getpid(), signal.SIGTERM)
    assert [call[0] for call in child.method_calls] == ["terminate", "join"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("quick_compile")
def test_a_run_and_its_resumption(engines, tmp_path):
    report = serve_capacity.run(JOB, tmp_path, "the command")
    assert [directory.rsplit("/", 1)[-1] for directory in engines] == ["ouro-tiny", "LLA"]
    first = report.read_text()
    # 4 MiB over 6,144 bytes a token: 42 pages of 16 tokens.
    assert "| 64 | 10 |" in first
    assert "- LLA: `LLA(rank_k=8, rank_v=8)`, 768 bytes a token" in first
    assert "3 requests of 8 + 4 tokens" in first

    (tmp_path / "cells" / "LLA" / "latency 128.json").unlink()
    serve_capacity.run(JOB, tmp_path, "the command")
    assert engines[2:] == [engines[1]], "only what is missing runs again"
    with pytest.raises(ConfigError, match="was started with another rounds"):
        serve_capacity.run(dataclasses.replace(JOB, rounds=3), tmp_path, "the command")


def test_mistakes_are_named(engines, tmp_path):
    other = hla_jax.load(GOLDEN / "ouro-tiny-gqa", dtype=None)
    hla_jax.export(other, random_maps(JOB.caches["LLA"], other.config), tmp_path / "other")
    for number, (changes, message) in enumerate(
        (
            (dict(pool_mib=4, contexts=(2048,)), "--pool_mib: 4 MiB hold no sequence of 2,048 tokens with full cache"),
            (dict(caches={"LLA": str(tmp_path / "other")}), "is of another model than"),
            (dict(model=str(tmp_path / "other")), "--model: .* has a cache already, lla_config"),
            (dict(pool_mib=1000, contexts=(8192,)), "--contexts: needs .* tokens, the model has"),
        )
    ):
        with pytest.raises(ConfigError, match=message):
            serve_capacity.run(dataclasses.replace(JOB, **changes), tmp_path / str(number), "the command")
    assert engines == []
