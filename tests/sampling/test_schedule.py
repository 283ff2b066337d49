"""The order of the environment's replies, and interrupted and continued rollouts."""

import dataclasses
import gc
import random
import threading
import time
from functools import partial

import jax
import numpy as np
import pytest

from jaxrl.envs.base import Observation, Outcome, StepResult, Task
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling import rollout
from jaxrl.sampling.episodes import ReplySchedule
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.sampling.stop_strings import StopAutomaton, join_automata
from jaxrl.types import Draw, flatten_groups
from tests.helpers import tiny_params
from tests.toys import ROOMY, SMALL, Player, ScriptedEnv, script, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

STOPS = tuple("abcdefghijklmnop")  # a random policy stops about every tenth token
QUESTIONS = ["where?", "who was it?", "when"]
PARAMS = tiny_params(SMALL, seed=11)  # some of the first rows stop in their first chunk
ARRIVAL = ReplySchedule(deterministic=False)
SCHEDULES = [ReplySchedule(lag_chunks=1), ReplySchedule(lag_chunks=3), ARRIVAL]
NUM_ROWS = 4
NOTE = StepResult(observation=Observation(prefix="[", body="ok", suffix="]"))


class SlowEnv(ScriptedEnv):
    """Environment whose calls take random times: two observations, then the end."""

    def __init__(self, stops, longest_s=0.0, seed=0):
        super().__init__(stops, script(NOTE, NOTE, StepResult(outcome=Outcome.ANSWERED)))
        self._random = random.Random(seed)
        self._longest_s = longest_s

    def step(self, episodes, texts):
        time.sleep(self._random.uniform(0, self._longest_s))
        return super().step(episodes, texts)


def build_player(chunk_tokens):
    """Build a player with fewer rows than samples."""
    sizes = {"num_rows": NUM_ROWS}
    return Player(SMALL, toy_tokenizer(), STOPS, chunk_tokens=chunk_tokens, **sizes)


@pytest.fixture(scope="module")
def player():
    return build_player(chunk_tokens=4)


def play(player, env, **settings):
    player.engine.set_weights(PARAMS)
    return player.play(env, QUESTIONS, group_size=3, **settings)


@pytest.fixture(scope="module")
def expected(player):
    """Return the samples of one schedule."""
    actual = play(player, SlowEnv(STOPS), schedule=ReplySchedule(lag_chunks=1))
    assert max(len(trajectory.turns) for trajectory in actual) == 3
    return actual


def assert_same(actual, expected, *, tolerance):
    for a, b in zip(actual, expected, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
        np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_samples_do_not_depend_on_the_schedule(player, expected, schedule):
    actual = play(player, SlowEnv(STOPS, 0.02), schedule=schedule)
    assert_same(actual, expected, tolerance=5e-5)


def test_samples_do_not_depend_on_the_length_of_chunks(expected):
    assert_same(play(build_player(chunk_tokens=2), SlowEnv(STOPS)), expected, tolerance=5e-5)


@pytest.mark.parametrize("lag", [1, 3])
def test_a_deterministic_schedule_does_not_depend_on_the_clock(player, lag):
    counts, samples = [], []
    for longest_s in (0.0, 0.03):
        before = vars(player.engine.counts).copy()
        samples.append(
            play(player, SlowEnv(STOPS, longest_s), schedule=ReplySchedule(lag_chunks=lag))
        )
        now = vars(player.engine.counts)
        counts.append({name: now[name] - before[name] for name in now})
    assert counts[0] == counts[1]
    assert_same(*samples, tolerance=0)


@pytest.mark.parametrize(("lag", "overlaps"), [(1, True), (3, True), (3, False)])
def test_the_device_has_a_chunk_while_the_environment_works(player, monkeypatch, lag, overlaps):
    env, in_flight = SlowEnv(STOPS), []
    assert not player.engine.overlaps
    monkeypatch.setattr(player.engine, "overlaps", overlaps)
    step = env.step

    def recorded(episodes, texts):
        in_flight.append(len(player.engine._in_flight))
        return step(episodes, texts)

    monkeypatch.setattr(env, "step", recorded)
    play(player, env, schedule=ReplySchedule(lag_chunks=lag))
    assert max(in_flight) == (1 if overlaps and lag > 1 else 0)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_calls_do_not_wait_for_one_another(player, expected, schedule):
    # The first call returns when a second one has begun.
    second = threading.Event()

    class Waiting(SlowEnv):
        num_calls = 0

        def step(self, episodes, texts):
            self.num_calls += 1
            if self.num_calls == 1:
                assert second.wait(timeout=60)
            second.set()
            return super().step(episodes, texts)

    assert_same(play(player, Waiting(STOPS), schedule=schedule), expected, tolerance=5e-5)


def env_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("env")]


