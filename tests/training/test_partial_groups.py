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


def draw_groups(seed):
    """Return groups with rewards, verdicts and lengths of all kinds; any member may fail."""
    rng = np.random.default_rng(seed)
    groups = []
    for task in range(NUM_GROUPS):
        members = []
        for index in range(SIZE):
            fields = {"task_number": task, "sample_index": index, "length": int(rng.integers(4, 9))}
            if rng.random() < 0.35:
                member = make_failure(reward=99.0, **fields)  # which must count nowhere
            else:
                member = make_trajectory(reward=float(rng.integers(-2, 3)), **fields)
            entropies = np.where(member.loss_mask, rng.random(), 0).astype(np.float32)
            verdict = {"is_correct": bool(rng.random() < 0.5), "rollout_entropies": entropies}
            members.append(dataclasses.replace(member, **verdict))
        groups.append(Group(trajectories=tuple(members)))
    return groups


def without_failures(groups):
    """Return the groups without failures; groups that have no member left are dropped."""
    left = [Group(trajectories=tuple(group.scored_trajectories)) for group in groups]
    return [group for group in left if group.trajectories]


def padded(groups):
    """Return the groups with a failed one behind them: batches of one shape compile once."""
    count = SIZE * NUM_GROUPS - len(flatten_groups(groups))
    rest = [make_failure(task_number=99, sample_index=i) for i in range(count)]
    return [*groups, *([Group(trajectories=tuple(rest))] if rest else [])]


CASES = [
    *(("grpo", {"advantage.grpo.normalize_std": value}) for value in (False, True)),
    *(
        ("reinforce_plus_plus", {"advantage.reinforce_plus_plus.baseline": value})
        for value in (False, True)
    ),
    ("rloo", {}),
    *(
        (name, {"advantage.pass_at_k.k": 2})
        for name in ESTIMATORS
        if name.startswith("pass_at_k") and name != "pass_at_k_bootstrap"
    ),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_advantages_are_those_of_the_group_that_is_left(name, changes):
    estimate = estimator(**{"advantage.name": name, **changes})
    has_signal = False
    for seed in range(4):
        groups = draw_groups(seed)
        whole = flatten_groups(estimate(groups, 0, 0))
        alone = flatten_groups(estimate(padded(without_failures(groups)), 0, 0))
        got = [t.advantage for t in whole if t.is_scored]
        np.testing.assert_allclose(got, [t.advantage for t in alone if t.is_scored], atol=1e-6)
        assert all(t.advantage == 0 for t in whole if not t.is_scored)
        has_signal |= any(got)
    assert has_signal


def test_random_subsets_hold_no_failure():
    """Only failures are right here: a subset with one of them would pass."""
    estimate = estimator(**{"advantage.name": "pass_at_k_bootstrap", "advantage.pass_at_k.k": 2})
    groups = draw_groups(0)
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


@pytest.mark.parametrize(
    "changes",
    [
        {"filter.name": "varied", "filter.varied.metric": "acc"},
        {"filter.name": "varied", "filter.varied.metric": "seq_reward"},
        {"filter.name": "accuracy_range", "filter.accuracy_range.low": 0.3},
    ],
)
def test_filters_see_what_is_left(changes):
    method = method_with(**{"rollout.group_size": SIZE, **changes})

    def run_filter(groups):
        return [group.task_id for group in _filter_groups(groups, groups, method, 0.0)]

    counts = set()
    for seed in range(20):
        groups = draw_groups(seed)
        tasks = run_filter(groups)
        assert tasks == run_filter(without_failures(groups))
        counts.add(len(tasks))
    assert len(counts) > 1  # it has work to do


def test_partial_groups_are_counted():
    kinds = [
        (make_trajectory, make_trajectory),
        (make_trajectory, make_failure),
        (make_failure, make_trajectory),
        (make_failure, make_failure),  # failed as a whole, which filter/failed_share tells
    ]
    groups = [
        Group(trajectories=tuple(make(sample_index=i) for i, make in enumerate(members)))
        for members in kinds
    ]
    metrics = compute_group_metrics([*map(GroupStats.compute, groups)], 2)
    assert metrics["rollout/partial_groups"] == 2
    assert metrics["filter/failed_share"] == 0.25
