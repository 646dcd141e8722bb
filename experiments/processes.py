"""Measurements of memory: a process of its own for each, and what the system says of it."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pathlib
import socket
from collections.abc import Callable
from typing import Any

import jax


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function` in a new interpreter and returns its result. Raises what it raises."""
    # "spawn": a forked child would inherit this process's pages, and its peak.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def in_fresh_processes(count: int, function: Callable[..., Any], *arguments: Any, devices: int = 1) -> list[Any]:
    """As `in_fresh_process`, in `count` processes that share their CPU devices; the results in the processes' order."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # No process ends its part before all have come, so that each gets one.
    with concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(_joined, port, count, rank, devices, function, arguments) for rank in range(count)]
        return [part.result() for part in parts]


def _joined(port: int, count: int, rank: int, devices: int, function: Callable[..., Any], arguments: Any) -> Any:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, rank)
    try:
        return function(*arguments)
    finally:
        jax.distributed.shutdown()


def memory(field: str) -> int:
    """A line of /proc/self/status in bytes: "VmRSS" is what is resident now, "VmHWM" the most that was."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
