"""What vLLM does with an exported directory: how many sequences a pool holds, how long a step takes, how long a batch.

An engine runs in this process and is driven step by step, so that its scheduler can be looked at. Nothing here computes
with JAX, which would take the device's memory from the engine.

Private parts of vLLM: `engine_core` of the client in this process, its scheduler's `running` and `requests`, and the
pool of blocks.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from typing import Any

_PAGE = 16  # tokens, of the widest kind of cache
_STEPS = 100_000  # a request that is never finished must not hang


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of an engine.

    Attributes:
      directory: an export.
      dtype: of weights and caches.
      pool_bytes: of all pages.
      tokens: the longest sequence.
      sequences: the most that may run at once.
      eager: no captured steps, which only a GPU has.
    """

    directory: str
    dtype: str
    pool_bytes: int
    tokens: int
    sequences: int
    eager: bool


class Server:
    """An engine with a pool of its own. Prompts are random tokens; no token ends a sequence."""

    def __init__(self, settings: Settings):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        self.llm = LLM(
            settings.directory,
            dtype=settings.dtype,
            kv_cache_memory_bytes=settings.pool_bytes,
            block_size=_PAGE,
            max_model_len=settings.tokens,
            max_num_batched_tokens=max(settings.tokens, settings.sequences),
            max_num_seqs=settings.sequences,
            enforce_eager=settings.eager,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            async_scheduling=False,
            skip_tokenizer_init=True,
        )
        self.engine: Any = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.vocabulary = self.engine.model_config.get_vocab_size()
        self.random = random.Random(0)
        self.preempted: dict[str, int] = {}
        self.pages = self.free

    @property
    def running(self) -> int:
        """Sequences that the last step computed."""
        return len(self.scheduler.running)

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def preemptions(self) -> int:
        """Since the last `clear`."""
        return sum(self.preempted.values())

    def submit(self, prompt: int, new: int) -> None:
        """A request with so many prompt tokens, which gets so many new ones."""
        from vllm import SamplingParams

        tokens = [self.random.randrange(self.vocabulary) for _ in range(prompt)]
        how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        self.llm.enqueue({"prompt_token_ids": tokens}, how, use_tqdm=False)

    def step(self) -> int:
        """One step of the engine. Returns how many requests it finished."""
        outputs = self.engine.step()
        self.preempted |= {name: request.num_preemptions for name, request in self.scheduler.requests.items()}
        return sum(output.finished for output in outputs)

    def clear(self) -> None:
        """Aborts whatever is left. Raises `RuntimeError` unless every page is free again."""
        self.engine.abort_request(list(self.scheduler.requests), internal=True)
        self.engine.step()
        self.preempted = {}
        if self.engine.has_unfinished_requests() or self.free != self.pages:
            raise RuntimeError(f"{self.pages - self.free} of {self.pages} pages are still held after all requests")


def capacity(server: Server, context: int, expected: int) -> dict[str, int]:
    """Sequences of about `context` tokens that run at once: one more comes with each step until not all run.

    Each comes as long as those before it have become, so all are equally long at any time; they reach `context` when
    the `expected` number runs.

    Returns:
      `sequences`, the `context` at which that many ran, and whether the engine's limit of sequences ended it.
    """
    start = max(context - expected + 1, 1)
    limit = server.scheduler.max_num_running_reqs
    count = 0
    while count < limit:
        server.submit(start + count, limit + 2)  # none ends before the last one came
        server.step()
        if server.running <= count or server.preemptions:
            break
        count += 1
    server.clear()
    return {"sequences": count, "context": start + count - 1, "limited": int(count == limit)}


def step_seconds(server: Server, context: int, batch: int, rounds: int) -> dict[str, Any] | None:
    """Seconds of `rounds` decoding steps of `batch` sequences with `context` tokens, and until the first of them.

    Returns:
      None where not all of them run.
    """
    start = time.perf_counter()
    for _ in range(batch):
        server.submit(context, batch + rounds + 1)
    for _ in range(batch):  # a step takes one prompt at least
        server.step()
        if server.running == batch:
            break
    first = time.perf_counter() - start
    seconds = []
    for _ in range(rounds + 1):  # the first warms up
        if server.running != batch or server.preemptions:
            server.clear()
            return None
        start = time.perf_counter()
        server.step()
        seconds.append(time.perf_counter() - start)
    server.clear()
    return {"batch": batch, "seconds": seconds[1:], "prompt_seconds": first}


def completion(server: Server, requests: list[tuple[int, int]]) -> dict[str, Any]:
    """Everything that is asked for, at once, to its end: requests are (prompt tokens, new tokens)."""
    most, running, steps, left = 0, 0, 0, len(requests)
    start = time.perf_counter()
    for prompt, new in requests:
        server.submit(prompt, new)
    while left and steps < _STEPS:
        left -= server.step()
        steps += 1
        running += server.running
        most = max(most, server.running)
    seconds, preemptions = time.perf_counter() - start, server.preemptions
    server.clear()
    return {
        "seconds": seconds,
        "new_tokens": sum(new for _, new in requests),
        "steps": steps,
        "most_running": most,
        "mean_running": running / steps,
        "preemptions": preemptions,
    }
