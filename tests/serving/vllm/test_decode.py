"""One decoding step over pages: PyTorch against loops in float64, and the Triton kernels against PyTorch."""

# ruff: noqa: E402 (the imports below need torch)

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the plugin runs in vLLM's environment")
pytest.importorskip("vllm", reason="the plugin runs in vLLM's environment")

from hla_jax.serving.torch.looped_cache import turn
from hla_jax.serving.vllm import decode
from serving.vllm import run_pages_interpreter as pages

HERE = pathlib.Path(__file__).parent


def loops(q, stored, scale, window, turned):
    """The same, a row and a head at a time."""
    if turned is not None:
        q = torch.stack([turn(x.unflatten(-1, (-1, 8)), type(turned)(c, s)).flatten(-2) for x, c, s in zip(q, *turned)])
    batch, heads = q.shape[:2]
    keys, values = stored.pages
    latent_heads, rank_v = values.shape[2:]
    latent = torch.zeros(batch, heads, rank_v, dtype=torch.float64)
    exact = None if window is None else torch.zeros(batch, heads, window.k.shape[-1], dtype=torch.float64)
    lse = torch.zeros(batch, heads, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            at = [(int(stored.tables[b, t // keys.shape[1]]), t % keys.shape[1]) for t in range(stored.lengths[b])]
            n = h * latent_heads // heads
            scores = [q[b, h].double() @ keys[page, token, n].double() for page, token in at]
            mine = [values[page, token, n].double() for page, token in at]
            count = len(mine)
            if window is not None:
                g = h * window.k.shape[1] // heads
                ring = range(int(window.filled[b]))
                near_keys = [window.keys[b, w, g] for w in ring] + [window.k[b, g]]
                scores += [window.q[b, h].double() @ key.double() for key in near_keys]
                mine += [window.values[b, w, g].double() for w in ring] + [window.v[b, g].double()]
            if not scores:
                lse[b, h] = -torch.inf
                continue
            scores = torch.stack(scores) * scale
            lse[b, h] = torch.logsumexp(scores, 0)
            weights = (scores - lse[b, h]).exp()
            latent[b, h] = sum((w * v for w, v in zip(weights[:count], mine[:count])), latent[b, h])
            if window is not None:
                exact[b, h] = sum((w * v for w, v in zip(weights[count:], mine[count:])), exact[b, h])
    return latent, exact, lse


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    out = tmp_path_factory.mktemp("triton") / "out.npz"
    pytest.importorskip("triton", reason="the kernels are Triton's")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    subprocess.run([sys.executable, str(HERE / "run_pages_interpreter.py"), str(out)], check=True, env=environment)
    return np.load(out)


@pytest.mark.parametrize("name", pages.CASES)
def test_pytorch_agrees_with_loops(name):
    operands = pages.inputs(**pages.CASES[name])
    for found, expected in zip(decode.by_torch(*operands), loops(*operands), strict=True):
        if expected is not None:
            torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", pages.CASES)
def test_triton_agrees_with_pytorch(name, interpreted):
    for number, expected in enumerate(decode.by_torch(*pages.inputs(**pages.CASES[name]))):
        if expected is not None:
            np.testing.assert_allclose(interpreted[f"{name}/{number}"], expected, atol=2e-5, rtol=2e-5)
