"""Runs a program that a model wrote, in a process of its own that may do little.

It gets an empty folder as its home and working directory, no environment, no packages but the standard library, limits
on time, memory, open files and file sizes, and no network where the system lets a user give it away (Linux's user
namespaces); an audit hook refuses sockets, other programs, native libraries, and changes to files outside its folder.
This stops accidents, not an attacker: for programs that nobody has reason to trust, run the whole evaluation in a
container.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile

_GUARD = pathlib.Path(__file__).with_name("sandbox_guard.py")


def run(program: str, seconds: float = 10.0, megabytes: int = 2048) -> str:
    """Runs Python source to its end.

    Args:
      program: the source; its output is thrown away.
      seconds: of wall-clock and of CPU time.
      megabytes: of address space.

    Returns:
      "passed" if it ran to its end, else "timeout" or what stopped it, in one line. A program that leaves early, with
      whatever exit status, has not run to its end.
    """
    # Only a run to the end tells the parent this word, which the program is not given.
    word = secrets.token_hex(16)
    settings = json.dumps({"seconds": seconds, "megabytes": megabytes, "word": word})
    with tempfile.TemporaryDirectory(prefix="answer_") as folder:
        # -I and an empty environment: nothing of the user's comes in. No preexec_fn: this process has threads.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            told, _ = process.communicate(f"{settings}\n{program}".encode(errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            _end(process)
    lines = told.decode(errors="replace").splitlines()
    if word in lines:
        return "passed"
    if process.returncode == -signal.SIGXCPU:
        return "timeout"
    return lines[-1][:200] if lines else "ended early"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
