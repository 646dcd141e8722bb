"""Which implementation of an operation runs: by platform, or by name."""

from __future__ import annotations

from collections.abc import Mapping

import jax

REFERENCE = "reference"
PLATFORMS = {"pallas_tpu": "tpu", "triton_gpu": "gpu"}
"""The platform that each kernel is written for. `reference` and what is plain jnp run on all."""


def platform() -> str:
    """The platform that is traced for: that of the abstract mesh's device, if there is one, else jax's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None or device.platform is None else device.platform


def choose(
    operation: str, requested: str | None, cannot: Mapping[str, str | None], plain: str = REFERENCE
) -> tuple[str, str]:
    """An operation's implementation, and why, in words for the banner.

    Args:
      operation: its name, for errors.
      requested: an implementation's name; None: the platform's kernel where it takes the inputs, else `plain`.
      cannot: for each of the operation's kernels what it cannot take of these inputs; None where it takes them.
      plain: the implementation for every platform.

    Raises:
      ValueError: `requested` is unknown, does not run on this platform, or does not take the inputs.
    """
    here = platform()
    if requested is None:
        for name, problem in cannot.items():
            if PLATFORMS[name] == here:
                return (plain, f"{name} {problem}") if problem else (name, f"the kernel for a {here}")
        return plain, f"no kernel for a {here}"
    if requested in (REFERENCE, plain):
        return requested, "as asked for"
    if requested not in cannot:
        raise ValueError(f"{operation}: no implementation {requested!r}; there are {[REFERENCE, plain, *cannot]}")
    if PLATFORMS[requested] != here:
        raise ValueError(f"{operation}: {requested} runs on a {PLATFORMS[requested]}, this is a {here}")
    if problem := cannot[requested]:
        raise ValueError(f"{operation}: {requested} {problem}")
    return requested, "as asked for"
