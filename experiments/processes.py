"""Measurements of memory: a process of its own for each, and what the system says of it."""

from __future__ import annotations

import multiprocessing
import pathlib
from collections.abc import Callable
from typing import Any


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function` in a new interpreter and returns its result. Raises what it raises."""
    # "spawn": a forked child would inherit this process's pages, and its peak.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def memory(field: str) -> int:
    """A line of /proc/self/status in bytes: "VmRSS" is what is resident now, "VmHWM" the most that was."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
