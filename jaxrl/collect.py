"""From tasks to the trajectories that a step trains on: resampling, shaping, filters.

Everything here is decided from the trajectories of all processes, in task order, so that all of
them decide alike. Groups are whole throughout.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxrl.envs.base import Outcome, Task, Turn
from jaxrl.envs.rewards import normalize_answer
from jaxrl.learning import Failures, first_error
from jaxrl.metrics import mean
from jaxrl.objectives.filters import keep_informative, needs_resampling, within_accuracy
from jaxrl.objectives.shaping import boundary_aware_rewards, overlong_penalty
from jaxrl.rules import overlong_limit
from jaxrl.types import Draw, Trajectory

Generate = Callable[[Sequence[Draw]], list[Trajectory]]
"""Samples and scores a group of every draw, in their order; group ids count from 0."""

DrawTasks = Callable[[int, int], tuple[list[Draw], int]]
"""From a position of the task stream and a number to so many draws and the position after them."""

Penalty = Callable[[Sequence[Trajectory]], np.ndarray]
"""What a KL term takes off the reward of each trajectory, float [N]."""

Group = list[Trajectory]


class NotEnoughGroupsError(ValueError):
    """The filter kept too few groups in as many batches as it may draw."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """What became of one group; of its trajectories, environment errors left out."""

    task_id: str
    num_correct: int
    num_scored: int
    mean_entropy: float  # nats a token, the mean over trajectories; NaN without any
    error: str = ""  # the first environment error's text

    @classmethod
    def of(cls, group: Group) -> Tried:
        """A group as it was sampled last."""
        scored = [t for t in group if t.is_scored]
        return cls(
            task_id=group[0].task_id,
            num_correct=sum(t.is_correct for t in scored),
            num_scored=len(scored),
            mean_entropy=mean([t.mean_entropy for t in scored]),
            error=first_error(group),
        )

    @property
    def look(self) -> str:
        """One of `LOOKS`."""
        if not self.num_scored:
            return "failed"
        if 0 < self.num_correct < self.num_scored:
            return "mixed"
        return "all_right" if self.num_correct else "all_wrong"


LOOKS = ("all_right", "all_wrong", "mixed", "failed")
"""What a group may look like; of a failed one all trajectories had environment errors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """What a step trains on."""

    trajectories: list[Trajectory]  # in groups of ids 0, 1, …
    carried: list[Group]  # surplus groups, for the next step
    items_taken: int  # of the task stream, in all
    tried: list[Tried]  # every group that was sampled, whether it passed the filter or not
    metrics: dict[str, float]


def collect(
    generate: Generate,
    draw: DrawTasks,
    config: ConfigDict,
    *,
    items_taken: int,
    carried: Sequence[Group] = (),
    is_late: bool = True,
    penalty: Penalty | None = None,
    failures: Failures | None = None,
) -> Collected:
    """Draws batches of tasks until `rollout.tasks_per_step` groups have passed the filter.

    Args:
        generate: samples groups.
        draw: takes tasks from their stream.
        config: of the run.
        items_taken: where the task stream stands.
        carried: groups left over by the step before.
        is_late: False in the early stage of a method that has one.
        penalty: of the KL term in the reward, where the filter is to see it.
        failures: takes note of every batch, and tells what there is to tell.

    Raises:
        NothingWorksError: see `Failures.count`.
        NotEnoughGroupsError: after `filter.max_batches` batches there are still too few.
    """
    settings, wanted = config.filter, config.rollout.tasks_per_step
    groups: list[Group] = list(carried)
    tried: list[Tried] = []
    num_batches = num_resampled = num_generated = 0
    while len(groups) < wanted:
        if 0 < settings.max_batches <= num_batches:
            raise NotEnoughGroupsError(
                _complaint(settings, num_batches, len(groups), wanted, tried)
            )
        draws, items_taken = draw(items_taken, settings.tasks_per_batch or wanted)
        batch, num_again = _generate_again(generate, draws, config, is_late)
        if failures is not None:
            failures.count(batch)
        scores = np.array([t.reward for t in batch], np.float32)
        shaped = shape(batch, config, is_late=is_late)
        kept = _keep(shaped, scores, config, penalty)
        in_groups = by_group(shaped)
        tried += [Tried.of(group) for group in in_groups]
        groups += [group for group in in_groups if kept[group[0].group_id]]
        num_batches += 1
        num_resampled += num_again
        num_generated += len(batch) + num_again * config.rollout.group_size
        if failures is not None and num_batches % _TOLD_EVERY == 0 and len(groups) < wanted:
            failures.say(
                f"warning: {len(groups)} of {wanted} groups have passed the filter in "
                f"{num_batches} batches; the groups were: {_shares(tried)}"
            )
    chosen = [renumbered(group, index) for index, group in enumerate(groups[:wanted])]
    surplus = groups[wanted:]
    looks = Counter(group.look for group in tried)
    num_groups = len(tried) or math.nan  # of no group at all, where enough were carried over
    return Collected(
        trajectories=[trajectory for group in chosen for trajectory in group],
        carried=surplus if settings.carry_over else [],
        items_taken=items_taken,
        tried=tried,
        metrics={
            "rollout/num_generated": num_generated,
            "filter/num_batches": num_batches,
            "filter/kept_share": (len(groups) - len(carried)) / num_groups,
            "filter/surplus_groups": len(surplus),
            "filter/carried_groups": len(surplus) if settings.carry_over else 0,
            "filter/accuracy": (
                sum(group.num_correct for group in tried)
                / (sum(group.num_scored for group in tried) or math.nan)
            ),
            "filter/resampled_groups": num_resampled,
            **{f"filter/{look}_share": looks[look] / num_groups for look in LOOKS},
        },
    )


