"""Files of a directory or hub repository: which tensors they have, and whose they are."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from typing import Any

from transformers.utils import cached_file

MAP = re.compile(
    r"(?:model\.layers\.\d+\.self_attn|transformer\.core_block\.\d+\.attn)"
    r"\.(hla|lla|head_latent|layer_latent|low_bit|shared_loop)\.\w+"
)
"""Tensors of a cache scheme, whichever the family."""


def refuse(where: str, missing: set[str], unknown: set[str]) -> None:
    for problem, names in (("missing", missing), ("unknown", unknown)):
        if names:
            first = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{where}: {problem} tensors {first}{more}")


def tensor_files(source: Any, **where: Any) -> list[pathlib.Path]:
    """The safetensors files of a directory or hub repository."""
    index = cached_file(source, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False, **where)
    names = ["model.safetensors"]
    if index is not None:
        names = sorted(set(json.loads(pathlib.Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    return [pathlib.Path(str(cached_file(source, name, **where))) for name in names]


def header(file: pathlib.Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of its tensors, and where their bytes begin."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        found = json.loads(stream.read(length))
    found.pop("__metadata__", None)
    return found, 8 + length


def fingerprint(files: list[pathlib.Path]) -> str:
    """Identity of a model's own tensors: the SHA-256 of one JSON line a tensor, sorted by name, maps left out."""
    lines = {}
    for file in files:
        tensors, start = header(file)
        with file.open("rb") as stream:
            for name, about in tensors.items():
                if not MAP.fullmatch(name):
                    begin, end = about["data_offsets"]
                    stream.seek(start + begin)
                    digest = hashlib.sha256(stream.read(end - begin)).hexdigest()
                    lines[name] = json.dumps([name, about["dtype"], about["shape"], digest], separators=(",", ":"))
    return hashlib.sha256("".join(f"{lines[name]}\n" for name in sorted(lines)).encode()).hexdigest()


def checked_base(source: Any, entry: Any) -> str:
    """The path or hub id of the model that a maps-only directory belongs to, once its tensors are known to be its."""
    base = entry.get("id", entry.get("path")) if isinstance(entry, dict) else None
    if not isinstance(base, str) or not isinstance(entry.get("sha256"), str):
        raise ValueError(f"{source}: config.json: base_model must have id or path, and sha256; found {entry!r}")
    try:
        files = tensor_files(base)
    except OSError as error:
        raise ValueError(f"{source}: config.json: base_model not found: {error}") from None
    if (found := fingerprint(files)) != entry["sha256"]:
        raise ValueError(
            f"{source}: these maps belong to another base model than {base}: "
            f"expected sha256 {entry['sha256']}, found {found}"
        )
    return base
