"""Filters and resampling of fixed trajectories, which a table returns as the sampler."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest

from jaxrl.data.stream import Stream
from jaxrl.envs.base import Task
from jaxrl.training.collect import (
    CollectedGroups,
    NotEnoughGroupsError,
    StepSampler,
    collect,
    draw_tasks,
)
from jaxrl.training.controllers import Controllers, SkipSet, StageGate
from jaxrl.training.failures import FailureCounter
from jaxrl.types import Group, GroupStats, flatten_groups, replace_fields
from tests import helpers
from tests.episodes import NumberedTasks, in_turns, make_failure, make_trajectory, strayed

method_with = partial(helpers.method_with, **{"rollout.tasks_per_step": 2, "rollout.group_size": 2})


def make_member(is_correct, *, sample=0, reward=None, **fields):
    """Return a right or wrong trajectory, or an environment error (None)."""
    if is_correct is None:
        return make_failure(sample_index=sample)
    reward = float(is_correct) if reward is None else reward
    trajectory = make_trajectory(reward=reward, sample_index=sample)
    return dataclasses.replace(trajectory, is_correct=bool(is_correct), **fields)


class Sampler:
    """Table of groups by task and attempt, in place of a rollout."""

    def __init__(self, groups):
        self.groups, self.calls = groups, []

    def __call__(self, draws):
        self.calls.append([(draw.stream_index, draw.attempt) for draw in draws])
        return [
            Group(
                trajectories=tuple(
                    dataclasses.replace(trajectory, attempt=draw.attempt, task=draw.task)
                    for trajectory in self.groups[draw.stream_index][draw.attempt]
                )
            )
            for draw in draws
        ]


def make_sampler(*groups):
    """Return a sampler of groups with the given correctness; a tuple has one value per attempt."""
    by_attempt = [group if isinstance(group, tuple) else (group,) for group in groups]
    return Sampler(
        [
            [[make_member(right, sample=i) for i, right in enumerate(group)] for group in attempts]
            for attempts in by_attempt
        ]
    )


def run(
    sample,
    *,
    num_tasks_taken=0,
    buffered_groups=(),
    in_flight_tasks=(),
    controllers=Controllers(),
    add_divergences=list,
    **changes,
):
    """Collect a step with this sampler under a changed configuration."""
    return collect(
        StepSampler(rollout=lambda draws, _, **options: sample(draws), sampling=None),
        NumberedTasks(),
        method_with(**changes),
        num_tasks_taken=num_tasks_taken,
        buffered_groups=buffered_groups,
        in_flight_tasks=in_flight_tasks,
        controllers=controllers,
        add_divergences=add_divergences,
        failures=FailureCounter(limit=0, log=lambda line: None, num_batches=0),
    )


def tasks_of(groups):
    """Return the task of every trajectory."""
    return [t.task_id for t in flatten_groups(groups)]


def test_without_a_filter_a_step_is_one_batch():
    actual = run(make_sampler([1, 1], [0, 0]))
    assert tasks_of(actual.groups) == ["q0", "q0", "q1", "q1"]
    assert (actual.num_tasks_taken, actual.buffered_groups) == (2, [])
    assert actual.metrics["rollout/num_generated"] == 4
    assert actual.metrics["filter/kept_share"] == 1.0


def test_partial_groups_are_counted():
    sample = make_sampler([1, 1], [1, None], [None, 1], [None, None])
    metrics = run(sample, **{"rollout.tasks_per_step": 4}).metrics
    assert metrics["rollout/partial_groups"] == 2
    assert metrics["filter/failed_share"] == 0.25


def test_dynamic_sampling_draws_until_enough_groups_differ():
    sample = make_sampler([1, 1], [1, 0], [0, 0], [0, 0], [0, 1], [1, 0])
    actual = run(sample, **{"filter.name": "varied"})
    assert sample.calls == [[(0, 0), (1, 0)], [(2, 0), (3, 0)], [(4, 0), (5, 0)]]
    assert [group.task_id for group in actual.groups] == ["q1", "q4"]
    # The third differing group is left over, and dropped.
    assert (actual.num_tasks_taken, actual.buffered_groups) == (6, [])
    expected = {
        "rollout/num_generated": 12,
        "filter/num_batches": 3,
        "filter/kept_share": 0.5,
        "filter/surplus_groups": 1,
        "filter/accuracy": 5 / 12,
        "filter/all_right_share": 1 / 6,
        "filter/all_wrong_share": 2 / 6,
        "filter/mixed_share": 3 / 6,
    }
    assert {name: actual.metrics[name] for name in expected} == expected


def test_leftover_groups_are_carried_over_and_come_first():
    sample = make_sampler([1, 0], [0, 1], [1, 0], [1, 1], [1, 0])
    changes = {"filter.name": "varied", "filter.carry_over": True, "filter.tasks_per_batch": 3}
    first = run(sample, **changes)
    assert tasks_of(first.groups) == ["q0", "q0", "q1", "q1"]
    assert [tasks_of([group]) for group in first.buffered_groups] == [["q2", "q2"]]
    changes["filter.tasks_per_batch"] = 2
    then = run(
        sample,
        **changes,
        num_tasks_taken=first.num_tasks_taken,
        buffered_groups=first.buffered_groups,
    )
    assert [group.task_id for group in then.groups] == ["q2", "q4"]
    assert then.metrics["filter/kept_share"] == 0.5


def test_the_filter_gives_up_and_counts_what_the_groups_were():
    sample = make_sampler([1, 1], [0, 0], [1, 1], [None, None], [1, 0], [1, 1])
    counts = "3 all right, 1 all wrong, 1 mixed, 1 failed"
    with pytest.raises(NotEnoughGroupsError, match=f"only 1 of 2 groups .* {counts}"):
        run(sample, **{"filter.name": "varied", "filter.max_batches": 3})


def test_online_filtering_is_strict_and_counts_scored_members_only():
    groups = [[1, 1, None, 0], [1, None, None, 1], [0, 0, 0, 1], [1, 0, 1, 1]]
    changes = {
        "filter.name": "range",
        "filter.range.low": 0.25,
        "filter.range.high": 0.75,
    }
    actual = run(make_sampler(*groups, [1, 0, 0, 1]), **changes, **{"filter.tasks_per_batch": 5})
    # 2 of 3 and 2 of 4; 1/4 and 3/4 lie on the bounds.
    assert sorted(set(tasks_of(actual.groups))) == ["q0", "q4"]


@pytest.mark.parametrize(("metric", "task"), [("acc", "q2"), ("score", "q1"), ("seq_reward", "q0")])
def test_the_metric_says_what_a_group_is_compared_by(metric, task):
    long = {"token_ids": np.ones(12, np.int32), "loss_mask": np.arange(12) >= 2}
    same_but_long = [make_member(0), make_member(0, sample=1, **long)]
    other_score = [make_member(0, reward=0.1), make_member(0, sample=1, reward=0.2)]
    other_answer = [make_member(1, reward=0.0), make_member(0, sample=1, reward=0.0)]
    table = Sampler([[same_but_long], [other_score], [other_answer]])
    changes = {
        "filter.name": "varied", "filter.key": metric, "filter.tasks_per_batch": 3,
        "rollout.tasks_per_step": 1, "shaping.overlong_buffer": 4,
        "shaping.overlong_max_tokens": 10,
    }  # fmt: skip
    actual = run(table, **changes)
    assert set(tasks_of(actual.groups)) == {task}


@pytest.mark.parametrize(
    ("key", "low", "high", "tasks"),
    [
        ("f1", -0.5, 0.375, ["q0"]),  # 0.25 and 0.375; q2 has a member without it
        ("f1", 0.25, 0.9, ["q1"]),
        ("response_length", 9, 11, ["q2"]),
    ],
)
def test_a_group_is_kept_by_the_mean_of_any_recorded_metric(key, low, high, tasks):
    long = {"token_ids": np.ones(12, np.int32), "loss_mask": np.arange(12) >= 2}
    rows = [
        [make_member(1, reward_parts={"f1": f1}) for f1 in (0.0, 0.5)],
        [make_member(0, reward_parts={"f1": f1}) for f1 in (0.0, 0.75)],
        [make_member(1, reward_parts={"f1": 0.2}, **long), make_member(0, **long)],
    ]
    changes = {
        "filter.name": "range", "filter.key": key, "filter.range.low": low,
        "filter.range.high": high, "filter.tasks_per_batch": 3, "rollout.tasks_per_step": 1,
    }  # fmt: skip
    assert tasks_of(run(Sampler([[row] for row in rows]), **changes).groups) == [*tasks, *tasks]


def test_by_turns_a_group_differs_where_a_member_earned_later():
    def make_group(*amounts):
        return [in_turns(a, 0.5, lengths=[1, 1], index=i) for i, a in enumerate(amounts)]

    # The same sums throughout; in the second group they are equal from the first turn on only.
    table = Sampler([[make_group((1.0, 0.0), (1.0, 0.0))], [make_group((1.0, 0.0), (0.0, 1.0))]])
    changes = {
        "filter.name": "varied", "filter.key": "score", "filter.tasks_per_batch": 2,
        "rollout.tasks_per_step": 1, "filter.max_batches": 1,
    }  # fmt: skip
    actual = run(table, **changes, **{"advantage.by_turn": True})
    assert set(tasks_of(actual.groups)) == {"q1"}
    with pytest.raises(NotEnoughGroupsError):
        run(table, **changes)


def test_the_final_reward_counts_the_kl_penalty():
    changes = {
        "filter.name": "varied", "filter.key": "seq_final_reward",
        "rollout.tasks_per_step": 1,
        "kl.coef": 0.5, "kl.apply_to": "reward", "filter.max_batches": 1,
    }  # fmt: skip

    def add_divergences(groups):
        divergences = [strayed(0.1 * i) for i, _ in enumerate(flatten_groups(groups))]
        return replace_fields(groups, divergence=divergences)

    even = run(make_sampler([0, 0]), **changes, add_divergences=add_divergences)
    assert tasks_of(even.groups) == ["q0", "q0"]
    # The penalty itself is not taken off here: that is done once, for what is trained on. What was
    # measured stays, so that it is not measured again.
    assert [t.reward for t in flatten_groups(even.groups)] == [0.0, 0.0]
    assert all(t.divergence is not None for t in flatten_groups(even.groups))

    # The group is even where all strayed as far.
    def measure_alike(groups):
        return replace_fields(groups, divergence=[strayed(0.1)] * len(flatten_groups(groups)))

    with pytest.raises(NotEnoughGroupsError):
        run(make_sampler([0, 0]), **changes, add_divergences=measure_alike)


def test_groups_without_success_or_abstention_are_sampled_again_as_a_whole():
    sample = make_sampler(([0, 0], [0, 0], [1, 0]), [0, 1], ([0, 0], [1, 1]))
    changes = {"filter.resample_attempts": 2}
    actual = run(sample, **changes, **{"rollout.tasks_per_step": 3})
    assert sample.calls == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (2, 1)], [(0, 2)]]
    assert [t.attempt for t in flatten_groups(actual.groups)] == [2, 2, 0, 0, 1, 1]
    assert [t.reward for t in flatten_groups(actual.groups)] == [1, 0, 0, 1, 1, 1]
    assert [group.task_id for group in actual.groups] == ["q0", "q1", "q2"]
    assert actual.metrics["filter/resampled_groups"] == 3
    assert actual.metrics["rollout/num_generated"] == 12


def test_resampling_waits_for_the_late_stage():
    sample = make_sampler(([0, 0], [1, 1]), [0, 1])
    early, late = (Controllers(gate=StageGate(is_late=is_late)) for is_late in (False, True))
    actual = run(sample, **{"filter.resample_attempts": 2}, controllers=early)
    assert [t.attempt for t in flatten_groups(actual.groups)] == [0, 0, 0, 0]
    actual = run(sample, **{"filter.resample_attempts": 2}, controllers=late)
    assert [t.attempt for t in flatten_groups(actual.groups)] == [1, 1, 0, 0]


@pytest.mark.parametrize(("size", "taken"), [(4, 2), (1, 1)])
def test_the_survivor_of_failures_is_no_group_of_one(size, taken):
    """A single survivor of four has no advantage; groups with a configured size of 1 are kept."""
    sample = make_sampler([1, None, None, None][:size], [1, 0, None, None])
    changes = {"rollout.tasks_per_step": 1, "rollout.group_size": size}
    assert run(sample, **{"filter.name": "varied"}, **changes).num_tasks_taken == taken


@pytest.mark.parametrize(("num_solved", "count"), [(98, 16), (0, 5)])
def test_draws_go_on_while_anything_is_left(num_solved, count):
    """This holds for any number of draws, and however often solved tasks recur."""
    stream = Stream([Task(id=f"q{i}", question="?") for i in range(100)], seed=0)
    solved = SkipSet({f"q{i}": 0.0 for i in range(num_solved)})
    draws, num_tasks_taken = draw_tasks(stream, 0, count, solved)
    assert len(draws) == count
    passed = [task.id for task in stream.get_items(0, num_tasks_taken)]
    assert [draw.task.id for draw in draws] == [name for name in passed if name not in solved]
    assert [draw.task.id for draw in draws] == [passed[draw.stream_index] for draw in draws]


def test_a_stream_of_solved_tasks_is_refused():
    stream = Stream([Task(id=f"q{i}", question="?") for i in range(3)], seed=0)
    with pytest.raises(NotEnoughGroupsError, match="all 3 tasks are solved and skipped"):
        draw_tasks(stream, 5, 1, SkipSet({f"q{i}": 0.0 for i in range(3)}))


def test_unfinished_groups_are_given_again_and_only_the_missing_ones_drawn():
    # Slow groups come back as None until they are sampled a second time.
    calls = []

    def sample_slowly(draws):
        before = {index for call in calls for index in call}
        calls.append([draw.stream_index for draw in draws])
        groups = make_sampler(*[[1, 0]] * 20)(draws)
        return [
            None if draw.stream_index % 3 == 0 and draw.stream_index not in before else group
            for draw, group in zip(draws, groups, strict=True)
        ]

    changes = {"filter.unfinished_tasks": 1}
    first = run(sample_slowly, **changes)
    assert calls == [[0, 1, 2]]  # two are wanted, and one may be under way
    assert tasks_of(first.groups) == ["q1", "q1", "q2", "q2"]
    assert (first.in_flight_tasks, first.num_tasks_taken, first.buffered_groups) == ([0], 3, [])
    left = {"num_tasks_taken": 3, "in_flight_tasks": first.in_flight_tasks}
    second = run(sample_slowly, **changes, **left)
    assert calls[1:] == [[0, 3, 4]]
    assert tasks_of(second.groups) == ["q0", "q0", "q4", "q4"]
    assert (second.in_flight_tasks, second.num_tasks_taken) == ([3], 5)
    saved = json.loads(json.dumps(second.to_json()))
    assert CollectedGroups.from_json(saved).in_flight_tasks == [3]


@pytest.mark.parametrize("name", ["", "math"])
def test_saved_groups_keep_their_environment(name):
    trajectory = make_member(True)
    task = dataclasses.replace(trajectory.task, environment=name)
    group = Group(trajectories=(dataclasses.replace(trajectory, task=task),))
    collected = CollectedGroups(
        groups=[group],
        buffered_groups=[],
        num_tasks_taken=1,
        sampled_stats=[GroupStats.from_group(group)],
        metrics={},
    )
    text = json.dumps(collected.to_json())
    assert ('environment"' in text) == bool(name)  # a run with one environment saves no name
    restored = CollectedGroups.from_json(json.loads(text))
    assert restored.groups[0].trajectories[0].task == task
    assert restored.sampled_stats == collected.sampled_stats
