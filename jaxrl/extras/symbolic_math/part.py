"""Mathematics by its meaning: math-verify, in worker processes that are bounded and replaced.

What value comparison (`math_answers`) decides, it decides. The rest, as roots, sets, intervals,
matrices and formulas, goes to a worker.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import lru_cache, partial

from jaxrl.envs.base import Finished, Task
from jaxrl.envs.rewards.combiner import Call, Measured
from jaxrl.envs.rewards.math_answers import join_thousands, value_equal
from jaxrl.envs.rewards.rules import last_boxed
from jaxrl.utils.worker_pool import WorkerPool

MAX_CHARACTERS = 2000
"""A longer answer equals only what it equals by value; it is not sent to a worker."""

_CACHED = 20_000  # questions


class MathVerify:
    """The reward part `math_verify`: 1 where the final answer equals an accepted one, else 0.

    The final answer that the environment read is compared. An abstention is 0. An answer that
    takes too long, or more memory than allowed, or that ends two workers, is not shown to be equal:
    it is 0 too and counted (`undecided`), as it is the answer that did so. Were it an environment
    error, a policy could leave the statistics of its group by writing what hangs. A worker that
    cannot start, or gets no processor for long, is our failure and an environment error.
    """

    is_async = False

    def __init__(self, *, deadline_s: float, memory_mib: int, workers: int) -> None:
        """Starts no process yet.

        Args:
            deadline_s: computing time a question may take, in seconds.
            memory_mib: of each worker.
            workers: at most so many processes.

        Raises:
            ImportError: math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("math-verify is not installed; pip install -e '.[math]'")
        self.pool = WorkerPool("math", deadline_s=deadline_s, memory_mib=memory_mib, size=workers)
        self._ask = lru_cache(maxsize=_CACHED)(self._compared)

    def calls(self, group: Sequence[Finished]) -> list[Call]:
        """One for each episode."""
        return [
            Call(members=(index,), make=partial(self.measure, one), read=lambda value: [value])
            for index, one in enumerate(group)
        ]

    def lacks(self, task: Task) -> list[str]:
        """Accepted answers, where a task has none."""
        return [] if task.answers else ["answers"]

    def measure(self, one: Finished) -> Measured:
        """Measures an episode's score."""
        answer = "" if one.reward.is_abstention else one.reward.final_answer.strip()
        equal = self.is_equal(answer, one.episode.task.answers) if answer else False
        return Measured(score=float(equal is True), others={"undecided": float(equal is None)})

    def is_equal(self, answer: str, truths: Sequence[str]) -> bool | None:
        """Returns True if an answer equals an accepted one; None where limits end the comparison.

        Raises:
            WorkerLostError: no worker can be started.
            TimeoutError: a worker got no processor.
        """
        decided = [value_equal(answer, truth) for truth in truths]
        if True in decided:
            return True
        open_ = tuple(_inner(t) for t, known in zip(truths, decided, strict=True) if known is None)
        if not open_ or len(answer) > MAX_CHARACTERS:
            return False
        return self._ask(_inner(answer), open_)

    def _compared(self, answer: str, truths: Sequence[str]) -> bool | None:
        verdict = self.pool.ask({"answer": answer, "truths": list(truths)})
        return bool(verdict["equal"]) if "equal" in verdict else None


def _inner(text: str) -> str:
    """An expression without what is around it."""
    boxed = last_boxed(text)
    text = (text if boxed is None else boxed).strip().rstrip(".")
    for mark in ("$$", "$"):
        if len(text) >= 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)].strip()
    return join_thousands(text)
