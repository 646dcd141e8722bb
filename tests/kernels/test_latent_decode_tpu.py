"""The TPU kernel in Pallas' interpreter: values, races, and faults planted in it that must be found.

A fault can hang the interpreter, so that races and faults are looked for in a process with a time limit.
"""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from hla_jax.kernels.latent_decode import Stored, Window, pallas_tpu
from tests.kernels import latent_cases as cases

pytestmark = pytest.mark.usefixtures("quick_compile")
SCALE = 0.3
BLOCK = 8
SECONDS = 600
"""For all planted faults on a busy machine; a fault that hangs takes for ever."""

EDGES = {
    "page": 32,
    "lengths": (0, 1, 7, 8, 9, 16, 31, 32, 0),
    "window": 4,
    "filled": (0, 1, 3, 4, 4, 0, 2, 4, 4),
    "heads": 5,
    "kv_heads": 1,
    "rank_k": 10,
    "rank_v": 6,
}
CASES = {
    "edges of blocks, capacity and ring; odd heads": EDGES,
    "edges in two splits": EDGES | {"splits": 2},
    "pages of two blocks, three latent heads, rotation": {
        "paged": True,
        "page": 2 * BLOCK,
        "lengths": (15, 0, 16, 17, 33),
        "heads": 6,
        "latent_heads": 3,
        "kv_heads": 2,
        "rank_k": 8,
        "rotation": True,
    },
    "pages shorter than a block, a head each, only the current token, two splits": {
        "paged": True,
        "page": 4,
        "lengths": (3, 4, 5, 0),
        "latent_heads": 4,
        "kv_heads": 4,
        "window": 0,
        "splits": 2,
    },
    "no window, more splits than blocks": {"lengths": (0, 9, 16), "window": None, "splits": 3},
    "bfloat16, rotation, two splits": {"dtype": "bfloat16", "lengths": (16, 3), "rotation": True, "splits": 2},
    "bfloat16, no window": {"dtype": "bfloat16", "lengths": (16, 0), "window": None, "latent_heads": 2},
    "scores of 1e4": {"magnitude": 1e4, "tolerance": 1e-2},
}

RACY = {
    "page": 32,
    "lengths": (17, 0, 9),
    "window": 4,
    "filled": (4, 0, 3),
    "heads": 2,
    "kv_heads": 1,
}
TOKENS = lambda shape, axis: lax.broadcasted_iota(jnp.int32, shape, axis)
FAULTS = {
    "no wait for a block": ({"_wait": lambda copy: None}, RACY | {"window": None, "filled": None}),
    "no wait for the ring": ({"_wait": lambda copy: None}, RACY | {"lengths": (0, 0, 0)}),
    "one buffer for all blocks": ({"_buffer": lambda turn: turn * 0}, RACY),
    "a token too many": ({"_before": lambda valid, shape, axis: TOKENS(shape, axis) < valid + 1}, RACY),
    "a token too few": ({"_before": lambda valid, shape, axis: TOKENS(shape, axis) < valid - 1}, RACY),
    "no mask on values": ({"_before": lambda valid, shape, axis: TOKENS(shape, axis) < valid + 99 * (1 - axis)}, RACY),
}
MODES = ("eager", "on_wait")
"""When a copy takes place: at once, or when it is waited for. A fault may show in one alone."""


def run(
    splits: int = 1, tolerance: float | None = None, cores: int = 1, mode: str = "eager", races: bool = False, **case
):
    """Compares a case with the oracle."""
    q, stored, window, rotation = cases.make(**{"batch": len(case.get("lengths", "ab"))} | case)
    interpret = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=races, num_cores_or_threads=cores)
    got = pallas_tpu.latent_decode(q, stored, SCALE, window, rotation, interpret=interpret, splits=splits)
    assert got[0].dtype == stored.values.dtype
    assert got[2].dtype == jnp.float32
    tolerance = tolerance or (2e-2 if q.dtype == jnp.bfloat16 else 1e-5)
    cases.agree(got, cases.oracle(q, stored, SCALE, window, rotation), tolerance, tolerance)


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "BLOCK_TOKENS", BLOCK)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(short_blocks, name):
    run(**CASES[name])


