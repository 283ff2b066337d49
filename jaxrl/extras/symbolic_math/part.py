"""Symbolic comparison of answers with math-verify, in worker processes with limits.

`math_answers` first compares numerical values. Workers compare only the remaining answers, such as
roots, sets, intervals, matrices and formulas.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jaxrl.envs.base import ScoredEpisode
from jaxrl.envs.rewards.combiner import AnswerPart, RewardPartResult
from jaxrl.envs.rewards.math_answers import compare_values, remove_thousands_separators
from jaxrl.envs.rewards.rules import extract_last_boxed
from jaxrl.extras.symbolic_math.worker import is_equal_to_any

MAX_ANSWER_CHARS = 2000
"""Maximum length of an answer that is sent to a worker, in characters."""

_CACHE_SIZE = 20_000
_EXTRA_WAIT_S = 60.0
_WAIT_FACTOR = 20.0
"""Parameters of a call's timeout, `_EXTRA_WAIT_S + _WAIT_FACTOR * deadline_s` seconds."""


class WorkerLostError(RuntimeError):
    """Error raised if a worker process cannot be started or does not respond."""


class MathVerify(AnswerPart):
    """Reward part `math_verify`: 1 if the final answer equals an accepted answer, else 0.

    An abstention scores 0. An answer that exceeds the time or memory limit, or crashes the worker,
    also scores 0; the metric `undecided` counts such answers. If they caused environment errors, a
    policy could avoid a low reward with an answer that hangs. If a worker cannot start or does not
    respond, the episode ends with an environment error.
    """

    def __init__(self, *, deadline_s: float, memory_mib: int, workers: int) -> None:
        """Store the limits. Workers start at the first comparison.

        Args:
            deadline_s: Limit on the CPU time of a comparison, in seconds.
            memory_mib: Memory limit of each worker, in MiB.
            workers: Maximum number of worker processes.

        Raises:
            ImportError: math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("math-verify is not installed; pip install -e '.[math]'")
        self._limits = {"deadline_s": deadline_s, "memory_mib": memory_mib}
        self._wait_s = _WAIT_FACTOR * deadline_s + _EXTRA_WAIT_S
        self._num_workers = workers
        self._pool: Any = None
        self._lock = threading.Lock()
        self._cached_compare = lru_cache(maxsize=_CACHE_SIZE)(self._compare_in_worker)

    def score_answer(self, sample: ScoredEpisode) -> RewardPartResult:
        """Score the final answer of an episode."""
        answer = "" if sample.reward.is_abstention else sample.reward.final_answer.strip()
        equal = self.is_equal(answer, sample.episode.task.answers) if answer else False
        return RewardPartResult(
            score=float(equal is True), extra_values={"undecided": float(equal is None)}
        )

    def is_equal(self, answer: str, truths: Sequence[str]) -> bool | None:
        """Return True if an answer equals an accepted answer; None if a limit was exceeded.

        Raises:
            WorkerLostError: A worker cannot be started or does not respond.
        """
        verdicts = [compare_values(answer, truth) for truth in truths]
        if True in verdicts:
            return True
        undecided = tuple(
            _strip_math_notation(t)
            for t, verdict in zip(truths, verdicts, strict=True)
            if verdict is None
        )
        if not undecided or len(answer) > MAX_ANSWER_CHARS:
            return False
        return self._cached_compare(_strip_math_notation(answer), undecided)

    def _compare_in_worker(self, answer: str, truths: Sequence[str]) -> bool | None:
        from pebble import ProcessExpired

        for _ in range(2):  # retry once: the system may have killed the first worker
            pool = self._get_pool()
            try:
                call = pool.schedule(
                    is_equal_to_any,
                    args=[answer, truths],
                    kwargs=self._limits,
                    timeout=self._wait_s,
                )
                return bool(call.result(2 * self._wait_s))
            except ProcessExpired as error:
                if error.exitcode == -signal.SIGPROF:
                    return None
            except (ImportError, TimeoutError) as error:
                raise WorkerLostError(
                    f"no math_verify worker responds ({error}); is the extra `math` installed?"
                ) from error
            except Exception:  # MemoryError and RecursionError too
                if pool.active:
                    return None
        return None

    def _get_pool(self) -> Any:
        """Return the worker pool, or a new pool if the old pool is broken."""
        from pebble import ProcessPool

        with self._lock:
            if self._pool is None or not self._pool.active:
                self.close()
                spawn_context = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(max_workers=self._num_workers, context=spawn_context)
            return self._pool

    def close(self) -> None:
        """Stop the workers, which otherwise stop at exit."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()


def _strip_math_notation(text: str) -> str:
    r"""Strip `\boxed{}`, dollar signs, a final period and thousands separators."""
    boxed = extract_last_boxed(text)
    text = (text if boxed is None else boxed).strip().rstrip(".")
    for mark in ("$$", "$"):
        if len(text) >= 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)].strip()
    return remove_thousands_separators(text)