def assert_clean(player, expected):
    """Check that no request, thread or cache is left and that the next rollout is unaffected."""
    assert player.engine.is_idle
    assert player.engine.num_running == 0
    assert env_threads() == []
    assert cache_bytes(player.engine) == 0
    assert_same(play(player, SlowEnv(STOPS)), expected, tolerance=5e-5)


@pytest.mark.parametrize(
    ("schedule", "num_calls"), [(SCHEDULES[0], 1), (SCHEDULES[1], 4), (ARRIVAL, 4)]
)
def test_a_rollout_can_be_interrupted(player, expected, schedule, num_calls):
    answers = iter([False] * (num_calls - 1) + [True])
    with pytest.raises(Interrupted):
        play(player, SlowEnv(STOPS, 0.01), schedule=schedule, should_stop=lambda: next(answers))
    assert_clean(player, expected)


class Broken(SlowEnv):
    """Environment that fails at its third call."""

    num_calls = 0

    def step(self, episodes, texts):
        self.num_calls += 1
        if self.num_calls == 3:
            raise OSError("the disk is full")
        return super().step(episodes, texts)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_a_failed_call_is_repeated_for_each_episode_alone(player, expected, schedule):
    assert_same(play(player, Broken(STOPS, 0.01), schedule=schedule), expected, tolerance=5e-5)
    assert player.engine.is_idle


class Hanging(SlowEnv):
    """Environment whose second call does not return until `go` is set."""

    num_calls = 0

    def __init__(self):
        super().__init__(STOPS)
        self.go = threading.Event()
        self.hung = []

    def step(self, episodes, texts):
        self.num_calls += 1
        if self.num_calls == 2:
            self.hung = episodes
            self.go.wait(60)
        return super().step(episodes, texts)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_a_call_that_hangs_costs_only_its_own_episodes(player, expected, schedule):
    env = Hanging()
    actual = play(player, env, schedule=dataclasses.replace(schedule, deadline_s=0.3))
    lost = [t for t in actual if t.outcome == Outcome.ENVIRONMENT_ERROR]
    assert len(lost) == len(env.hung) > 0
    error = "Hanging.step: no reply within 0.3 s (config.env.step_deadline_s)"
    assert [t.turns[-1].error for t in lost] == [error] * len(lost)
    for trajectory, whole in zip(actual, expected, strict=True):
        if trajectory.is_scored:
            assert trajectory.token_ids.tolist() == whole.token_ids.tolist()
    assert [thread.daemon for thread in env_threads()] == [True]  # the process can exit
    env.go.set()
    assert player.engine.is_idle
    assert_same(play(player, SlowEnv(STOPS)), expected, tolerance=5e-5)


def test_a_rollout_is_interrupted_while_a_call_hangs(player, expected, monkeypatch):
    monkeypatch.setattr(rollout, "IDLE_POLL_S", 0.05)
    monkeypatch.setattr(rollout, "_ABORT_TIMEOUT_S", 0.1)
    env = Hanging()
    started = time.monotonic()
    with pytest.raises(Interrupted):
        play(player, env, should_stop=lambda: bool(env.hung))
    assert time.monotonic() - started < 30
    env.go.set()
    while env_threads():
        time.sleep(0.01)
    assert_clean(player, expected)


