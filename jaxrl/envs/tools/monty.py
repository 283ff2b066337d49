"""Python tool that runs the model's code in Monty, a sandboxed interpreter."""

from __future__ import annotations

import datetime
import importlib
import weakref
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.tools.base import MAX_ERROR, PYTHON_DESCRIPTION, Tool


class MontyTool(Tool):
    """Python tool based on Monty (https://github.com/pydantic/monty), an interpreter in Rust.

    Code runs in worker processes with time and memory limits, and without access to files, the
    network, the environment or other programs. Each snippet starts with a clean state. Clock,
    sleep and random numbers are fixed, so output is reproducible. Parts of the standard library are
    available, but no packages.
    """

    name = "python"
    blank = "No output"
    argument = "code"
    description = PYTHON_DESCRIPTION
    max_threads = 8

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        max_memory: int = 64 * 2**20,
        max_output: int = 100_000,
        max_workers: int = max_threads,
    ) -> None:
        """Start the worker pool.

        Args:
            timeout_s: Timeout of a snippet in seconds.
            max_memory: Memory limit of a snippet in bytes.
            max_output: Output limit of a snippet in bytes.
            max_workers: Maximum number of worker processes.

        Raises:
            ImportError: pydantic-monty is not installed.
        """
        try:
            self._monty: Any = importlib.import_module("pydantic_monty")
        except ImportError as error:
            raise ImportError(
                "the Python tool needs pydantic-monty; pip install 'jaxrl[python-tool]'."
            ) from error
        self._max_output = max_output
        self._limits = {"max_feed_duration_secs": timeout_s, "max_memory": max_memory}
        self._os_policy = {
            "datetime": datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC),
            "sleep": "zero",
            "random_start": {"seed": 0},
        }
        # The interpreter enforces the limits; a worker that exceeds them anyway is killed.
        self._pool = self._monty.Monty(
            min_processes=1,
            max_processes=max_workers,
            request_timeout=timeout_s + 5.0,
        )
        self._pool.__enter__()
        weakref.finalize(self, self._pool.__exit__, None, None, None)

    def run(self, code: str, /) -> str:
        """Run code and return its output, or the type and text of its error.

        If the worker dies, the code is run again in another worker, since the system may have
        killed the first, for example when memory ran out. If the second worker also dies, the error
        is attributed to the code.
        """
        try:
            for _ in range(2):
                with self._pool.checkout(limits=self._limits, os_policy=self._os_policy) as session:
                    stdout = self._monty.CollectString(self._max_output)
                    try:
                        session.feed_run(code, print_callback=stdout)
                    except self._monty.MontyCrashedError as error:
                        if error.timed_out:
                            return _TIMEOUT
                    except (self._monty.MontyRuntimeError, self._monty.MontySyntaxError) as error:
                        # Omit the traceback, which repeats long lines of code.
                        message = _truncate_error(error.display("type-msg")).rstrip()
                        # Monty's messages contain measurements, which are not reproducible.
                        fixed_messages = {"TimeoutError": _TIMEOUT, "MemoryError": _MEMORY}
                        return fixed_messages.get(message.partition(":")[0], message)
                    else:
                        return stdout.output.strip("\n") or self.blank
        except (self._monty.MontyError, RuntimeError, OSError) as error:
            raise ToolError(f"the Python sandbox failed: {_truncate_error(str(error))}") from error
        return "SystemError: the interpreter crashed"


def _truncate_error(error: str) -> str:
    return error if len(error) <= MAX_ERROR else error[:MAX_ERROR] + " .."


_TIMEOUT, _MEMORY = "TimeoutError: time limit exceeded", "MemoryError: limit exceeded"
