"""Groups that continue in a later rollout have the same tokens as if played at once."""

import numpy as np
import pytest

from jaxrl.envs.base import Task
from jaxrl.sampling.episodes import ReplySchedule
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.sampling.rollout import Rollout
from jaxrl.types import Draw, flatten_groups
from tests.helpers import tiny_params
from tests.sampling.slow import SlowEnv
from tests.toys import ROOMY, SMALL, Player, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

STOPS = (*"abcdefgh", "mn", "nm", "op", "po", "ij", "ji", "kl", "lk")
PARAMS, LATER = tiny_params(SMALL, seed=11), tiny_params(SMALL, seed=12)
DRAWS = [
    Draw(task=Task(id=f"task {index}", question=q, answers=("x",)), stream_index=index)
    for index, q in enumerate(
        ["where?", "who was it?", "when", "why is it so", "how", "which of them", "what", "is it?"]
    )
]


@pytest.fixture(scope="module")
def player():
    length = ROOMY.max_total_tokens
    return Player(
        SMALL, toy_tokenizer(), STOPS, num_rows=6, chunk_tokens=2, max_prompt_tokens=length
    )


def build_rollout(player, env, schedule):
    return Rollout(player.engine, env, player.tokenizer, player.automaton, ROOMY, schedule)


def sampling(version=0, max_unfinished=0, stage=0):
    return SamplingConfig(
        group_size=2,
        temperature=1.0,
        top_p=1.0,
        seeds=Seeds(seed=0, stage=stage, step=0),
        policy_version=version,
        max_unfinished=max_unfinished,
    )


def play_in_steps(player, env, schedule, *, max_unfinished, params=(PARAMS,)):
    """Play rollouts that leave some groups open; return the groups and the number of rollouts."""
    rollout, finished, left, count = build_rollout(player, env, schedule), {}, list(DRAWS), 0
    while left:
        player.engine.set_weights(params[min(count, len(params) - 1)])
        groups = rollout(left, sampling(count, min(max_unfinished, len(left) - 1)))
        assert player.engine.is_idle
        finished |= {g.task_id: g for g in groups if g is not None}
        assert sum(g is None for g in groups) == min(max_unfinished, len(left) - 1)
        left = [draw for draw, g in zip(left, groups, strict=True) if g is None]
        count += 1
    return [finished[draw.task.id] for draw in DRAWS], count


def play_at_once(player, schedule):
    player.engine.set_weights(PARAMS)
    return build_rollout(player, SlowEnv(STOPS), schedule)(DRAWS, sampling())


SCHEDULES = [ReplySchedule(lag_chunks=2), ReplySchedule(deterministic=False)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_continued_groups_have_the_tokens_of_an_undivided_rollout(player, schedule):
    whole = flatten_groups(play_at_once(player, schedule))
    assert max(len(t.turns) for t in whole) == 3
    mixed = 0
    for max_unfinished in (1, 4):
        env = SlowEnv(STOPS, 0.01, seed=max_unfinished)
        groups, count = play_in_steps(player, env, schedule, max_unfinished=max_unfinished)
        assert count > 1
        for a, b in zip(flatten_groups(groups), whole, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert [turn.text for turn in a.turns] == [turn.text for turn in b.turns]
            assert a.outcome == b.outcome
            np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, atol=5e-5, rtol=0)
            mixed += len(set(a.policy_versions[a.loss_mask].tolist())) > 1
    assert mixed > 0  # some were interrupted in the middle


def test_each_token_has_the_version_of_the_weights_that_drew_it(player):
    """The tokens of version 0 are those of a rollout with these weights alone."""
    schedule = ReplySchedule(lag_chunks=1)
    params = (PARAMS, LATER, PARAMS, LATER)
    groups, _ = play_in_steps(player, SlowEnv(STOPS), schedule, max_unfinished=4, params=params)
    whole = flatten_groups(play_at_once(player, schedule))
    num_mixed = 0
    for got, alone in zip(flatten_groups(groups), whole, strict=True):
        versions = got.policy_versions[got.loss_mask]
        assert (np.diff(versions) >= 0).all()
        old = np.flatnonzero(got.loss_mask)[versions == 0]
        assert got.token_ids[old].tolist() == alone.token_ids[old].tolist()
        np.testing.assert_allclose(
            got.rollout_logprobs[old], alone.rollout_logprobs[old], atol=5e-5, rtol=0
        )
        num_mixed += 0 < len(old) < len(versions)
    assert num_mixed


def test_a_deterministic_rollout_leaves_the_same_groups_whatever_the_clock(player):
    def play(longest_s, seed):
        env = SlowEnv(STOPS, longest_s, seed)
        groups, count = play_in_steps(player, env, ReplySchedule(lag_chunks=2), max_unfinished=2)
        return count, [t.policy_versions.tolist() for t in flatten_groups(groups)]

    assert play(0.0, 0) == play(0.03, 1)


def test_unfinished_groups_survive_an_evaluation_but_not_a_rollback(player):
    schedule = ReplySchedule(lag_chunks=2)
    whole = play_at_once(player, schedule)
    rollout = build_rollout(player, SlowEnv(STOPS), schedule)
    first = rollout(DRAWS, sampling(0, 2))
    left = [draw for draw, group in zip(DRAWS, first, strict=True) if group is None]
    evaluated = rollout(DRAWS[:1], sampling(stage=1))
    assert [len(group.trajectories) for group in evaluated] == [2]
    again = rollout(left, sampling(1, 1))
    finished = {g.task_id: g for g in [*first, *again] if g is not None}
    assert len(finished) == len(DRAWS) - 1
    for group in whole:
        if group.task_id in finished:
            got = finished[group.task_id].trajectories
            ids = [t.token_ids.tolist() for t in group.trajectories]
            assert [t.token_ids.tolist() for t in got] == ids
    # After a rollback the stage has another number: nothing is continued, and nothing is left.
    back = rollout(DRAWS, sampling(0, 3, stage=5))
    assert sum(group is None for group in back) == 3
    assert all(stage == 5 for stage, *_ in rollout._unfinished)
