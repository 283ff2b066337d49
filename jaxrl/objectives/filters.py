"""Filters that select groups to train on and groups to resample, in numpy on the host."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Real

Array = jax.Array | np.ndarray


def list_group_members(group_ids: Int[Array, " N"]) -> list[np.ndarray]:
    """Return the trajectory indices of each group, in ascending order of group id.

    Args:
        group_ids: Group of each trajectory; a negative id means no group.
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
    """Return a mask of the groups whose metric values are not all equal (dynamic sampling).

    DAPO section 3.2 (https://arxiv.org/abs/2503.14476). If all values of a group are equal, its
    advantages are zero. A group of size 1 is always kept, because there is no second value to
    compare with.

    Args:
        metric: Value to compare within groups. DAPO uses correctness: if length shapes the reward,
            rewards differ even in a group where every answer is wrong.
        group_ids: Trajectories with the same id form a group, in any order. Trajectories with a
            negative id are dropped.
    """
    metric = np.asarray(metric)
    mask = np.zeros(len(metric), bool)
    for members in list_group_members(group_ids):
        values = metric[members]
        mask[members] = len(members) == 1 or values.max() > values.min()
    return mask


def keep_in_range(
    metric: Real[Array, " N"] | Bool[Array, " N"],
    group_ids: Int[Array, " N"],
    *,
    low: float,
    high: float,
) -> Bool[np.ndarray, " N"]:
    """Return a mask of the groups with `low < mean metric < high` (online filtering).

    ARES (https://arxiv.org/abs/2510.08457) filters by accuracy. Its released code filters by total
    reward, which lets all-wrong groups pass.

    Args:
        metric: Value to average within groups. A group with a NaN does not pass.
        group_ids: See `keep_informative`.
        low: Mean at or below which a group does not pass.
        high: Mean at or above which a group does not pass.
    """
    metric = np.asarray(metric)
    mask = np.zeros(len(metric), bool)
    for members in list_group_members(group_ids):
        mask[members] = low < metric[members].mean(dtype=np.float64) < high
    return mask


def needs_resampling(
    scores: Float[Array, " N"], is_abstention: Bool[Array, " N"], group_ids: Int[Array, " N"]
) -> Bool[np.ndarray, " N"]:
    """Return a mask of trajectories in groups with neither a correct answer nor an abstention.

    BAPO (https://arxiv.org/abs/2601.11037) resamples all trajectories of such groups.

    Args:
        scores: Correctness, at most 0 for a wrong answer, before any boundary-aware bonus.
        is_abstention: True if the answer, well-formed or not, says that the model does not know.
        group_ids: Trajectories with the same id form a group. Trajectories with a negative id are
            not resampled.
    """
    scores, is_abstention = np.asarray(scores), np.asarray(is_abstention)
    mask = np.zeros(len(scores), bool)
    for members in list_group_members(group_ids):
        mask[members] = (scores[members] <= 0).all() and not is_abstention[members].any()
    return mask


FILTERS: dict[str, Callable[..., Any]] = {
    "varied": keep_informative,
    "range": keep_in_range,
}
"""Group filters by `filter.name`, in addition to `none`. Arrays are bound by parameter name."""

TRAJECTORY_FILTERS: dict[str, str] = {
    "void_turns": "jaxrl.extras.stability.masks:has_no_void_turn",
}
"""Trajectory filters by `filter.trajectories`, in addition to `none`.

A filter returns True to keep a trajectory.
"""

COLUMNS = ("metric", "scores", "rewards", "is_correct", "is_abstention", "group_ids")
"""Arrays that a filter may request.

`metric` is the column named by `filter.key`; `scores` are rewards before shaping.
"""

KEYS = ("acc", "score", "seq_reward", "seq_final_reward", "response_length", "mean_entropy")
"""Metrics that `filter.key` may name, in addition to reward parts."""
