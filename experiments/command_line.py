"""What every command shares: no stray arguments, and a mistake of the user's in one line instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, logging

from hla_jax.attention.scheme import SchemeError
from hla_jax.config import ConfigError
from hla_jax.data.streams import DataError
from hla_jax.serving.export import ExportError
from hla_jax.tensor_files import WeightsError
from hla_jax.tokenizer import TokenizerError
from hla_jax.training.checkpoints import CheckpointError
from hla_jax.training.loop import TrainingError

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


def run(main: Callable[[], Any]) -> None:
    """Parses the flags and runs `main`; a mistake of the user's becomes one line and exit code 1."""

    def checked(argv: list[str]) -> None:
        # Orbax reports every file that it writes.
        logging.set_verbosity(logging.WARNING)
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        try:
            main()
        except _USER_ERRORS as error:
            sys.exit(f"error: {error}")

    app.run(checked)


def whole_numbers(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    """A list flag's numbers. Raises `ConfigError` for anything else."""
    if not all(value.strip().isdigit() for value in values):
        raise ConfigError(f"--{flag}: expected whole numbers separated by commas, found {','.join(values)}")
    return tuple(map(int, values))
