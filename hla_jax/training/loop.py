"""The training loop, same for every recipe: counts, logs, evaluates, saves, resumes, stops. A step does the rest."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
import pathlib
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils
from tqdm.auto import tqdm

from hla_jax.data.streams import Stream
from hla_jax.training.checkpoints import Checkpoints
from hla_jax.training.metrics import MetricsWriter
from hla_jax.training.step import Metrics, TrainState

# A loss is diverging when it stays this many times above its running median for this many steps.
_DIVERGED_RATIO, _DIVERGED_STEPS, _MEDIAN_OF = 4.0, 20, 100


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """When things happen, in steps (a step is one update; the last step always logs, evaluates and saves).

    Attributes:
      steps: of the whole run.
      log_every, evaluate_every, save_every: intervals.
      keep: number of newest checkpoints that stay.
      best_metric: name among the evaluation's results; of the checkpoints saved at a step that evaluates, the one where
        it was smallest stays too.
    """

    steps: int
    log_every: int = 10
    evaluate_every: int = 100
    save_every: int = 100
    keep: int = 2
    best_metric: str | None = None

    def __post_init__(self) -> None:
        if min(self.log_every, self.evaluate_every, self.save_every, self.keep) < 1 or self.steps < 0:
            raise ValueError(f"intervals and keep must be at least 1, and steps not negative; got {self}")


class TrainingError(RuntimeError):
    """Training cannot go on: the loss is not finite or diverges, or the work directory cannot be used."""


class Interrupted(SystemExit):
    """A signal asked the run to stop, and it saved. The exit code is the shell's for that signal (143 for SIGTERM)."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(128 + signal_number)
        self.message = message

    def __str__(self) -> str:
        return self.message


def run(
    state: TrainState,
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    batches: Stream[Any],
    config: LoopConfig,
    workdir: pathlib.Path,
    evaluate: Callable[[TrainState], Mapping[str, float]] | None = None,
) -> TrainState:
    """Trains to `config.steps`, from the newest checkpoint in `workdir` if there is one.

    A run that was stopped and is started again does the same updates, to the bit, as one that was not.

    Args:
      state: before the first update; also says what a checkpoint must look like. The first step overwrites it.
      step: (state, batch) -> (state, metrics), with at least the metric `loss`.
      batches: an endless stream; moved to the checkpoint's position.
      config: intervals.
      workdir: gets `checkpoints/`, `metrics.jsonl` and `tensorboard/`.
      evaluate: state -> results, also called before the first update; must not keep the state's arrays.

    Returns:
      The state after the last step.

    Raises:
      TrainingError: the loss is not finite or diverges; the message names the step and the last good checkpoint.
      CheckpointError: a checkpoint cannot be written, or does not fit.
      Interrupted: SIGTERM or SIGINT came; a checkpoint was saved.
    """
    _make_writable(workdir)
    checkpoints = Checkpoints(workdir / "checkpoints", config.keep, config.best_metric)
    restored = checkpoints.restore(state)
    if restored is not None:
        state, position = restored
        batches.set_state(position)
    start = int(state.step)
    writer = MetricsWriter(workdir, resumed_at=start if restored else -1) if jax.process_index() == 0 else None

    monitor = _Monitor(checkpoints)
    evaluated: dict[str, float] = {}
    try:
        with (
            _Signals() as signals,
            tqdm(total=config.steps, initial=start, unit="step", disable=writer is None) as bar,
        ):
            if restored is not None:
                bar.write(f"resumed after step {start} from {checkpoints.directory}")
            elif evaluate is not None:
                evaluated = _floats(evaluate(state))
                if config.best_metric not in {None, *evaluated}:
                    raise TrainingError(f"best_metric {config.best_metric!r} is not among {sorted(evaluated)}")
                if writer:
                    writer.write(0, evaluated)
            since = start, time.monotonic()
            for now in range(start + 1, config.steps + 1):
                state, metrics = step(state, next(batches))
                monitor.add(now, metrics)
                bar.update()

                last = now == config.steps
                stopped = signals.received()
                line: dict[str, float] = {}
                if last or now % config.log_every == 0:
                    line = monitor.check()
                    line["steps_per_second"] = (now - since[0]) / (time.monotonic() - since[1])
                    since = now, time.monotonic()
                    bar.set_postfix({name: f"{x:.4g}" for name, x in {"loss": line["loss"], **evaluated}.items()})
                if evaluate is not None and (last or now % config.evaluate_every == 0):
                    monitor.check()
                    evaluated = _floats(evaluate(state))
                    line |= evaluated
                if line and writer:
                    writer.write(now, line)
                if last or stopped or now % config.save_every == 0:
                    monitor.check()  # a state whose loss is not finite must not become the last good checkpoint
                if last or stopped or (now % config.save_every == 0 and not monitor.alarmed):
                    checkpoints.save(now, state, batches.get_state(), line)
                if stopped:
                    checkpoints.wait()
                    message = (
                        f"stopped by {stopped.name} after step {now}; saved, the same command continues from there"
                    )
                    bar.write(message)
                    raise Interrupted(stopped, message)
    finally:
        if writer:
            writer.close()
    checkpoints.close()
    return state


