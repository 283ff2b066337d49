"""Selection of kernels that pass a numerical self-test.

A kernel may fail or return wrong results on a different chip or with a different compiler release.
Each operation has a list of candidate kernels, with XLA last, and self-tests (`Trial`) on small
random arrays with the run's head sizes, page size and dtype. The run uses the first candidate that
passes. The kernels and their comparison with XLA are extras.
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
"""Extra whose `check.select_kernel` compares kernels with XLA."""

HALF_PRECISION_ONLY = ("mosaic_gpu",)
"""Names of kernels that support only 16-bit floats: Hopper GPUs would round wider floats."""


@dataclass(kw_only=True)
class Trial:
    """Self-test of an operation on small random arrays.

    Attributes:
        operation: Display name of the operation.
        names: Names of the compared values: outputs and gradients.
        run: Function of a kernel and `arrays` that returns the values to compare, `[..., values]`.
            They must not depend on anything that the kernel's contract leaves undefined.
        arrays: Arguments on the host; float32 arrays are rounded to the run's dtype.
        reference: Implementation of the operation in XLA.
        dtype: Dtype of the run.
        device: Device that runs the self-test.
    """

    operation: str
    names: tuple[str, ...]
    run: Callable[..., Sequence[jax.Array]]
    arrays: tuple[np.ndarray, ...]
    reference: Callable[..., Any]
    dtype: DTypeLike
    device: jax.Device


def supports_dtype(kernel: str, dtype: DTypeLike | None) -> bool:
    """Return True if a kernel supports `dtype`; None skips the check."""
    return dtype is None or kernel not in HALF_PRECISION_ONLY or jnp.dtype(dtype).itemsize == 2


def list_candidates(name: str, kernels: Iterable[str], dtype: DTypeLike | None) -> list[str]:
    """Return the kernels to try before XLA, in order of preference.

    Args:
        name: Configured kernel name.
        kernels: Names of the platform's kernels, in order of preference.
        dtype: Dtype of the matmuls; None skips the dtype check.
    """
    if name == "auto":
        return [kernel for kernel in kernels if supports_dtype(kernel, dtype)]
    return [] if name == "xla" else [name]


def resolve_kernel_name(
    config_key: str,
    name: str,
    platform: str,
    kernels: Mapping[str, Mapping[str, str]],
    dtype: DTypeLike | None,
    *,
    size_problem: str = "",
) -> tuple[str, str]:
    """Resolve a configured name to a kernel name; also return the reason, to be logged.

    Args:
        config_key: Config key that holds the name, such as `config.model.attention`.
        name: Configured kernel name.
        platform: JAX platform of the devices.
        kernels: Kernels by platform and name, in order of preference.
        dtype: Dtype of the matmuls; None skips the dtype check.
        size_problem: Reason why the model's sizes exclude all kernels; "" if they do not.

    Raises:
        ValueError: The kernel does not support these devices, this dtype or these sizes.
    """
    if name == "xla":
        return name, f"set by {config_key}"
    names = kernels.get(platform, {})
    if name == "auto":
        if names and size_problem:
            return "xla", f"since {size_problem}"
        excluded = [kernel for kernel in names if not supports_dtype(kernel, dtype)]
        more = f" and {' and '.join(excluded)} is for bfloat16" if excluded else ""
        selected = (*list_candidates(name, names, dtype), "xla")[0]
        return selected, f"since the devices are {platform}s{more}"
    problem = size_problem
    if name not in names:
        platforms = " and ".join(f"{other}s" for other in kernels if name in kernels[other])
        problem = f"kernels are for {platforms}, but the devices are {platform}s"
    elif not supports_dtype(name, dtype):
        problem = f"kernels multiply 16-bit floats, but config.model.dtype is '{dtype}'"
    if problem:
        raise ValueError(f"{config_key} is {name!r}, whose {problem}; set it to 'auto' or 'xla'.")
    return name, f"set by {config_key}"


@dataclass(frozen=True, kw_only=True)
class SelectedKernel:
    """Kernel selected for an operation.

    Attributes:
        name: Kernel name, as in the config.
        function: Implementation of the operation.
        kernel_checks: Self-test result of each kernel that was tried.
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

    A kernel must pass on every process to be selected.

    Args:
        make_trials: Function that returns the self-tests of a kernel, given its name. A kernel
            without self-tests is selected untested.
        candidates: Import function of each candidate kernel by name, in order of preference.
        reference: Implementation of the operation in XLA, returned if no kernel passes.
        config_key: Config key that requests one kernel, which must then pass; "" for automatic
            selection.

    Raises:
        ValueError: The requested kernel does not pass.
        RuntimeError: A failed kernel made the device unusable.
    """
    # Without the extra, kernels cannot be tested, so none is used.
    if not candidates or not (config_key or importlib.util.find_spec(KERNELS_EXTRA)):
        return SelectedKernel(name="xla", function=reference)
    return pkgutil.resolve_name(f"{KERNELS_EXTRA}.check:select_kernel")(
        make_trials, candidates, reference, config_key=config_key
    )


TOKAMAX_VERSION = "0.0.17"
"""Required version of tokamax, also pinned in pyproject.toml.

We use its masks, backward kernels and settings, which are not public API.
"""


@functools.cache
def import_tokamax(module: str) -> Any:
    """Import `tokamax._src.ops.<module>`; the first import takes 4 seconds of CPU time.

    Raises:
        ImportError: tokamax or one of its dependencies is not installed, or the version differs.
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
            f"tokamax {tokamax.__version__} is installed, but jaxrl uses private modules of "
            f"{TOKAMAX_VERSION}; run `pip install tokamax=={TOKAMAX_VERSION}`."
        )
    return importlib.import_module(f"tokamax._src.ops.{module}")
