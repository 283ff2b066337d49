"""Compare mathematical expressions in a worker process."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Sequence


def is_equal_to_any(
    answer: str, truths: Sequence[str], *, deadline_s: float, memory_mib: int
) -> bool:
    """Return True if an answer in LaTeX equals one of the accepted answers.

    SIGPROF kills the process after `deadline_s` seconds of CPU time. Raising an exception would not
    interrupt a single long operation on large integers.
    """
    _init_worker(memory_mib)
    signal.setitimer(signal.ITIMER_PROF, deadline_s)
    try:
        return any(_load_comparison()(answer, truth) for truth in truths)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@functools.cache
def _init_worker(memory_mib: int) -> None:
    """Load math-verify, limit this process's memory, and arrange to exit with the parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _load_comparison()("x", "x")  # load all modules before limiting memory
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))


@functools.cache
def _load_comparison() -> Callable[[str, str], bool]:
    """Return a function that tests whether two expressions are mathematically equal.

    Expressions must parse completely. By default, math-verify also searches the text for a number
    and would accept an answer with several numbers. Its time limits are disabled, since they need
    signal handlers, which do not run during a single operation.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def parse_latex(text: str) -> list:
        return parse(
            f"\\boxed{{{text}}}",
            extraction_config=latex,
            fallback_mode="no_fallback",
            parsing_timeout=None,
            raise_on_error=True,
        )

    def is_equal(answer: str, truth: str) -> bool:
        return bool(
            verify(
                parse_latex(truth), parse_latex(answer), timeout_seconds=None, raise_on_error=True
            )
        )

    return is_equal
