"""Runs the Triton kernels on the CPU, in Triton's interpreter: `python run_triton_interpreter.py OUT.npz`.

A process of its own, for Triton decides when it is imported whether it compiles. The JAX side runs as it is; only the
launch is replaced. Once more with each fault planted, for the tests to see that they would see it.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple

import numpy as np

SCALE = 0.3


class Case(NamedTuple):
    inputs: dict[str, Any]  # of latent_cases.make
    cut: dict[str, int] = {}  # noqa: RUF012 (over the geometry's own choice; never changed)


# Blocks are of 16 tokens and parts are few, so that short sequences have edges of both.
SMALL = dict(block=16, splits=3, near_block=16)
EDGES = (0, 1, 15, 16, 17, 32, 33, 48, 49, 63, 64)
CASES = {
    "lengths": Case(dict(batch=11, page=64, lengths=EDGES), SMALL),
    "lengths, no window": Case(dict(batch=11, page=64, lengths=EDGES, window=None), SMALL),
    "one split": Case(dict(page=64, lengths=(64, 33)), SMALL | dict(splits=1)),
    "own geometry": Case(dict(page=256, lengths=(256, 0), heads=16, rank_k=64, rank_v=64, kv_heads=16)),
    "own geometry, paged": Case(dict(page=16, lengths=(200, 31), heads=16, kv_heads=16, paged=True)),
    "small pages": Case(dict(batch=8, page=8, lengths=(0, 1, 7, 8, 9, 16, 17, 40), paged=True), SMALL),
    "large pages": Case(dict(batch=5, page=32, lengths=(31, 32, 33, 64, 96), paged=True), SMALL),
    "odd pages": Case(dict(batch=3, page=10, lengths=(9, 10, 41), paged=True, latent_heads=2), SMALL),
    "window edges": Case(dict(batch=4, lengths=(16, 0, 3, 9), window=8, filled=(0, 1, 7, 8)), SMALL),
    "window in parts": Case(
        dict(batch=6, lengths=(16, 0, 3, 9, 2, 0), window=40, filled=(0, 1, 39, 40, 16, 17)),
        SMALL | dict(near_splits=2),
    ),
    "current token only": Case(dict(lengths=(0, 13), window=0), SMALL),
    "head by head": Case(dict(lengths=(16, 5), heads=5, latent_heads=5, kv_heads=5, paged=True), SMALL),
    "odd heads": Case(dict(lengths=(16, 5), heads=5, kv_heads=5), SMALL),
    "groups of heads": Case(dict(lengths=(16, 5), heads=6, latent_heads=2, kv_heads=3), SMALL),
    "blocks of heads": Case(dict(lengths=(16, 5), heads=20, kv_heads=4), SMALL | dict(rows=16)),
    "rows of one block": Case(dict(lengths=(16, 5), heads=20, kv_heads=1), SMALL),
    "large scores": Case(dict(page=48, lengths=(48, 20), magnitude=1e4), SMALL),
    "rotated": Case(dict(page=48, lengths=(48, 20), rank_k=64, rotation=True), SMALL),
    "rank 24": Case(dict(lengths=(16, 5), rank_k=24, rank_v=20, head_dim=12, rotation=True), SMALL),
    "rank 48, paged": Case(
        dict(page=8, lengths=(30, 5), rank_k=48, rank_v=32, latent_heads=4, rotation=True, paged=True), SMALL
    ),
    "rank 576": Case(dict(page=40, lengths=(40, 5), rank_k=576, rank_v=512, heads=3, kv_heads=3, rotation=True), SMALL),
    "half": Case(dict(page=48, lengths=(48, 20), rank_k=64, rotation=True, dtype="float16"), SMALL),
    "half, paged": Case(dict(page=8, lengths=(30, 5), rank_k=48, paged=True, dtype="float16"), SMALL),
}


class Fault(NamedTuple):
    case: str  # that shows it
    right: str  # text in the kernels
    wrong: str


FAULTS = {
    "length off by one": Fault("lengths", "tl.load(lengths + b)", "tl.load(lengths + b) - 1"),
    "sum not rescaled": Fault("lengths", "summed * shrink[:, None]", "summed"),
    "total not rescaled": Fault("lengths", "total * shrink", "total"),
    "pages swapped": Fault("swapped", "tables + token // PAGE,", "tables + ((token // PAGE) ^ 1),"),
    "slot ignored": Fault("clean", "tl.load(slot).to(tl.int64) * PAGES", "b * 0"),
    "window's weight forgotten": Fault(
        "lengths",
        'float("-inf"))\n    top',
        'float("-inf"))\n    sums = tl.where(part < NEAR_SPLITS, float("-inf"), sums)\n    top',
    ),
    "current token in all parts": Fault("window in parts", "tl.where(part == 0, 1.0, 0.0)", "1.0"),
    "ring read to its end": Fault("window edges", "tl.load(filled + b)", "WINDOW"),
    "values not masked": Fault(
        "lengths", "used[:, None] & (column < RANK_V)", "(token < PAGE)[:, None] & (column < RANK_V)"
    ),
    "rotated backwards": Fault("rotated", "tl.where(second, imaginary", "tl.where(second, -imaginary"),
    "rest of the rank forgotten": Fault("rank 24", "if REST > 0:\n            rest", "if REST < 0:\n            rest"),
    "empty parts merged": Fault("lengths", "(weight > 0)[:, None] & ", ""),
}
# Nothing spoilt, and pages in pairs, of which one is not full: what these faults read is memory.
ONLY_FAULTS = {
    "swapped": Case(dict(page=8, lengths=(28, 12), paged=True, spoil=False), SMALL),
    "clean": Case(dict(lengths=(16, 5), spoil=False), SMALL),
}


def main(out: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import jax.numpy as jnp
    import latent_cases
    import torch

    from hla_jax import compat
    from hla_jax.kernels.latent_decode import triton_gpu

    def interpreted(*args, kernel, out_type, grid, num_warps, num_stages=None, **constants):
        """What jax-triton does, at once. Fresh memory holds anything: here, no numbers."""
        outs = [torch.from_numpy(np.full(x.shape, np.nan, x.dtype)) for x in out_type]
        kernel[grid](*(torch.from_numpy(np.array(x)) for x in args), *outs, **constants)
        return tuple(jnp.asarray(x.numpy()) for x in outs)

    compat.triton_call = interpreted
    kernels = triton_gpu.triton_kernels
    source = pathlib.Path(kernels.__file__).read_text()
    found = {}

    def run(name: str, case: Case) -> None:
        q, stored, window, rotation = latent_cases.make(**case.inputs)
        cut = kernels.geometry(triton_gpu.shapes(q, stored, window))._replace(**case.cut)
        results = triton_gpu.latent_decode(q, stored, SCALE, window, rotation, cut)
        found.update({f"{name}/{i}": np.asarray(x) for i, x in enumerate(results) if x is not None})

    for name, case in (CASES | ONLY_FAULTS).items():
        run(name, case)
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, fault) in enumerate(FAULTS.items()):
            assert source.count(fault.right) == 1, f"{name}: the text to spoil is not there once"
            path = pathlib.Path(folder, f"faulty_{number}.py")
            path.write_text(source.replace(fault.right, fault.wrong))
            triton_gpu.triton_kernels = _module(path)
            run(name, (CASES | ONLY_FAULTS)[fault.case])
    np.savez(out, **found)


def _module(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Triton looks its functions up there
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.path[:0] = [str(pathlib.Path(__file__).parents[2])]
    main(sys.argv[1])
