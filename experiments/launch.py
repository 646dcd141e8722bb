"""What every experiment's `main` shares: a config file with overrides, and a work directory.

    from experiments import launch
    config = launch.read_config(UptrainJob)        # the frozen dataclass, with --config.field=value applied

`get_config()` in a config file returns an `ml_collections.ConfigDict` of a frozen dataclass, so that flags can override
fields.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import dacite
from absl import flags
from ml_collections import config_flags

from experiments import command_line
from hla_jax.config import ConfigError

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/nano_hla.py.")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for everything the run leaves; the same one resumes a stopped run."
)

T = TypeVar("T")


def read_config(kind: type[T]) -> T:
    """The config file's values and the overrides of the command line, as the dataclass `kind`."""
    try:
        return dacite.from_dict(kind, _CONFIG.value.to_dict(), dacite.Config(strict=True))
    except (dacite.DaciteError, ValueError) as error:
        raise ConfigError(f"--config: {error}") from None


def workdir() -> pathlib.Path:
    """The run's work directory."""
    return pathlib.Path(str(_WORKDIR.value))


def title() -> str:
    """The command, as it was given, for banners and reports."""
    module = pathlib.Path(sys.argv[0]).stem
    return " ".join([f"python -m experiments.{module}", *sys.argv[1:]])


def run(main: Callable[[], Any]) -> None:
    """`command_line.run` of a command that needs a config and a work directory."""
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main)
