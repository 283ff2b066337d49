"""Adaptive controllers, updated between steps: coefficients, targets, gates and difficulties.

The state of a controller is a frozen dataclass of plain JSON values, which checkpoints store as
JSON. `update` returns the next state; its arguments are the measurements and the settings.
`Controllers` holds the states that the method uses. `update_controllers` updates them from the
trajectories of a step, `update_stage_gate` from an evaluation.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl.objectives.entropy import high_window_entropy_mask, window_entropy
from jaxrl.objectives.metrics import mean_or_nan
from jaxrl.objectives.shaping import BUCKETS
from jaxrl.training.method import (
    KLSettings,
    Method,
    ShapingSettings,
    has_stage_gate,
    needs_divergences,
    uses_difficulty_buckets,
    uses_entropy_windows,
)
from jaxrl.types import (
    EntropyWindows,
    Group,
    GroupStats,
    Trajectory,
    flatten_groups,
    replace_fields,
)

KL_BUDGETS: Mapping[str, float] = {"easy": 0.05, "medium": 0.1, "hard": 0.2}
"""ARES's budgets of the KL divergence from the reference, in nats, for each difficulty."""


def grade_difficulty(
    num_correct: int, num_samples: int, *, min_accuracies: Sequence[float] = (2 / 3, 1 / 3)
) -> str:
    """Return a task's difficulty: easy, medium or hard.

    ARES (https://arxiv.org/abs/2510.08457). `min_accuracies` has the minimum accuracies of easy and
    medium tasks. Division rounds correctly, so 2 of 3 reaches 2/3.
    """
    easy, medium = min_accuracies
    accuracy = num_correct / num_samples
    return "easy" if accuracy >= easy else "medium" if accuracy >= medium else "hard"


@dataclass(frozen=True)
class DifficultyBuckets:
    """Difficulty of each task when it was last sampled."""

    buckets: dict[str, str] = field(default_factory=dict)  # by task id

    def update(
        self,
        task_ids: Sequence[str],
        num_correct: Sequence[int],
        num_samples: Sequence[int],
        *,
        min_accuracies: Sequence[float] = (2 / 3, 1 / 3),
    ) -> DifficultyBuckets:
        """Update the difficulties of a batch's tasks, combining groups of the same task."""
        counts: dict[str, tuple[int, int]] = {}
        for task_id, right, total in zip(task_ids, num_correct, num_samples, strict=True):
            before_right, before_total = counts.get(task_id, (0, 0))
            counts[task_id] = before_right + int(right), before_total + int(total)
        graded = {
            task_id: grade_difficulty(*count, min_accuracies=min_accuracies)
            for task_id, count in counts.items()
        }
        return DifficultyBuckets(self.buckets | graded)


@dataclass(frozen=True)
class EntropyCoefficients:
    """Coefficients and target counts of `shaping.entropy_reward` for each difficulty."""

    # Coefficient of each bucket, in units of reward.
    alphas: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.5))
    # Target number of tokens with high window entropy; buckets without samples so far are absent.
    targets: dict[str, int] = field(default_factory=dict)

    def update(
        self,
        mean_counts: Sequence[float],
        buckets: Sequence[str],
        *,
        rate: float = 0.05,
        max_alpha: float = 2.0,
    ) -> EntropyCoefficients:
        """Update alpha and the target of each bucket after one batch of groups.

        ARES (https://arxiv.org/abs/2510.08457): alpha changes by `rate * (mean_count - target)`. It
        rises with the count for easy and medium tasks, where it scales a penalty. It falls for hard
        tasks, where it scales a bonus. Then the rounded mean becomes the target. The released code
        updates the target first, so alpha there reacts only to the rounding.

        A bucket without groups does not change. A bucket without a target gets only a target.

        Args:
            mean_counts: Mean number of tokens with high window entropy in each group.
            buckets: Difficulty of each group's task.
            rate: Change of alpha per token of difference.
            max_alpha: Upper bound of alpha; the lower bound is 0.
        """
        alphas, targets = dict(self.alphas), dict(self.targets)
        for bucket in BUCKETS:
            pairs = zip(mean_counts, buckets, strict=True)
            values = [float(count) for count, group_bucket in pairs if group_bucket == bucket]
            if not values:
                continue
            average = math.fsum(values) / len(values)
            if bucket in targets:
                step = rate * (average - targets[bucket]) * (-1 if bucket == "hard" else 1)
                alphas[bucket] = min(max(alphas[bucket] + step, 0.0), max_alpha)
            targets[bucket] = round(average)
        return EntropyCoefficients(alphas, targets)


