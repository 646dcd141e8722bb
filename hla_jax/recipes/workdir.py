"""What recipes keep in a work directory, so that a run that was stopped continues: whose it is, and fitted maps."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from hla_jax import attention_files, tensor_files
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.config import ConfigError, OuroConfig, read_json


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
        tensor_files.write_json(noted, mine)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be used as the work directory: {error}") from error


def kept_maps(directory: pathlib.Path, scheme: Scheme, config: OuroConfig, make: Callable[[], Attention]) -> Attention:
    """A scheme with its maps from `directory`, made and written there unless an earlier start of the job left them."""
    if scheme.map_shapes(config) and not directory.exists():
        pending = attention_files.pending_maps(scheme.interchange, make().params)
        with tensor_files.new_directory(directory) as partial:
            tensor_files.write_tensors(partial, pending)
    return read_maps(directory, scheme, config)


def read_maps(directory: pathlib.Path, scheme: Scheme, config: OuroConfig) -> Attention:
    """A scheme with its maps from `directory`. Raises `WeightsError` where they are not there, or do not fit."""
    if not (shapes := scheme.map_shapes(config)):
        return Attention(scheme)
    return Attention(scheme, attention_files.load_maps(directory, scheme.interchange, shapes, config.num_layers))
