"""Metrics as a JSON-lines file and for TensorBoard."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping

from tensorboardX import SummaryWriter


class MetricsWriter:
    """Appends a run's metrics to `metrics.jsonl`, one line a step, and to TensorBoard event files beside it.

    Lines after step `resumed_at` are dropped, because they belong to updates that were lost: the file reads as one run.
    A run that starts anew passes -1.
    """

    def __init__(self, workdir: pathlib.Path, resumed_at: int):
        self.path = workdir / "metrics.jsonl"
        self._drop_lines_after(resumed_at)
        self._file = self.path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=resumed_at + 1)

    def _drop_lines_after(self, step: int) -> None:
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            # A process that was killed may leave half a last line.
            if not line.endswith("\n") or json.loads(line)["step"] > step:
                break
            kept.append(line)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics after update number `step`; later calls have larger steps."""
        try:
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()
        except OSError as error:
            message = f"cannot write the metrics of step {step}: {error.strerror}"
            raise OSError(error.errno, message, str(self.path)) from error
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        self._events.close()
