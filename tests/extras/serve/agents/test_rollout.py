"""Agent rollouts over HTTP: exactly what was sampled is trained."""

import json
import sys
import time
import types
from collections import Counter

import numpy as np
import pytest

from jaxrl.envs.base import Outcome
from jaxrl.extras.serve.agents import rollout as agent_rollout
from jaxrl.extras.serve.agents.environment import AgentEngine
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling.interfaces import Seeds
from jaxrl.types import flatten_groups
from tests.extras.serve.agents.played import (
    TO_PLAY,
    agents,
    contexts,
    draws,
    limits,
    played_engine,
    read_notes,
    sampling,
)
from tests.extras.serve.agents.to_play import post
from tests.extras.serve.served import MAX_TOTAL, PARAMS, make_engine

pytestmark = pytest.mark.usefixtures("quick_compilation")


def sampled_pairs(trajectories):
    """Return, sorted, the pairs of prompt and sampled ids of each trajectory."""
    episodes = []
    for trajectory in trajectories:
        pairs = []
        for ids, mask in contexts(trajectory):
            edges = np.flatnonzero(np.diff([0, *mask, 0]))
            pairs += [(ids[:a], ids[a:b]) for a, b in edges.reshape(-1, 2)]
        episodes.append(pairs)
    return sort_pairs(episodes)


def sort_pairs(episodes):
    return sorted(
        sorted((tuple(prompt), tuple(ids)) for prompt, ids in pairs) for pairs in episodes
    )


def test_a_conversation_is_one_context(tmp_path):
    with agents("converses", settings={"folder": str(tmp_path)}) as rollout:
        groups = rollout(draws("a", "b", "c"), sampling(step=7))
    notes = read_notes(tmp_path)
    assert [group.task_id for group in groups] == ["a", "b", "c"]
    for trajectory in flatten_groups(groups):
        assert trajectory.contexts == ()
        assert len(trajectory.turns) == len(trajectory.turn_starts) == 3
        assert trajectory.outcome == Outcome.ANSWERED
        text = trajectory.final_answer
        assert trajectory.reward_parts == {
            "reward": pytest.approx(len(text) / 10),
            "exact_match": len(text) % 2,
        }
        assert trajectory.turns[-1].text == text
        mask = trajectory.loss_mask
        assert (trajectory.rollout_logprobs[mask] < 0).all()
        assert not trajectory.rollout_logprobs[~mask].any()
        assert (trajectory.rollout_entropies[mask] > 0).all()
        assert set(trajectory.policy_versions[mask]) == {7}
        assert set(trajectory.policy_versions[~mask]) == {-1}
    for group in groups:
        episodes = sampled_pairs(group.trajectories)
        assert episodes == sort_pairs(notes[group.task_id])
        assert len({pair for pairs in episodes for pair in pairs}) == 6  # each its own sample


def test_a_fork_is_a_context_of_its_own_and_each_token_is_trained_once(tmp_path):
    with agents("wanders", settings={"folder": str(tmp_path)}) as rollout:
        [group] = rollout(draws("a"), sampling(1))
    [notes] = read_notes(tmp_path)["a"]
    [trajectory] = group.trajectories
    assert sampled_pairs([trajectory]) == sort_pairs([notes])
    ids = [prompt + completion for prompt, completion in notes]
    # The first, second and fourth are one context; the fork, a new question and a cut begin others.
    assert [token_ids for token_ids, _ in contexts(trajectory)] == [ids[3], ids[2], ids[4], ids[5]]
    num_repeated = [count for _, count in trajectory.contexts]
    left, right = (notes[index][0][len(ids[0]) :] for index in (1, 2))
    is_same = [a == b for a, b in zip(left, right, strict=False)]
    assert num_repeated[0] == len(ids[0]) + is_same.index(False)
    assert all(0 < count < len(ids[0]) for count in num_repeated[1:])
    assert len(trajectory.turns) == 6


def test_the_run_sets_seed_and_temperature(tmp_path):
    def play(name, step, temperature=1.0):
        (folder := tmp_path / name).mkdir()
        with agents("converses", settings={"folder": str(folder)}) as rollout:
            groups = rollout(draws("a", "b"), sampling(step=step, temperature=temperature))
        return [t.token_ids.tolist() for t in flatten_groups(groups)]

    first = play("first", 0)
    assert play("again", 0) == first
    assert play("next", 1) != first
    cold = play("cold", 0, temperature=0.001)
    assert cold[0] == cold[1] != first[0]


