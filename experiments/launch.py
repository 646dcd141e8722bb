"""What every experiment's `main` shares: a config file with overrides, and a work directory.

    from experiments import launch
    config = launch.read_config(UptrainJob)        # the frozen dataclass, with --config.field=value applied

`get_config()` in a config file returns an `ml_collections.ConfigDict` of a frozen dataclass, so that flags can override
fields.
"""

from __future__ import annotations

import pathlib
import shlex
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import dacite
import jax
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags

from experiments import command_line
from hla_jax import sharding
from hla_jax.config import ConfigError

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/nano_hla.py.")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for everything the run leaves; the same one resumes a stopped run."
)

_MULTIHOST = flags.DEFINE_bool(
    "multihost", False, "This is one of several processes (TPU pod slice, SLURM, MPI, Kubernetes): find the others."
)

T = TypeVar("T")


def read_config(kind: type[T]) -> T:
    """The config file's values and the overrides of the command line, as the dataclass `kind`."""
    try:
        return dacite.from_dict(kind, _CONFIG.value.to_dict(), dacite.Config(strict=True))
    except (dacite.DaciteError, ValueError) as error:
        raise ConfigError(f"--config: {error}") from None


def has_config() -> bool:
    """Whether the command line names a config file."""
    return _CONFIG.value is not None


def workdir() -> pathlib.Path:
    """The run's work directory."""
    return pathlib.Path(str(_WORKDIR.value))


def title() -> str:
    """The command, as it was given, for banners and reports."""
    module = pathlib.Path(sys.argv[0]).stem
    return shlex.join(["python", "-m", f"experiments.{module}", *sys.argv[1:]])


def devices() -> Mesh | None:
    """All devices side by side: each has the whole model and reads its part of the rows. None for a single one."""
    return sharding.make_mesh(data=-1) if jax.device_count() > 1 else None


def run(main: Callable[[], Any]) -> None:
    """`command_line.run` of a command that needs a config and a work directory."""
    flags.mark_flags_as_required(["config", "workdir"])

    def started() -> None:
        if _MULTIHOST.value:
            jax.distributed.initialize()
        main()

    command_line.run(started)
