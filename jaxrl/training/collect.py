"""Collect the groups of a step: draw tasks, roll out, shape rewards, filter.

All processes make the same decisions, because each process sees the trajectories of all processes,
in task order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.data import serialization
from jaxrl.data.stream import FixedStream, Stream
from jaxrl.envs.base import CallRecord, OutageError, Task
from jaxrl.logs.metrics import compute_group_metrics, compute_search_metrics
from jaxrl.objectives.filters import needs_resampling
from jaxrl.sampling.interfaces import RolloutFunction, SamplingConfig
from jaxrl.training import rewards
from jaxrl.training.controllers import Controllers, SkipSet
from jaxrl.training.estimators import compute_returns
from jaxrl.training.failures import AllEpisodesFailedError, FailureCounter, truncate_to_line
from jaxrl.training.method import Method
from jaxrl.training.usage import BudgetSpentError, UsageStats
from jaxrl.types import (
    GROUP_KINDS,
    Columns,
    Draw,
    Group,
    GroupStats,
    flatten_groups,
    replace_fields,
)
from jaxrl.utils.callables import NamedFunction, UserCodeError, wrap_user_code

DivergenceFn = Callable[[Sequence[Group]], list[Group]]
"""Function that adds a divergence to each trajectory, if the method uses it."""


class NotEnoughGroupsError(ValueError):
    """Error raised if `filter.max_batches` batches give too few groups or all tasks are skipped."""


FATAL_ERRORS = (
    NotEnoughGroupsError,
    AllEpisodesFailedError,
    OutageError,
    UserCodeError,
    BudgetSpentError,
)
"""Errors that end the run during collection. Completed steps are saved first."""


@dataclass(frozen=True, kw_only=True)
class CollectedGroups:
    """Groups for one training step, with sampling statistics."""

    groups: list[Group]
    buffered_groups: list[Group]  # surplus groups, for the next step
    in_flight_tasks: list[int] = field(default_factory=list)  # stream indices of tasks in flight
    num_tasks_taken: int  # total number of tasks taken from the stream
    sampled_stats: list[GroupStats]  # all sampled groups, including those that the filter dropped
    metrics: dict[str, float]
    ledger: UsageStats = field(default_factory=UsageStats)  # usage, dropped groups included

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values. The groups must not have divergences yet."""
        plain = dataclasses.asdict(dataclasses.replace(self, groups=[], buffered_groups=[]))
        for stats in plain["sampled_stats"]:
            if not stats["environment"]:
                del stats["environment"]
        groups = {
            name: serialization.serialize_groups(getattr(self, name)) for name in _GROUP_FIELDS
        }
        return {**plain, **groups}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> CollectedGroups:
        """Create an instance from the result of `to_json`."""
        fields: dict[str, Any] = {
            n: serialization.deserialize_groups(saved[n]) for n in _GROUP_FIELDS
        }
        fields["sampled_stats"] = [GroupStats(**stats) for stats in saved["sampled_stats"]]
        fields["ledger"] = UsageStats.from_json(saved["ledger"])
        return cls(**{**saved, **fields})


_GROUP_FIELDS = ("groups", "buffered_groups")


