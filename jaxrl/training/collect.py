"""Groups that a step trains on, from tasks: draw, roll out, shape rewards, filter.

Everything here is decided from the trajectories of all processes, in task order, so that all of
them decide alike.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.data import serialization
from jaxrl.data.stream import Stream
from jaxrl.envs.base import CallRecord, OutageError, Task
from jaxrl.logs.metrics import search_metrics
from jaxrl.objectives.filters import needs_resampling
from jaxrl.sampling.interfaces import RolloutFunction, Sampling
from jaxrl.training import rewards
from jaxrl.training.controllers import Controllers, SkipSet
from jaxrl.training.estimators import returns_of
from jaxrl.training.failures import Failures, NothingWorksError, short
from jaxrl.training.method import Filter, Method
from jaxrl.training.usage import BudgetSpentError, Ledger
from jaxrl.types import GROUP_KINDS, Columns, Draw, Group, GroupStats, members, with_fields
from jaxrl.utils.callables import NamedFunction, UserCodeError, wrap_user_code

Measure = Callable[[Sequence[Group]], list[Group]]
"""Puts the divergence of each trajectory on it, where the method has a use for it."""


class NotEnoughGroupsError(ValueError):
    """The filter kept too few groups in as many batches as it may draw."""


ENDING = (NotEnoughGroupsError, NothingWorksError, OutageError, UserCodeError, BudgetSpentError)
"""Errors that end a run while it collects, once what was finished is saved."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Groups that a step trains on, and how they came about."""

    groups: list[Group]
    leftover: list[Group]  # groups beyond the need, for the next step
    unfinished: list[int] = field(default_factory=list)  # places in the stream of those under way
    num_tasks_taken: int  # from the stream, in all
    tried: list[GroupStats]  # every group that was sampled, whether it passed the filter or not
    metrics: dict[str, float]
    ledger: Ledger = field(default_factory=Ledger)  # of all that was sampled, dropped groups too

    def to_json(self) -> dict[str, Any]:
        """Converts to plain JSON values, exactly; before anything of it was measured."""
        plain = dataclasses.asdict(dataclasses.replace(self, groups=[], leftover=[]))
        groups = {name: serialization.groups_to_json(getattr(self, name)) for name in _GROUPS}
        return {**plain, **groups}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Collected:
        """The inverse of `to_json`."""
        made: dict[str, Any] = {n: serialization.groups_from_json(saved[n]) for n in _GROUPS}
        made["tried"] = [GroupStats(**s) for s in saved["tried"]]
        made["ledger"] = Ledger.from_json(saved["ledger"]) if "ledger" in saved else Ledger()
        return cls(**{**saved, **made})


_GROUPS = ("groups", "leftover")


@dataclass(frozen=True, kw_only=True)
class Left:
    """Progress and leftovers of earlier steps.

    Attributes:
        num_tasks_taken: tasks that were taken from the stream.
        groups: beyond what the step before needed.
        unfinished: places in the stream of tasks that are under way.
    """

    num_tasks_taken: int = 0
    groups: Sequence[Group] = ()
    unfinished: Sequence[int] = ()