@dataclass(frozen=True)
class KLBudget:
    """Multipliers of the KL coefficient by difficulty, set by dual ascent on a KL budget."""

    # Multiplier of each bucket.
    multipliers: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 1.0))

    def update(
        self,
        kls: Mapping[str, float],
        *,
        budgets: Mapping[str, float] = KL_BUDGETS,
        rate: float = 0.01,
    ) -> KLBudget:
        """Set each measured bucket's multiplier to `max(0, multiplier + rate * (kl - budget))`.

        ARES (https://arxiv.org/abs/2510.08457). The multiplier scales the configured coefficient;
        the released code multiplies the previous coefficient instead.

        Args:
            kls: Divergence of each bucket in nats per token, averaged over tokens, then over
                trajectories. NaN means no measurement.
            budgets: Target divergence of each bucket, in nats per token.
            rate: Change of a multiplier per nat above the budget.
        """
        updated = {
            bucket: max(0.0, self.multipliers[bucket] + rate * (float(kl) - budgets[bucket]))
            for bucket, kl in kls.items()
            if not math.isnan(kl)
        }
        return KLBudget(self.multipliers | updated)


@dataclass(frozen=True)
class StageGate:
    """Gate that ends the early stage of training when correctness stops rising."""

    best: float | None = None  # best validation so far; None before the first
    tolerance: int = 0  # number of validations below the best validation at that time
    is_late: bool = False

    def update(self, value: float, *, max_tolerance: int = 5) -> StageGate:
        """Update the gate after one validation.

        BAPO (https://arxiv.org/abs/2601.11037). The late stage begins, permanently, after more than
        `max_tolerance` validations below the best so far, consecutive or not.

        Args:
            value: Mean correctness without bonuses. NaN changes nothing.
            max_tolerance: Maximum number of validations below the best in the early stage.
        """
        if math.isnan(value):
            return self
        best = float(value) if self.best is None else max(self.best, float(value))
        tolerance = self.tolerance + (value < best)
        return StageGate(best, tolerance, self.is_late or tolerance > max_tolerance)


@dataclass(frozen=True)
class AdaptiveKL:
    """KL coefficient with proportional control, which keeps the divergence near a target."""

    coef: float

    def update(
        self, kl: float, num_samples: int, *, target: float = 0.1, horizon: int = 10_000
    ) -> AdaptiveKL:
        """Scale the coefficient by `1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon`.

        Section 2.2 of https://arxiv.org/abs/1909.08593, which also counts samples. NaN (no scored
        tokens) changes nothing.

        Args:
            kl: Divergence of the batch in nats per token.
            num_samples: Number of trajectories in the batch.
            target: Target divergence in nats per token.
            horizon: Number of samples over which the changes add up to the clipped error.
        """
        if math.isnan(kl):
            return self
        error = _clip_magnitude(float(kl) / target - 1.0, 0.2)
        return AdaptiveKL(self.coef * (1.0 + error * num_samples / horizon))


@dataclass(frozen=True)
class LogKL:
    """KL coefficient adapted slowly, on a log scale, to keep the divergence near a target."""

    coef: float
    average: float = 0.0  # moving average of kl / target - 1
    num_updates: int = 0

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
        """Average the error `kl / target - 1`, and change the coefficient every `every` updates.

        The change is `log coef += rate * clip(average, -0.2, 0.2)`. ARES's code
        (https://github.com/shawn0728/ARES) uses this instead of the paper's dual ascent,
        `KLBudget`. ARES's code averages the divergence and, at each change, averages the error
        again. Here, only the error is averaged, once per update. NaN changes nothing.

        Args:
            kl: Divergence of the batch in nats per token.
            target: Target divergence in nats per token.
            decay: Decay of the average per update.
            rate: Change of the logarithm per unit of clipped average error.
            every: Number of updates between changes of the coefficient.
            dead_zone: Absolute average error below which the coefficient does not change.
            min_coef: Lower bound of the coefficient.
            max_coef: Upper bound of the coefficient.
        """
        if math.isnan(kl):
            return self
        average = decay * self.average + (1.0 - decay) * (float(kl) / target - 1.0)
        state = dataclasses.replace(self, average=average, num_updates=self.num_updates + 1)
        if state.num_updates % every or abs(average) < dead_zone:
            return state
        coef = self.coef * math.exp(rate * _clip_magnitude(average, 0.2))
        return dataclasses.replace(state, coef=min(max(coef, min_coef), max_coef))


