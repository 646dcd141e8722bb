"""Calibration at Huginn's real size, where the moments of all steps' values must not be formed: which arrays it would
make; and, at a small size, that streaming finds the same maps.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Scheme
from hla_jax.calibration import calibrate as fitting
from hla_jax.calibration import codec, moments, principal
from hla_jax.calibration.calibrate import calibrate
from hla_jax.config import HUGINN_3P5B
from hla_jax.generation.generate import decode_forced
from hla_jax.model import Model
from hla_jax.models import weights
from tiny import tiny_huginn, tiny_params, tiny_tokens

LENGTH = 255
JOINT = (31 * 5280) ** 2 * 4
"""Bytes of the moments of a layer's values of steps 2 .. 32, were they formed: 107 GB."""


class Enough(Exception):
    """Raised where a layer's maps would be made of what was measured."""


def passes(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list, list]]:
    """Measures and shapes of operands of every pass over the data that fitting takes. Nothing is computed: for sums
    stand arrays of zeros that take no memory, and bases have one column, but are noted with as many as they would have.
    """
    found: list[tuple[list, list]] = []
    width = max(scheme.rank_k, scheme.rank_v) + 32
    zeros = lambda *shape: np.broadcast_to(np.float32(0), shape)

    def measure(params, config, sequences, measures, operands=None, together=1):
        if operands is None:
            found.append((list(measures), [None] * len(measures)))
        else:
            shapes = [jax.ShapeDtypeStruct((*x.shape[:-1], width), x.dtype) for x in operands]
            found.append(([dataclasses.replace(each, width=width) for each in measures], shapes))
        return [zeros(config.num_layers // together, *each.shape) for each in measures]

    def subspace_iteration(multiply, basis, rank, rounds):
        for _ in range(rounds + 1):
            multiply(basis)
        return zeros(*basis.shape[:-1], rank)

    def of_moments(formed, rank, content=None):
        *latents, size, _ = formed.shape
        return codec.Spectrum(zeros(*latents, size - 1), zeros(*latents, size - 1, rank))

    def enough(*_):
        raise Enough

    monkeypatch.setattr(moments, "measure", measure)
    monkeypatch.setattr(principal, "subspace_iteration", subspace_iteration)
    monkeypatch.setattr(principal, "random_basis", lambda size, rank: zeros(size, 1))
    monkeypatch.setattr(principal, "leading_eigenvectors", lambda moment, count: zeros(len(moment), count))
    monkeypatch.setattr(codec, "_of_moments", of_moments)
    monkeypatch.setattr(fitting, "key_maps", enough)
    params = {"layers": {"k_proj": np.zeros((4, 1, 1)), "v_proj": np.zeros((4, 1, 1)), "k_bias": np.zeros((4, 1))}}
    with contextlib.suppress(Enough):
        list(itertools.islice(fitting.principal_maps(scheme, params, HUGINN_3P5B, None), 1))
    return found


def largest_array(measures: list, operands: list) -> tuple[int, ...]:
    """Bytes and shape of the largest array of a pass, with as many sequences of a batch as it takes."""
    config, dtype = HUGINN_3P5B, jnp.dtype("bfloat16")
    layers = moments.sets_at_once(config, measures, jnp.float32)[0]
    rows = max(1, moments.CAPTURE_BYTES // moments.sequence_bytes(config, dtype, LENGTH, layers))
    shape = jax.ShapeDtypeStruct
    sums = [shape((len(layers), *each.shape), jnp.float32) for each in measures]
    mine = [None if x is None else shape((len(layers), *x.shape[1:]), x.dtype) for x in operands]
    add = functools.partial(moments._add, config=config, layers=layers, together=1, measures=tuple(measures))
    program = jax.make_jaxpr(
        lambda params, tokens, lengths, sums, operands: add(
            params, tokens=tokens, lengths=lengths, sums=sums, operands=operands
        )
    )(weights.abstract_params(config, dtype), shape((rows, LENGTH), jnp.int32), shape((rows,), jnp.int32), sums, mine)
    return max(arrays(program.jaxpr))


def arrays(program: core.Jaxpr) -> set[tuple[int, ...]]:
    """Bytes and shape of everything a program computes, those of its loops too."""
    found = {(x.aval.size * x.aval.dtype.itemsize, *x.aval.shape) for each in program.eqns for x in each.outvars}
    return found.union(*(arrays(inner) for inner in core.subjaxprs(program)))


@pytest.mark.parametrize(
    ("scheme", "count"),
    [
        # Keys and step 1's values, then the values of the others three times.
        (HLA(480, 512, 192, 128), 4),
        (LLA(96, 160), 1),
        # The means of keys and values, and each three times.
        (LLA(480, 800, fold_heads=True), 8),
    ],
)
def test_no_pass_forms_the_joint_moments(scheme, count, monkeypatch):
    found = passes(scheme, monkeypatch)
    assert len(found) == count
    largest = [largest_array(*each) for each in found]
    assert max(largest)[0] <= 2.3e9 < JOINT / 40, largest


def test_moments_of_keys_are_small_enough_to_form():
    each = moments.KeyMoments(HUGINN_3P5B, range(1, 32))
    assert each.shape == (48, 31 * 55, 31 * 55)
    assert np.prod(each.shape) * 4 == 558_148_800


@pytest.mark.long
@pytest.mark.parametrize("scheme", [HLA(16, 16, 8, 1), LLA(6, 9)])
def test_streaming_finds_the_maps_of_formed_moments(scheme, monkeypatch, quick_compile):
    """With a bias of the keys, sequences of two lengths, and a basis of as many directions as there are."""
    config = tiny_huginn(num_layers=1, num_coda=1)
    model, tokens = Model(config, tiny_params(config)), np.asarray(tiny_tokens(config, 3, 12))
    rows = [tokens[0].tolist(), tokens[1, :7].tolist(), tokens[2].tolist()]
    formed = calibrate(model, scheme, rows)
    monkeypatch.setattr(principal, "LARGEST_MOMENT", 0)
    streamed = calibrate(model, scheme, rows)
    assert not np.array_equal(*(one.params[max(one.params)] for one in (formed, streamed)))
    found, expected = (decode_forced(model, tokens, 5, one) for one in (streamed, formed))
    assert np.abs(expected - decode_forced(model, tokens, 5)).max() > 1e-2
    np.testing.assert_allclose(found, expected, atol=2e-3)