@dataclass(kw_only=True)
class StepSampler:
    """Samples groups for one step, on all processes, and counts what they cost.

    Attributes:
        rollout: Rollout of all processes.
        sampling: Sampling settings of the step.
        should_stop: Returns True once the rollout is to be interrupted.
        progress: Receives how many trajectories have ended, and of how many.
        check_budget: Raises `BudgetSpentError` if the run may not sample more.
        on_usage: Receives the usage of all calls so far.
        prices: Price of each tool, for the usage.
        usage: Usage of all calls so far, dropped groups included.
        unfinished: Draws whose groups resume in the next call.
        records: Tool calls of all trajectories so far.
    """

    rollout: RolloutFunction
    sampling: Sampling
    should_stop: Callable[[], bool] = lambda: False
    progress: Callable[[int, int], None] = lambda done, total: None
    check_budget: Callable[[], None] = lambda: None
    on_usage: Callable[[Ledger], None] = lambda usage: None
    prices: Mapping[str, float] = field(default_factory=dict)
    usage: Ledger = field(default_factory=Ledger)
    unfinished: list[Draw] = field(default_factory=list)
    records: list[CallRecord] = field(default_factory=list)

    def sample(self, draws: Sequence[Draw]) -> list[Group]:
        """Sample a group for each draw; those that are not finished are left out.

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
        self.records += [record for t in members(groups) for record in t.records]
        self.usage += Ledger.of(members(groups), self.prices)
        self.on_usage(self.usage)
        return groups

    def sample_with_retries(self, draws: Sequence[Draw], attempts: int) -> tuple[list[Group], int]:
        """Sample groups, and again those in which nobody has a reward above 0 or abstains.

        BAPO (https://arxiv.org/abs/2601.11037): each attempt replaces the whole group, and the
        last one is kept whatever it holds.

        Returns:
            The groups, and how many were sampled again, counted once per attempt.
        """
        groups = self.sample(draws)
        num_resampled = 0
        for attempt in range(1, attempts + 1):
            columns = Columns(groups)
            failed = needs_resampling(columns.rewards, columns.is_abstention, columns.group_ids)
            indices = sorted({int(i) for i in columns.group_ids[failed]})
            if not indices:
                break
            fresh = self.sample([dataclasses.replace(draws[i], attempt=attempt) for i in indices])
            # Every draw has its group: unfinished_tasks is refused together with retries.
            for index, group in zip(indices, fresh, strict=True):
                groups[index] = group
            num_resampled += len(indices)
        return groups, num_resampled


@dataclass(kw_only=True)
class _Batches:
    """Groups and counts of a step's batches so far."""

    num_tasks_taken: int
    kept: list[Group]
    tried: list[GroupStats] = field(default_factory=list)
    count: int = 0
    num_resampled: int = 0
    num_generated: int = 0


def collect(
    sampler: StepSampler,
    stream: Stream[Task],
    method: Method,
    *,
    left: Left,
    controllers: Controllers,
    measure: Measure,
    failures: Failures,
) -> Collected:
    """Draws batches of tasks until `rollout.tasks_per_step` groups have passed the filter.

    Args:
        sampler: samples groups.
        stream: tasks in their order.
        method: says what is kept.
        left: by the steps before.
        controllers: before the step; give the tasks to skip, the early or late stage, and the KL
            coefficient for the filter.
        measure: adds divergences, for a filter that compares rewards with their KL term.
        failures: counts batches in which every episode failed, and logs warnings.

    Raises:
        NothingWorksError: see `Failures.count`.
        OutageError: what the environment asks has answered nobody for too long.
        NotEnoughGroupsError: after `filter.max_batches` batches there are still too few.
    """
    settings, wanted = method.filter, method.tasks_per_step
    batches = _Batches(
        num_tasks_taken=left.num_tasks_taken,
        kept=list(left.groups),
    )
    sampler.unfinished = [
        Draw(task=stream.take(at, 1)[0], stream_index=at) for at in left.unfinished
    ]
    attempts = settings.resample_attempts
    if not (controllers.is_late or settings.resample_early):
        attempts = 0
    while len(batches.kept) < wanted:
        if 0 < settings.max_batches <= batches.count:
            raise NotEnoughGroupsError(_complaint(settings, batches, wanted))
        count = settings.tasks_per_batch or wanted
        # Begin so many that the step is full while unfinished_tasks are still under way.
        if settings.unfinished_tasks or sampler.unfinished:
            to_begin = settings.unfinished_tasks - len(sampler.unfinished)
            count = max(wanted - len(batches.kept) + to_begin, 0)
        draws, batches.num_tasks_taken = draw(
            stream, batches.num_tasks_taken, count, controllers.skipped
        )
        draws = [*sampler.unfinished, *draws]
        groups, num_retried = sampler.sample_with_retries(draws, attempts)
        failures.count(members(groups))
        shaped = rewards.shape(groups, method.shaping, is_late=controllers.is_late)
        if settings.sees_kl:
            shaped = measure(shaped)
        batches.kept += _filter_groups(shaped, groups, method, controllers.kl_coef(method.kl))
        batches.tried += map(GroupStats.of, shaped)
        batches.count += 1
        batches.num_resampled += num_retried
        batches.num_generated += len(members(groups)) + num_retried * method.group_size
        if batches.count % _TOLD_EVERY == 0 and len(batches.kept) < wanted:
            failures.log(
                f"warning: {len(batches.kept)} of {wanted} groups have passed the filter in "
                f"{batches.count} batches; the groups were: {_shares(batches.tried)}"
            )
    new_leftover = batches.kept[wanted:]
    carried: list[Group] = []
    if settings.carry_over:  # without divergences, measured under a policy that the update replaces
        carried = with_fields(new_leftover, divergence=[None] * len(members(new_leftover)))
    return Collected(
        groups=batches.kept[:wanted],
        leftover=carried,
        unfinished=[draw.stream_index for draw in sampler.unfinished],
        num_tasks_taken=batches.num_tasks_taken,
        tried=batches.tried,
        ledger=sampler.usage,
        metrics=_metrics(
            batches,
            sampler.records,
            num_leftover_before=len(left.groups),
            num_leftover=len(new_leftover),
            method=method,
        ),
    )


_TOLD_EVERY = 10
"""Batches of one step after which a filter that waits for more groups says so."""


def draw(
    stream: Stream[Task], num_tasks_taken: int, count: int, skipped: SkipSet | None = None
) -> tuple[list[Draw], int]:
    """The next `count` tasks of the stream that are not skipped, and how many are then taken.

    Raises:
        NotEnoughGroupsError: a whole epoch is skipped.
    """
    draws: list[Draw] = []
    num_skipped = 0  # since the last that was not
    while len(draws) < count:
        [task] = stream.take(num_tasks_taken, 1)
        if skipped is not None and task.id in skipped:
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


def _metrics(
    batches: _Batches,
    records: Sequence[CallRecord],
    *,
    num_leftover_before: int,
    num_leftover: int,
    method: Method,
) -> dict[str, float]:
    """Metrics of what a step has drawn and kept, and of leftovers before and after it."""
    tried, size = batches.tried, method.group_size
    kinds = Counter(group.kind for group in tried)
    num_groups = len(tried) or np.nan  # of no group at all, where enough were left over
    num_scored = sum(group.num_scored for group in tried)
    return {
        "rollout/num_generated": batches.num_generated,
        "filter/num_batches": batches.count,
        "filter/kept_share": (len(batches.kept) - num_leftover_before) / num_groups,
        "filter/surplus_groups": num_leftover,
        "filter/carried_groups": num_leftover if method.filter.carry_over else 0,
        "rollout/partial_groups": sum(0 < group.num_scored < size for group in tried),
        "filter/accuracy": sum(group.num_correct for group in tried) / (num_scored or np.nan),
        "filter/resampled_groups": batches.num_resampled,
        **{f"filter/{kind}_share": kinds[kind] / num_groups for kind in GROUP_KINDS},
        **search_metrics(records),
    }


def _shares(tried: Sequence[GroupStats]) -> str:
    """Describes the kinds of groups, and why the first that failed did."""
    kinds = Counter(group.kind for group in tried)
    counts = [(kinds[kind], kind.replace("_", " ")) for kind in GROUP_KINDS if kinds[kind]]
    shares = ", ".join(f"{count} {name}" for count, name in counts)
    error = next((short(group.error) for group in tried if group.error), "")
    return shares + (f" (the first environment error: {error})" if error else "")


def some_failed(tried: Sequence[GroupStats], group_size: int) -> str | None:
    """Tells how many episodes of a step failed, and the first error; None where none or all did.

    That all of a batch failed is told where it is sampled; see `Failures`.
    """
    total = len(tried) * group_size
    failed = total - sum(group.num_scored for group in tried)
    if failed in (0, total):
        return None
    error = next(short(group.error) for group in tried if group.error)
    return f"{failed} of {total} episodes ended in an environment error; the first: {error}"


def _complaint(settings: Filter, batches: _Batches, wanted: int) -> str:
    assert settings.keep is not None
    shown = {"metric": settings.metric} if "metric" in settings.keep.arguments else {}
    keys = ", ".join(f"{name}={v!r}" for name, v in {**shown, **settings.keep.settings}.items())
    return (
        f"after {batches.count} batches (config.filter.max_batches) only {len(batches.kept)} of "
        f"{wanted} groups have passed config.filter.name={settings.keep.name!r} ({keys}); the "
        f"{len(batches.tried)} groups sampled were: {_shares(batches.tried)}. With most failed, "
        "mend what the error names. With most all right the tasks are too easy for this policy, "
        "with most all wrong too hard: raise config.filter.max_batches (0: no limit) or, with "
        "--accept_changes, change config.tasks.train.source or config.rollout.group_size. What was "
        "finished is saved."
    )


def _filter_groups(
    groups: Sequence[Group], unshaped: Sequence[Group], method: Method, kl_coef: float
) -> list[Group]:
    """Returns the groups that pass the filter.

    With advantages by turn, a group passes if it would by the returns from any one turn on.

    Args:
        groups: with shaped rewards, and divergences where the filter sees the KL term.
        unshaped: the same, before their rewards were shaped.
        method: has the filter.
        kl_coef: coefficient of the KL term in the reward.
    """
    keep = method.filter.keep
    if keep is None:
        return list(groups)
    columns, before = Columns(groups), Columns(unshaped)
    passes = np.zeros(len(columns.group_ids), bool)
    metrics = np.zeros((1, len(passes)), np.float32)
    if "metric" in keep.arguments:
        # Values of `filter.varied.metric`, [N, K]; K is 1 but for rewards by turns.
        match method.filter.metric:
            case "acc":
                values = columns.is_correct[:, None]
            case "score":
                values = returns_of(before, method.advantage)
            case "seq_reward":
                values = returns_of(columns, method.advantage)
            case _:
                values = returns_of(columns, method.advantage)
                values = values - rewards.kl_penalties(groups, kl_coef)[:, None]
        metrics = values.astype(np.float32).T
    for metric in metrics:
        offered = {"scores": before.rewards, "metric": metric}

        def column(name: str, offered: dict[str, np.ndarray] = offered) -> np.ndarray:
            return offered[name] if name in offered else getattr(columns, name)

        passes |= filter_flags(keep, column, len(passes))
    kept = {int(index) for index in columns.group_ids[passes]}
    # A lone survivor of environment errors has nothing to differ from; a group of one is meant.
    fewest = min(2, method.group_size)
    return [group for i, group in enumerate(groups) if i in kept and len(group.scored) >= fewest]


def filter_flags(
    keep: NamedFunction, column: Callable[[str], np.ndarray], count: int
) -> np.ndarray:
    """Applies the filter to `count` trajectories, bool; `column` has its arrays by name.

    Raises:
        UserCodeError: it failed, or says something else.
    """
    checked = wrap_user_code(keep.key, keep.name, lambda *arrays: np.asarray(keep(*arrays)))
    flags: np.ndarray = checked(*map(column, keep.arguments))
    if flags.dtype != bool or flags.shape != (count,):
        raise UserCodeError(
            f"config.filter.name names {keep.name!r}, which returned {flags.dtype} "
            f"{list(flags.shape)}; expected bool [{count}], one a trajectory."
        )
    return flags
