"""The one file that knows of library versions: one function a difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import Array, ShapeDtypeStruct


def triton_call(*args: Array, kernel: Any, out_type: Sequence[ShapeDtypeStruct], grid: tuple[int, ...], **static: Any):
    """Launches a Triton kernel from JAX: inputs, then outputs, then `static` (warps, stages and constants).

    Raises:
      ImportError: there is no jax-triton, or jax has no GPU support.
    """
    try:
        import jax_triton
    except ImportError as e:
        raise ImportError(
            'Triton kernels are launched through jax-triton: pip install "jax[cuda13]" and jax-triton, 0.3.1 for Python'
            " 3.11 or jax below 0.11, the newest otherwise"
        ) from e
    # Since 0.4 `out_shape` is called `out_type`.
    outputs = "out_shape" if jax_triton.__version_info__ < (0, 4) else "out_type"
    library = jax_triton.triton_lib
    if hasattr(library, "pe"):
        # The rule for unused outputs in 0.4.1 takes two arguments, and jax 0.12 gives three; jax's own rule does.
        library.pe.dce_rules.pop(library.triton_kernel_call_p, None)
    return jax_triton.triton_call(*args, kernel=kernel, grid=grid, **{outputs: out_type}, **static)


def pretend_compute_capability(capability: int) -> None:
    """Lets Triton kernels be compiled for a GPU that is not there; 90 is an H100 or H200.

    Raises:
      ImportError: jax has no GPU support.
    """
    from jaxlib import gpu_triton

    gpu_triton.get_compute_capability = lambda device: capability


def without_preemption(checkpointer: Any) -> None:
    """Keeps an orbax checkpointer from asking whether the processes were told to stop.

    It would ask at every save, with the checkpoint's number as the step. JAX agrees on a step that the numbers it was
    asked about lead to, so that a loop which counts otherwise could miss it.
    """
    checkpointer._manager.reached_preemption = lambda step: False
