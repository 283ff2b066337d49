"""Selection of kernels that pass a self-test before a run uses them.

A kernel that was compiled for another chip, or by another release of its compiler, may fail or
return wrong results. Each operation has a list of candidate kernels, of which XLA is the last, and
a trial: small random arrays with the run's heads, pages and dtype. The run uses the first candidate
that passes. Kernels are extras, and so is the comparison with XLA.
"""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl.models.architecture import KernelCheck

KERNELS_EXTRA = "jaxrl.extras.kernels"
"""The extra whose `check.select_kernel` compares kernels with XLA."""

HALF_PRECISION_ONLY = ("mosaic_gpu",)
"""Names of kernels for 16-bit floats only: a Hopper chip would round wider ones."""


@dataclass(kw_only=True)
class Trial:
    """An operation on small random arrays.

    Attributes:
        operation: Display name.
        names: Names of the compared values: outputs and gradients.
        run: Function from a kernel and `arrays` to the compared values, `[..., values]`, with a
            head axis. Nothing in them depends on what the kernel's contract leaves undefined.
        arrays: Arguments on the host; float32 arrays are rounded to the run's dtype.
        reference: The operation in XLA.
        dtype: Dtype of the run.
        device: Device that runs it.
    """

    operation: str
    names: tuple[str, ...]
    run: Callable[..., Sequence[jax.Array]]
    arrays: tuple[np.ndarray, ...]
    reference: Callable[..., Any]
    dtype: DTypeLike
    device: jax.Device


def supports_dtype(kernel: str, dtype: DTypeLike | None) -> bool:
    """Return True if a kernel supports a dtype; None is a dtype that every kernel supports."""
    return dtype is None or kernel not in HALF_PRECISION_ONLY or jnp.dtype(dtype).itemsize == 2


def explain_excluded(kernels: Iterable[str], dtype: DTypeLike | None) -> str:
    """Return a clause that names the kernels skipped for a dtype, or ""."""
    names = [name for name in kernels if not supports_dtype(name, dtype)]
    return f" and {' and '.join(names)} is for bfloat16" if names else ""


@dataclass(frozen=True, kw_only=True)
class SelectedKernel:
    """The selected kernel of an operation.

    Attributes:
        name: Kernel's name in the configuration.
        function: Implementation of the operation.
        kernel_checks: Result for each kernel that was tried.
    """

    name: str
    function: Callable[..., Any]
    kernel_checks: tuple[KernelCheck, ...] = ()


def select_kernel(
    make_trials: Callable[[str], Sequence[Trial]],
    candidates: Mapping[str, Callable[[], Callable[..., Any]]],
    reference: Callable[..., Any],
    *,
    config_key: str = "",
) -> SelectedKernel:
    """Return the first candidate kernel that agrees with XLA. Every process must call this.

    A kernel that fails on one process is used by none.

    Args:
        make_trials: Function from a kernel's name to the trials that the kernel must pass. A kernel
            without trials is not run.
        candidates: Importer of each candidate kernel by name, in order of preference.
        reference: The operation in XLA, returned if no kernel passes.
        config_key: Config key with which the user named the kernel; that kernel must pass.

    Raises:
        ValueError: The kernel that the user named does not pass.
        RuntimeError: A kernel has left the device unusable.
    """
    # The extra may be absent; no kernel is used untested.
    if not candidates or not (config_key or importlib.util.find_spec(KERNELS_EXTRA)):
        return SelectedKernel(name="xla", function=reference)
    return pkgutil.resolve_name(f"{KERNELS_EXTRA}.check:select_kernel")(
        make_trials, candidates, reference, config_key=config_key
    )


TOKAMAX_VERSION = "0.0.17"
"""Required version of tokamax; pyproject.toml pins the same one.

Masks, backward kernels and settings are not public API.
"""


@functools.cache
def import_tokamax(module: str) -> Any:
    """Import a module of tokamax's operations; the first import takes 4 seconds of CPU time.

    Raises:
        ImportError: tokamax or a dependency of it is not installed, or the version differs.
    """
    try:
        import tokamax
    except ImportError as error:
        raise ImportError(
            f"tokamax cannot be imported ({error}); with Python 3.12 or later run `pip install "
            "'jaxrl[cuda]'`."
        ) from error
    if tokamax.__version__ != TOKAMAX_VERSION:
        raise ImportError(
            f"tokamax {tokamax.__version__} is installed, but parts of {TOKAMAX_VERSION} are used "
            f"that are not public; run `pip install tokamax=={TOKAMAX_VERSION}`."
        )
    return importlib.import_module(f"tokamax._src.ops.{module}")
