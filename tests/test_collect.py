"""Filters, resampling and shaping on trajectories made by hand; the sampler is a table."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl.collect import (
    NotEnoughGroupsError,
    Tried,
    collect,
    from_json,
    shape,
    some_failed,
    to_json,
)
from jaxrl.config import default_config
from jaxrl.envs.base import Outcome, Task
from jaxrl.learning import Failures, NothingWorksError
from jaxrl.types import Draw
from tests.episodes import make_failure, make_trajectory


def settings(**changes):
    config = default_config()
    config.rollout.tasks_per_step, config.rollout.group_size = 2, 2
    config.update_from_flattened_dict(changes)
    return config


def member(right, *, group=0, sample=0, reward=None, **fields):
    """A trajectory that is right, wrong, or (None) an environment error."""
    if right is None:
        return make_failure(group_id=group, sample_index=sample)
    made = make_trajectory(
        reward=float(right) if reward is None else reward, group_id=group, sample_index=sample
    )
    return dataclasses.replace(made, is_correct=bool(right), **fields)


class Sampler:
    """Groups by task and attempt from a table, which is what rollouts are to `collect`."""

    def __init__(self, groups):
        self.groups, self.calls = groups, []

    def __call__(self, draws):
        self.calls.append([(draw.position, draw.attempt) for draw in draws])
        return [
            dataclasses.replace(trajectory, group_id=index, attempt=draw.attempt, task=draw.task)
            for index, draw in enumerate(draws)
            for trajectory in self.groups[draw.position][draw.attempt]
        ]


def take(position, count):
    places = range(position, position + count)
    return [Draw(task=Task(id=f"q{p}", question="?"), position=p) for p in places], position + count


def sampler(*groups):
    """Each group is its members' correctness, or a tuple of such for its attempts."""
    attempts = [group if isinstance(group, tuple) else (group,) for group in groups]
    return Sampler(
        [
            [[member(right, sample=i) for i, right in enumerate(one)] for one in tries]
            for tries in attempts
        ]
    )


def run(sample, **changes):
    known = {"items_taken", "carried", "is_late"}
    arguments = {key: changes.pop(key) for key in known & changes.keys()}
    config = settings(**changes)
    return collect(sample, take, config, **{"items_taken": 0, **arguments})


def tasks_of(groups):
    return [t.task_id for t in groups]


def test_without_a_filter_a_step_is_one_batch():
    got = run(sampler([1, 1], [0, 0]))
    assert [t.group_id for t in got.trajectories] == [0, 0, 1, 1]
    assert (got.items_taken, got.carried) == (2, [])
    assert got.metrics["rollout/num_generated"] == 4
    assert got.metrics["filter/kept_share"] == 1.0


def test_dynamic_sampling_draws_until_enough_groups_differ():
    sample = sampler([1, 1], [1, 0], [0, 0], [0, 0], [0, 1], [1, 0])
    got = run(sample, **{"filter.name": "varied"})
    assert sample.calls == [[(0, 0), (1, 0)], [(2, 0), (3, 0)], [(4, 0), (5, 0)]]
    assert tasks_of(got.trajectories) == ["q1", "q1", "q4", "q4"]
    assert [t.group_id for t in got.trajectories] == [0, 0, 1, 1]
    # The third differing group is surplus, and dropped.
    assert (got.items_taken, got.carried) == (6, [])
    assert got.metrics == {
        "rollout/num_generated": 12,
        "filter/num_batches": 3,
        "filter/kept_share": 0.5,
        "filter/surplus_groups": 1,
        "filter/carried_groups": 0,
        "filter/accuracy": 5 / 12,
        "filter/resampled_groups": 0,
        "filter/all_right_share": 1 / 6,
        "filter/all_wrong_share": 2 / 6,
        "filter/mixed_share": 3 / 6,
        "filter/failed_share": 0.0,
    }


