"""Return of freed host memory to the operating system, for runs on a CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX event with the duration of a compilation."""

LONG_COMPILE_S = 0.5
"""Seconds. A shorter compilation leaves little memory to return."""


def give_back() -> None:
    """Return the freed memory that glibc keeps to the operating system.

    After a compilation, this is most of what the compiler used.
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
    """Call `give_back` after each long compilation from now on."""

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED and duration_secs > LONG_COMPILE_S:
            give_back()

    jax.monitoring.register_event_duration_secs_listener(listen)