@dataclass(kw_only=True)
class StepSampler:
    """Sampler of a step's groups on all processes; also sums their usage."""

    rollout: RolloutFunction  # rollout over all processes
    sampling: SamplingConfig
    should_stop: Callable[[], bool] = lambda: False
    progress: Callable[[int, int], None] = lambda done, total: None  # shows trajectories done
    check_budget: Callable[[], None] = lambda: None  # may raise `BudgetSpentError`
    on_usage: Callable[[UsageStats], None] = lambda usage: None  # receives the usage so far
    prices: Mapping[str, float] = field(default_factory=dict)  # price of an attempt, by tool
    usage: UsageStats = field(default_factory=UsageStats)  # usage so far, dropped groups included
    unfinished: list[Draw] = field(default_factory=list)  # draws that the next call resumes
    call_records: list[CallRecord] = field(default_factory=list)  # tool calls so far

    def sample(self, draws: Sequence[Draw]) -> list[Group]:
        """Sample a group for each draw; return the complete groups.

        Raises:
            BudgetSpentError: The run has spent its budget.
            Interrupted, OutageError: See `sampling.rollout.Rollout`.
        """
        self.check_budget()
        sampled = self.rollout(
            draws, self.sampling, should_stop=self.should_stop, progress=self.progress
        )
        groups = [group for group in sampled if group is not None]
        self.unfinished = [d for d, group in zip(draws, sampled, strict=True) if group is None]
        self.call_records += [record for t in flatten_groups(groups) for record in t.call_records]
        self.usage += UsageStats.from_trajectories(flatten_groups(groups), self.prices)
        self.on_usage(self.usage)
        return groups

    def sample_with_retries(self, draws: Sequence[Draw], attempts: int) -> tuple[list[Group], int]:
        """Sample groups, and resample those with neither a positive reward nor an abstention.

        BAPO (https://arxiv.org/abs/2601.11037): each attempt replaces the complete group, and the
        last attempt is used regardless of its rewards.

        Returns:
            The groups, and the number of times that a group was resampled.
        """
        groups = self.sample(draws)
        num_resampled = 0
        for attempt in range(1, attempts + 1):
            columns = Columns(groups)
            failed = needs_resampling(columns.rewards, columns.is_abstention, columns.group_ids)
            indices = sorted({int(i) for i in columns.group_ids[failed]})
            if not indices:
                break
            resampled = self.sample(
                [dataclasses.replace(draws[i], attempt=attempt) for i in indices]
            )
            # Every draw has a group: validation rejects unfinished_tasks together with retries.
            for index, group in zip(indices, resampled, strict=True):
                groups[index] = group
            num_resampled += len(indices)
        return groups, num_resampled


def collect(
    sampler: StepSampler,
    stream: Stream[Task] | FixedStream[Task],
    method: Method,
    *,
    num_tasks_taken: int = 0,
    buffered_groups: Sequence[Group] = (),
    in_flight_tasks: Sequence[int] = (),
    controllers: Controllers,
    add_divergences: DivergenceFn,
    failures: FailureCounter,
) -> CollectedGroups:
    """Sample batches of tasks until `rollout.tasks_per_step` groups have passed the filter.

    Args:
        sampler: Sampler of the step.
        stream: Stream of training tasks, or a fixed list of tasks.
        method: Training method.
        num_tasks_taken: Number of tasks that earlier steps took from the stream.
        buffered_groups: Surplus groups from earlier steps.
        in_flight_tasks: Stream indices of tasks that earlier steps started but did not finish.
        controllers: Controllers before the step, for the tasks to skip, the stage (early or late),
            and the KL coefficient of the filter.
        add_divergences: Function that measures divergences, for a filter on rewards minus the KL
            penalty.
        failures: Counter of failed batches, which also logs warnings.

    Raises:
        AllEpisodesFailedError: See `FailureCounter.record_batch`.
        OutageError: A service that the environment needs has been unavailable for too long.
        NotEnoughGroupsError: Too few groups passed in `filter.max_batches` batches.
    """
    settings, num_wanted = method.filter, method.tasks_per_step
    accepted, sampled_stats = list(buffered_groups), list[GroupStats]()
    num_batches = num_resampled = num_generated = 0
    sampler.unfinished = [
        Draw(task=stream.get_items(at, 1)[0], stream_index=at) for at in in_flight_tasks
    ]
    # Resample groups without a positive reward; in the early stage, only if configured.
    should_resample = controllers.is_late or settings.resample_early
    attempts = settings.resample_attempts if should_resample else 0
    while len(accepted) < num_wanted:
        if 0 < settings.max_batches <= num_batches:
            raise NotEnoughGroupsError(
                _describe_shortage(method, num_batches, len(accepted), sampled_stats)
            )
        count = settings.tasks_per_batch or num_wanted
        # Start enough tasks to fill the step and leave `unfinished_tasks` in flight.
        if settings.unfinished_tasks or sampler.unfinished:
            num_new = settings.unfinished_tasks - len(sampler.unfinished)
            count = max(num_wanted - len(accepted) + num_new, 0)
        draws, num_tasks_taken = draw_tasks(stream, num_tasks_taken, count, controllers.skipped)
        groups, num_retried = sampler.sample_with_retries([*sampler.unfinished, *draws], attempts)
        failures.record_batch(flatten_groups(groups))
        # The filter uses shaped rewards.
        shaped = rewards.shape_rewards(groups, method.shaping, is_late=controllers.is_late)
        if settings.filters_on_penalized_rewards:
            shaped = add_divergences(shaped)
        accepted += _filter_groups(shaped, groups, method, controllers.get_kl_coef(method.kl))
        sampled_stats += map(GroupStats.from_group, shaped)
        num_batches += 1
        num_resampled += num_retried
        num_generated += len(flatten_groups(groups)) + num_retried * method.group_size
    surplus_groups = accepted[num_wanted:]
    carried_groups: list[Group] = []
    if settings.carry_over:
        # The update changes the policy that the divergences describe.
        carried_groups = replace_fields(
            surplus_groups, divergence=[None] * len(flatten_groups(surplus_groups))
        )
    return CollectedGroups(
        groups=accepted[:num_wanted],
        buffered_groups=carried_groups,
        in_flight_tasks=[draw.stream_index for draw in sampler.unfinished],
        num_tasks_taken=num_tasks_taken,
        sampled_stats=sampled_stats,
        ledger=sampler.usage,
        metrics={
            "rollout/num_generated": num_generated,
            "filter/num_batches": num_batches,
            "filter/kept_share": (len(accepted) - len(buffered_groups))
            / (len(sampled_stats) or np.nan),
            "filter/surplus_groups": len(surplus_groups),
            "filter/carried_groups": len(carried_groups),
            "filter/resampled_groups": num_resampled,
            **compute_group_metrics(sampled_stats),
            **compute_search_metrics(sampler.call_records),
        },
    )


