"""Choice of kernels that pass a self-test before a run uses them.

A kernel that was compiled for another chip, or by another release of its compiler, may fail, or
worse, be wrong. Each operation has a line of kernels that compute it, of which XLA is the last, and
a trial: small random arrays of the run's heads, pages and dtype. The first kernel of the line that
passes is the run's. Kernels are extras, and so is the comparison with XLA.
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

EXTRA = "jaxrl.extras.kernels"
"""The extra whose `check.select_kernel` compares kernels with XLA."""

HALF_ALONE = ("mosaic_gpu",)
"""Kernels that multiply 16-bit floats alone, by name: a Hopper chip would round others."""


@dataclass(kw_only=True)
class Trial:
    """An operation on small random arrays.

    Attributes:
        operation: Name for people.
        names: Names of what is compared: outputs and gradients.
        run: Function from a kernel and `arrays` to what is compared, `[..., values]`, whose heads
            have an axis. Nothing in it depends on what the kernel's contract leaves open.
        arrays: Arguments on the host; those of float32 are rounded to the run's dtype.
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


def takes(kernel: str, dtype: DTypeLike | None) -> bool:
    """Return True if a kernel of this name multiplies numbers of a dtype; None: one all take."""
    return dtype is None or kernel not in HALF_ALONE or jnp.dtype(dtype).itemsize == 2


def excluded(kernels: Iterable[str], dtype: DTypeLike | None) -> str:
    """Return a clause that names kernels which are not tried with a dtype; "" without any."""
    names = [name for name in kernels if not takes(name, dtype)]
    return f" and {' and '.join(names)} is for bfloat16" if names else ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The kernel of an operation.

    Attributes:
        name: Name in the configuration.
        function: The operation.
        kernel_checks: Findings about each kernel that was tried.
    """

    name: str
    function: Callable[..., Any]
    kernel_checks: tuple[KernelCheck, ...] = ()


def select_kernel(
    make_trials: Callable[[str], Sequence[Trial]],
    line: Mapping[str, Callable[[], Callable[..., Any]]],
    reference: Callable[..., Any],
    *,
    named_by: str = "",
) -> Choice:
    """Return the first kernel of a line that computes what XLA does; all processes call this.

    If one process finds that a kernel fails, none uses it.

    Args:
        make_trials: Function from a kernel's name to the trials that it has to pass. A kernel
            without trials is not run.
        line: Function that imports each kernel, by name, the preferred first.
        reference: The operation in XLA, the result if no kernel passes.
        named_by: Key by which the user named the kernel, which then has to pass.

    Raises:
        ValueError: The kernel that the user named does not pass.
        RuntimeError: A kernel has left the device unable to compute anything.
    """
    # That extra can be deleted, and no kernel is used untested.
    if not line or not (named_by or importlib.util.find_spec(EXTRA)):
        return Choice(name="xla", function=reference)
    return pkgutil.resolve_name(f"{EXTRA}.check:select_kernel")(
        make_trials, line, reference, named_by=named_by
    )


TOKAMAX = "0.0.17"
"""The version of tokamax whose parts are used: masks, backward kernels and settings are not public.

pyproject.toml names the same.
"""


@functools.cache
def tokamax_part(module: str) -> Any:
    """Imports a module of tokamax's operations; the first takes 4 seconds of a processor.

    Raises:
        ImportError: tokamax, or what it imports, is not installed, or it has another version.
    """
    try:
        import tokamax
    except ImportError as error:
        raise ImportError(
            f"tokamax cannot be imported ({error}); with Python 3.12 or later run `pip install "
            "'jaxrl[cuda]'`."
        ) from error
    if tokamax.__version__ != TOKAMAX:
        raise ImportError(
            f"tokamax {tokamax.__version__} is installed, but parts of {TOKAMAX} are used that are "
            f"not public; run `pip install tokamax=={TOKAMAX}`."
        )
    return importlib.import_module(f"tokamax._src.ops.{module}")
