"""vLLM's CPU worker, with seeds that survive a replay.

A replayed row (`scheduler.py`) is sampled and its token dropped; vLLM then winds a seeded request's generator back,
which PyTorch's CPU generators cannot do. Here their states are put back instead.

Private parts of vLLM: `_sample`, `_bookkeeping_sync` and `discard_request_mask` of its model runner.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class CPUWorker(cpu_worker.CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = _Runner  # the worker makes its own runner and cannot be told another


class _Runner(CPUModelRunner):
    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        dropped = [row for row in generators if self.discard_request_mask.np[row]]
        states = {row: generators[row].get_state() for row in dropped}
        out = super()._sample(*args, **kwargs)
        for row, state in states.items():
            generators[row].set_state(state)
        return out

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        dropped = {row: generators[row] for row in generators if self.discard_request_mask.np[row]}
        for row in dropped:
            del generators[row]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(dropped)