_TOLD_EVERY = 10
"""Batches of one step after which a filter that waits for more groups says so."""


def _shares(tried: Sequence[Tried]) -> str:
    """What groups looked like, and why the first one failed that did."""
    looks = Counter(group.look for group in tried)
    shares = ", ".join(f"{looks[look]} {look.replace('_', ' ')}" for look in LOOKS if looks[look])
    error = next((group.error for group in tried if group.error), "")
    return shares + (f" (the first environment error: {error})" if error else "")


def some_failed(tried: Sequence[Tried], group_size: int) -> str | None:
    """How many episodes of a step failed, and the first error; None where none or all did.

    That all of a batch failed is told where it is sampled; see `Failures`.
    """
    total = len(tried) * group_size
    failed = total - sum(group.num_scored for group in tried)
    if failed in (0, total):
        return None
    error = next(group.error for group in tried if group.error)
    return f"{failed} of {total} episodes ended in an environment error; the first: {error}"


def _complaint(
    settings: ConfigDict, num_batches: int, found: int, wanted: int, tried: Sequence[Tried]
) -> str:
    measure = (
        f"differ in {settings.metric!r}"
        if settings.name == "varied"
        else f"have a mean accuracy between {settings.low} and {settings.high}"
    )
    return (
        f"after {num_batches} batches (config.filter.max_batches) only {found} of {wanted} groups "
        f"{measure} (config.filter.name={settings.name!r}); the {len(tried)} groups sampled "
        f"were: {_shares(tried)}. With most failed, mend what the error names. With most all right "
        "the tasks are too easy for this policy, with most all wrong too hard: raise "
        "config.filter.max_batches (0: no limit) or, with --accept_changes, change "
        "config.tasks.train.source or config.rollout.group_size. What was finished is saved."
    )


def _generate_again(
    generate: Generate, draws: Sequence[Draw], config: ConfigDict, is_late: bool
) -> tuple[list[Trajectory], int]:
    """Samples groups, and those without success or abstention anew; how many that were.

    BAPO (https://arxiv.org/abs/2601.11037): a group is replaced as a whole, and the last attempt
    stays as it is.
    """
    groups = by_group(generate(draws))
    attempts = config.filter.resample_attempts if is_late or config.filter.resample_early else 0
    num_resampled = 0
    for attempt in range(1, attempts + 1):
        batch = [trajectory for group in groups for trajectory in group]
        again = needs_resampling(
            np.array([t.reward for t in batch], np.float32),
            np.array([t.is_abstention for t in batch], bool),
            scored_ids(batch),
        )
        indices = sorted({t.group_id for t, flag in zip(batch, again, strict=True) if flag})
        if not indices:
            break
        fresh = generate([dataclasses.replace(draws[i], attempt=attempt) for i in indices])
        for index, group in zip(indices, by_group(fresh), strict=True):
            groups[index] = renumbered(group, index)
        num_resampled += len(indices)
    return [trajectory for group in groups for trajectory in group], num_resampled


