import dataclasses
import json

import numpy as np

from jaxrl.data.serialization import from_json, to_json
from jaxrl.envs.base import CallRecord, Task, Turn
from tests.episodes import in_turns, make_trajectory, strayed, wavering


def test_a_trajectory_survives_json_bit_for_bit():
    rng = np.random.default_rng(0)
    wild = rng.standard_normal(6).astype(np.float32) * np.float32(1e-30)
    made = dataclasses.replace(
        make_trajectory(),
        rollout_logprobs=wild,
        rollout_entropies=np.nextafter(wild, np.float32(1)),
        is_abstention=True,
        reward=0.1 + 0.2,
        reward_parts={"f1": 1 / 3},
        reward_records=(CallRecord(call="p", tool="helpful", attempts=2), CallRecord(call="r")),
        task=Task(id="é", messages=({"role": "user", "content": "?"},)),
        turns=(
            Turn(text="a", records=(CallRecord(call="q", source="cache", attempts=0),)),
            Turn(
                text="b",
                records=(CallRecord(call="r", tool="t", waited_s=0.5, error="x"),) * 2,
                observation="[x][y]",
                results=("x", "y"),
            ),
        ),
    )
    got = from_json(json.loads(json.dumps(to_json(made))))
    for field in dataclasses.fields(made):
        np.testing.assert_equal(getattr(got, field.name), getattr(made, field.name))
    assert got.token_ids.dtype == np.int32
    assert got.loss_mask.dtype == bool


def test_what_a_step_finds_out_anew_is_not_kept():
    made = make_trajectory()
    found = {"divergence": strayed(0.1, 0.2, 0.3, 0.4), "windows": wavering(2, length=6)}
    assert to_json(dataclasses.replace(made, **found)) == to_json(made)
    got = from_json(to_json(made))
    assert (got.divergence, got.windows, got.advantage) == (None, None, None)


def test_what_older_trajectories_held_beside_is_passed_over():
    saved = to_json(make_trajectory()) | {"group_id": 3}
    assert to_json(from_json(saved)) == to_json(make_trajectory())


def test_turns_that_have_no_records_are_read():
    saved = to_json(make_trajectory())
    for turn in saved["turns"]:
        del turn["records"]
    assert to_json(from_json(saved)) == to_json(make_trajectory())


def test_older_trajectories_have_no_calls_of_judges():
    made = dataclasses.replace(make_trajectory(), reward_records=(CallRecord(call="p", tool="j"),))
    saved = to_json(made)
    del saved["reward_records"]
    assert from_json(saved).reward_records == ()


def test_turns_survive_json_and_older_trajectories_have_none():
    made = in_turns([0.1, -0.2], 1 / 3, lengths=[1, 2])
    made = dataclasses.replace(made, advantage=0.5, turn_advantages=(0.1, 0.7))
    got = from_json(json.loads(json.dumps(to_json(made))))
    for name in ("turn_starts", "turn_rewards", "rest_reward", "turn_advantages", "advantage"):
        assert getattr(got, name) == getattr(made, name), name
    saved = to_json(make_trajectory())
    before = from_json(
        {name: saved[name] for name in saved if not name.startswith(("turn_", "rest"))}
    )
    assert (before.turn_starts, before.turn_rewards, before.turn_advantages) == ((), (), None)