@pytest.mark.parametrize("says_so", [True, False])
def test_lost_replies_are_repeated_and_trained_once(tmp_path, says_so):
    engine = played_engine()
    before = engine.counts.sampled
    settings = {"folder": str(tmp_path), "says_so": says_so}
    with agents("loses", settings=settings) as rollout:
        groups = rollout(draws("a", "b"), sampling())
    for group in groups:
        notes = read_notes(tmp_path)[group.task_id]
        assert sampled_pairs(group.trajectories) == sort_pairs(notes)
    trained = flatten_groups(groups)
    assert [len(t.turns) for t in trained] == [4] * 4
    # Cancelled completions sampled some tokens that nobody received.
    num_trained = sum(t.num_sampled for t in trained)
    chunk = engine.programs.num_steps
    assert num_trained <= engine.counts.sampled - before <= num_trained + 4 * (6 + chunk)


FAULTS = {
    "silent": "never called the model",
    "raises": "RuntimeError: the tool is gone",
    "hangs": "has not ended after 3 s",
    "nothing": "gave no reward",
    "text": "reward is 'well done'",
    "bool": None,
    "nan": "not JSON compliant",
    "good": None,
}


def test_an_episode_without_a_reward_is_an_environment_error_and_never_a_zero():
    with agents("fails", deadline_s=3.0, max_concurrent=16) as rollout:
        groups = rollout(draws(*FAULTS), sampling(1))
    for group, (name, error) in zip(groups, FAULTS.items(), strict=True):
        [trajectory] = group.trajectories
        assert group.task_id == name
        if error is None:
            assert trajectory.outcome == Outcome.ANSWERED
            assert trajectory.reward_parts["reward"] == 1
            assert trajectory.num_sampled == 6
        else:
            assert error in trajectory.error, trajectory.error
            assert trajectory.reward == 0
            assert not trajectory.is_scored


def play_programs(*names, log=lambda _: None):
    """Return trajectories of programs; the name of a task selects the program's behavior."""
    with agents(command=(sys.executable, str(TO_PLAY)), log=log) as rollout:
        return flatten_groups(rollout(draws(*names), sampling(1)))


def test_a_program_posts_or_writes_its_reward_and_its_subprocesses_cannot():
    lines = []
    names = ("cheats-writes", "cheats-posts-again", "cheats-forgets", "ends")
    writes, posts, forgets, ends = play_programs(*names, log=lines.append)
    assert writes.reward_parts["reward"] == 0.75
    assert writes.outcome == Outcome.ABSTAINED
    assert posts.reward_parts["reward"] == 0.25
    assert "gave no reward" in forgets.error
    assert "ended with 4: I cannot" in ends.error
    # Each attempt is logged.
    assert [line.split("'")[1] for line in lines] == [t.task_id for t in (writes, posts, forgets)]


def test_contradictory_rewards_are_an_environment_error():
    lines = []
    names = ("posts-writes", "posts-otherwise", "posts-fails")
    *contradictory, failed = play_programs(*names, log=lines.append)
    for trajectory in contradictory:
        assert not trajectory.is_scored
        assert "0.25" in trajectory.error
    assert [line.split("'")[1] for line in lines] == list(names[:2])
    assert "ended with 5" in failed.error  # whatever it has posted
    assert not failed.is_scored


def test_a_reward_after_the_end_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path))
    with agents(command=(sys.executable, str(TO_PLAY))) as rollout:
        tasks = draws("writes", "forgets")
        writes, forgets = flatten_groups(rollout(tasks, sampling(1)))
        for task in tasks:
            reward = json.loads((tmp_path / task.task.id).read_text())
            assert post(reward["url"], {"reward": 1}, reward["key"])[0] == 404
    assert writes.reward_parts["reward"] == 0.75
    assert not forgets.is_scored


@pytest.mark.parametrize(
    ("limit", "error", "num_sampled"),
    [
        ({"max_turns": 2}, "expected at most config.rollout.max_turns", 12),
        ({"within": limits(max_total_tokens=40)}, "maximum context length", None),
        ({"within": limits(max_response_tokens=8)}, "maximum context length", 8),
    ],
)
def test_an_episode_has_limits_of_tokens_and_turns(tmp_path, limit, error, num_sampled):
    with agents("converses", settings={"folder": str(tmp_path)}, **limit) as rollout:
        [group] = rollout(draws("a"), sampling(1))
    [trajectory] = group.trajectories
    assert error in trajectory.error
    assert trajectory.num_sampled == (num_sampled or trajectory.num_sampled)
    assert 0 < len(trajectory.token_ids) <= (40 if num_sampled is None else MAX_TOTAL)


@pytest.mark.parametrize(("total", "response"), [(160, 200), (400, 100)])
def test_concurrent_completions_share_the_episodes_tokens(tmp_path, total, response):
    within = limits(max_total_tokens=total, max_response_tokens=response)
    settings = {"folder": str(tmp_path)}
    with agents("spreads", settings=settings, within=within) as rollout:
        [group] = rollout(draws("a"), sampling(1))
    [trajectory] = group.trajectories
    assert trajectory.error == ""
    assert trajectory.outcome == Outcome.OUT_OF_BUDGET
    assert "maximum context length" in trajectory.final_answer
    assert 0 < len(trajectory.token_ids) <= total
    assert trajectory.num_sampled <= response
    assert sampled_pairs([trajectory]) == sort_pairs(read_notes(tmp_path)["a"])