def _floats(results: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in results.items()}


def _make_writable(workdir: pathlib.Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe = workdir / f".writable-{jax.process_index()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise TrainingError(f"{workdir}: cannot be used as the work directory: {error}") from error


class _Monitor:
    """Looks at every step's loss, but only now and then, so that the host does not wait for the device at each step."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints
        self._pending: list[tuple[int, Metrics]] = []
        self._latest: dict[str, float] = {}
        self._losses: collections.deque[float] = collections.deque(maxlen=_MEDIAN_OF)
        self._high: list[int] = []  # steps in a row whose loss was far above the median

    @property
    def alarmed(self) -> bool:
        """Whether the newest loss that was checked is far above the median."""
        return bool(self._high)

    def add(self, step: int, metrics: Metrics) -> None:
        self._pending.append((step, metrics))

    def check(self) -> dict[str, float]:
        """The metrics of the newest step. Raises `TrainingError` where a loss since the last call is bad."""
        for step, metrics in jax.device_get(self._pending):
            self._latest = _floats(metrics)
            for name in ("loss", "grad_norm"):
                if not math.isfinite(self._latest.get(name, 0.0)):
                    self._stop(f"{name} is {self._latest[name]} at step {step}")
            self._watch(step, self._latest["loss"])
        self._pending.clear()
        return dict(self._latest)

    def _watch(self, step: int, loss: float) -> None:
        if len(self._losses) < _DIVERGED_STEPS or loss <= _DIVERGED_RATIO * abs(statistics.median(self._losses)):
            self._losses.append(loss)
            self._high.clear()
            return
        self._high.append(step)
        if len(self._high) == _DIVERGED_STEPS:
            median = statistics.median(self._losses)
            since = self._high[0]
            self._stop(f"the loss diverges: more than {_DIVERGED_RATIO:g} x {median:.4g} since step {since}")

    def _stop(self, what: str) -> None:
        self._checkpoints.wait()
        raise TrainingError(f"{what}; {self._checkpoints.describe_last()}")


class _Signals:
    """Turns SIGTERM and SIGINT into a request that the loop sees between steps; a second SIGINT interrupts at once.

    With several processes JAX has SIGTERM: it lets all of them agree on the step after which they stop, whichever of
    them was told to.
    """

    _steps = itertools.count(1)
    """Steps of all runs of this process. A step agreed on may be another run's, where this one ends before it."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            alone = jax.process_count() == 1
            for number in (signal.SIGTERM, signal.SIGINT) if alone else (signal.SIGINT,):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received is not None:
            raise KeyboardInterrupt
        self._received = signal.Signals(number)
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def received(self) -> signal.Signals | None:
        """The signal after which to stop now. Called once a step."""
        if jax.process_count() == 1:
            return self._received
        return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(next(self._steps)) else None