def draw_tasks(
    stream: Stream[Task] | FixedStream[Task],
    num_tasks_taken: int,
    num_tasks: int,
    skip_set: SkipSet | None = None,
) -> tuple[list[Draw], int]:
    """Return the next `num_tasks` tasks that are not in `skip_set`, and the new `num_tasks_taken`.

    Raises:
        NotEnoughGroupsError: All tasks are skipped.
    """
    draws: list[Draw] = []
    num_skipped = 0  # consecutive
    while len(draws) < num_tasks:
        [task] = stream.get_items(num_tasks_taken, 1)
        if skip_set is not None and task.id in skip_set:
            num_skipped += 1
            if num_skipped > 2 * stream.epoch_length:
                raise NotEnoughGroupsError(
                    f"all {stream.num_items} tasks are solved and skipped "
                    "(config.filter.skip_solved); there is nothing left to train on. Set "
                    "config.num_steps to end here, or add tasks."
                )
        else:
            draws.append(Draw(task=task, stream_index=num_tasks_taken))
            num_skipped = 0
        num_tasks_taken += 1
    return draws, num_tasks_taken


def describe_failures(sampled_stats: Sequence[GroupStats]) -> str | None:
    """Describe a step's failed episodes and the first error; None if none or all failed.

    `FailureCounter` reports batches in which every episode failed.
    """
    failed = sum(group.num_failed for group in sampled_stats)
    total = failed + sum(group.num_scored for group in sampled_stats)
    if failed in (0, total):
        return None
    error = next(truncate_to_line(group.error) for group in sampled_stats if group.error)
    return f"{failed} of {total} episodes ended in an environment error; the first: {error}"


