"""The process that `sandbox.run` starts: takes its own rights away, then runs the program that comes on its input.

Not imported. The first line of the input holds its settings, JSON: "seconds", "megabytes", and the "word" that it tells
the parent after a run to the end; otherwise it tells the error, in one line.
"""

import contextlib
import ctypes
import json
import os
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_REFUSED = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.kill", "pty.", "ctypes.")
# Events with the paths that they change.
_CHANGED = ("remove", "rename", "rmdir", "mkdir", "chmod", "chown", "link", "symlink", "truncate")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def leave_network() -> None:
    """A network of its own without any device, where the system allows it; the audit hook refuses sockets anyway."""
    user, group = os.getuid(), os.getgid()
    try:
        if ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            return
        # Without a name in its new world, the process could not make files.
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as mapping:
                mapping.write(text)
    except (OSError, AttributeError):
        pass


def limit(seconds: float, megabytes: int) -> None:
    """Limits of the operating system, where there are any."""
    try:
        import resource
    except ImportError:
        return
    wanted = {
        "RLIMIT_CPU": int(seconds) + 1,
        "RLIMIT_AS": megabytes << 20,
        "RLIMIT_FSIZE": 16 << 20,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    for name, value in wanted.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))


def guard(folder: str) -> None:
    """Refuses what a solution to an exercise has no need of, for as long as the process lives."""

    def inside(path: object) -> bool:
        if isinstance(path, int):
            return True
        text = os.fsdecode(path)  # type: ignore[arg-type]
        return os.path.realpath(text).startswith(folder + os.sep) or text == os.devnull

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"{event} is refused")
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in mode for letter in "wax+") if mode else bool((flags or 0) & _WRITING)
            if writes and not inside(path):
                raise PermissionError(f"writing to {path} is refused")
        elif event.removeprefix("os.") in _CHANGED and not all(
            inside(path) for path in arguments if isinstance(path, str | bytes)
        ):
            raise PermissionError(f"{event} outside the folder is refused")

    sys.addaudithook(hook)


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    source = sys.stdin.buffer.read().decode(errors="replace")
    report = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    leave_network()
    limit(settings["seconds"], settings["megabytes"])
    guard(os.path.realpath(os.getcwd()))
    try:
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # SystemExit too: a program that leaves has not run to its end
        message = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
    else:
        message = settings["word"]
    report.write(message + "\n")
    report.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