def test_an_error_in_the_middle_of_a_chunk_leaves_the_engine_usable(player, expected, monkeypatch):
    engine, decode = player.engine, player.engine._decode
    calls = iter(range(100))

    def failing(*args, **settings):
        result = decode(*args, **settings)  # which takes the cache that it is given
        if next(calls) == 3:
            raise MemoryError("no room")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_decode", failing)
        with pytest.raises(MemoryError):
            play(player, SlowEnv(STOPS))
    assert_clean(player, expected)


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def cache_bytes(engine):
    return sum(array.nbytes for array in jax.tree.leaves(engine._cache))


def test_who_holds_memory_in_each_phase(player):
    engine = player.engine
    engine.clear()
    engine.release()
    # Otherwise each collection below would go through the objects of all earlier tests.
    gc.collect()
    gc.freeze()
    params = jax.tree.map(jax.numpy.array, PARAMS)
    num_params = sum(array.size for array in jax.tree.leaves(params))
    before = live_bytes()

    engine.set_weights(params)
    weights = live_bytes() - before
    assert weights == 4 * num_params  # untied: exactly one copy
    engine.set_weights(params)
    assert live_bytes() - before == weights  # the old weights are freed

    played = play(player, SlowEnv(STOPS))
    shape = NUM_ROWS * SMALL.num_kv_heads * 64 * SMALL.head_dim
    cache = 2 * SMALL.num_layers * shape * 4
    assert cache_bytes(engine) == cache
    assert live_bytes() - before >= weights + cache

    engine.release()
    assert live_bytes() == before
    # The trainer's own weights are untouched, though they are float32 and on one device too.
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
    with pytest.raises(RuntimeError, match="no weights; call set_weights"):
        player.play(SlowEnv(STOPS), QUESTIONS)
    assert_same(play(player, SlowEnv(STOPS)), played, tolerance=0)
    gc.unfreeze()


DRAWS = [
    Draw(task=Task(id=f"task {index}", question=q, answers=("x",)), stream_index=index)
    for index, q in enumerate(
        ["where?", "who was it?", "when", "why is it so", "how", "which of them", "what", "is it?"]
    )
]
LATER = tiny_params(SMALL, seed=12)


def build_rollout(player, env, schedule):
    return rollout.Rollout(player.engine, env, player.tokenizer, player.automaton, ROOMY, schedule)


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
    play_draws, finished, left, count = build_rollout(player, env, schedule), {}, list(DRAWS), 0
    while left:
        player.engine.set_weights(params[min(count, len(params) - 1)])
        groups = play_draws(left, sampling(count, min(max_unfinished, len(left) - 1)))
        assert player.engine.is_idle
        finished |= {g.task_id: g for g in groups if g is not None}
        assert sum(g is None for g in groups) == min(max_unfinished, len(left) - 1)
        left = [draw for draw, g in zip(left, groups, strict=True) if g is None]
        count += 1
    return [finished[draw.task.id] for draw in DRAWS], count


