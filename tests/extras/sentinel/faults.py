"""Faults put into a run on purpose, and the signs of the sentinel that name each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs.base import CallRecord
from jaxrl.types import Group, Trajectory

Groups = list[Group]
Parts = Any
"""Components as `components.assemble` makes them."""


def constant_rewards(groups: Groups) -> Groups:
    """A reward that tells nothing apart."""
    return of_each(groups, lambda t: dataclasses.replace(t, reward=0.5))


def huge_rewards(groups: Groups) -> Groups:
    """Rewards a thousand times as large, and gradients with them."""
    return of_each(groups, lambda t: dataclasses.replace(t, reward=1000 * t.reward))


def swapped_ids(groups: Groups) -> Groups:
    """Two neighboring sampled ids that changed places in every response."""

    def swap(trajectory: Trajectory) -> Trajectory:
        places = np.flatnonzero(trajectory.loss_mask)
        ids = trajectory.token_ids.copy()
        if len(places) > 3:
            ids[places[2:4]] = ids[places[[3, 2]]]
        return dataclasses.replace(trajectory, token_ids=ids)

    return of_each(groups, swap)


def one_key(groups: Groups) -> Groups:
    """Samples 0 and 1 of each group drawn by the same key."""
    twins = []
    for group in groups:
        first, second, *others = group.trajectories
        twin = dataclasses.replace(first, sample_index=second.sample_index)
        twins.append(Group(trajectories=(first, twin, *others)))
    return twins


def yielding_judge(groups: Groups) -> Groups:
    """A judge whose verdict is 1 for every answer."""

    def praise(trajectory: Trajectory) -> Trajectory:
        parts = {**trajectory.reward_parts, "judge": 1.0}
        asked = (CallRecord(call="is it right?", tool="judge"),)
        return dataclasses.replace(trajectory, reward_parts=parts, reward_records=asked)

    return of_each(groups, praise)


def other_prompts(groups: Groups) -> Groups:
    """A prompt that changes from sample to sample."""

    def change(trajectory: Trajectory) -> Trajectory:
        ids = trajectory.token_ids.copy()
        ids[0] += trajectory.sample_index % 2
        return dataclasses.replace(trajectory, token_ids=ids)

    return of_each(groups, change)


def of_each(groups: Groups, change: Callable[[Trajectory], Trajectory]) -> Groups:
    """Groups of changed trajectories."""
    return [Group(trajectories=tuple(map(change, group.trajectories))) for group in groups]


IN_GROUPS: dict[str, tuple[Callable[[Groups], Groups], tuple[str, ...]]] = {
    "constant rewards": (constant_rewards, ("rewards_constant",)),
    "exploding gradient": (huge_rewards, ("gradient_exploded",)),
    "swapped ids": (swapped_ids, ("ids_differ",)),
    "two samples, one key": (one_key, ("keys_repeat",)),
    "a judge that says yes": (yielding_judge, ("judge_says_yes",)),
    "prompts that differ": (other_prompts, ("prompts_differ",)),
}
"""By a fault, what it does to the groups of a rollout, and the signs that name it rightly."""


def with_groups(parts: Parts, step: int, change: Callable[[Groups], Groups]) -> Parts:
    """Parts whose rollouts are changed from a training step on."""
    rollout = parts.rollout

    def faulty(draws: Any, sampling: Any, **others: Any) -> Groups:
        groups = rollout(draws, sampling=sampling, **others)
        is_late = sampling.seeds.step >= step - 1
        return change(groups) if is_late and sampling.group_size > 1 else groups  # not evaluations

    return dataclasses.replace(parts, rollout=faulty)


def with_stale_sampler(parts: Parts, step: int) -> Parts:
    """Parts whose sampler gets the same weights again and again from a training step on."""
    taken: list[Any] = []
    set_weights = parts.engine.set_weights

    def forgetful(weights: Any) -> None:
        if len(taken) < step:
            taken.append(None)
            taken[-1] = jax.tree.map(jnp.copy, weights)  # the update donates them
            taken[:-1] = [None] * (len(taken) - 1)
        set_weights(jax.tree.map(jnp.copy, taken[-1]))

    parts.engine.set_weights = forgetful
    return parts


FAULTS: dict[str, tuple[str, ...]] = {
    **{name: signs for name, (_, signs) in IN_GROUPS.items()},
    "stale sampler": ("sampler_differs",),
    "none": (),
}
"""Faults, and the signs that name each rightly."""


def with_fault(parts: Parts, fault: str, step: int) -> Parts:
    """Parts in which a fault acts from a training step on, counted from 1."""
    if fault in IN_GROUPS:
        return with_groups(parts, step, IN_GROUPS[fault][0])
    return with_stale_sampler(parts, step) if fault == "stale sampler" else parts


def signs_of(workdir: Path) -> list[tuple[int, str]]:
    """Steps and names of the signs of a run, those that were there already left out."""
    path = workdir / "sentinel.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(line["step"], line["sign"]) for line in map(json.loads, lines)]