def test_surplus_groups_are_carried_over_and_come_first():
    sample = sampler([1, 0], [0, 1], [1, 0], [1, 1], [1, 0])
    changes = {"filter.name": "varied", "filter.carry_over": True, "filter.tasks_per_batch": 3}
    first = run(sample, **changes)
    assert tasks_of(first.trajectories) == ["q0", "q0", "q1", "q1"]
    assert [tasks_of(group) for group in first.carried] == [["q2", "q2"]]
    changes["filter.tasks_per_batch"] = 2
    then = run(sample, **changes, items_taken=first.items_taken, carried=first.carried)
    assert tasks_of(then.trajectories) == ["q2", "q2", "q4", "q4"]
    assert [t.group_id for t in then.trajectories] == [0, 0, 1, 1]
    assert then.metrics["filter/kept_share"] == 0.5


def test_the_filter_gives_up_and_tells_what_the_groups_were():
    sample = sampler([1, 1], [0, 0], [1, 1], [None, None], [1, 0], [1, 1])
    with pytest.raises(NotEnoughGroupsError) as refused:
        run(sample, **{"filter.name": "varied", "filter.max_batches": 3})
    message = str(refused.value)
    assert "after 3 batches (config.filter.max_batches) only 1 of 2 groups" in message
    assert "the 6 groups sampled were: 3 all right, 1 all wrong, 1 mixed, 1 failed" in message


def failures(limit):
    said = []
    return Failures(limit=limit, say=said.append, num_batches=0), said


def test_batches_in_which_everything_failed_stop_a_filter_that_would_wait_for_ever():
    config = settings(**{"filter.name": "varied", "filter.max_batches": 0})
    sample = sampler([0, 0], [None, None], *[[None, None]] * 20)
    counted, said = failures(3)
    with pytest.raises(NothingWorksError, match=r"3 batches in a row .*: the server is down\."):
        collect(sample, take, config, items_taken=0, failures=counted)
    assert (len(sample.calls), len(said)) == (4, 3)


def test_a_filter_that_waits_says_so_and_why_groups_failed():
    changes = {"filter.name": "varied", "filter.max_batches": 20}
    sample = sampler(*[[0, 0], [None, None]] * 20)
    counted, said = failures(3)
    with pytest.raises(NotEnoughGroupsError, match=r"20 failed \(the first .* the server is down"):
        collect(sample, take, settings(**changes), items_taken=0, failures=counted)
    assert [line.partition(";")[0] for line in said] == [
        f"warning: 0 of 2 groups have passed the filter in {count} batches" for count in (10, 20)
    ]


def test_how_many_episodes_of_a_step_failed():
    failed, whole = Tried.of([make_failure()] * 2), Tried.of([make_trajectory()] * 2)
    half = Tried.of([make_trajectory(), make_failure()])
    said = f"ended in an environment error; the first: {failed.error}"
    assert some_failed([whole, failed, half], 2) == f"3 of 6 episodes {said}"
    assert some_failed([failed], 2) is some_failed([whole], 2) is some_failed([], 2) is None


def test_online_filtering_is_strict_and_counts_scored_members_only():
    groups = [[1, 1, None, 0], [1, None, None, 1], [0, 0, 0, 1], [1, 0, 1, 1]]
    changes = {"filter.name": "accuracy_range", "filter.low": 0.25, "filter.high": 0.75}
    got = run(sampler(*groups, [1, 0, 0, 1]), **changes, **{"filter.tasks_per_batch": 5})
    # 2 of 3 and 2 of 4; 1/4 and 3/4 lie on the bounds.
    assert sorted(set(tasks_of(got.trajectories))) == ["q0", "q4"]


@pytest.mark.parametrize(("metric", "kept"), [("acc", "q2"), ("score", "q1"), ("seq_reward", "q0")])
def test_the_metric_says_what_a_group_is_compared_by(metric, kept):
    long = {"token_ids": np.ones(12, np.int32), "loss_mask": np.arange(12) >= 2}
    same_but_long = [member(0), member(0, sample=1, **long)]
    other_score = [member(0, reward=0.1), member(0, sample=1, reward=0.2)]
    other_answer = [member(1, reward=0.0), member(0, sample=1, reward=0.0)]
    table = Sampler([[same_but_long], [other_score], [other_answer]])
    changes = {
        "filter.name": "varied", "filter.metric": metric, "filter.tasks_per_batch": 3,
        "rollout.tasks_per_step": 1, "shaping.overlong_buffer": 4,
        "shaping.overlong_max_tokens": 10,
    }  # fmt: skip
    got = run(table, **changes)
    assert set(tasks_of(got.trajectories)) == {kept}


