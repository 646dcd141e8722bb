"""What every experiment's `main` shares: a config file with overrides, a work directory, readable errors.

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
from absl import app, flags, logging
from ml_collections import config_flags

from hla_jax.attention.scheme import SchemeError
from hla_jax.config import ConfigError
from hla_jax.data.streams import DataError
from hla_jax.serving.export import ExportError
from hla_jax.tensor_files import WeightsError
from hla_jax.tokenizer import TokenizerError
from hla_jax.training.checkpoints import CheckpointError
from hla_jax.training.loop import TrainingError

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/nano_hla.py.")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for everything the run leaves; the same one resumes a stopped run."
)

_USER_ERRORS = (
    SchemeError,
    ConfigError,
    DataError,
    ExportError,
    WeightsError,
    TokenizerError,
    CheckpointError,
    TrainingError,
    FileExistsError,
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
    """Parses the flags and runs `main`; a mistake of the user's becomes one line and exit code 1, not a traceback."""

    def checked(argv: list[str]) -> None:
        # Orbax reports every file that it writes.
        logging.set_verbosity(logging.WARNING)
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        try:
            main()
        except _USER_ERRORS as error:
            sys.exit(f"error: {error}")

    flags.mark_flags_as_required(["config", "workdir"])
    app.run(checked)