def _clip_magnitude(value: float, limit: float) -> float:
    """Clip a value to [-limit, limit]."""
    return min(max(value, -limit), limit)


@dataclass(frozen=True)
class EntropyThreshold:
    """Threshold at or above which a window entropy counts as high."""

    value: float | None = None  # nats; None before the first estimate

    def update(
        self,
        window_entropies: Sequence[np.ndarray],
        *,
        percentile: float = 95.0,
        decay: float = 0.99,
    ) -> EntropyThreshold:
        """Move the threshold toward an estimate: the median of the samples' entropy percentiles.

        The first estimate becomes the threshold. Later estimates update it to
        `decay * threshold + (1 - decay) * estimate`. Samples without windows are ignored, as are
        samples with a non-finite value, which would stay in the average forever. If no samples
        remain, nothing changes.

        Args:
            window_entropies: Entropies in nats of each sample's complete windows, 1-D.
            percentile: Percentile of a sample's windows, 0 to 100, interpolated linearly.
            decay: Decay of the moving average.
        """
        samples = [
            x.astype(np.float64) for x in window_entropies if x.size and np.isfinite(x).all()
        ]
        levels = [np.percentile(sample, percentile) for sample in samples]
        if not levels:
            return self
        estimate = float(np.median(levels))
        if self.value is None:
            return EntropyThreshold(value=estimate)
        return EntropyThreshold(value=decay * self.value + (1.0 - decay) * estimate)


@dataclass(frozen=True)
class SkipSet:
    """Tasks that are no longer sampled, because all samples were correct with low entropy."""

    task_ids: dict[str, float] = field(default_factory=dict)  # mean entropy in nats by task id

    def __contains__(self, task_id: str) -> bool:
        """Return True if the task is skipped."""
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
        """Mark the tasks of all-correct, low-entropy groups as skipped. They stay skipped.

        ARES (https://arxiv.org/abs/2510.08457).

        Args:
            task_ids: Task of each group.
            num_correct: Number of correct trajectories of each group.
            num_samples: Number of trajectories of each group.
            mean_entropies: Mean entropy per sampled token of each group, in nats.
            threshold: Entropy in nats below which an all-correct group's task is skipped.
        """
        groups = zip(task_ids, num_correct, num_samples, mean_entropies, strict=True)
        solved = {
            task_id: float(entropy)
            for task_id, right, total, entropy in groups
            if 0 < right == total and entropy < threshold
        }
        return SkipSet(self.task_ids | solved)


