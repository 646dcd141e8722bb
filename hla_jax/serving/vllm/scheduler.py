"""A preempted request is replayed: its prompt in one exact pass, what it had generated token by token.

vLLM frees a preempted request's cache and computes all of its tokens again, as if they were a prompt. The latent caches
read a prompt exactly and generated tokens through latents, so that would change what follows. The scheduler here gives
such a request its prompt first, then one token a step; vLLM drops what is sampled meanwhile, as it does between the
chunks of a prompt. Outputs are those of a run without preemption.

Private parts of vLLM: `need_mamba_block_aligned_split` and `_mamba_block_aligned_split`, the hook that shortens what
one step computes of a request.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

NAME = f"{__name__}.scheduler"


class _Replay:
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, num_local_tokens: int = 0, num_external_tokens: int = 0
    ) -> int:
        done = request.num_computed_tokens + num_local_tokens + num_external_tokens
        return min(num_new_tokens, max(request.num_prompt_tokens - done, 1))


class ReplayScheduler(_Replay, Scheduler):
    pass


class AsyncReplayScheduler(_Replay, AsyncScheduler):
    pass


def scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """The scheduler for latent caches, made as vLLM makes its own."""
    kind = AsyncReplayScheduler if vllm_config.scheduler_config.async_scheduling else ReplayScheduler
    return kind(vllm_config, *args, **kwargs)
