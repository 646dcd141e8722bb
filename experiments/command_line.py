"""What every command shares: no stray arguments, and a mistake of the user's in one line instead of a traceback."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, logging

from hla_jax.attention import registry
from hla_jax.attention.scheme import Scheme, SchemeError
from hla_jax.config import ConfigError
from hla_jax.data.streams import DataError
from hla_jax.evaluation.task import TaskError
from hla_jax.serving.export import ExportError
from hla_jax.tensor_files import WeightsError
from hla_jax.tokenizer import TokenizerError
from hla_jax.training.checkpoints import CheckpointError
from hla_jax.training.loop import TrainingError

_USER_ERRORS = (
    SchemeError,
    ConfigError,
    DataError,
    TaskError,
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
            # What the hub says of itself has several lines.
            sys.exit("error: " + " ".join(line.strip() for line in str(error).splitlines() if line.strip()))

    app.run(checked)


def whole_numbers(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    """A list flag's numbers. Raises `ConfigError` for anything else."""
    if not all(value.strip().isdigit() for value in values):
        raise ConfigError(f"--{flag}: expected whole numbers separated by commas, found {','.join(values)}")
    return tuple(map(int, values))


def scheme(flag: str, text: str) -> Scheme:
    """A cache scheme, written as its class is called: `HLA(rank_k=512, rank_v=512, rank_loop1=256, window=128)`.

    Raises:
      ConfigError: it is something else; `SchemeError` where the fields are not the scheme's.
    """
    kinds = {kind.__name__: name for name, kind in registry.SCHEMES.items()}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        entry = f"{kinds[call.func.id]}_config"
        fields = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, KeyError):
        raise ConfigError(
            f"--{flag}: expected one of {', '.join(kinds)} with its fields by name, such as "
            f"LLA(rank_k=96, rank_v=160); found {text}"
        ) from None
    return registry.from_entries({entry: fields})
