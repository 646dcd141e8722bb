"""Measures memory and time of loading a checkpoint, prefilling a prompt and decoding, in a process of its own.

    python -m experiments.measure_decode --model=runs/ouro-1p4b --scheme=hla
    python -m experiments.measure_decode --model=runs/ouro-2p6b --prompt_tokens=32 --new_tokens=0    # one forward pass

Prints one JSON object. The HLA scheme has the papers' sizes and random maps: this measures, it does not approximate.
`peak_bytes` is the process's peak resident set after each part (VmHWM), interpreter and libraries included.

XLA's CPU backend computes 16-bit floats in float32, and converts all layers' weights once, ahead of the loops: three
times the weights in memory. XLA_FLAGS=--xla_disable_hlo_passes=while-loop-invariant-code-motion converts layer by layer
instead: 1.3 times the weights, and half the speed.
"""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import hla_jax
from experiments.processes import in_fresh_process, memory
from hla_jax.attention.outer import whole
from hla_jax.attention.scheme import Attention
from hla_jax.calibration.random import random_maps
from hla_jax.evaluation.schemes import HLA_PAPER, papers_schemes
from hla_jax.generation import decode
from hla_jax.generation.sampling import Sampling, request_keys


def measure(directory: str, scheme: str, dtype: str, prompt_tokens: int, new_tokens: int) -> dict[str, object]:
    """Runs every part once, compiled ahead of time, so that `seconds` has compiling and running apart."""
    jax.devices()  # the backend's own memory belongs to the start
    seconds: dict[str, float] = {}
    peak: dict[str, int] = {"start": memory("VmHWM")}

    def timed(part: str, function, *arguments):
        start = time.perf_counter()
        out = jax.block_until_ready(function(*arguments))
        seconds[part], peak[part] = round(time.perf_counter() - start, 2), memory("VmHWM")
        return out

    def compiled(part: str, function, *arguments):
        return timed(f"compile {part}", lambda: function.lower(*arguments).compile())

    model = timed("load", lambda: hla_jax.load(directory, dtype))
    config, params = model.config, model.params
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (1, prompt_tokens)), jnp.int32)
    held = {"weights_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params))}
    made = 0
    if new_tokens == 0:
        timed("forward", lambda: hla_jax.forward(model, tokens))
    else:
        attention = Attention(hla_jax.FullCache()) if scheme == "full" else timed("maps", paper_hla, model, dtype)
        capacity, lengths = prompt_tokens + new_tokens, jnp.asarray([prompt_tokens])
        held["maps_bytes"] = sum(leaf.nbytes for leaf in attention.params.values())
        held["cache_bytes"] = whole(config, attention.scheme).cache_bytes(config, capacity, dtype)
        prefill = compiled("prefill", decode.prefill, params, config, attention, tokens, lengths, capacity)
        logits, cache = timed("prefill", prefill, params, attention, tokens, lengths)
        keys, stop = request_keys(jnp.zeros(1, int)), jnp.zeros(0, jnp.int32)
        limit = jnp.asarray([new_tokens + 1])  # the prefill's own token counts
        progress = decode.start(logits, cache, Sampling(), keys, stop)
        settings = (keys, stop, limit)
        advance = compiled(
            "decode", decode.advance, params, config, attention, progress, Sampling(), *settings, new_tokens
        )
        out, _ = timed("decode", advance, params, attention, progress, Sampling(), *settings)
        made = int(jnp.sum(out >= 0))
        seconds["per token"] = round(seconds["decode"] / made, 2)
    return held | {
        "new_tokens": made,
        "peak_bytes": peak,
        "peak_over_held": round(memory("VmHWM") / sum(held.values()), 3),
        "seconds": seconds,
    }


def paper_hla(model: hla_jax.Model, dtype: str) -> Attention:
    """HLA with 10.7 times fewer numbers per token, a window of 128, and random maps."""
    return random_maps(papers_schemes(model.config)[HLA_PAPER], model.config, 0, dtype)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    options = flags.FLAGS
    found = in_fresh_process(
        measure, options.model, options.scheme, options.dtype, options.prompt_tokens, options.new_tokens
    )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    flags.DEFINE_string("model", None, "Checkpoint to load.", required=True)
    flags.DEFINE_enum("scheme", "full", ["full", "hla"], "Cache to decode with.")
    flags.DEFINE_string("dtype", "bfloat16", "Dtype of weights, maps and cache.")
    flags.DEFINE_integer("prompt_tokens", 256, "Tokens of the prompt.", lower_bound=1)
    flags.DEFINE_integer(
        "new_tokens", 8, "Tokens to decode after the first one; 0 runs one forward pass instead.", lower_bound=0
    )
    app.run(main)
