"""A group that lost members to environment errors is normalized over what is left, everywhere."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.objectives.advantages import ESTIMATORS, subset_advantages
from jaxrl.training.collect import _filter_groups, compute_group_metrics
from jaxrl.types import Columns, Group, GroupStats, flatten_groups, replace_fields
from tests.episodes import make_failure, make_trajectory
from tests.helpers import estimator, method_with

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZE, NUM_GROUPS = 5, 3
ROWS = SIZE * NUM_GROUPS


def drawn(seed):
    """Groups with rewards, verdicts and lengths of all kinds, of which any member may fail."""
    rng = np.random.default_rng(seed)
    groups = []
    for task in range(NUM_GROUPS):
        made = []
        for index in range(SIZE):
            fields = {"task_number": task, "sample_index": index, "length": int(rng.integers(4, 9))}
            # What a failure would have earned must count nowhere.
            make = make_failure if rng.random() < 0.35 else make_trajectory
            right = bool(rng.random() < 0.5)
            one = make(
                reward=float(rng.integers(-2, 3)) if make is make_trajectory else 99.0, **fields
            )
            entropies = np.where(one.loss_mask, rng.random(), 0).astype(np.float32)
            made.append(dataclasses.replace(one, is_correct=right, rollout_entropies=entropies))
        groups.append(Group(trajectories=tuple(made)))
    return groups


def left(groups):
    """The groups without those that failed, and without groups that have nobody left."""
    return [
        Group(trajectories=tuple(group.scored_trajectories))
        for group in groups
        if group.scored_trajectories
    ]


def filled(groups):
    """The same with a failed group behind them: batches of one shape compile once."""
    count = ROWS - len(flatten_groups(groups))
    rest = [make_failure(task_number=99, sample_index=i) for i in range(count)]
    return [*groups, *([Group(trajectories=tuple(rest))] if rest else [])]


def scored(groups):
    return [t for t in flatten_groups(groups) if t.is_scored]


NAMES = [
    (name, changes)
    for name in ESTIMATORS
    if name != "pass_at_k_bootstrap"
    for changes in (
        [{"advantage.reinforce_plus_plus.baseline": b} for b in (False, True)]
        if name == "reinforce_plus_plus"
        else [{"advantage.grpo.normalize_std": b} for b in (False, True)]
        if name == "grpo"
        else [{"advantage.pass_at_k.k": 2}]
    )
]


@pytest.mark.parametrize(("name", "changes"), NAMES)
def test_advantages_are_those_of_the_group_that_is_left(name, changes):
    estimate = estimator(**{"advantage.name": name, **changes})
    has_signal = False
    for seed in range(6):
        whole = estimate(drawn(seed), 0, 0)
        alone = estimate(filled(left(drawn(seed))), 0, 0)
        got = [t.advantage for t in scored(whole)]
        np.testing.assert_allclose(got, [t.advantage for t in scored(alone)], atol=1e-6)
        assert all(t.advantage == 0 for t in flatten_groups(whole) if not t.is_scored)
        has_signal |= any(got)
    assert has_signal


@pytest.mark.parametrize("seed", range(2))
def test_random_subsets_hold_nobody_who_failed(seed):
    """Only those who failed are right here: a subset with one of them would pass."""
    estimate = estimator(**{"advantage.name": "pass_at_k_bootstrap", "advantage.pass_at_k.k": 2})
    groups = drawn(seed)
    wrong = replace_fields(groups, is_correct=[not t.is_scored for t in flatten_groups(groups)])
    assert not any(t.advantage for t in flatten_groups(estimate(wrong, 0, 0)))
    columns = Columns(groups)
    key = jax.random.fold_in(jax.random.key(0), 0)
    same = (columns.group_ids[:, None] == columns.group_ids) & (columns.group_ids >= 0)
    draws = np.where(same, jax.random.uniform(key, same.shape), -1.0)
    subsets = np.argsort(-draws, axis=1)[:, :2]
    expected = subset_advantages(columns.is_correct, columns.group_ids, subsets)
    got = [t.advantage for t in flatten_groups(estimate(groups, 0, 0))]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_two_of_four_by_hand():
    """Of four two are left, with the rewards 1 and 0: mean 1/2, standard deviation sqrt(1/2)."""
    made = [make_trajectory(reward=1.0, sample_index=0), make_failure(sample_index=1, reward=9.0)]
    made += [make_failure(sample_index=2), make_trajectory(reward=0.0, sample_index=3)]
    group = [Group(trajectories=tuple(made))]
    changes = {"advantage.grpo.normalize_std": True, "advantage.grpo.epsilon": 0.0}
    advantages = [t.advantage for t in flatten_groups(estimator(**changes)(group, 0, 0))]
    np.testing.assert_allclose(advantages, [0.5**0.5, 0, 0, -(0.5**0.5)], atol=1e-6)
    of_others = estimator(**{"advantage.name": "rloo"})(group, 0, 0)
    np.testing.assert_allclose(
        [t.advantage for t in flatten_groups(of_others)], [1, 0, 0, -1], atol=1e-6
    )


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"filter.name": "varied", "filter.varied.metric": m}
            for m in ("acc", "score", "seq_reward")
        ),
        {"filter.name": "accuracy_range", "filter.accuracy_range.low": 0.3},
    ],
)
def test_filters_see_what_is_left(changes):
    method = method_with(**{"rollout.group_size": SIZE, **changes})

    def kept(groups):
        found = _filter_groups(groups, groups, method, 0.0)
        return [group.task_id for group in found]

    counts = set()
    for seed in range(30):
        groups = drawn(seed)
        assert kept(groups) == kept(left(groups))
        counts.add(len(kept(groups)))
    assert len(counts) > 1  # it has work to do


def test_partial_groups_are_counted():
    made = lambda *kinds: Group(  # noqa: E731
        trajectories=tuple(make(sample_index=i) for i, make in enumerate(kinds))
    )
    groups = [
        made(make_trajectory, make_trajectory),
        made(make_trajectory, make_failure),
        made(make_failure, make_trajectory),
        made(make_failure, make_failure),  # failed as a whole, which filter/failed_share tells
    ]
    metrics = compute_group_metrics([*map(GroupStats.compute, groups)], 2)
    assert metrics["rollout/partial_groups"] == 2
    assert metrics["filter/failed_share"] == 0.25
