"""Detection and explanation of steps that learn nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxrl.objectives.metrics import Metric
from jaxrl.types import Trajectory
from jaxrl.utils.text import escape_control_chars

_MAX_ERROR_CHARS = 200  # characters of an error message in a warning


_REMEDY = (
    "The policy and the tasks are not the cause: fix what the error names, then run the same "
    "command again. Finished work is saved."
)


class AllEpisodesFailedError(RuntimeError):
    """Error raised when all episodes of consecutive batches or of an evaluation fail."""


@dataclasses.dataclass(kw_only=True)
class FailureCounter:
    """Counter of consecutive batches in which every episode failed; persists across restarts."""

    limit: int  # number of failed batches after which the run ends; 0 for no limit
    log: Callable[[str], None]
    num_batches: int

    def record_batch(self, batch: Sequence[Trajectory]) -> None:
        """Increment the counter if every episode of a batch failed; otherwise, reset it.

        Raises:
            AllEpisodesFailedError: The limit is reached.
        """
        if any(trajectory.is_scored for trajectory in batch):
            self.num_batches = 0
            return
        self.num_batches += 1
        error = describe_first_error(batch)
        self.log(
            f"warning: each of the {len(batch)} episodes of this batch ended in an environment "
            f"error; the first: {error}"
        )
        if 0 < self.limit <= self.num_batches:
            raise AllEpisodesFailedError(
                f"every episode of {self.num_batches} batches in a row "
                f"(config.rollout.max_failed_steps) ended in an environment error; the last "
                f"batch's first: {error}. {_REMEDY}"
            )

    def check_suites(self, errors: Mapping[str, str]) -> None:
        """Raise an error if every episode of a suite in the final evaluation failed.

        Args:
            errors: First error of each suite in which every episode failed.

        Raises:
            AllEpisodesFailedError: `errors` is not empty, and the limit is not 0.
        """
        if errors and self.limit:
            raise AllEpisodesFailedError(
                f"every episode of the evaluation ({', '.join(errors)}) ended in an environment "
                f"error; the first: {next(iter(errors.values()))}. {_REMEDY}"
            )


def describe_first_error(trajectories: Iterable[Trajectory]) -> str:
    """Return the first environment error as one short line; "" if there is none."""
    return next((truncate_to_line(t.error) for t in trajectories if not t.is_scored), "")


def truncate_to_line(text: str) -> str:
    """Shorten text to a single line of at most about `_MAX_ERROR_CHARS` characters."""
    line = " ".join(escape_control_chars(text).split())
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[:_MAX_ERROR_CHARS]} …"


def has_updated_params(update_metrics: Sequence[Mapping[str, Metric]]) -> bool:
    """Return True if any optimizer step with a nonzero gradient was applied."""
    return any(
        0 < float(m["grad_norm"].value) < math.inf and not m["skipped"].value
        for m in update_metrics
    )


def explain_no_learning(
    trajectories: Sequence[Trajectory], update_metrics: Sequence[Mapping[str, Metric]]
) -> str | None:
    """Explain why a step learned nothing; return None if it learned or all answers were correct.

    `FailureCounter` reports batches in which all episodes failed.
    """
    scored = [t for t in trajectories if t.is_scored]
    if not scored:
        return None
    if not any(t.has_signal for t in scored):
        if all(t.is_correct for t in scored):
            return None  # nothing is wrong
        rewards = [t.reward for t in scored]
        spread = f"{min(rewards):.3g}"
        spread += f" to {max(rewards):.3g}" if min(rewards) != max(rewards) else ""
        return f"every advantage was 0, since all compared values were equal (rewards {spread})"
    if not update_metrics:
        return "no trajectory has a loss (config.filter.trajectories excludes all of them)"
    if all(m["skipped"].value for m in update_metrics):
        return "its update was skipped, since the gradient was not finite"
    return None
