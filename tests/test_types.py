import dataclasses
import math

import numpy as np
import pytest

from jaxrl.types import Columns, Group, GroupStats, flatten_groups, replace_fields
from tests.episodes import FAILED, grouped, make_failure, make_trajectory, strayed


def test_token_steps_are_the_sampled_tokens():
    trajectory = make_trajectory(length=5)
    steps = trajectory.token_steps(lambda token: f"<{token}>")
    assert [step.position for step in steps] == [2, 3, 4] == trajectory.generated_positions
    ids = trajectory.full_input_ids
    assert [step.token_id for step in steps] == ids[2:]
    assert [step.token_text for step in steps] == [f"<{token}>" for token in ids[2:]]
    assert [step.log_prob for step in steps] == [-1.0] * 3


def make_correct(**fields):
    return dataclasses.replace(make_trajectory(**fields), is_correct=True)


# Three groups of different sizes; of the last one nothing was scored.
GROUPS = [
    Group(
        trajectories=(
            make_correct(reward=1.0, length=6),
            make_failure(sample_index=1, reward=9.0, length=5),
            make_trajectory(reward=-0.5, sample_index=2, length=8),
        )
    ),
    Group(trajectories=(make_correct(reward=0.25, task_number=1, length=3),)),
    Group(trajectories=(dataclasses.replace(make_failure(task_number=2), is_correct=True),)),
]


class TestGroup:
    def test_members_are_counted(self):
        assert [group.task_id for group in GROUPS] == ["t0", "t1", "t2"]
        assert [len(group.scored_trajectories) for group in GROUPS] == [2, 1, 0]
        assert [group.num_correct for group in GROUPS] == [1, 1, 0]

    def test_groups_are_flattened_in_order(self):
        members = [(t.task_id, t.sample_index) for t in flatten_groups(GROUPS)]
        assert members == [("t0", 0), ("t0", 1), ("t0", 2), ("t1", 0), ("t2", 0)]
        assert flatten_groups([]) == []

    def test_group_stats_by_hand(self):
        mixed, lone, failed = (GroupStats.from_group(group) for group in GROUPS)
        assert mixed == GroupStats(
            task_id="t0",
            num_correct=1,
            num_scored=2,
            mean_entropy=0.5,
            error=FAILED.error,
            num_failed=1,
        )
        assert (lone.num_correct, lone.num_scored, lone.error) == (1, 1, "")
        assert (failed.num_correct, failed.num_scored) == (0, 0)
        assert math.isnan(failed.mean_entropy)
        wrong = GroupStats.from_group(Group(trajectories=(make_trajectory(),)))
        kinds = [stats.kind for stats in (mixed, lone, wrong, failed)]
        assert kinds == ["mixed", "all_right", "all_wrong", "failed"]


class TestColumns:
    def test_by_hand(self):
        columns = Columns(GROUPS)
        # An environment error is in no group, and never right, whatever it says of itself.
        wanted = {
            "group_ids": (np.int32, [0, -1, 0, 1, -1]),
            "rewards": (np.float32, [1.0, 9.0, -0.5, 0.25, 0.0]),
            "is_correct": (bool, [True, False, False, True, False]),
            "token_counts": (np.int32, [4, 3, 6, 1, 4]),
            "mean_entropies": (np.float32, [0.5] * 5),
        }
        for name, (dtype, values) in wanted.items():
            column = getattr(columns, name)
            assert column.dtype == dtype, name
            np.testing.assert_array_equal(column, values, err_msg=name)

    def test_abstentions_and_form_come_from_the_environment(self):
        honest = dataclasses.replace(make_trajectory(), is_abstention=True)
        garbled = dataclasses.replace(make_trajectory(), is_well_formed=False)
        columns = Columns(grouped([honest, garbled]))
        np.testing.assert_array_equal(columns.is_abstention, [True, False])
        np.testing.assert_array_equal(columns.is_well_formed, [True, False])

    def test_a_task_that_is_drawn_twice_has_two_groups(self):
        twice = [Group(trajectories=(make_trajectory(sample_index=i),)) for i in (0, 1)]
        np.testing.assert_array_equal(Columns(twice).group_ids, [0, 1])

    def test_no_groups_make_empty_columns(self):
        assert Columns([]).group_ids.shape == Columns([]).rewards.shape == (0,)


class TestReplaceFields:
    def test_each_trajectory_gets_its_own_value(self):
        changed = replace_fields(GROUPS, advantage=[1, 2, 3, 4, 5], reward=[5, 4, 3, 2, 1])
        assert [len(group.trajectories) for group in changed] == [3, 1, 1]
        assert [t.advantage for t in flatten_groups(changed)] == [1, 2, 3, 4, 5]
        assert [t.reward for t in flatten_groups(changed)] == [5, 4, 3, 2, 1]
        assert [t.task_id for t in flatten_groups(changed)] == [
            t.task_id for t in flatten_groups(GROUPS)
        ]
        assert [t.advantage for t in flatten_groups(GROUPS)] == [None] * 5  # unchanged
        assert replace_fields([], advantage=[]) == []

    def test_too_few_values_are_refused(self):
        with pytest.raises(ValueError, match="reward: 4 values for 5 trajectories"):
            replace_fields(GROUPS, advantage=[0.0] * 5, reward=[0.0] * 4)


def test_divergence_in_total_and_per_token():
    assert strayed(0.5, -0.25, 1.0, 0.75).total == 2.0
    assert strayed(0.5, -0.25, 1.0, 0.75).mean == 0.5
    assert math.isnan(strayed().mean)