def play_at_once(player, schedule):
    player.engine.set_weights(PARAMS)
    return build_rollout(player, SlowEnv(STOPS), schedule)(DRAWS, sampling())


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
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
    """Tokens of version 0 equal those of a rollout that only has the weights of version 0."""
    schedule = ReplySchedule(lag_chunks=1)
    params = (PARAMS, LATER, PARAMS, LATER)
    groups, _ = play_in_steps(player, SlowEnv(STOPS), schedule, max_unfinished=4, params=params)
    whole = flatten_groups(play_at_once(player, schedule))
    num_mixed = 0
    for actual, alone in zip(flatten_groups(groups), whole, strict=True):
        versions = actual.policy_versions[actual.loss_mask]
        assert (np.diff(versions) >= 0).all()
        old = np.flatnonzero(actual.loss_mask)[versions == 0]
        assert actual.token_ids[old].tolist() == alone.token_ids[old].tolist()
        np.testing.assert_allclose(
            actual.rollout_logprobs[old], alone.rollout_logprobs[old], atol=5e-5, rtol=0
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
    unfinished = build_rollout(player, SlowEnv(STOPS), schedule)
    first = unfinished(DRAWS, sampling(0, 2))
    left = [draw for draw, group in zip(DRAWS, first, strict=True) if group is None]
    evaluated = unfinished(DRAWS[:1], sampling(stage=1))
    assert [len(group.trajectories) for group in evaluated] == [2]
    again = unfinished(left, sampling(1, 1))
    finished = {g.task_id: g for g in [*first, *again] if g is not None}
    assert len(finished) == len(DRAWS) - 1
    for group in whole:
        if group.task_id in finished:
            actual = finished[group.task_id].trajectories
            ids = [t.token_ids.tolist() for t in group.trajectories]
            assert [t.token_ids.tolist() for t in actual] == ids
    # After a rollback the stage has another number: nothing is continued, and nothing is left.
    back = unfinished(DRAWS, sampling(0, 3, stage=5))
    assert sum(group is None for group in back) == 3
    assert all(stage == 5 for stage, *_ in unfinished._unfinished)


MIXED_STOPS = {"letters": STOPS, "vowels": ("a", "e", "io"), "none": ()}


@pytest.fixture(scope="module")
def mixed_player():
    """A player whose sampler knows the stop strings of several environments."""
    tokenizer = toy_tokenizer()
    automata = join_automata(
        [StopAutomaton(tokenizer.vocab_bytes, stops) for stops in MIXED_STOPS.values()]
    )
    sizes = {"num_rows": NUM_ROWS}
    player = Player(SMALL, tokenizer, (), chunk_tokens=4, automaton=automata[0], **sizes)
    player.engine.set_weights(PARAMS)
    return player, dict(zip(MIXED_STOPS, automata, strict=True))


def in_environment(draw, name):
    return dataclasses.replace(draw, task=dataclasses.replace(draw.task, environment=name))


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_a_mixture_samples_each_environment_as_if_alone(mixed_player, schedule):
    player, automata = mixed_player
    envs = {name: SlowEnv(stops, 0.01) for name, stops in MIXED_STOPS.items()}
    names = [[*envs][i % 3] for i in range(len(DRAWS))]
    draws = [in_environment(draw, name) for draw, name in zip(DRAWS, names, strict=True)]
    make = partial(rollout.Rollout, player.engine)
    mixture = make(envs, player.tokenizer, automata, ROOMY, schedule)
    groups = mixture(draws, sampling())
    for name, env in envs.items():
        alone = make({name: env}, player.tokenizer, {name: automata[name]}, ROOMY, schedule)
        own = [draw for draw in draws if draw.task.environment == name]
        actual = [group for group in groups if group.trajectories[0].task.environment == name]
        assert_same(flatten_groups(actual), flatten_groups(alone(own, sampling())), tolerance=5e-5)
    # A turn ends only at its own environment's stop strings, also after an observation.
    for group in groups:
        stops = MIXED_STOPS[group.trajectories[0].task.environment]
        for trajectory in group.trajectories:
            assert trajectory.task == group.trajectories[0].task
            for turn in trajectory.turns:
                found = [stop for stop in stops if stop in turn.text]
                assert not found or turn.text.endswith(tuple(found))
    turns = [turn.text for t in flatten_groups(groups) for turn in t.turns[1:]]
    assert any(set(text) & set(STOPS[:-1]) for text in turns)


def test_a_failing_environment_affects_no_other(mixed_player):
    player, automata = mixed_player

    class Failing(SlowEnv):
        def step(self, episodes, texts):
            raise RuntimeError("down")

    class Recording(SlowEnv):
        def step(self, episodes, texts):
            sent.extend((id(episode), len(episode.turns)) for episode in episodes)
            return super().step(episodes, texts)

    sent = []
    envs = {"letters": Recording(STOPS), "vowels": Failing(MIXED_STOPS["vowels"])}
    draws = [in_environment(draw, [*envs][i % 2]) for i, draw in enumerate(DRAWS)]
    mixture = rollout.Rollout(player.engine, envs, player.tokenizer, automata, ROOMY)
    trajectories = flatten_groups(mixture(draws, sampling()))
    for trajectory in trajectories:
        is_failing = trajectory.task.environment == "vowels"
        assert trajectory.is_scored != (is_failing and trajectory.outcome != "out_of_budget")
    assert len(sent) == len(set(sent))  # no turn of the other environment was sent twice
    with pytest.raises(ValueError, match="has the environment ''; expected one of 'letters', 'vo"):
        mixture(DRAWS[:1], sampling())