def verdict(mode: str, splits: int = 1, cores: int = 1, **case) -> str:
    """ "right", "wrong" or "race"."""
    printed = io.StringIO()
    try:
        # jax 0.10 prints that there was a race, later versions raise.
        with contextlib.redirect_stdout(printed):
            run(mode=mode, splits=splits, cores=cores, races=True, **case)
    except AssertionError:
        return "wrong"
    except jax.errors.JaxRuntimeError as error:
        pltpu.reset_tpu_interpret_mode_state()
        return "race" if "race" in str(error).lower() else f"error: {error}"
    return "race" if "RACE DETECTED" in printed.getvalue() else "right"


def verdicts() -> dict[str, list[str]]:
    """Of the kernel and of each fault, in both modes."""
    jax.config.update("jax_disable_most_optimizations", True)
    pallas_tpu.BLOCK_TOKENS = BLOCK
    found = {"none": [verdict(mode, **RACY) for mode in MODES]}
    found["none, two cores"] = [verdict(mode, splits=2, cores=2, **RACY) for mode in MODES]
    for name, (fault, case) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            for function, faulty in fault.items():
                patch.setattr(pallas_tpu, function, faulty)
            found[name] = [verdict(mode, **case) for mode in MODES]
    return found


@pytest.fixture(scope="module")
def found():
    program = "import json; from tests.kernels import test_latent_decode_tpu as t; print(json.dumps(t.verdicts()))"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("fault", ["none", "none, two cores"])
def test_has_no_race(found, fault):
    assert found[fault] == ["right", "right"]


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(found, fault):
    assert set(found[fault]) & {"race", "wrong"}, found[fault]


def shapes(
    page: int = 1024, width: int = 512, window: int = 128, near: int = 2048, dtype=jnp.bfloat16
) -> tuple[Stored, Window]:
    spec = jax.ShapeDtypeStruct
    lengths, slot = spec((2,), jnp.int32), spec((), jnp.int32)
    ring, token = spec((3, 2, window, near), dtype), spec((2, 16, near // 16), dtype)
    buffer = spec((3, 2, page, width), dtype)
    return Stored(buffer, buffer, slot, lengths), Window(token, ring, ring, slot, lengths, token, token)


@pytest.mark.parametrize(
    ("unfit", "says"),
    [
        ({}, None),
        ({"page": 64}, None),
        ({"page": 1028}, "a multiple of 8 tokens"),
        ({"page": 1032}, "blocks of 8: make the page, or the capacity, a multiple of 512"),
        ({"width": 576}, "multiple of 128 numbers"),
        ({"window": 0}, None),
        ({"window": 100}, "a multiple of 8 tokens"),
        ({"near": 16 * 12}, "multiple of 128 numbers"),
        ({"window": 2048}, "a window of up to"),
    ],
)
def test_says_which_shapes_a_tpu_cannot_take(unfit, says):
    stored, window = shapes(**unfit)
    problem = pallas_tpu.problem(stored, window)
    assert (problem is None) == (says is None)
    if says is not None:
        assert says in problem
        q = jax.ShapeDtypeStruct((2, 16, stored.keys.shape[-1]), jnp.bfloat16)
        with pytest.raises(ValueError, match="pallas_tpu"):
            jax.eval_shape(lambda *inputs: pallas_tpu.latent_decode(*inputs[:2], SCALE, inputs[2]), q, stored, window)


def test_says_when_there_are_too_many_pages():
    stored, _ = shapes(page=16)
    many = stored._replace(tables=jax.ShapeDtypeStruct((256, 1024), jnp.int32))
    assert "use longer pages" in pallas_tpu.problem(many)


def test_refuses_masked_tokens():
    q, stored, window, _ = cases.make()
    masked = stored._replace(visible=jnp.ones((2, 16), bool))
    with pytest.raises(ValueError, match="visible"):
        pallas_tpu.latent_decode(q, masked, SCALE, window, interpret=pltpu.InterpretParams())
