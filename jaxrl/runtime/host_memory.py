"""Return of freed host memory, which is a CPU's, to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"
"""The event of JAX that tells how long a program was compiled."""

LONG_COMPILE_S = 0.5
"""A shorter compilation leaves little behind."""


def give_back() -> None:
    """Gives memory that nothing uses any more back to the system.

    The C library keeps what was freed in small pieces, for later. What is never given back counts
    as this process's: of a compiler that is most of what it took. Only glibc can be asked.
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
    """Gives memory back after each long compilation from now on."""

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED and duration_secs > LONG_COMPILE_S:
            give_back()

    jax.monitoring.register_event_duration_secs_listener(listen)
