"""Speed and bytes: every scheme is timed from the context that was asked for, and bytes are those of the cache."""

import jax
import jax.numpy as jnp
import pytest

from hla_jax.evaluation import report, speed
from hla_jax.evaluation.memory import cache_memory
from hla_jax.evaluation.schemes import FULL, HLA_INITIAL, HLA_UPTRAINED, REUSE, SHARED, distinct, side_by_side
from hla_jax.generation import decode
from hla_jax.model import Model
from tests import tiny


@pytest.fixture(scope="module")
def model() -> Model:
    config = tiny.tiny_config()
    return Model(config, tiny.tiny_params(config))


@pytest.fixture(scope="module")
def schemes(model):
    hla = tiny.random_hla(model.config, window=4)
    return side_by_side(hla, hla)


def test_ratios_are_taken_within_a_round(model, schemes, monkeypatch):
    starts = []

    class Timer:
        def __init__(self, model, attention, capacity, batch, new_tokens):
            starts.append((capacity, batch, new_tokens))
            self.times = iter([8.0, 2.0, 4.0] if len(starts) % 4 == 1 else [4.0, 2.0, 1.0])

        def seconds(self, context):
            return next(self.times)

    monkeypatch.setattr(speed, "_Run", Timer)
    first, second = speed.decode_speed(model, schemes, [16, 32], batch=3, new_tokens=8, rounds=3)
    assert (first.context, second.context, first.batch) == (16, 32, 3)
    assert set(first.tokens_per_second) == {FULL, HLA_UPTRAINED, SHARED, REUSE}
    assert first.tokens_per_second[FULL] == 3 * 8 / 4.0
    assert first.tokens_per_second[SHARED] == 3 * 8 / 2.0
    assert first.ratio[FULL] == speed.Ratio(1.0, 1.0, 1.0)
    assert first.ratio[SHARED] == speed.Ratio(2.0, 1.5, 3.0)
    assert starts == [(24, 3, 8)] * 4 + [(40, 3, 8)] * 4


@pytest.mark.usefixtures("quick_compile")
def test_every_run_starts_at_the_same_context(model, schemes, monkeypatch):
    seen, advance = [], decode.advance

    def spy(params, config, attention, progress, *rest):
        seen.append((progress.cache.lengths.tolist(), progress.cache.buffers["k"].shape[2]))
        return advance(params, config, attention, progress, *rest)

    monkeypatch.setattr(decode, "advance", spy)
    (found,) = speed.decode_speed(model, {FULL: schemes[FULL]}, [20], batch=2, new_tokens=3, rounds=2)
    assert seen == [([20, 20], 23)] * 3
    assert found.tokens_per_second[FULL] > 0


def test_what_does_not_fit_is_left_out(model, schemes, monkeypatch):
    class Full:
        def __init__(self, model, attention, capacity, batch, new_tokens):
            if batch * (capacity - new_tokens) > 64:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

        def seconds(self, context):
            return 2.0

    monkeypatch.setattr(speed, "_Run", Full)
    found = speed.throughput(model, schemes[FULL], 16, speed.doubling(11), new_tokens=4)
    assert [(one.batch, one.tokens_per_second[FULL]) for one in found] == [(1, 2.0), (2, 4.0), (4, 8.0)]
    small, large = speed.decode_speed(model, {FULL: schemes[FULL]}, [64, 65], rounds=1)
    assert small.tokens_per_second
    assert not large.tokens_per_second
    assert not large.ratio
    assert "out of memory" in report.speed_table([small, large])[-1]


def test_kernels_share_one_cache_of_whole_pages(model, schemes, monkeypatch):
    made = []

    class Counted:
        def __init__(self, model, attention, capacity, batch, new_tokens):
            made.append(capacity)

        def seconds(self, context):
            return float(context)

    monkeypatch.setattr(speed, "_Run", Counted)
    found = speed.decode_speed(model, {FULL: schemes[FULL]}, [8, 32, 16], new_tokens=1, rounds=1, kernels=True)
    assert made == [512]
    assert [one.tokens_per_second[FULL] for one in found] == [1 / 8, 1 / 32, 1 / 16]


def test_bytes_are_those_of_the_allocated_cache(model, schemes):
    found = cache_memory(model.config, schemes, [10, 50], "float32")
    assert HLA_INITIAL not in found
    for name, memory in found.items():
        for context in (10, 50):
            cache = schemes[name].scheme.init_cache(model.config, 1, context, jnp.float32)
            held = sum(buffer.nbytes for buffer in cache.buffers.values())
            assert memory.at[context] == held == memory.per_sequence + context * memory.per_token
            assert memory.ratio_at[context] == found[FULL].at[context] / held
    # Numbers per token and layer from the design: 2 T G dh, rk + rv + 2 r1, 2 G dh; the window 2 T G dh W.
    sizes, hla = model.config, schemes[HLA_UPTRAINED].scheme
    head = sizes.num_kv_heads * sizes.head_dim
    per_layer = {
        FULL: 2 * sizes.num_loops * head,
        HLA_UPTRAINED: hla.rank_k + hla.rank_v + 2 * hla.rank_loop1,
        SHARED: 2 * head,
        REUSE: 2 * head,
    }
    assert {name: memory.per_token for name, memory in found.items()} == {
        name: 4 * sizes.num_layers * numbers for name, numbers in per_layer.items()
    }
    assert found[REUSE].per_sequence == found[FULL].per_sequence == 0
    assert found[SHARED].per_sequence == 4 * sizes.num_layers * 2 * sizes.num_loops * head * 4


def test_same_sizes_are_one_scheme(schemes):
    assert list(distinct(schemes)) == [FULL, HLA_UPTRAINED, SHARED, REUSE]
