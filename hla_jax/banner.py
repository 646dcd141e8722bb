"""What an experiment says at its start: on what it runs, in which precision, with which attention, and why."""

from __future__ import annotations

import importlib.metadata
import platform

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def banner(
    title: str,
    *,
    dtype: str,
    dtype_reason: str,
    attention: str,
    attention_reason: str,
    mesh: jax.sharding.Mesh | None = None,
) -> str:
    """The start-up banner of every experiment, several lines of text.

    Args:
      title: what runs, such as "uptrain configs/nano_hla.py".
      dtype, dtype_reason: of the computation, such as "bfloat16" and "as stored".
      attention, attention_reason: the path that attention takes, such as "jnp" and "no kernel for a cpu".
      mesh: the devices' mesh; None: one device computes.
    """
    devices = jax.devices()
    kinds = sorted({f"{device.platform} ({device.device_kind})" for device in devices})
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES)
    rows = {
        "devices": f"{len(devices)} x {', '.join(kinds)}, {jax.process_count()} process(es)",
        "mesh": "none: one device"
        if mesh is None
        else ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        "dtype": f"{dtype}: {dtype_reason}",
        "attention": f"{attention}: {attention_reason}",
        "versions": f"python {platform.python_version()}, {versions}",
    }
    return "\n".join([f"== {title} ==", *(f"{name:>9}  {text}" for name, text in rows.items())])
