"""Everything that only a GPU can tell, in one command and within 8 minutes on one H200 or H100.

    python -m experiments.gpu_check --out=gpu_check

Checks every GPU kernel against the reference, and times kernels, whole Ouro-1.4B decoding steps with random weights,
and throughput at full memory, against the aims below. Each part is a process of its own, so that none falls with
another; what they found is in OUT/gpu_check.json and, as tables, in OUT/gpu_check.md. Needs jax with its GPU plugin,
flax, optax, orbax-checkpoint, transformers and triton. Where jax-triton is missing, a wheel of it in `--wheels` is
unpacked under OUT (`pip download jax-triton==0.3.1 --no-deps --dest wheels` gets one). `--rehearse` runs small shapes
through the reference on any machine.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from typing import Any

from absl import app, flags

from hla_jax import tensor_files
from hla_jax.evaluation.markdown import table
from hla_jax.models import looped, weights

_OUT = flags.DEFINE_string("out", "gpu_check", "Folder for the results.")
_WHEELS = flags.DEFINE_string("wheels", "wheels", "Folder with a wheel of jax-triton, if it is not installed.")
_PART = flags.DEFINE_string("part", None, "Run this part alone, in this process.")
_REHEARSE = flags.DEFINE_bool("rehearse", False, "Small shapes through the reference, on any machine.")
_SECONDS = flags.DEFINE_integer("seconds", 470, "Of all parts together; what is left when they are over is left out.")

FULL, HLA, LLA = "full cache", "HLA", "LLA absorbed"
BF16_TOLERANCE, FLOAT32_TOLERANCE = 2e-2, 1e-4


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    if _PART.value:
        write(out / f"{_PART.value}.json", PARTS[_PART.value](_REHEARSE.value))
        return
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94"}
    if importlib.util.find_spec("jax_triton") is None and not _REHEARSE.value:
        environment["PYTHONPATH"] = os.pathsep.join([str(unpack(out)), environment.get("PYTHONPATH", "")])
    started = time.monotonic()
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "parts": {}}
    for part in PARTS:
        left = _SECONDS.value - (time.monotonic() - started)
        found["parts"][part] = in_a_process(part, out, environment, left)
        write(out / "gpu_check.json", found)
    lines = report(found)
    (out / "gpu_check.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def unpack(out: pathlib.Path) -> pathlib.Path:
    """The folder that a jax-triton wheel is unpacked to: it is plain Python."""
    wheels = sorted(pathlib.Path(_WHEELS.value).glob("jax_triton-*.whl"))
    if not wheels:
        raise app.UsageError(f"jax-triton is not installed, and {_WHEELS.value} has no jax_triton-*.whl")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        wheel.extractall(out / "packages")
    return (out / "packages").absolute()


def in_a_process(part: str, out: pathlib.Path, environment: dict[str, str], seconds: float) -> dict[str, Any]:
    """Runs a part; returns what it found, or how it ended."""
    result = out / f"{part}.json"
    result.unlink(missing_ok=True)
    if seconds < 5:
        return {"error": "no time was left"}
    print(f"== {part}", flush=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "experiments.gpu_check", f"--part={part}", f"--out={out}"]
    with open(out / f"{part}.log", "w") as log:
        try:
            extra = ["--rehearse"] if _REHEARSE.value else []
            code = subprocess.run(
                command + extra, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    spent = {"seconds": round(time.monotonic() - started, 1)}
    if result.exists():
        return json.loads(result.read_text()) | spent
    tail = (out / f"{part}.log").read_text(errors="replace")[-1500:]
    return {"error": "took too long" if code is None else f"exit status {code}", "log": tail} | spent


def write(path: pathlib.Path, found: dict[str, Any]) -> None:
    with tensor_files.new_file(path) as partial:
        tensor_files.write_json(partial, found)


# The parts. Each imports what it needs, in a process of its own.


def machine(rehearse: bool) -> dict[str, Any]:
    """What runs here, and how fast a copy is."""
    import importlib.metadata

    import jax

    from hla_jax.evaluation import cost
    from hla_jax.kernels.latent_decode import api

    versions: dict[str, str | None] = {}
    for package in ("jax", "jaxlib", "jax-triton", "triton", "flax", "optax", "orbax-checkpoint", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "device": jax.devices()[0].device_kind,
        "versions": versions,
        "memory": cost.device_memory(),
        "copy_bytes_per_second": cost.copy_bandwidth(1 << (24 if rehearse else 32)),
        "attention": api.choose(),
    }


def kernels(rehearse: bool) -> dict[str, Any]:
    """Every kernel against the reference in float32: the largest difference over the largest value."""
    from hla_jax.evaluation import kernel_check

    capacity = 128 if rehearse else 2048
    lengths = [n for n in (0, 1, 63, 64, 65, 127, 128, 1000, 2047, 2048) if n <= capacity]
    rows = []
    for name, shape in kernel_check.SHAPES.items():
        for dtype, tolerance in (("bfloat16", BF16_TOLERANCE), ("float32", FLOAT32_TOLERANCE)):
            row: dict[str, Any] = {"case": name, "dtype": dtype, "ok": False}
            try:
                errors = kernel_check.errors(kernel_check.operands(shape, lengths, capacity, dtype))
                row |= {"errors": errors, "ok": max(errors.values()) < tolerance}
            except Exception:
                row["log"] = traceback.format_exc()[-1500:]
            rows.append(row)
    return {"cases": rows}


def kernel_speed(rehearse: bool) -> dict[str, Any]:
    """Time of one call, and the bytes that it reads over what a copy moves in that time."""
    from hla_jax.evaluation import cost, kernel_check

    bandwidth = cost.copy_bandwidth(1 << (24 if rehearse else 31))
    sizes = [(1, 256)] if rehearse else [(1, 1024), (1, 16384), (1, 65536), (16, 4096), (64, 4096)]
    rows = []
    for name in ("HLA", "HLA, loop 1", "full cache", "LLA absorbed, by head"):
        shape = kernel_check.SHAPES[name]
        for batch, context in sizes:
            row: dict[str, Any] = {"case": name, "batch": batch, "context": context}
            try:
                # More slots than the card's second-level cache holds.
                read = shape.bytes_read(batch, context)
                slots = 2 if rehearse else int(min(24, max(2, (1 << 30) // read)))
                found = kernel_check.operands(shape, [context] * batch, context, "bfloat16", slots, filled=True)
                seconds = kernel_check.seconds(found, calls=4 if rehearse else 96)
                row |= {"microseconds": 1e6 * seconds, "of_copy": read / seconds / bandwidth}
            except Exception:
                row["log"] = traceback.format_exc()[-1500:]
            rows.append(row)
    return {"copy_bytes_per_second": bandwidth, "rows": rows}


def random_model(rehearse: bool):
    """Ouro-1.4B with random weights, and the schemes."""
    import jax

    from hla_jax.calibration.random import random_maps
    from hla_jax.config import OURO_1P4B
    from hla_jax.evaluation.schemes import papers_schemes
    from hla_jax.model import Model

    config = OURO_1P4B
    if rehearse:
        config = dataclasses.replace(config, num_layers=1, hidden_size=256, intermediate_size=256, vocab_size=256)
    make = jax.jit(lambda key: looped.for_decoding(weights.init_params(config, key, "bfloat16")))
    schemes = papers_schemes(config)
    return Model(config, make(jax.random.key(0))), {
        name: random_maps(schemes[name], config, 0, "bfloat16") for name in (FULL, HLA, LLA)
    }


def steps(rehearse: bool) -> dict[str, Any]:
    """Latency of a whole decoding step, one sequence."""
    from hla_jax.evaluation import cost, speed

    model, schemes = random_model(rehearse)
    contexts = [128, 256] if rehearse else [1024, 4096, 16384, 65536]
    bandwidth = cost.copy_bandwidth(1 << (24 if rehearse else 31))
    rounds, tokens = (1, 2) if rehearse else (5, 16)
    found = speed.decode_speed(model, schemes, contexts, new_tokens=tokens, rounds=rounds, kernels=True)
    rows = []
    for one in found:
        for name, rate in one.tokens_per_second.items():
            traffic = cost.step_traffic(model.config, schemes[name].scheme, one.context, 1, "bfloat16")
            of_copy = traffic.total * rate / bandwidth
            row = {"scheme": name, "context": one.context, "milliseconds": 1e3 / rate, "of_copy": of_copy}
            rows.append(row | {"ratio": one.ratio[name].median if name in one.ratio else None})
    return {"rows": rows}


def throughput(rehearse: bool) -> dict[str, Any]:
    """Tokens a second at a quarter, a half and nearly all of the sequences that memory holds."""
    from hla_jax.evaluation import cost, speed

    model, schemes = random_model(rehearse)
    rows = []
    for context in [128] if rehearse else [16384, 4096]:
        for name in (FULL, HLA):
            fit = cost.capacity(model.config, schemes[name].scheme, context + 512, cost.device_memory(), "bfloat16")
            batches = [1, 2] if rehearse else sorted({max(1, int(fit * share)) for share in (0.25, 0.5, 0.85)})
            for one in speed.throughput(
                model, schemes[name], context, batches, new_tokens=2 if rehearse else 16, rounds=2, kernels=True
            ):
                rate = one.tokens_per_second[FULL]
                rows.append(
                    {"scheme": name, "context": context, "batch": one.batch, "tokens_per_second": rate, "fit": fit}
                )
    return {"rows": rows}


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "machine": machine,
    "kernels": kernels,
    "steps": steps,
    "kernel_speed": kernel_speed,
    "throughput": throughput,
}


def report(found: dict[str, Any]) -> list[str]:
    """All tables."""
    parts = found["parts"]
    lines = [f"# GPU check, {found['date']}", ""]
    for part, result in parts.items():
        if "error" in result:
            lines += [f"**{part}: {result['error']}** ({part}.log)", ""]
    if "device" in parts["machine"]:
        about = parts["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
        lines += [
            f"{about['device']}, {about['memory'] / 2**30:.0f} GiB for arrays; {versions}. A copy moves"
            f" {about['copy_bytes_per_second'] / 1e9:,.0f} GB/s. Attention: {about['attention'][0]}.",
            "",
        ]
    lines += [*table(["aim", "measured", "met"], aims(parts)), ""]
    if cases := parts["kernels"].get("cases"):
        text = lambda case: ", ".join(f"{part} {error:.1e}" for part, error in case.get("errors", {}).items())
        rows = [(c["case"], c["dtype"], text(c) or "failed", "yes" if c["ok"] else "**no**") for c in cases]
        lines += ["Kernels against the reference:", "", *table(["case", "dtype", "error", "ok"], rows), ""]
    if rows := parts["steps"].get("rows"):
        lines += ["Decoding steps of Ouro-1.4B, one sequence:", ""]
        timed = [
            (r["scheme"], f"{r['context']:,}", f"{r['milliseconds']:.2f}", ratio(r["ratio"]), f"{r['of_copy']:.0%}")
            for r in rows
        ]
        lines += [*table(["scheme", "context", "ms", "over the full cache", "of a copy's speed"], timed), ""]
    if rows := parts["kernel_speed"].get("rows"):
        figures = lambda r: (f"{r['microseconds']:.1f}", f"{r['of_copy']:.0%}") if "of_copy" in r else ("failed", "")
        cells = [(r["case"], str(r["batch"]), f"{r['context']:,}", *figures(r)) for r in rows]
        lines += ["Kernels:", "", *table(["case", "batch", "context", "µs", "of a copy's speed"], cells), ""]
    if rows := parts["throughput"].get("rows"):
        reached = [
            (r["scheme"], f"{r['context']:,}", f"{r['batch']:,} of {r['fit']:,}", f"{r['tokens_per_second']:,.0f}")
            for r in rows
        ]
        lines += ["Throughput:", "", *table(["scheme", "context", "sequences", "tokens/s"], reached), ""]
    return lines


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def aims(parts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What was aimed for, and whether it was met."""
    steps_found = {(r["scheme"], r["context"]): r for r in parts["steps"].get("rows", [])}
    best: dict[tuple[str, int], float] = {}
    for r in parts["throughput"].get("rows", []):
        key = r["scheme"], r["context"]
        best[key] = max(best.get(key, 0.0), r["tokens_per_second"])
    cases = parts["kernels"].get("cases", [])
    rows: list[tuple[str, float | None, float]] = [
        (
            "every kernel agrees with the reference",
            sum(case["ok"] for case in cases) / len(cases) if cases else None,
            1.0,
        )
    ]
    for context, aim in ((1024, 0.95), (16384, 1.5), (65536, 2.5)):
        value = steps_found.get((HLA, context), {}).get("ratio")
        rows.append((f"HLA at least {aim}x the full cache's speed at {context:,}", value, aim))
    pair = best.get((HLA, 16384)), best.get((FULL, 16384))
    gain = pair[0] / pair[1] if pair[0] and pair[1] else None
    rows.append(("HLA at least 4.4x the full cache's throughput at 16,384", gain, 4.4))
    for scheme in (FULL, HLA):
        reached = [r["of_copy"] for (name, _), r in steps_found.items() if name == scheme]
        rows.append((f"{scheme}: a step at 70% of a copy's speed or more", max(reached, default=None), 0.7))
    return [
        (aim, "not measured", "") if value is None else (aim, f"{value:.2f}", "yes" if value >= least else "**no**")
        for aim, value, least in rows
    ]


if __name__ == "__main__":
    app.run(main)
