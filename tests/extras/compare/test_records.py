"""Trajectories restored from their records, and batches that are not whole."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl.envs.base import CallRecord, Turn
from jaxrl.extras.compare.opening import choose_checkpoint
from jaxrl.extras.compare.records import read_groups, restored
from jaxrl.logs.records import trajectory_record
from jaxrl.logs.writers import write_trajectories
from jaxrl.types import Columns, Group
from tests.episodes import in_turns, make_failure, make_trajectory


def through_json(trajectory):
    return restored(json.loads(json.dumps(trajectory_record(trajectory))))


def test_all_that_an_objective_reads_is_restored():
    rng = np.random.default_rng(0)
    turns = (
        Turn(text="a", tool_call="q", observation="o", records=(CallRecord(call="q"),)),
        Turn(text="b", is_cut=True),
    )
    made = dataclasses.replace(
        in_turns([0.1, -0.2], 1 / 3, lengths=[1, 2]),
        rollout_logprobs=-rng.random(7).astype(np.float32),
        rollout_entropies=rng.random(7).astype(np.float32),
        turns=turns,
        advantage=0.25,
        turn_advantages=(0.5, 0.0),
        is_abstention=True,
        is_well_formed=False,
        is_correct=True,
        opener="<think>",
        reward_parts={"f1": 0.5},
    )
    got = through_json(made)
    for field in dataclasses.fields(made):
        one, wanted = getattr(got, field.name), getattr(made, field.name)
        if field.name in ("rollout_logprobs", "rollout_entropies"):
            np.testing.assert_allclose(one, wanted, atol=6e-7)
        else:
            np.testing.assert_equal(one, wanted, field.name)
    assert got.token_ids.dtype == np.int32
    assert got.generated_text == made.generated_text
    np.testing.assert_array_equal(got.token_advantages, made.token_advantages)
    for name in ("rewards", "rest_rewards", "turn_rewards", "turn_token_counts", "is_well_formed"):
        columns = [Columns([Group(trajectories=(one,))]) for one in (got, made)]
        np.testing.assert_array_equal(*(getattr(one, name) for one in columns))


def test_a_failure_stays_one():
    got = through_json(make_failure())
    assert not got.is_scored
    assert got.reward == 0


def written(folder, sizes, step=7):
    """A step with groups of these sizes."""
    made = [
        make_trajectory(task_number=group, sample_index=index)
        for group, size in enumerate(sizes)
        for index in range(size)
    ]
    fields = [{"group_id": int(t.task_id[1:])} for t in made]
    write_trajectories(folder / "trajectories" / f"step_{step:06d}.jsonl", made, fields)


def test_groups_in_their_order(tmp_path):
    written(tmp_path, [2, 2, 2])
    groups = read_groups(tmp_path, 7, 2)
    assert [group.task_id for group in groups] == ["t0", "t1", "t2"]
    assert [t.sample_index for t in groups[1].trajectories] == [0, 1]


@pytest.mark.parametrize(
    ("sizes", "size", "told"),
    [
        ([4, 4, 2], 4, "has only 2 of the 4 trajectories of the task 't2', .*log.trajectories=-1"),
        ([3], 4, "has only 3 of the 4 trajectories of the task 't0'"),
        ([4, 4], 2, "has a group of 4 trajectories, .* expected groups of config.rollout.group_si"),
        ([], 2, "is empty; set config.log.trajectories=-1"),
    ],
)
def test_groups_that_are_not_whole(tmp_path, sizes, size, told):
    written(tmp_path, sizes)
    with pytest.raises(ValueError, match=told):
        read_groups(tmp_path, 7, size)


def test_steps_that_were_not_recorded(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--step=3: .* no trajectories of this step; it"):
        read_groups(tmp_path, 3, 2)
    written(tmp_path, [2], step=7)
    written(tmp_path, [2], step=12)
    with pytest.raises(FileNotFoundError, match="holds steps 7, 12"):
        read_groups(tmp_path, 3, 2)
    file = tmp_path / "trajectories" / "step_000007.jsonl"
    file.write_text(file.read_text() + '{"group_id": 0}\n')
    with pytest.raises(ValueError, match=r"step_000007.jsonl:3 is no record of a trajectory"):
        read_groups(tmp_path, 7, 2)


def test_the_weights_that_sampled_are_chosen(tmp_path):
    for step in (4, 8, 9, 12):
        (tmp_path / str(step)).mkdir()
    chosen = {step: choose_checkpoint(tmp_path, step) for step in (4, 5, 9, 10, 11, 12, 99)}
    assert chosen == {4: 4, 5: 4, 9: 8, 10: 9, 11: 9, 12: 12, 99: 12}
    assert choose_checkpoint(tmp_path, 5, wanted=12) == 12
    with pytest.raises(ValueError, match=r"--checkpoint=5: .* no such .* holds 4, 8, 9, 12"):
        choose_checkpoint(tmp_path, 5, wanted=5)
    with pytest.raises(ValueError, match=r"--step=3: .* has no checkpoint of this step or before"):
        choose_checkpoint(tmp_path, 3)
