"""What is not served: one message names all of it, and the flags with which the rest works."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from hla_jax.serving.vllm import scheduler
from hla_jax.serving.vllm.parallel import Share

SCHEMES = {"OuroForCausalLM": "full", "OuroHLAForCausalLM": "hla", "OuroLLAForCausalLM": "lla"}
"""Of the classes."""

_CPU_WORKER = "hla_jax.serving.vllm.cpu_worker.CPUWorker"


class Limits(VerifyAndUpdateConfig):
    """vLLM calls it with the whole configuration before anything is made of it."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raises `ValueError` for what is not served; sets what the classes need."""
        model = vllm_config.model_config
        problems = refusals(vllm_config)
        if problems:
            raise ValueError(f"{model.model}: {model.architecture} " + "; ".join(problems))
        # One forward pass is not a graph that torch.compile sees; a GPU captures whole decoding steps instead.
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = (
            CUDAGraphMode.NONE if model.enforce_eager else CUDAGraphMode.FULL_DECODE_ONLY
        )
        if model.hf_config.scheme.name != "full":
            vllm_config.scheduler_config.scheduler_cls = scheduler.NAME
            if current_platform.is_cpu() and vllm_config.parallel_config.worker_cls == "auto":
                vllm_config.parallel_config.worker_cls = _CPU_WORKER


def refusals(vllm_config: VllmConfig) -> list[str]:
    """What of a configuration is not served, with what to pass instead."""
    model, cache, planner = vllm_config.model_config, vllm_config.cache_config, vllm_config.scheduler_config
    config, parallel = model.hf_config, vllm_config.parallel_config
    scheme = config.scheme
    found: list[tuple[Any, str]] = [
        (
            SCHEMES[model.architecture] != scheme.name,
            f"has the cache scheme {SCHEMES[model.architecture]}, but config.json has the entries of {scheme.name}",
        ),
        (
            getattr(config, "early_exit_threshold", 1.0) != 1.0,
            "runs all loops for every token: set early_exit_threshold to 1.0 in config.json",
        ),
        (parallel.pipeline_parallel_size > 1, "cannot be split by layers: pass --pipeline-parallel-size 1"),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "cannot be split by context: pass neither --decode- nor --prefill-context-parallel-size",
        ),
        (parallel.enable_dbo, "takes a batch as a whole: pass no --enable-dbo"),
        (vllm_config.speculative_config, "decodes one token a step: pass no --speculative-config"),
        (model.quantization, "takes weights as they are: pass no --quantization"),
        (cache.cache_dtype != "auto", "keeps the cache in the model's dtype: pass --kv-cache-dtype auto"),
        (
            model.dtype not in (torch.bfloat16, torch.float32),
            "is computed in bfloat16 or float32: pass --dtype bfloat16",
        ),
        (vllm_config.lora_config, "has no adapters: pass no --enable-lora"),
    ]
    if scheme.name != "full":
        found += [
            (cache.enable_prefix_caching, "reads each prompt in one pass: pass --no-enable-prefix-caching"),
            (planner.enable_chunked_prefill, "reads each prompt in one pass: pass --no-enable-chunked-prefill"),
            (
                planner.max_num_batched_tokens < model.max_model_len,
                f"reads each prompt in one pass: pass --max-num-batched-tokens {model.max_model_len} or more",
            ),
            (planner.scheduler_cls, "has a scheduler of its own: pass no --scheduler-cls"),
            (
                planner.disable_hybrid_kv_cache_manager,
                "has several kinds of cache: pass --no-disable-hybrid-kv-cache-manager",
            ),
            (vllm_config.kv_transfer_config, "keeps its cache to itself: pass no --kv-transfer-config"),
            (vllm_config.use_v2_model_runner, "runs in vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0"),
        ]
    if scheme.name == "lla":
        found += [
            (scheme.first_pass == "exact", 'saves no memory with first_pass "exact": export it with "latent"'),
            (scheme.full_memory, "saves no memory with full_memory: export it without"),
        ]
    problems = [problem for condition, problem in found if condition]
    try:
        Share(0, parallel.tensor_parallel_size).check(scheme, config.num_attention_heads, config.num_key_value_heads)
    except ValueError as error:
        problems.append(f"cannot be split so: {error}")
    return problems
