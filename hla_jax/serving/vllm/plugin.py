"""Ouro in vLLM with the full cache, HLA or LLA: a plugin that vLLM finds by itself once this package is installed.

    vllm serve DIRECTORY --no-enable-prefix-caching --no-enable-chunked-prefill

vLLM runs the directories that `hla_jax.export` writes with its own scheduler and paged cache, and nothing here uses
JAX. vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). What is private of vLLM is
named where it is used.

    limits.py       what is refused, and with which flag it works
    models.py       the three classes: weights, maps, logits
    stack.py        the looped layers, tensor-parallel; they take attention as an argument
    full.py, hla.py, lla.py   attention of each cache;  prompts.py: exact, over a prompt
    caches.py       kinds of cache, and their rows in a batch;  pages.py: sizes of pages
    decode.py       one decoding step over pages: PyTorch, or the project's Triton kernels
    maps.py         the maps, cut for tensor parallelism;  parallel.py: which heads a process has
    scheduler.py    preempted requests are replayed under the decoding rule;  cpu_worker.py: with their seeds
"""

from __future__ import annotations


def register() -> None:
    """Makes the configuration, the classes, the checks of the flags and the window's cache known to vLLM."""
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from hla_jax.serving.torch.configuration_ouro import OuroConfig
    from hla_jax.serving.vllm import limits

    AutoConfig.register("ouro", OuroConfig, exist_ok=True)
    for name in limits.SCHEMES:
        ModelRegistry.register_model(name, f"hla_jax.serving.vllm.models:{name}")
        MODELS_CONFIG_MAP[name] = limits.Limits
