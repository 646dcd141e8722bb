"""A corpus that every machine has: the source of Python's own standard library.

The files are found through `sysconfig`, sorted by name, and split into training and held-out text by a hash of the
file's name, so that the split does not depend on the machine. The text is that of the running interpreter's version.
"""

from __future__ import annotations

import hashlib
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Literal

Split = Literal["train", "held_out"]

_HELD_OUT_OF = 16  # one file in so many is held out
# Installed packages and test suites are not the library; codecs are tables of characters.
_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "_bundled", "test", "tests", "idle_test", "encodings"}
)


def split_of(name: str) -> Split:
    """Which half a file belongs to, by its path relative to the library, with `/` between folders."""
    digest = hashlib.sha256(name.encode()).digest()
    return "held_out" if int.from_bytes(digest[:4], "big") % _HELD_OUT_OF == 0 else "train"


def files(split: Split) -> list[pathlib.Path]:
    """The library's Python files of one split, sorted by name.

    Raises:
      FileNotFoundError: this interpreter comes without its library's source.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    found = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    kept = [name for name in found if not _EXCLUDED & set(name.split("/"))]
    if not kept:
        raise FileNotFoundError(f"{root}: no Python source of the standard library")
    return [root / name for name in kept if split_of(name) == split]


def documents(split: Split) -> Iterator[str]:
    """The text of each file of one split, in the order of `files`; bytes that are not UTF-8 are replaced."""
    for path in files(split):
        yield path.read_text(encoding="utf-8", errors="replace")


def passages(split: Split, characters: int = 2000) -> Iterator[str]:
    """The files of one split cut at line ends into passages of about this many characters, so that a long file does not
    outweigh many short documents in a mixture.
    """
    for text in documents(split):
        passage = ""
        for line in text.splitlines(keepends=True):
            passage += line
            if len(passage) >= characters:
                yield passage
                passage = ""
        if passage:
            yield passage
