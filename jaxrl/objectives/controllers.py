"""What a run learns about itself between steps: coefficients, targets, gates, difficulties.

Every controller is a frozen dataclass of plain JSON values, which a checkpoint stores as it is.
`init` gives the first state and `update` the next one; settings are arguments, not state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BUCKETS = ("easy", "medium", "hard")
"""Difficulties of tasks, as the current policy finds them."""

KL_BUDGETS: Mapping[str, float] = {"easy": 0.05, "medium": 0.1, "hard": 0.2}
"""ARES's bounds on the KL divergence to the reference, in nats, by difficulty."""


def difficulty(num_correct: int, num_samples: int) -> str:
    """How hard a task is by its group: easy from 2/3 correct, medium from 1/3, else hard.

    ARES (https://arxiv.org/abs/2510.08457). Counts rather than a ratio, so that 2 of 3 is exact.
    """
    if not 0 <= num_correct <= num_samples or num_samples == 0:
        raise ValueError(f"{num_correct} of {num_samples} samples are correct; expected a share.")
    if 3 * num_correct >= 2 * num_samples:
        return "easy"
    return "medium" if 3 * num_correct >= num_samples else "hard"


@dataclass(frozen=True)
class DifficultyBuckets:
    """The difficulty of every task as it was when last sampled."""

    buckets: dict[str, str] = field(default_factory=dict)  # by task id

    @classmethod
    def init(cls) -> DifficultyBuckets:
        """No task is known."""
        return cls()

    def update(
        self, task_ids: Sequence[str], num_correct: Sequence[int], num_samples: Sequence[int]
    ) -> DifficultyBuckets:
        """After one batch of groups; groups of the same task are counted together."""
        counts: dict[str, tuple[int, int]] = {}
        for task_id, right, total in zip(task_ids, num_correct, num_samples, strict=True):
            before_right, before_total = counts.get(task_id, (0, 0))
            counts[task_id] = before_right + int(right), before_total + int(total)
        found = {task_id: difficulty(*count) for task_id, count in counts.items()}
        return DifficultyBuckets(self.buckets | found)


@dataclass(frozen=True)
class EntropyCoefficients:
    """How strongly, and around what count, `shaping.entropy_reward` shapes each difficulty."""

    alphas: dict[str, float]  # in units of reward, by bucket
    targets: dict[str, int]  # tokens of high window entropy; a bucket not seen yet has none

    @classmethod
    def init(cls, *, alpha: float = 0.5) -> EntropyCoefficients:
        """The same coefficient for every bucket, and no targets."""
        return cls(dict.fromkeys(BUCKETS, alpha), {})

    def update(
        self,
        mean_counts: Sequence[float],
        buckets: Sequence[str],
        *,
        rate: float = 0.05,
        max_alpha: float = 2.0,
    ) -> EntropyCoefficients:
        """After one batch of groups.

        ARES (https://arxiv.org/abs/2510.08457): alpha follows the mean count less the target,
        upwards for easy and medium tasks, where it scales a penalty, and downwards for hard ones,
        where it scales a bonus. Then the mean, rounded, is the new target. The released code moves
        the target first, which leaves alpha only the rounding to follow.

        A bucket that is absent stays as it is; one without a target only gets its target.

        Args:
            mean_counts: tokens of high window entropy, the mean over each group.
            buckets: the difficulty of each group's task.
            rate: change of alpha per token of difference.
            max_alpha: alpha stays between 0 and this.
        """
        alphas, targets = dict(self.alphas), dict(self.targets)
        for bucket in BUCKETS:
            pairs = zip(mean_counts, buckets, strict=True)
            values = [float(count) for count, place in pairs if place == bucket]
            if not values:
                continue
            mean = math.fsum(values) / len(values)
            if bucket in targets:
                step = rate * (mean - targets[bucket]) * (-1 if bucket == "hard" else 1)
                alphas[bucket] = min(max(alphas[bucket] + step, 0.0), max_alpha)
            targets[bucket] = round(mean)
        return EntropyCoefficients(alphas, targets)


@dataclass(frozen=True)
class KLBudget:
    """A multiplier of the KL coefficient for each difficulty, by dual ascent on a budget."""

    multipliers: dict[str, float]  # by bucket

    @classmethod
    def init(cls) -> KLBudget:
        """A multiplier of 1 for every bucket."""
        return cls(dict.fromkeys(BUCKETS, 1.0))

    def update(
        self,
        kls: Mapping[str, float],
        *,
        budgets: Mapping[str, float] = KL_BUDGETS,
        rate: float = 0.01,
    ) -> KLBudget:
        """`max(0, multiplier + rate * (kl - budget))`; buckets without a measurement stay.

        ARES (https://arxiv.org/abs/2510.08457). The multiplier is applied to the coefficient that
        was configured; the released code compounds it.

        Args:
            kls: nats, by bucket: the mean over its trajectories of their mean per token. NaN is
                no measurement.
            budgets: nats, by bucket.
            rate: change of a multiplier per nat.
        """
        moved = {
            bucket: max(0.0, self.multipliers[bucket] + rate * (float(kl) - budgets[bucket]))
            for bucket, kl in kls.items()
            if not math.isnan(kl)
        }
        return KLBudget(self.multipliers | moved)


