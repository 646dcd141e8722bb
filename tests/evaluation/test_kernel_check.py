"""What a GPU is checked with finds a wrong kernel, here the reference with planted faults."""

import jax.numpy as jnp
import pytest

from experiments import gpu_check
from hla_jax.evaluation import kernel_check
from hla_jax.kernels.latent_decode import reference

SMALL = {
    "hla": kernel_check.Shape(1, 256, 128, 8, heads=2, rotated=True),
    "paged": kernel_check.Shape(1, 128, 128, 8, heads=2, page=16),
    "no window": kernel_check.Shape(2, 64, 32, None, heads=4),
}
LENGTHS = [0, 1, 16, 17, 32]


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_agrees_with_itself(name):
    found = kernel_check.errors(kernel_check.operands(SMALL[name], LENGTHS, 32, jnp.float32))
    assert set(found) == ({"latent", "lse"} if name == "no window" else {"latent", "exact", "lse"})
    assert max(found.values()) < 1e-6
    found = kernel_check.errors(kernel_check.operands(SMALL[name], LENGTHS, 32, jnp.bfloat16))
    assert 0 < max(found.values()) < gpu_check.BF16_TOLERANCE


FAULTS = {
    "a token too many": lambda stored: stored._replace(lengths=stored.lengths + 1),
    "a token too few": lambda stored: stored._replace(lengths=jnp.maximum(stored.lengths - 1, 0)),
    "another slot": lambda stored: stored._replace(slot=stored.slot - 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_found(fault, monkeypatch):
    def faulty(q, stored, scale, window=None, rotation=None, implementation=None):
        return reference.latent_decode(q, FAULTS[fault](stored), scale, window, rotation)

    monkeypatch.setattr(kernel_check.api, "latent_decode", faulty)
    found = kernel_check.errors(kernel_check.operands(SMALL["hla"], LENGTHS, 32, jnp.float32))
    assert not max(found.values()) < gpu_check.BF16_TOLERANCE


def test_calls_are_timed():
    given = kernel_check.operands(SMALL["hla"], [32], 32, jnp.float32, filled=True)
    assert kernel_check.seconds(given, calls=2) > 0


def test_bytes_of_a_call():
    assert kernel_check.SHAPES["HLA"].bytes_read(2, 1000) == 2 * 2 * (1024 * 1000 + 2 * 128 * 2048)


def test_the_report_says_what_was_missed_and_what_failed():
    row = lambda scheme, context, ratio: {
        "scheme": scheme,
        "context": context,
        "milliseconds": 1.0,
        "ratio": ratio,
        "of_copy": 0.75,
    }
    parts = {
        "machine": {"error": "exit status 1"},
        "kernels": {"cases": [{"case": "HLA", "dtype": "bfloat16", "ok": False, "log": "..."}]},
        "steps": {"rows": [row("full cache", 1024, 1.0), row("HLA", 1024, 0.9), row("HLA", 16384, 1.6)]},
        "kernel_speed": {"rows": [{"case": "HLA", "batch": 1, "context": 1024, "log": "..."}]},
        "throughput": {"error": "took too long"},
    }
    text = "\n".join(gpu_check.report({"date": "2026-01-01", "parts": parts}))
    assert "**machine: exit status 1**" in text
    assert "| every kernel agrees with the reference | 0.00 | **no** |" in text
    assert "speed at 1,024 | 0.90 | **no** |" in text
    assert "speed at 16,384 | 1.60 | yes |" in text
    assert "throughput at 16,384 | not measured |  |" in text
    assert "| full cache: a step at 70% of a copy's speed or more | 0.75 | yes |" in text
    assert "| HLA | 1 | 1,024 | failed |  |" in text