@dataclass(frozen=True)
class Controllers:
    """States of all adaptive controllers; None for those that the method does not use."""

    gate: StageGate | None = None
    threshold: EntropyThreshold | None = None
    buckets: DifficultyBuckets | None = None
    coefficients: EntropyCoefficients | None = None
    kl: AdaptiveKL | LogKL | KLBudget | None = None
    skipped: SkipSet | None = None

    @classmethod
    def init(cls, method: Method) -> Controllers:
        """Return the initial controller states."""
        shaping, kl = method.shaping, method.kl
        coefficients = EntropyCoefficients(dict.fromkeys(BUCKETS, shaping.alpha_init))
        return cls(
            gate=StageGate() if has_stage_gate(shaping) else None,
            threshold=EntropyThreshold() if uses_entropy_windows(shaping, kl) else None,
            buckets=DifficultyBuckets() if uses_difficulty_buckets(shaping, kl) else None,
            coefficients=coefficients if shaping.entropy_reward else None,
            kl=_init_kl_controller(kl) if needs_divergences(kl) else None,
            skipped=SkipSet() if method.filter.skip_solved else None,
        )

    @classmethod
    def from_json(cls, saved: dict[str, Any], method: Method) -> Controllers:
        """Create an instance from the result of `asdict`; initialize missing states."""
        new = cls.init(method)
        states = {field.name: getattr(new, field.name) for field in dataclasses.fields(cls)}
        for name, state in states.items():
            stored = saved.get(name)
            if state is not None and stored and stored.keys() == dataclasses.asdict(state).keys():
                states[name] = type(state)(**stored)
        return cls(**states)

    @property
    def is_late(self) -> bool:
        """Return False in the early stage of a method with a stage gate, else True."""
        return self.gate is None or self.gate.is_late

    @property
    def entropy_threshold(self) -> float | None:
        """Threshold in nats at or above which a window entropy counts as high; None if unknown."""
        return None if self.threshold is None else self.threshold.value

    def get_bucket(self, task_id: str) -> str:
        """Return the difficulty of a task; hard if it is unknown."""
        return "hard" if self.buckets is None else self.buckets.buckets.get(task_id, "hard")

    def get_kl_coef(self, kl: KLSettings) -> float:
        """Return the current KL coefficient: the configured value unless a controller adapts it."""
        return self.kl.coef if isinstance(self.kl, AdaptiveKL | LogKL) else kl.coef

    def metrics(self) -> dict[str, Any]:
        """Return all states as metrics `controller/<name>/<field>`; a set becomes its size."""
        states = dataclasses.asdict(self)
        if self.buckets is not None:
            counts = Counter(self.buckets.buckets.values())
            states["buckets"] = {name: counts[name] for name in BUCKETS}
        if self.skipped is not None:
            states["skipped"] = {"count": len(self.skipped.task_ids)}
        active = {name: state for name, state in states.items() if state is not None}
        return flatten_dict({"controller": active}, sep="/")


def _init_kl_controller(kl: KLSettings) -> AdaptiveKL | LogKL | KLBudget | None:
    match kl.controller:
        case "adaptive":
            return AdaptiveKL(kl.coef)
        case "log":
            return LogKL(kl.coef)
        case "budget":
            return KLBudget()
    return None


def update_controllers(
    controllers: Controllers,
    groups: Sequence[Group],
    sampled_stats: Sequence[GroupStats],
    method: Method,
    is_trigger: np.ndarray | None,
) -> tuple[Controllers, list[Group]]:
    """Update the controllers from a step's groups; also return the groups, with `windows` set.

    The step trains with the KL coefficient from before this call: otherwise a divergence would
    determine the coefficient of its own penalty. All other updated states apply to this step.
    Divergences are measured before the parameter update.

    Args:
        controllers: Controllers before the step.
        groups: Groups to train on, with divergences if the method needs them.
        sampled_stats: Statistics of all sampled groups, including those that the filter dropped.
        method: Training method, with the settings of the controllers.
        is_trigger: bool [V], True for token ids that may start a high-entropy window; None for all.
    """
    groups, shaping = list(groups), method.shaping
    scored = [group for group in groups if group.scored_trajectories]
    updated: dict[str, Any] = {}
    # Grade the tasks by the groups to train on.
    if controllers.buckets is not None:
        updated["buckets"] = controllers.buckets.update(
            [group.task_id for group in scored],
            [group.num_correct for group in scored],
            [len(group.scored_trajectories) for group in scored],
            min_accuracies=shaping.min_accuracies,
        )
    # Skip tasks that all samples solved with low entropy. Groups with environment errors do not
    # count: a single remaining sample could skip its task for good.
    if controllers.skipped is not None:
        complete = [stats for stats in sampled_stats if stats.num_scored == method.group_size]
        updated["skipped"] = controllers.skipped.update(
            [stats.task_id for stats in complete],
            [stats.num_correct for stats in complete],
            [stats.num_scored for stats in complete],
            [stats.mean_entropy for stats in complete],
            threshold=method.filter.skip_entropy,
        )
    # Update the threshold from scored trajectories, then mark the windows of all trajectories.
    if controllers.threshold is not None:
        trajectories = flatten_groups(groups)
        entropies = [_compute_window_entropy(t, shaping.entropy_window) for t in trajectories]
        pairs = list(zip(trajectories, entropies, strict=True))
        threshold = updated["threshold"] = controllers.threshold.update(
            [values[valid] for trajectory, (values, valid) in pairs if trajectory.is_scored],
            percentile=shaping.entropy_percentile,
            decay=shaping.entropy_decay,
        )
        windows = [
            _make_entropy_windows(t, *pair, threshold.value, is_trigger, shaping)
            for t, pair in pairs
        ]
        groups = replace_fields(groups, windows=windows)
    after = dataclasses.replace(controllers, **updated)
    # With a threshold, update the coefficients from the marked windows.
    if after.coefficients is not None and after.entropy_threshold is not None:
        scored = [group for group in groups if group.scored_trajectories]
        updated["coefficients"] = after.coefficients.update(
            [
                mean_or_nan(
                    [
                        t.windows.num_high_entropy_windows
                        for t in group.scored_trajectories
                        if t.windows
                    ]
                )
                for group in scored
            ],
            [after.get_bucket(group.task_id) for group in scored],
            rate=shaping.alpha_step,
            max_alpha=shaping.alpha_max,
        )
    # Update the KL state from the mean divergence per trained token.
    divergences, kl = compute_mean_divergences(groups), method.kl
    values = [value for _, value in divergences]
    match after.kl:
        case AdaptiveKL() as adaptive:
            updated["kl"] = adaptive.update(mean_or_nan(values), len(values), **kl.adaptive)
        case LogKL() as log:
            updated["kl"] = log.update(mean_or_nan(values), **kl.log)
        case KLBudget() as budget:
            by_bucket: dict[str, list[float]] = {}
            for task_id, value in divergences:
                by_bucket.setdefault(after.get_bucket(task_id), []).append(value)
            means = {name: mean_or_nan(values) for name, values in by_bucket.items()}
            updated["kl"] = budget.update(means, **kl.budget)
    return dataclasses.replace(controllers, **updated), groups


