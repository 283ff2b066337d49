"""Return of freed host memory to the operating system, for runs on a CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""JAX event with the duration of a compilation."""

LONG_COMPILE_S = 0.5
"""Minimum compilation time in seconds. Shorter compilations leave little memory to return."""


def trim_memory() -> None:
    """Make glibc return freed memory to the operating system.

    After a compilation, this returns most of the compiler's memory.
    """
    _load_malloc_trim()(0)


@functools.cache
def _load_malloc_trim() -> Callable[[int], Any]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return lambda _: None


@functools.cache
def enable_memory_trimming() -> None:
    """Call `trim_memory` after each long compilation from now on."""

    def on_event(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT and duration_secs > LONG_COMPILE_S:
            trim_memory()

    jax.monitoring.register_event_duration_secs_listener(on_event)
