import dataclasses

import numpy as np

from jaxrl.envs.base import CallRecord, Task
from jaxrl.logs.records import (
    OPTIONAL_FIELDS,
    build_question_record,
    build_trajectory_record,
    round_token_arrays,
    round_values,
)
from tests.episodes import in_turns, make_trajectory


def test_calls_of_judges_are_recorded():
    judged = dataclasses.replace(
        make_trajectory(), reward_records=(CallRecord(call="p", tool="j"),)
    )
    [record] = build_trajectory_record(judged)["reward_records"]
    assert (record["call"], record["tool"], record["source"]) == ("p", "j", "tool")
    assert "reward_records" not in build_trajectory_record(make_trajectory())


def test_optional_fields_are_recorded_where_they_differ_from_the_default():
    plain = dataclasses.replace(make_trajectory(), turn_starts=())
    assert not build_trajectory_record(plain).keys() & set(OPTIONAL_FIELDS)
    trajectory = dataclasses.replace(
        in_turns([0.1, -0.2], 0.25, lengths=[1, 2]),
        turn_advantages=(0.1, 0.7),
        reward_reason="IDK penalized",
        is_abstention=True,
        is_well_formed=False,
        opener="<think>",
        contexts=((3, 2),),
    )
    record = build_trajectory_record(trajectory)
    assert {name: record[name] for name in OPTIONAL_FIELDS} == {
        "turn_starts": list(trajectory.turn_starts),
        "contexts": [(3, 2)],
        "turn_rewards": [0.1, -0.2],
        "rest_reward": 0.25,
        "turn_advantages": [0.1, 0.7],
        "reward_reason": "IDK penalized",
        "is_abstention": True,
        "is_well_formed": False,
        "opener": "<think>",
    }


def test_numbers_are_rounded_so_that_small_weights_remain():
    values = np.array([-1.23456789, 1.23456789e-7, 0.0], np.float32)
    assert round_values(values) == [-1.234568, 0.0, 0.0]
    assert round_values(values, is_relative=True) == [-1.23457, 1.23457e-7, 0.0]
    record = round_token_arrays({"old_logprobs": values, "token_weights": values})
    assert record == {
        "old_logprobs": [-1.234568, 0.0, 0.0],
        "token_weights": [-1.23457, 1.23457e-7, 0.0],
    }


def test_the_question_of_a_chat_is_its_last_message():
    messages = ({"role": "system", "content": "Search."}, {"role": "user", "content": "Where?"})
    chat = dataclasses.replace(make_trajectory(), task=Task(id="t1", messages=messages))
    assert build_question_record(chat, "")["question"] == "Where?"
    alone = make_trajectory()
    assert build_question_record(alone, "")["question"] == alone.task.question
