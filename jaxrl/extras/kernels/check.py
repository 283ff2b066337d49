"""Numerical self-test of kernels against XLA at startup."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.architecture import KernelCheck
from jaxrl.models.kernel_check import Choice, Trial
from jaxrl.runtime import distributed
from jaxrl.runtime.preemption import Interrupted

LEAST_ERROR = {2: 0.005, 4: 0.001}
"""Relative errors that always pass, by bytes per value: the rounding of bfloat16 and of TF32."""

LEAST_WORST = 0.05
"""Like `LEAST_ERROR`, for the worst vector."""

LEAST_OF_PIECE = {2: 0.009, 4: 0.002}
"""Like `LEAST_ERROR`, for each piece. Over many random inputs, our kernels' bfloat16 error was at
most 0.41%; other valid orders of summation reached 0.46%.
"""

MAX_ALONE = 128
"""Maximum length of an axis, such as heads, of which each index is a piece."""

CUTS = 16
"""Number of pieces of a longer axis. With 64 pieces of 1,000 tokens, valid kernels are off by up to
0.45%, since gradients of a segment's first tokens nearly cancel; with 8, an error in only the late
keys hardly shows.
"""

LEAST_LENGTH = 0.01
"""Minimum vector length assumed for a piece, relative to the average; a piece may be all zeros."""

LATE_S = 120.0
"""Seconds after which a warning reports that a check is still running: a kernel may hang."""

UNTUNED: dict[str, str | bool] = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": False,
}
"""XLA options that skip compiling and timing tens of tilings for each product on a GPU."""


def select_kernel(
    make_trials: Callable[[str], Sequence[Trial]],
    line: Mapping[str, Callable[[], Callable[..., Any]]],
    reference: Callable[..., Any],
    *,
    named_by: str = "",
) -> Choice:
    """Try the candidate kernels in order; see `models.kernel_check.select_kernel`."""
    kernel_checks: list[KernelCheck] = []
    for name, load in line.items():
        for trial in make_trials(name):
            with _told_when_late(trial, name):
                is_sound, finding = _examine(trial, load)
            if distributed.any_process(not is_sound) and is_sound:
                is_sound, finding = False, "fails in another process of this run"
            verdict = KernelCheck(
                operation=trial.operation, kernel=name, is_sound=is_sound, finding=finding
            )
            kernel_checks.append(verdict)
            if not is_sound:
                break
        if not kernel_checks or kernel_checks[-1].is_sound:
            return Choice(name=name, function=load(), kernel_checks=tuple(kernel_checks))
        if named_by:
            raise ValueError(
                f"{named_by} is {name!r}, which fails its check before the run: "
                f"{kernel_checks[-1].operation}: {kernel_checks[-1].finding}. Set it to 'auto', "
                "which takes the next kernel that passes, or to 'xla'."
            )
    return Choice(name="xla", function=reference, kernel_checks=tuple(kernel_checks))


@contextlib.contextmanager
def _told_when_late(trial: Trial, kernel: str) -> Iterator[None]:
    def tell() -> None:
        print(
            f"warning: {trial.operation}: the check of {kernel} still runs after {LATE_S:.0f} s. "
            "A kernel that hangs cannot be stopped: if this continues, end the run and set "
            "config.model.attention or config.model.experts to 'xla'.",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(LATE_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _results(
    trial: Trial, function: Callable[..., Any], *, widens: bool = False
) -> list[np.ndarray]:
    """Compile and run the operation; `widens` runs it in float32 on the same rounded values."""
    placed = []
    for x in trial.arrays:
        is_wide = x.dtype == np.float32
        rounded = jax.device_put(x.astype(trial.dtype) if is_wide else x, trial.device)
        placed.append(rounded.astype(jnp.float32) if widens and is_wide else rounded)
    program = jax.jit(partial(trial.run, function)).lower(*placed)
    results = program.compile(compiler_options=UNTUNED)(*placed)
    return [np.asarray(x, np.float64) for x in results]


def _examine(trial: Trial, load: Callable[[], Callable[..., Any]]) -> tuple[bool, str]:
    """Return whether a kernel agrees with XLA, and the measurements."""
    # A kernel that fails to compile or run is not used; one that breaks the device ends the run.
    begin = time.monotonic()
    try:
        results = _results(trial, load())
    except Interrupted:
        raise
    except Exception as error:
        _expect_sound_device(trial, error)
        return False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    seconds = time.monotonic() - begin
    # Errors are relative to XLA in float32. XLA's rounding in the run's dtype sets the bounds.
    itemsize = jnp.dtype(trial.dtype).itemsize
    with jax.default_matmul_precision("highest"):
        in_float32 = _results(trial, trial.reference, widens=True)
    rounded = _results(trial, trial.reference)  # the rounding error that any kernel may have
    errors = []
    for name, got, exact, usual in zip(trial.names, results, in_float32, rounded, strict=True):
        if got.shape != exact.shape:
            return False, f"{name}: of shape {got.shape}, where XLA's is {exact.shape}"
        if not np.isfinite(got).all():
            return False, f"{name}: {np.sum(~np.isfinite(got))} of {got.size} are not finite"
        # A kernel may err twice as much in total and in each piece, four times in one vector.
        off, rounding = Errors.of(got, exact), Errors.of(usual, exact)
        bound = max(2 * rounding.whole, LEAST_ERROR[itemsize])
        if off.whole > bound:
            return False, f"{name}: off by {off.whole:.2%}, where at most {bound:.2%} is rounding"
        bound = max(4 * rounding.worst, LEAST_WORST)
        if off.worst > bound:
            return False, (
                f"{name}: one vector is off by {off.worst:.1%}, where at most {bound:.1%} is "
                "rounding"
            )
        bounds = {k: max(2 * one, LEAST_OF_PIECE[itemsize]) for k, one in rounding.pieces.items()}
        piece = max(bounds, key=lambda one: off.pieces[one] - bounds[one])
        if off.pieces[piece] > bounds[piece]:
            return False, (
                f"{name}[{piece}]: off by {off.pieces[piece]:.2%}, where at most "
                f"{bounds[piece]:.2%} is rounding"
            )
        errors.append(f"{name} {off.whole:.2%}")
    return True, f"off by {', '.join(errors)}; compiled and run in {seconds:.1f} s"


class Errors(NamedTuple):
    """Relative errors of vectors `[..., values]`."""

    whole: float  # of the complete array
    worst: float  # of the worst vector, relative to the average length
    pieces: dict[str, float]  # per axis, relative to the piece's length; keys are NumPy slices

    @classmethod
    def of(cls, got: np.ndarray, exact: np.ndarray) -> Errors:
        """Compute the errors, also by piece: one of ten heads or late keys hardly affect the total.

        Late keys have short gradients, since few queries read them.
        """
        off, square = (np.square(x).sum(axis=-1) for x in (got - exact, exact))
        usual = square.mean() or 1.0
        pieces = {}
        for axis, size in enumerate(off.shape):
            places, offs, squares = (
                np.array_split(x, size if size <= MAX_ALONE else CUTS)
                for x in (np.arange(size), *(np.moveaxis(x, axis, 0) for x in (off, square)))
            )
            for place, one, own in zip(places, offs, squares, strict=True):
                length = max(own.mean(), LEAST_LENGTH**2 * usual)
                piece = f"{':, ' * axis}{place[0]}:{place[-1] + 1}"
                pieces[piece] = float(np.sqrt(one.mean() / length))
        return cls(float(np.sqrt(off.mean() / usual)), float(np.sqrt(off.max() / usual)), pieces)


def _expect_sound_device(trial: Trial, failure: Exception) -> None:
    """Raise if a kernel has broken its device, as an out-of-bounds write can on a GPU."""
    try:
        np.asarray(jax.device_put(np.ones(2), trial.device) + 1)
    except Exception as error:
        raise RuntimeError(
            f"a kernel of the {trial.operation} failed ({failure}) and left {trial.device} unable "
            "to compute anything; start again with config.model.attention and config.model.experts "
            "set to 'xla'."
        ) from error