@dataclass(frozen=True)
class StageGate:
    """Whether training has left the early stage, in which correctness still rises."""

    best: float | None = None  # highest validation so far; None: there was none yet
    tolerance: int = 0  # validations below the best of their time
    is_late: bool = False

    @classmethod
    def init(cls) -> StageGate:
        """Early, with nothing seen."""
        return cls()

    def update(self, value: float, *, max_tolerance: int = 5) -> StageGate:
        """After one validation.

        BAPO (https://arxiv.org/abs/2601.11037). Validations below the best are counted over the
        whole run, not in a row; one more than `max_tolerance` of them is the end of the early
        stage, for good.

        Args:
            value: mean correctness, without any bonus. NaN changes nothing.
            max_tolerance: validations below the best that are tolerated.
        """
        if math.isnan(value):
            return self
        best = float(value) if self.best is None else max(self.best, float(value))
        tolerance = self.tolerance + (value < best)
        return StageGate(best, tolerance, self.is_late or tolerance > max_tolerance)


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient that holds the divergence near a target."""

    coef: float

    @classmethod
    def init(cls, coef: float) -> AdaptiveKL:
        """The coefficient to start from."""
        return cls(coef)

    def update(
        self, kl: float, num_samples: int, *, target: float = 0.1, horizon: int = 10_000
    ) -> AdaptiveKL:
        """`coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)`.

        Section 2.2 of https://arxiv.org/abs/1909.08593, counted in samples as there. NaN, where no
        token was scored, changes nothing.

        Args:
            kl: nats a token, measured on the batch.
            num_samples: trajectories in the batch.
            target: nats a token.
            horizon: samples over which the full error would be made up five times.
        """
        if math.isnan(kl):
            return self
        error = _clip(float(kl) / target - 1.0, 0.2)
        return AdaptiveKL(self.coef * (1.0 + error * num_samples / horizon))


@dataclass(frozen=True)
class LogKL:
    """A KL coefficient that drifts slowly, on a logarithmic scale, towards a target divergence."""

    coef: float
    average: float = 0.0  # moving average of kl / target - 1
    num_updates: int = 0

    @classmethod
    def init(cls, coef: float) -> LogKL:
        """The coefficient to start from."""
        return cls(coef)

    def update(
        self,
        kl: float,
        *,
        target: float = 0.01,
        decay: float = 0.97,
        rate: float = 0.05,
        every: int = 100,
        dead_zone: float = 0.02,
        min_coef: float = 1e-4,
        max_coef: float = 100.0,
    ) -> LogKL:
        """Averages the error `kl / target - 1`; every so often the coefficient follows it.

        `log coef += rate * clip(average, -0.2, 0.2)`, what the code of ARES
        (https://github.com/shawn0728/ARES) runs in place of the paper's dual ascent, `KLBudget`.
        There the divergence is averaged and then, at the changes only, its error once more; here
        the error is averaged once, at every update. NaN changes nothing.

        Args:
            kl: nats a token, measured on the batch.
            target: nats a token.
            decay: of the average, per update.
            rate: change of the logarithm at an average error of 1.
            every: updates from one change of the coefficient to the next.
            dead_zone: a smaller average error changes nothing.
            min_coef: the coefficient is never below.
            max_coef: the coefficient is never above.
        """
        if math.isnan(kl):
            return self
        average = decay * self.average + (1.0 - decay) * (float(kl) / target - 1.0)
        state = dataclasses.replace(self, average=average, num_updates=self.num_updates + 1)
        if state.num_updates % every or abs(average) < dead_zone:
            return state
        coef = self.coef * math.exp(rate * _clip(average, 0.2))
        return dataclasses.replace(state, coef=min(max(coef, min_coef), max_coef))


def _clip(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


@dataclass(frozen=True)
class SkipSet:
    """Tasks that are drawn no more: always solved, and without hesitation."""

    task_ids: dict[str, float] = field(default_factory=dict)  # with the mean entropy, in nats

    @classmethod
    def init(cls) -> SkipSet:
        """Nothing is skipped."""
        return cls()

    def __contains__(self, task_id: str) -> bool:
        """Whether the task is skipped."""
        return task_id in self.task_ids

    def update(
        self,
        task_ids: Sequence[str],
        num_correct: Sequence[int],
        num_samples: Sequence[int],
        mean_entropies: Sequence[float],
        *,
        threshold: float,
    ) -> SkipSet:
        """After one batch of groups.

        ARES (https://arxiv.org/abs/2510.08457). A task once skipped stays so.

        Args:
            task_ids: of the groups.
            num_correct: correct trajectories of each group.
            num_samples: all trajectories of each group.
            mean_entropies: nats a sampled token, over each group.
            threshold: nats; a group all correct with less than this is skipped from now on.
        """
        groups = zip(task_ids, num_correct, num_samples, mean_entropies, strict=True)
        solved = {
            task_id: float(entropy)
            for task_id, right, total, entropy in groups
            if 0 < right == total and entropy < threshold
        }
        return SkipSet(self.task_ids | solved)