def shape(
    trajectories: Sequence[Trajectory], config: ConfigDict, *, is_late: bool
) -> list[Trajectory]:
    """Trajectories with what abstentions earn and what length costs in their rewards."""
    shaping = config.shaping
    if shaping.boundary_aware:
        scores = np.array([t.reward for t in trajectories], np.float32)
        paid = boundary_aware_rewards(
            scores,
            np.array([t.is_abstention for t in trajectories], bool),
            np.array([t.is_well_formed for t in trajectories], bool),
            [normalize_answer(t.final_answer) for t in trajectories],
            scored_ids(trajectories),
            is_late=is_late,
            sample_level=shaping.sample_level,
            bonus=shaping.abstention_bonus,
            max_rate=shaping.abstention_rate,
        )
        trajectories = add_rewards(trajectories, "abstention", paid - scores)
    if shaping.overlong_buffer:
        penalties = overlong_penalty(
            np.array([t.response_length for t in trajectories]),
            max_length=overlong_limit(config),
            buffer=shaping.overlong_buffer,
            factor=shaping.overlong_factor,
        )
        trajectories = add_rewards(trajectories, "overlong", penalties)
    return list(trajectories)


def _keep(
    trajectories: Sequence[Trajectory],
    scores: np.ndarray,
    config: ConfigDict,
    penalty: Penalty | None,
) -> dict[int, bool]:
    """Which groups pass the filter, by id."""
    settings, ids = config.filter, scored_ids(trajectories)
    if settings.name == "none":
        return {t.group_id: True for t in trajectories}
    correct = np.array([t.is_correct for t in trajectories], bool)
    if settings.name == "accuracy_range":
        flags = within_accuracy(correct, ids, low=settings.low, high=settings.high)
    else:
        values = {
            "acc": lambda: correct,
            "score": lambda: scores,
            "seq_reward": lambda: rewards(trajectories),
            "seq_final_reward": lambda: (
                rewards(trajectories) - (penalty(trajectories) if penalty else 0.0)
            ),
        }[settings.metric]()
        flags = keep_informative(np.asarray(values, np.float32), ids)
    sizes = Counter(ids.tolist())
    kept = dict.fromkeys((t.group_id for t in trajectories), False)
    for trajectory, flag in zip(trajectories, flags, strict=True):
        # A lone survivor of environment errors has nothing to differ from; a group of one is meant.
        is_lone = sizes[trajectory.group_id] < min(2, config.rollout.group_size)
        kept[trajectory.group_id] |= bool(flag) and not is_lone
    return kept


def add_rewards(
    trajectories: Sequence[Trajectory], part: str, amounts: np.ndarray
) -> list[Trajectory]:
    """Trajectories with so much more reward, kept as a part of that name; failures get nothing."""
    return [
        dataclasses.replace(
            t,
            reward=float(np.float32(t.reward) + np.float32(amount)),
            reward_parts={**t.reward_parts, part: float(amount)},
        )
        if t.is_scored
        else t
        for t, amount in zip(trajectories, amounts, strict=True)
    ]


def rewards(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """float32 [N]."""
    return np.array([t.reward for t in trajectories], np.float32)


def scored_ids(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Group ids, int32 [N]; -1 for an environment error, which is in no group."""
    return np.array([t.group_id if t.is_scored else -1 for t in trajectories], np.int32)


def by_group(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Trajectories by group id, in order of the first of each."""
    groups: dict[int, Group] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return list(groups.values())


def renumbered(group: Group, group_id: int) -> Group:
    """The group under another id."""
    return [dataclasses.replace(trajectory, group_id=group_id) for trajectory in group]


ARRAYS = {
    "token_ids": np.int32,
    "loss_mask": bool,
    "rollout_logprobs": np.float32,
    "rollout_entropies": np.float32,
    "policy_versions": np.int32,
}


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as plain JSON values, exactly; arrays as base64 of their little-endian bytes."""
    fields = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    for name, dtype in ARRAYS.items():
        data = np.ascontiguousarray(fields[name], np.dtype(dtype).newbyteorder("<")).tobytes()
        fields[name] = base64.b64encode(data).decode("ascii")
    task = dataclasses.asdict(trajectory.task)
    turns = [dataclasses.asdict(turn) for turn in trajectory.turns]
    parts = dict(trajectory.reward_parts)
    outcome = str(trajectory.outcome)
    return {**fields, "task": task, "turns": turns, "reward_parts": parts, "outcome": outcome}


def from_json(saved: Mapping[str, Any]) -> Trajectory:
    """The inverse of `to_json`."""
    fields = dict(saved)
    for name, dtype in ARRAYS.items():
        data = base64.b64decode(fields[name])
        array = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
        fields[name] = array.astype(dtype)
    task = dict(fields["task"])
    task["answers"] = tuple(task["answers"])
    task["messages"] = None if task["messages"] is None else tuple(task["messages"])
    fields["task"] = Task(**task)
    fields["turns"] = tuple(Turn(**turn) for turn in fields["turns"])
    fields["outcome"] = Outcome(fields["outcome"])
    return Trajectory(**fields)
