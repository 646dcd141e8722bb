"""What recipes keep in a work directory, so that a run that was stopped continues: whose it is, and fitted maps."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from hla_jax import attention_files, tensor_files
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.config import ConfigError, ModelConfig, read_json
from hla_jax.generation.generate import generate
from hla_jax.model import Model, load
from hla_jax.tensor_files import WeightsError

EXPORT = "export"
"""Folder of the fitted maps, which `hla_jax.load` reads."""


def claim(directory: pathlib.Path, job: Mapping[str, Any]) -> None:
    """Notes the job in a new directory, or checks that an old one is of the same job.

    Raises:
      ConfigError: the directory belongs to another job, or cannot be written.
    """
    mine = json.loads(json.dumps(job))
    noted = directory / "job.json"
    if noted.exists():
        if different := sorted(key for key in mine if mine[key] != read_json(noted).get(key)):
            raise ConfigError(
                f"{directory}: was started with another {', '.join(different)} (see job.json); take another --workdir"
            )
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            with tensor_files.new_file(noted) as partial:
                tensor_files.write_json(partial, mine)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be used as the work directory: {error}") from error


def exported(path: str) -> str:
    """The export in the work directory of `uptrain`, or of one cell of `compare`; any other path as it is.

    Raises:
      ConfigError: `path` is the work directory of a comparison, which has an export in every cell.
    """
    folder = pathlib.Path(path)
    if (folder / EXPORT / "config.json").is_file():
        return str(folder / EXPORT)
    if cells := sorted(export.parent for export in folder.glob(f"cells/*/{EXPORT}")):
        raise ConfigError(f"{folder}: has several exports; give one of them: {', '.join(map(str, cells))}")
    return path


def kept_maps(
    directory: pathlib.Path,
    scheme: Scheme,
    config: ModelConfig,
    make: Callable[[], Attention],
    mesh: Mesh | None = None,
) -> Attention:
    """A scheme with its maps from `directory`, made and written there unless an earlier start of the job left them.

    Several processes make them together, and the first writes them.
    """
    if scheme.map_shapes(config) and not directory.exists():
        pending = attention_files.pending_maps(config, scheme.interchange, make().params)
        if jax.process_index() == 0:
            with tensor_files.new_directory(directory) as partial:
                tensor_files.write_tensors(partial, pending)
        multihost_utils.sync_global_devices(f"maps written to {directory.name}")
    return read_maps(directory, scheme, config, mesh)


def read_maps(directory: pathlib.Path, scheme: Scheme, config: ModelConfig, mesh: Mesh | None = None) -> Attention:
    """A scheme with its maps from `directory`. Raises `WeightsError` where they are not there, or do not fit."""
    if not (shapes := scheme.map_shapes(config)):
        return Attention(scheme)
    return Attention(
        scheme,
        attention_files.load_maps(directory, config, scheme.interchange, shapes, None, mesh, scheme.map_axes()),
    )


def check_reload(
    directory: pathlib.Path, model: Model, attention: Attention, prompts: Sequence[Sequence[int]], new_tokens: int
) -> None:
    """Reloads an export and compares greedy tokens with those of what was exported. Raises `WeightsError` where they
    differ.
    """
    expected = generate(model, prompts, new_tokens, attention)
    found = generate(load(directory, dtype=None), prompts, new_tokens)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.tokens != other.tokens:
            raise WeightsError(f"{directory}: prompt {number} expected tokens {one.tokens}, found {other.tokens}")
    print(f"{directory}: reloaded, and gives the same {len(prompts)} x {new_tokens} greedy tokens")
