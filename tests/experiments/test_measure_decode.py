"""The measurement of decoding decodes: at real sizes nobody would wait to find out that it does not."""

import pytest

import hla_jax
from experiments.measure_decode import measure


@pytest.mark.long
@pytest.mark.parametrize(("model", "scheme"), [("nano", "full"), ("nano_huginn", "hla")])
def test_every_part_runs(model, scheme):
    found = measure(str(hla_jax.NANO.with_name(model)), scheme, "float32", prompt_tokens=5, new_tokens=2)
    parts = {"load", "compile prefill", "prefill", "compile decode", "decode", "per token"}
    assert set(found["seconds"]) - {"maps"} == parts
    assert found["cache_bytes"] > 0
    assert found["peak_bytes"]["decode"] >= found["peak_bytes"]["load"] > found["weights_bytes"]
    assert found["new_tokens"] == 2
