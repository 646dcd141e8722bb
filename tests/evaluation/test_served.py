"""Driving an engine: what is counted and timed, on a paged pool made by hand; and the report."""

import json

import pytest

from evaluation.pool import PAGE, Pool
from hla_jax.evaluation import cost, served
from hla_jax.evaluation.schemes import FULL
from hla_jax.evaluation.served_report import write_report
from hla_jax.model import NANO


@pytest.mark.parametrize(("pages", "context", "expected"), [(200, 100, 32), (200, 100, 20), (64, 1000, 1), (7, 10, 11)])
def test_capacity_is_where_the_pool_ends(pages, context, expected):
    pool = Pool(pages)
    found = served.capacity(pool, context, expected)
    assert pool.equal
    start = max(context - expected + 1, 1)
    fits = lambda count: count * -(-(start + count - 1) // PAGE) <= pages
    assert found == {
        "sequences": max(filter(fits, range(1, 100))),
        "context": start + found["sequences"] - 1,
        "limited": 0,
    }
    assert pool.free == pages


def test_capacity_says_when_the_engine_ended_it():
    assert served.capacity(Pool(200, limit=3), 100, 20) == {"sequences": 3, "context": 83, "limited": 1}


def test_steps_are_timed_while_all_run():
    found = served.step_seconds(Pool(100), context=50, batch=20, rounds=5)
    assert (found["batch"], len(found["seconds"])) == (20, 5)
    assert served.step_seconds(Pool(100), context=50, batch=26, rounds=5) is None
    # 20 sequences of 60 tokens fill the pool, and go on to grow.
    assert served.step_seconds(Pool(80), context=60, batch=20, rounds=30) is None


def test_a_batch_runs_to_its_end():
    found = served.completion(Pool(1000), [(10, 5)] * 3)
    # One prompt a step: the third comes in the third step and is over in the seventh.
    assert (found["new_tokens"], found["steps"], found["most_running"], found["preemptions"]) == (15, 7, 3, 0)
    crowded = served.completion(Pool(4), [(16, 30)] * 3)
    assert crowded["preemptions"] > 0
    assert crowded["most_running"] <= 4


def test_report(tmp_path):
    capacity = lambda count: {"sequences": count, "context": 100, "limited": 0}
    timed = lambda batch, seconds: {"batch": batch, "seconds": [seconds, 9.0, seconds]}
    done = lambda seconds: dict(
        seconds=seconds, new_tokens=600, steps=9, most_running=4, mean_running=2.5, preemptions=1
    )
    found = {
        name: {
            "capacity 128": capacity(4 * times),
            "capacity 256": capacity(2 * times),
            "latency 128": timed(1, 0.010),
            "latency 256": timed(1, 0.012 / times),
            "throughput 128": timed(4 * times, 0.02),
            "throughput 256": {},
            "completion": done(30.0 / times),
        }
        for name, times in ((FULL, 1), ("HLA", 3))
    }
    ratio = lambda name, context: 1.0 if name == FULL else 3.5
    path = write_report(found, [128, 256], (8, 10, 75), ratio, {"command": "`it`"}, tmp_path)
    text = path.read_text()
    for line in (
        "- command: `it`",
        "| 128 | 4 | 12 (3.00x, ideal 3.50x) |",
        "| 256 | 12.0 | 4.0 (0.33x) |",
        "| 128 | 200 (4 sequences) | 600 (3.00x, 12 sequences) |",
        "| HLA | 10.0 | 60 | 3.00x | 4 / 2.5 | 1 |",
    ):
        assert line in text
    assert json.loads((tmp_path / "serve_capacity.json").read_text())["cells"] == found
    assert (tmp_path / "serve_capacity.png").stat().st_size > 10_000


def test_the_serving_page_has_the_table_of_memory():
    """And the numbers of the papers."""
    lines = cost.memory_table()
    page = NANO.parents[2] / "docs" / "serving.md"
    assert "\n".join(lines) in page.read_text()
    assert any("| 72 KiB | 96 MiB |" in line for line in lines)