def update_stage_gate(
    controllers: Controllers, correctness: float, shaping: ShapingSettings
) -> Controllers:
    """Return the controllers with the stage gate updated after an evaluation.

    Args:
        controllers: Controllers before the evaluation.
        correctness: Fraction of correct greedy answers; NaN if nothing was scored.
        shaping: Settings of reward shaping, with the gate's tolerance.
    """
    if controllers.gate is None:
        return controllers
    updated = controllers.gate.update(correctness, max_tolerance=shaping.stage_tolerance)
    return dataclasses.replace(controllers, gate=updated)


def _compute_window_entropy(trajectory: Trajectory, window: int) -> tuple[np.ndarray, np.ndarray]:
    values, valid = window_entropy(
        trajectory.rollout_entropies[None],
        trajectory.loss_mask[None],
        np.ones((1, len(trajectory.token_ids)), np.int32),
        window=window,
    )
    return np.asarray(values[0], np.float32), np.asarray(valid[0])


def _make_entropy_windows(
    trajectory: Trajectory,
    values: np.ndarray,
    valid: np.ndarray,
    entropy_threshold: float | None,
    is_trigger: np.ndarray | None,
    shaping: ShapingSettings,
) -> EntropyWindows:
    """Build a trajectory's windows; those that reach `entropy_threshold` are high."""
    is_high = high_window_entropy_mask(values[None], valid[None], threshold=entropy_threshold)[0]
    if is_trigger is not None:
        is_high = is_high & is_trigger[trajectory.token_ids]
    window_values = values[valid].astype(np.float64)
    percentile = math.nan
    if len(window_values):
        percentile = float(np.percentile(window_values, shaping.entropy_percentile))
    excess = np.maximum(
        window_values - (np.inf if entropy_threshold is None else entropy_threshold), 0.0
    )
    return EntropyWindows(
        values=values,
        valid=valid,
        is_high=np.asarray(is_high),
        percentile=percentile,
        excess=float(excess.sum()),
    )


def compute_mean_divergences(groups: Sequence[Group]) -> list[tuple[str, float]]:
    """Return the task id and mean divergence, in nats per token, of each measured trajectory."""
    return [
        (t.task_id, t.divergence.mean)
        for t in flatten_groups(groups)
        if t.divergence is not None and t.divergence.num_tokens
    ]
