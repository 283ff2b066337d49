"""Filters of groups: worth training on, or to be sampled again. On the host, in numpy."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Real

Array = jax.Array | np.ndarray


def group_members(group_ids: Int[Array, " N"]) -> list[np.ndarray]:
    """The indices of each group's trajectories, groups by ascending id.

    Args:
        group_ids: one a trajectory; those with a negative id belong to no group.
    """
    ids = np.asarray(group_ids)
    order = np.argsort(ids, kind="stable")
    order = order[ids[order] >= 0]
    if not len(order):
        return []
    return np.split(order, np.flatnonzero(np.diff(ids[order])) + 1)


def keep_informative(
    metric: Real[Array, " N"] | Bool[Array, " N"], group_ids: Int[Array, " N"]
) -> Bool[np.ndarray, " N"]:
    """Dynamic sampling: True in groups whose members differ, and in groups of one.

    DAPO section 3.2 (https://arxiv.org/abs/2503.14476). A group that agrees has no advantages to
    learn from; a group of one never could.

    Args:
        metric: what the members are compared by. DAPO takes correctness: by a reward that is
            shaped by length, a group that is wrong throughout would differ.
        group_ids: trajectories with the same id are compared, wherever they stand. Those with a
            negative id are not kept.
    """
    metric = np.asarray(metric)
    kept = np.zeros(len(metric), bool)
    for members in group_members(group_ids):
        values = metric[members]
        kept[members] = len(members) == 1 or values.max() > values.min()
    return kept


def within_accuracy(
    is_correct: Bool[Array, " N"],
    group_ids: Int[Array, " N"],
    *,
    low: float,
    high: float,
) -> Bool[np.ndarray, " N"]:
    """Online filtering: True in groups with `low < mean accuracy < high`, both strict.

    ARES (https://arxiv.org/abs/2510.08457). The released code filters by the overall reward, which
    all-wrong groups pass; this reads correctness alone. A group of one never passes.

    Args:
        is_correct: the verdict on each trajectory.
        group_ids: as for `keep_informative`.
        low: the accuracy at or below which a group is too hard.
        high: the accuracy at or above which a group is too easy.
    """
    is_correct = np.asarray(is_correct)
    kept = np.zeros(len(is_correct), bool)
    for members in group_members(group_ids):
        kept[members] = low < is_correct[members].mean() < high
    return kept


def needs_resampling(
    scores: Float[Array, " N"], is_abstention: Bool[Array, " N"], group_ids: Int[Array, " N"]
) -> Bool[np.ndarray, " N"]:
    """True in groups to sample again, whole: nobody scored and nobody said so.

    BAPO (https://arxiv.org/abs/2601.11037): such a group may hold an answer, or an admission that
    there is none, that this draw missed.

    Args:
        scores: correctness, at most 0 where there is none; before any boundary-aware bonus.
        is_abstention: the answer says that the model does not know, well formed or not.
        group_ids: trajectories with the same id belong together. Those with a negative id are
            not sampled again.
    """
    scores, is_abstention = np.asarray(scores), np.asarray(is_abstention)
    again = np.zeros(len(scores), bool)
    for members in group_members(group_ids):
        again[members] = (scores[members] <= 0).all() and not is_abstention[members].any()
    return again


FILTERS: dict[str, Callable[..., Any]] = {
    "varied": keep_informative,
    "accuracy_range": within_accuracy,
}
"""Filters by `filter.name`, beside `none`. Arrays are bound by the names of their parameters."""

TRAJECTORIES: dict[str, str] = {
    "void_turns": "jaxrl.extras.stability.masks:has_no_void_turn",
}
"""By name in `filter.trajectories`, beside `none`: True of a trajectory that has a loss."""

COLUMNS = ("metric", "scores", "rewards", "is_correct", "is_abstention", "group_ids")
"""Arrays that a filter may ask for: `metric` is what `filter.varied.metric` names, `scores` are
rewards before they were shaped."""
