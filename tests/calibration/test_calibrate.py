"""Calibration: agreement with an independent oracle, exactness at full rank, and independence of how the data is
streamed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.attention.capture import attention_inputs
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import SchemeError
from hla_jax.calibration import moments, principal
from hla_jax.calibration.calibrate import calibrate
from hla_jax.generation.generate import decode_forced
from hla_jax.model import Model
from tiny import GOLDEN_MODELS, golden, tiny_config, tiny_params, tiny_tokens

SIZE = tiny_config().head_dim


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_agrees_with_the_oracle(name: str, dtype: str) -> None:
    """`hla_pca`: maps from both rows of the golden input, decoded under teacher forcing."""
    truth = golden(name, dtype)
    model = Model(truth.config, truth.params)
    attention = calibrate(model, truth.hla, truth.values["input_ids"], dtype)
    logits = decode_forced(model, truth.codecs["input_ids"][None], truth.prompt_length, attention)
    np.testing.assert_allclose(
        logits[0], truth.codecs["logits_hla_pca"], atol={"float32": 5e-3, "float64": 1e-10}[dtype]
    )


@pytest.mark.long
def test_full_rank_is_exact(x64: None) -> None:
    config = tiny_config()
    model = Model(config, tiny_params(config, "float64"))
    tokens = tiny_tokens(config, 2, 12)
    full = (config.num_loops - 1) * config.num_kv_heads * SIZE
    scheme = HLA(full, full, config.num_kv_heads * SIZE, window=0)
    attention = calibrate(model, scheme, np.asarray(tokens), "float64")
    exact = decode_forced(model, tokens, 3)
    np.testing.assert_allclose(decode_forced(model, tokens, 3, attention), exact, atol=1e-10)
    # The same in the other order of pairs: each frequency takes its eigenvectors in pair order.
    pairs = tuple(np.random.default_rng(0).permutation(np.arange(full // 2) % (SIZE // 2)).tolist())
    attention = calibrate(model, dataclasses.replace(scheme, pair_frequency=pairs), np.asarray(tokens), "float64")
    np.testing.assert_allclose(decode_forced(model, tokens, 3, attention), exact, atol=1e-10)


def measures(*loops: range) -> list[moments.Measure]:
    return [kind(tiny_config(), each) for each in loops for kind in (moments.KeyMoments, moments.ValueMoments)]


@pytest.mark.long
def test_moments_do_not_depend_on_batches_groups_or_padding(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    params = tiny_params(config, "float64")
    rows = [
        row[:length] for row, length in zip(np.asarray(tiny_tokens(config, 3, 10)).tolist(), (10, 4, 7), strict=True)
    ]
    wanted = measures(range(1, config.num_loops), range(1))
    together = moments.measure(params, config, moments.Sequences.of(rows), wanted)
    alone = [moments.measure(params, config, moments.Sequences.of([row]), wanted) for row in rows]
    monkeypatch.setattr(moments, "CAPTURE_BYTES", 1)
    monkeypatch.setattr(moments, "MOMENT_BYTES", 1)
    one_by_one = moments.measure(params, config, moments.Sequences.of(rows), wanted)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    jax.tree.map(close, one_by_one, together)
    jax.tree.map(lambda total, *parts: close(total, sum(parts)), together, *alone)


def test_moments_are_those_of_keys_and_values(x64: None) -> None:
    config = tiny_config()
    params = tiny_params(config, "float64")
    tokens = tiny_tokens(config, 2, 9)
    h = np.moveaxis(attention_inputs(params, config, tokens, jnp.arange(9)[None]), 1, 0)[:, 1:]
    h = h.reshape(config.num_layers, config.num_loops - 1, 18, -1)
    keys, values = (np.einsum("ltnd,led->lnte", h, params["layers"][name]) for name in ("k_proj", "v_proj"))
    found = moments.measure(
        params, config, moments.Sequences.of(np.asarray(tokens)), measures(range(1, config.num_loops))
    )
    joint = values.reshape(config.num_layers, 18, -1)
    np.testing.assert_allclose(found[1], np.einsum("lnd,lne->lde", joint, joint), rtol=1e-10)
    pairs = keys.reshape(config.num_layers, 18, -1, 2, SIZE // 2)
    np.testing.assert_allclose(found[0], np.einsum("lnpcf,lnqcf->lfpq", pairs, pairs), rtol=1e-9, atol=1e-12)


def test_range_finder_keeps_as_much_as_the_exact_directions(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    params = tiny_params(config, "float64")
    data = moments.Sequences.of(np.asarray(tiny_tokens(config, 2, 12)))
    loops, rank = range(1, config.num_loops), 4
    moment = moments.measure(params, config, data, [moments.ValueMoments(config, loops)])[0]
    exact = principal.value_directions(params, config, data, loops, rank, moment)
    monkeypatch.setattr(principal, "_OVERSAMPLING", 8)
    streamed = principal.value_directions(params, config, data, loops, rank, None)
    monkeypatch.setattr(principal, "LARGEST_EXACT", 8)
    formed = principal.value_directions(params, config, data, loops, rank, moment)
    kept = lambda u: np.einsum("ldr,lde,ler->l", u, moment, u)
    for found in (streamed, formed):
        gram = np.einsum("ldr,lds->lrs", found, found)
        np.testing.assert_allclose(gram, np.broadcast_to(np.eye(rank), gram.shape), atol=1e-6)
        assert np.all(kept(found) > 0.99 * kept(exact))


def test_a_scheme_without_maps_needs_no_data() -> None:
    config = tiny_config()
    assert calibrate(Model(config, tiny_params(config)), FullCache(), []).params == {}


def test_refusals() -> None:
    config = tiny_config()
    model = Model(config, tiny_params(config))
    with pytest.raises(ValueError, match="at least one sequence, and no empty one"):
        calibrate(model, HLA(SIZE, SIZE, SIZE, 4), [[1, 2], []])
    with pytest.raises(SchemeError, match="rank_k must be a positive multiple of head_dim 8"):
        calibrate(model, HLA(SIZE + 2, SIZE, SIZE, 4), [[1, 2]])
