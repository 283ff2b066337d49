"""Numerical self-test of kernels against XLA at startup."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.architecture import KernelCheck
from jaxrl.models.kernel_check import SelectedKernel, Trial
from jaxrl.runtime import distributed
from jaxrl.runtime.preemption import Interrupted

ERROR_FLOOR = {2: 0.005, 4: 0.001}
"""Relative error that always passes, by itemsize: the rounding error of bfloat16 or TF32."""

WORST_ERROR_FLOOR = 0.05
"""Like `ERROR_FLOOR`, for the vector with the largest error."""

PIECE_ERROR_FLOOR = {2: 0.009, 4: 0.002}
"""Like `ERROR_FLOOR`, for each piece of an array.

With random inputs, the bfloat16 errors of these kernels were at most 0.41%; other valid orders of
summation reached 0.46%.
"""

MAX_UNSPLIT = 128
"""Maximum length of an axis (such as heads) that is split into single indices."""

NUM_PIECES = 16
"""Number of pieces of a longer axis.

With 64 pieces of 1,000 tokens, valid kernels have errors of up to 0.45%, because gradients of a
segment's first tokens nearly cancel. With 8 pieces, errors in late keys are barely visible.
"""

MIN_RELATIVE_NORM = 0.01
"""Minimum norm of a piece, relative to the average. Pieces below it are zero or close to zero."""

NO_AUTOTUNE_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": False,
}
"""XLA options without autotuning, which times tens of tilings per GPU matmul."""


def select_kernel(
    make_trials: Callable[[str], Sequence[Trial]],
    candidates: Mapping[str, Callable[[], Callable[..., Any]]],
    reference: Callable[..., Any],
    *,
    config_key: str = "",
) -> SelectedKernel:
    """Return the first candidate kernel that passes; see `models.kernel_check.select_kernel`."""
    kernel_checks: list[KernelCheck] = []
    for name, load in candidates.items():
        for trial in make_trials(name):
            is_sound, finding = _check_kernel(trial, load)
            if distributed.any_process(not is_sound) and is_sound:
                is_sound, finding = False, "fails in another process of this run"
            check = KernelCheck(
                operation=trial.operation, kernel=name, is_sound=is_sound, finding=finding
            )
            kernel_checks.append(check)
            if not is_sound:
                break
        if not kernel_checks or kernel_checks[-1].is_sound:
            return SelectedKernel(name=name, function=load(), kernel_checks=tuple(kernel_checks))
        if config_key:
            raise ValueError(
                f"{config_key} is {name!r}, which fails its check before the run: "
                f"{kernel_checks[-1].operation}: {kernel_checks[-1].finding}. Set it to 'auto', "
                "which selects the next kernel that passes, or to 'xla'."
            )
    return SelectedKernel(name="xla", function=reference, kernel_checks=tuple(kernel_checks))


def _run_trial(
    trial: Trial, function: Callable[..., Any], *, use_float32: bool = False
) -> list[np.ndarray]:
    """Compile and run a trial. `use_float32` casts the rounded inputs to float32."""
    arrays = []
    for x in trial.arrays:
        is_wide = x.dtype == np.float32
        rounded = jax.device_put(x.astype(trial.dtype) if is_wide else x, trial.device)
        arrays.append(rounded.astype(jnp.float32) if use_float32 and is_wide else rounded)
    program = jax.jit(partial(trial.run, function)).lower(*arrays)
    results = program.compile(compiler_options=NO_AUTOTUNE_OPTIONS)(*arrays)
    return [np.asarray(x, np.float64) for x in results]


def _check_kernel(trial: Trial, load: Callable[[], Callable[..., Any]]) -> tuple[bool, str]:
    """Compare a kernel with XLA; return whether they agree, and a description of the errors."""
    # Skip a kernel that does not compile or run; end the run if a kernel breaks the device.
    start = time.monotonic()
    try:
        results = _run_trial(trial, load())
    except Interrupted:
        raise
    except Exception as error:
        _check_device(trial, error)
        return False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    seconds = time.monotonic() - start
    # Errors are relative to XLA in float32. XLA's rounding in the run's dtype sets the bounds.
    itemsize = jnp.dtype(trial.dtype).itemsize
    with jax.default_matmul_precision("highest"):
        exact_results = _run_trial(trial, trial.reference, use_float32=True)
    rounded = _run_trial(trial, trial.reference)  # its rounding error is typical of valid kernels
    errors = []
    for name, actual, exact, baseline in zip(
        trial.names, results, exact_results, rounded, strict=True
    ):
        if actual.shape != exact.shape:
            return False, f"{name}: shape {actual.shape}; XLA's is {exact.shape}"
        if not np.isfinite(actual).all():
            return False, f"{name}: {np.sum(~np.isfinite(actual))} of {actual.size} are not finite"
        # Bounds: twice the rounding error in total and per piece, four times it for a vector.
        off = RelativeErrors.from_arrays(actual, exact)
        rounding = RelativeErrors.from_arrays(baseline, exact)
        bound = max(2 * rounding.total, ERROR_FLOOR[itemsize])
        if off.total > bound:
            return False, f"{name}: off by {off.total:.2%}; rounding explains at most {bound:.2%}"
        bound = max(4 * rounding.worst, WORST_ERROR_FLOOR)
        if off.worst > bound:
            return False, (
                f"{name}: one vector is off by {off.worst:.1%}; rounding explains at most "
                f"{bound:.1%}"
            )
        bounds = {k: max(2 * x, PIECE_ERROR_FLOOR[itemsize]) for k, x in rounding.pieces.items()}
        piece = max(bounds, key=lambda x: off.pieces[x] - bounds[x])
        if off.pieces[piece] > bounds[piece]:
            return False, (
                f"{name}[{piece}]: off by {off.pieces[piece]:.2%}; rounding explains at most "
                f"{bounds[piece]:.2%}"
            )
        errors.append(f"{name} {off.total:.2%}")
    return True, f"off by {', '.join(errors)}; compiled and run in {seconds:.1f} s"


class RelativeErrors(NamedTuple):
    """Relative errors of an array of vectors `[..., values]`."""

    total: float  # over the complete array
    worst: float  # of the worst vector, relative to the average norm
    pieces: dict[str, float]  # relative to the norm of the piece; keys are NumPy slices

    @classmethod
    def from_arrays(cls, actual: np.ndarray, exact: np.ndarray) -> RelativeErrors:
        """Compute the total error, the error of the worst vector, and the error of each piece.

        Pieces reveal errors in a single head, or in late keys, which have small gradients.
        """
        off, square = (np.square(x).sum(axis=-1) for x in (actual - exact, exact))
        baseline = square.mean() or 1.0
        pieces = {}
        for axis, size in enumerate(off.shape):
            index_ranges, offs, squares = (
                np.array_split(x, size if size <= MAX_UNSPLIT else NUM_PIECES)
                for x in (np.arange(size), *(np.moveaxis(x, axis, 0) for x in (off, square)))
            )
            for indices, x, magnitude in zip(index_ranges, offs, squares, strict=True):
                length = max(magnitude.mean(), MIN_RELATIVE_NORM**2 * baseline)
                piece = f"{':, ' * axis}{indices[0]}:{indices[-1] + 1}"
                pieces[piece] = float(np.sqrt(x.mean() / length))
        return cls(
            float(np.sqrt(off.mean() / baseline)), float(np.sqrt(off.max() / baseline)), pieces
        )


def _check_device(trial: Trial, failure: Exception) -> None:
    """Raise a RuntimeError if a kernel broke the device, for example with an invalid GPU write."""
    try:
        np.asarray(jax.device_put(np.ones(2), trial.device) + 1)
    except Exception as error:
        raise RuntimeError(
            f"a kernel of the {trial.operation} failed ({failure}) and left {trial.device} unable "
            "to compute anything; restart with config.model.attention and config.model.experts "
            "set to 'xla'."
        ) from error
