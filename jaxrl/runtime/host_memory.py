"""Return of freed host memory, which is a CPU's, to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX event with the duration of a compilation."""

LONG_COMPILE_S = 0.5
"""A shorter compilation leaves little behind."""


def give_back() -> None:
    """Return freed memory to the system, as far as glibc keeps it.

    After a compilation that is most of what the compiler took.
    """
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], Any]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return lambda _: None


@functools.cache
def give_back_after_compiling() -> None:
    """Return memory to the system after each long compilation from now on."""

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED and duration_secs > LONG_COMPILE_S:
            give_back()

    jax.monitoring.register_event_duration_secs_listener(listen)