def _describe_shortage(
    method: Method, num_batches: int, num_accepted: int, sampled_stats: Sequence[GroupStats]
) -> str:
    group_filter = method.filter.group_filter
    assert group_filter is not None
    kinds = Counter(group.kind for group in sampled_stats)
    counts = [f"{kinds[kind]} {kind.replace('_', ' ')}" for kind in GROUP_KINDS if kinds[kind]]
    error = next((truncate_to_line(group.error) for group in sampled_stats if group.error), "")
    return (
        f"after {num_batches} batches (config.filter.max_batches) only {num_accepted} of "
        f"{method.tasks_per_step} groups have passed config.filter.name={group_filter.name!r}; the "
        f"{len(sampled_stats)} groups sampled were: {', '.join(counts)}"
        f"{f' (the first environment error: {error})' if error else ''}. If "
        "most failed, fix what the error names. If most are all right, the tasks are too easy for "
        "this policy; if most are all wrong, too hard: raise config.filter.max_batches (0: no "
        "limit) or, with --accept_changes, change config.tasks.train.source or "
        "config.rollout.group_size. Finished work is saved."
    )


def _filter_groups(
    groups: Sequence[Group], unshaped: Sequence[Group], method: Method, kl_coef: float
) -> list[Group]:
    """Return the groups that pass the filter.

    With turn-level advantages, the filter compares the returns of each turn, and a group passes if
    any turn does.

    Args:
        groups: Groups with shaped rewards, and divergences if the filter uses the KL penalty.
        unshaped: The same groups before reward shaping.
        method: Training method; `method.filter` is the filter.
        kl_coef: Coefficient of the KL penalty in the reward.
    """
    group_filter = method.filter.group_filter
    if group_filter is None:
        return list(groups)
    columns, before = Columns(groups), Columns(unshaped)
    passes = np.zeros(len(columns.group_ids), bool)
    metrics = np.zeros((1, len(passes)), np.float32)
    if "metric" in group_filter.arguments:
        # Values of `filter.key`, [N, K]. K is 1 unless rewards are by turn.
        match method.filter.key:
            case "acc":
                values = columns.is_correct[:, None]
            case "score":
                values = compute_returns(before, method.advantage)
            case "seq_reward":
                values = compute_returns(columns, method.advantage)
            case "seq_final_reward":
                values = compute_returns(columns, method.advantage)
                values = values - rewards.compute_kl_penalties(groups, kl_coef)[:, None]
            case "response_length" | "mean_entropy" as key:
                values = np.array([[getattr(t, key)] for t in flatten_groups(groups)])
            case part:  # NaN where it does not apply
                parts = [t.reward_parts for t in flatten_groups(groups)]
                values = np.array([[scores.get(part, np.nan)] for scores in parts])
        metrics = values.astype(np.float32).T
    for metric in metrics:
        arrays = {"scores": before.rewards, "metric": metric}

        def get_column(name: str, arrays: dict[str, np.ndarray] = arrays) -> np.ndarray:
            return arrays[name] if name in arrays else getattr(columns, name)

        passes |= apply_filter(group_filter, get_column, len(passes))
    accepted = {int(index) for index in columns.group_ids[passes]}
    # Drop a group if environment errors leave only one trajectory, which has nothing to be compared
    # with. A configured group size of 1 is intended.
    min_scored = min(2, method.group_size)
    return [
        group
        for i, group in enumerate(groups)
        if i in accepted and len(group.scored_trajectories) >= min_scored
    ]


def apply_filter(
    group_filter: NamedFunction, get_column: Callable[[str], np.ndarray], num_trajectories: int
) -> np.ndarray:
    """Apply a filter to trajectories; return the mask of those that pass, bool `[N]`.

    `get_column` returns the array with a given name, over the N = `num_trajectories` trajectories.

    Raises:
        UserCodeError: The filter failed, or returned the wrong dtype or shape.
    """
    call_filter = wrap_user_code(
        group_filter.key, group_filter.name, lambda *arrays: np.asarray(group_filter(*arrays))
    )
    flags: np.ndarray = call_filter(*map(get_column, group_filter.arguments))
    if flags.dtype != bool or flags.shape != (num_trajectories,):
        raise UserCodeError(
            f"config.filter.name names {group_filter.name!r}, which returned {flags.dtype} "
            f"{list(flags.shape)}; expected bool [{num_trajectories}], one per trajectory."
        )
    return flags