def test_an_unfinished_group_continues_in_the_next_rollout(tmp_path, monkeypatch):
    """An evaluation neither ages a rollout's episodes nor waits until they end."""
    delay = [0.0]  # the clock goes on between rollouts, and an episode's time does not
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + delay[0])
    monkeypatch.setattr(agent_rollout, "time", clock)
    tasks = draws(("b", {"slow": True}), "a")
    settings = {"folder": str(tmp_path)}
    with agents("waits", settings=settings, max_concurrent=2, deadline_s=5.0) as rollout:
        unfinished, finished = rollout(tasks, sampling(1, step=0, max_unfinished=1))
        assert (unfinished, finished.task_id) == (None, "a")
        rollout._engine.set_weights(PARAMS)  # as after an update
        delay[0] += 1000.0
        evaluation = sampling(1, seeds=Seeds(seed=0, stage=2, step=0))
        groups = rollout(draws(("e", {"slow": True}), "f"), evaluation)
        assert ["not ended after 5 s" in t.error for t in flatten_groups(groups)] == [True, False]
        delay[0] += 1000.0
        (tmp_path / "go").touch()
        [group] = rollout(tasks[:1], sampling(1, step=1))
    [trajectory] = group.trajectories
    assert trajectory.contexts == ()
    assert len(trajectory.turns) == 2
    versions = trajectory.policy_versions[trajectory.loss_mask]
    assert Counter(versions.tolist()) == {0: 6, 1: 6}
    assert sampled_pairs([trajectory]) == sort_pairs(read_notes(tmp_path)["b"])


def test_groups_that_are_not_drawn_again_are_dropped(tmp_path):
    tasks = draws("a", ("b", {"slow": True}))
    with agents("waits", settings={"folder": str(tmp_path)}, max_concurrent=8) as rollout:
        rollout(tasks, sampling(max_unfinished=1))
        assert len(rollout._running) == 2
        # The run goes back to a checkpoint, behind which it draws otherwise.
        back = sampling(max_unfinished=1, seeds=Seeds(seed=0, stage=5, step=0))
        rollout(draws("c", "d"), back)
        assert len(rollout._groups) == 1
        assert {m.task.id for m in rollout._running.values()} <= {"c", "d"}


def test_a_completion_continues_across_rollouts(tmp_path, monkeypatch):
    """A rollout ends after the first chunk of a long completion."""
    settings = {"folder": str(tmp_path), "turns": 1, "long": "b"}
    within = limits(max_response_tokens=400)
    tasks = draws("a", "b")
    with agents("converses", settings=settings, within=within) as rollout:
        step = rollout._engine.step

        def step_slowly(**settings):
            events = step(**settings)
            (tmp_path / "go").touch()
            time.sleep(0.05)
            return events

        with monkeypatch.context() as patched:
            patched.setattr(rollout._engine, "step", step_slowly)
            [_, unfinished] = rollout(tasks, sampling(1, step=0, max_unfinished=1))
        assert unfinished is None
        [group] = rollout(tasks[1:], sampling(1, step=1))
    [trajectory] = group.trajectories
    versions = trajectory.policy_versions[trajectory.loss_mask]
    assert set(versions.tolist()) == {0, 1}
    with agents("converses", settings=settings, within=within) as rollout:
        [whole] = flatten_groups(rollout(tasks[1:], sampling(1, step=0)))
    assert whole.token_ids.tolist() == trajectory.token_ids.tolist()


def test_a_stop_ends_the_agents_and_leaves_the_engine_empty(tmp_path):
    folder = {"folder": str(tmp_path)}
    with agents("waits", settings=folder) as rollout:
        started = time.monotonic()
        with pytest.raises(Interrupted):
            rollout(
                draws(("b", {"slow": True})),
                sampling(),
                should_stop=lambda: time.monotonic() > started + 1.5,
            )
        assert rollout._engine.is_idle
        [group] = rollout(draws("a"), sampling())
        assert not any(t.error for t in group.trajectories)


def test_an_engine_that_fails_ends_the_rollout(tmp_path):
    engine = make_engine(kind=AgentEngine, kinds=("full",))
    with agents("converses", settings={"folder": str(tmp_path)}, engine=engine) as rollout:
        engine.step = lambda **_: 1 / 0
        with pytest.raises(RuntimeError, match="the engine failed") as caught:
            rollout(draws("a"), sampling())
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
