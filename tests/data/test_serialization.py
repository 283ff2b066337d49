import dataclasses
import json

import numpy as np

from jaxrl.data.serialization import deserialize_trajectory, serialize_trajectory
from jaxrl.envs.base import CallRecord, Task, Turn
from tests.episodes import in_turns, make_trajectory, strayed, wavering


def test_a_trajectory_survives_json_bit_for_bit():
    rng = np.random.default_rng(0)
    wild = rng.standard_normal(6).astype(np.float32) * np.float32(1e-30)
    trajectory = dataclasses.replace(
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
    restored = deserialize_trajectory(json.loads(json.dumps(serialize_trajectory(trajectory))))
    for field in dataclasses.fields(trajectory):
        np.testing.assert_equal(getattr(restored, field.name), getattr(trajectory, field.name))
    assert restored.token_ids.dtype == np.int32
    assert restored.loss_mask.dtype == bool


def test_what_a_step_recomputes_is_not_saved():
    trajectory = make_trajectory()
    computed = {"divergence": strayed(0.1, 0.2, 0.3, 0.4), "windows": wavering(2, length=6)}
    assert serialize_trajectory(
        dataclasses.replace(trajectory, **computed)
    ) == serialize_trajectory(trajectory)
    restored = deserialize_trajectory(serialize_trajectory(trajectory))
    assert (restored.divergence, restored.windows, restored.advantage) == (None, None, None)


def test_rewards_of_turns_survive_json():
    trajectory = in_turns([0.1, -0.2], 1 / 3, lengths=[1, 2])
    trajectory = dataclasses.replace(trajectory, advantage=0.5, turn_advantages=(0.1, 0.7))
    restored = deserialize_trajectory(json.loads(json.dumps(serialize_trajectory(trajectory))))
    for name in ("turn_starts", "turn_rewards", "rest_reward", "turn_advantages", "advantage"):
        assert getattr(restored, name) == getattr(trajectory, name), name