def test_the_final_reward_counts_the_kl_penalty():
    changes = {
        "filter.name": "varied", "filter.metric": "seq_final_reward", "rollout.tasks_per_step": 1,
    }  # fmt: skip
    config = settings(**changes)
    even = collect(
        sampler([0, 0]), take, config, items_taken=0, penalty=lambda ts: np.arange(len(ts)) * 0.1
    )
    assert tasks_of(even.trajectories) == ["q0", "q0"]
    # The penalty itself is not taken off here: that is done once, for what is trained on.
    assert [t.reward for t in even.trajectories] == [0.0, 0.0]


def test_groups_without_success_or_abstention_are_sampled_again_as_a_whole():
    sample = sampler(([0, 0], [0, 0], [1, 0]), [0, 1], ([0, 0], [1, 1]))
    changes = {"filter.resample_attempts": 2}
    got = run(sample, **changes, **{"rollout.tasks_per_step": 3})
    assert sample.calls == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (2, 1)], [(0, 2)]]
    assert [t.attempt for t in got.trajectories] == [2, 2, 0, 0, 1, 1]
    assert [t.reward for t in got.trajectories] == [1, 0, 0, 1, 1, 1]
    assert [t.group_id for t in got.trajectories] == [0, 0, 1, 1, 2, 2]
    assert got.metrics["filter/resampled_groups"] == 3
    assert got.metrics["rollout/num_generated"] == 12


def test_resampling_waits_for_the_late_stage():
    sample = sampler(([0, 0], [1, 1]), [0, 1])
    got = run(sample, **{"filter.resample_attempts": 2}, is_late=False)
    assert [t.attempt for t in got.trajectories] == [0, 0, 0, 0]
    late = run(sample, **{"filter.resample_attempts": 2}, is_late=True)
    assert [t.attempt for t in late.trajectories] == [1, 1, 0, 0]


def test_an_abstention_is_no_reason_to_sample_again():
    honest = [member(0, is_abstention=True), member(0, sample=1)]
    sample = Sampler([[honest], [[member(1), member(0, sample=1)]]])
    changes = {"filter.resample_attempts": 2}
    assert run(sample, **changes).metrics["filter/resampled_groups"] == 0


def test_shaping_adds_parts_and_leaves_failures_alone():
    long = {"token_ids": np.ones(13, np.int32), "loss_mask": np.arange(13) >= 2}
    group = [
        member(0, is_abstention=True, outcome=Outcome.ABSTAINED),
        member(0, sample=1, **long),
        member(None, sample=2),
    ]
    changes = {
        "shaping.boundary_aware": True, "shaping.sample_level": False, "shaping.overlong_buffer": 4,
        "shaping.overlong_max_tokens": 12,
    }  # fmt: skip
    honest, slow, failed = shape(group, settings(**changes), is_late=True)
    assert (honest.reward, dict(honest.reward_parts)) == (0.5, {"abstention": 0.5, "overlong": 0})
    # 11 tokens after the prompt, 3 of them in the buffer of 4.
    assert (slow.reward, dict(slow.reward_parts)) == (-0.75, {"abstention": 0, "overlong": -0.75})
    assert (failed.reward, dict(failed.reward_parts)) == (0.0, {})


def test_carried_trajectories_survive_json_bit_for_bit():
    rng = np.random.default_rng(0)
    wild = rng.standard_normal(6).astype(np.float32) * np.float32(1e-30)
    made = member(
        1, rollout_logprobs=wild, rollout_entropies=np.nextafter(wild, np.float32(1)),
        is_abstention=True, reward_parts={"f1": 1 / 3},
    )  # fmt: skip
    made = dataclasses.replace(
        made, reward=0.1 + 0.2, task=Task(id="é", messages=({"role": "user", "content": "?"},))
    )
    got = from_json(json.loads(json.dumps(to_json(made))))
    for field in dataclasses.fields(made):
        np.testing.assert_equal(getattr(got, field.name), getattr(made, field.name))
    assert got.token_ids.dtype == np.int32
    assert got.loss_mask.dtype == bool
