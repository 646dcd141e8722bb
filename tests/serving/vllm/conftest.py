"""Exports of the embedded model with what JAX says of them, and vLLM's engine in this process."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import typing

import pytest

if importlib.util.find_spec("vllm") is not None:
    # Threads that wait for each other cost more than these sizes compute, and compiling vLLM's sampler costs a minute.
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }

NEW = 24
WINDOW = 16
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 18, 19, 24, 31, 33, 34, 40, 48, 57, 64, 65, 80, 90, 120, 150)
"""Of the prompts: around the window, and far beyond it."""

EXACT = {"enable_prefix_caching": False, "enable_chunked_prefill": False}


class Served(typing.NamedTuple):
    """An export, and what JAX generates greedily from it."""

    directory: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: typing.Any
    """[prompts, NEW, V]"""


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """name -> `Served`, made when first asked for."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import hla_jax
    from hla_jax.generation import decode
    from hla_jax.generation.generate import pad

    schemes = {
        "full": None,
        "hla": hla_jax.HLA(rank_k=64, rank_v=40, rank_loop1=32, window=WINDOW),  # pages that do not fill up
        "lla": hla_jax.LLA(rank_k=24, rank_v=40),
        "absorbed": hla_jax.LLA(rank_k=24, rank_v=40, rank_rope=8),
        "folded": hla_jax.LLA(rank_k=96, rank_v=160, fold_heads=True, single_pass=True),
    }
    base = hla_jax.load(hla_jax.NANO, dtype="float32")
    text = base.tokenizer.encode(inspect.getsource(argparse))
    prompts = [text[100 * n : 100 * n + length] for n, length in enumerate(LENGTHS)]
    made = {}

    def get(name):
        if name not in made:
            scheme = schemes[name]
            rows = [text[start : start + 128] for start in range(3000, 3800, 200)]
            attention = hla_jax.calibrate(base, scheme, rows) if scheme else base.attention
            directory = tmp_path_factory.mktemp("exports") / name
            hla_jax.export(base, attention, directory)
            tokens = [out.tokens for out in hla_jax.generate(base, prompts, NEW, attention, stop_tokens=())]
            padded, lengths = pad(prompts, max(LENGTHS))
            new = jnp.asarray(tokens)
            first, cache = decode.prefill(base.params, base.config, attention, padded, lengths, max(LENGTHS) + NEW)
            rest, _ = decode.forced(base.params, base.config, attention, cache, new[:, :-1])
            logits = jnp.concatenate([first[:, None], rest], axis=1)
            logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
            made[name] = Served(str(directory), prompts, tokens, logprobs)
            jax.clear_caches()
        return made[name]

    return get


@pytest.fixture(scope="session")
def engine():
    """Makes engines in this process; a second one waits for no import."""
    from vllm import LLM

    def make(directory, **options):
        options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, **EXACT, **options}
        options = {"kv_cache_memory_bytes": 64 << 20, "block_size": 16, **options}
        return LLM(str(directory), **options)

    return make


def scheduler(llm):
    """The engine's scheduler, which these tests look into."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm):
    return scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()


def as_prompts(prompts):
    return [{"prompt_token_ids": prompt} for prompt in prompts]
