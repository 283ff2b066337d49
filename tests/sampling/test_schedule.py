"""When the environment's replies enter, and how a rollout is interrupted."""

import dataclasses
import gc
import threading
import time

import jax
import numpy as np
import pytest

from jaxrl.envs.base import Outcome
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling import rollout
from jaxrl.sampling.engine import Request
from jaxrl.sampling.episodes import ReplySchedule
from jaxrl.sampling.sample_keys import derive_sample_keys
from tests.helpers import tiny_params
from tests.sampling.slow import SlowEnv
from tests.toys import SMALL, Player, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

STOPS = tuple("abcdefghijklmnop")  # a random policy stops about every tenth token
QUESTIONS = ["where?", "who was it?", "when"]
PARAMS = tiny_params(SMALL, seed=11)  # some of the first rows stop in their first chunk
ARRIVAL = ReplySchedule(deterministic=False)
SCHEDULES = [ReplySchedule(lag_chunks=1), ReplySchedule(lag_chunks=3), ARRIVAL]
NUM_ROWS = 4


@pytest.fixture(scope="module")
def player():
    """More samples than rows."""
    return Player(SMALL, toy_tokenizer(), STOPS, num_rows=NUM_ROWS, chunk_tokens=4)


def play(player, env, **settings):
    player.engine.set_weights(PARAMS)
    return player.play(env, QUESTIONS, group_size=3, **settings)


@pytest.fixture(scope="module")
def wanted(player):
    """The samples of one schedule."""
    got = play(player, SlowEnv(STOPS), schedule=ReplySchedule(lag_chunks=1))
    assert max(len(trajectory.turns) for trajectory in got) == 3
    return got


def assert_same(got, wanted, *, tolerance):
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
        np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_samples_do_not_depend_on_the_schedule(player, wanted, schedule):
    got = play(player, SlowEnv(STOPS, 0.02), schedule=schedule)
    assert_same(got, wanted, tolerance=5e-5)


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


@pytest.mark.parametrize("lag", [1, 3])
def test_replies_enter_after_the_lag(player, monkeypatch, lag):
    engine, stopped, waits = player.engine, {}, []
    step, resume = engine.step, engine.resume

    def recorded_step(**settings):
        events = step(**settings)
        stopped.update({event.request: event.chunk for event in events if event.status})
        return events

    def recorded_resume(resumed, images):
        for request, *_ in resumed:
            waits.append((engine.counts.chunks - stopped[request], engine.is_stalled))
        resume(resumed, images)

    monkeypatch.setattr(engine, "step", recorded_step)
    monkeypatch.setattr(engine, "resume", recorded_resume)
    play(player, SlowEnv(STOPS, 0.01), schedule=ReplySchedule(lag_chunks=lag))
    assert len(waits) > 10
    # Earlier only if there is nothing else to decode.
    assert {waited for waited, is_stalled in waits if not is_stalled} == {lag}
    assert all(waited <= lag for waited, _ in waits)


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
def test_calls_do_not_wait_for_one_another(player, wanted, schedule):
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

    assert_same(play(player, Waiting(STOPS), schedule=schedule), wanted, tolerance=5e-5)


def submit(engine, budgets):
    """Submit requests of one prompt and return their numbers."""
    engine.set_weights(PARAMS)
    count = np.arange(len(budgets), dtype=np.int32)
    keys = derive_sample_keys(0, 0, 0, count, count, count)
    return engine.submit(
        [
            Request(prompt_ids=(1, 2, 3), sample_key=key, budget=budget)
            for key, budget in zip(keys, budgets, strict=True)
        ]
    )


def test_the_oldest_rows_are_decoded_and_waiting_rows_keep_their_pages(player):
    engine = player.engine
    numbers = submit(engine, [20] * 8)
    events = engine.step()
    assert [event.request for event in events] == numbers[:NUM_ROWS]
    stopped = {event.request for event in events if event.status}
    assert 0 < len(stopped) < NUM_ROWS
    waiting = sum(len(engine._rows[number].pages) for number in stopped)
    running = [number for number in numbers if number not in stopped]
    assert [event.request for event in engine.step()] == running[:NUM_ROWS]
    assert sum(len(engine._rows[number].pages) for number in stopped) == waiting > 0
    # Resumed requests displace the youngest, which continue later.
    engine.resume([(number, [1], 8) for number in stopped])
    oldest = sorted(
        {*running[:NUM_ROWS], *stopped}
        - {number for number, row in engine._rows.items() if row.is_waiting}
    )
    assert [event.request for event in engine.step()] == oldest[:NUM_ROWS]
    engine.clear()
    assert engine.is_idle


def test_no_chunk_is_spent_on_rows_whose_budget_has_ended(player):
    engine = player.engine
    before = engine.counts.chunks
    submit(engine, [1, 4, 3])  # a chunk has four tokens
    while not engine.is_idle:
        for event in engine.step(ahead=1):
            assert event.status
            engine.finish(event.request)
    assert engine.counts.chunks - before == 1


def test_one_call_serves_all_rows_that_stopped_in_a_chunk(player, monkeypatch):
    env, sizes = SlowEnv(STOPS), []
    step = env.step
    monkeypatch.setattr(env, "step", lambda e, texts: sizes.append(len(texts)) or step(e, texts))
    before = player.engine.counts.chunks
    play(player, env)
    assert max(sizes) > 1
    assert sum(sizes) == len(env.texts)
    assert len(sizes) <= player.engine.counts.chunks - before


def env_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("env")]


def assert_clean(player, wanted):
    """Check that no request, thread or cache is left and that the next rollout is unaffected."""
    assert player.engine.is_idle
    assert player.engine.num_running == 0
    assert env_threads() == []
    assert cache_bytes(player.engine) == 0
    assert_same(play(player, SlowEnv(STOPS)), wanted, tolerance=5e-5)


@pytest.mark.parametrize(
    ("schedule", "num_calls"), [(SCHEDULES[0], 1), (SCHEDULES[1], 4), (ARRIVAL, 4)]
)
def test_a_rollout_can_be_interrupted(player, wanted, schedule, num_calls):
    answers = iter([False] * (num_calls - 1) + [True])
    with pytest.raises(Interrupted):
        play(player, SlowEnv(STOPS, 0.01), schedule=schedule, should_stop=lambda: next(answers))
    assert_clean(player, wanted)


class Broken(SlowEnv):
    """Environment that fails at its third call."""

    num_calls = 0

    def step(self, episodes, texts):
        self.num_calls += 1
        if self.num_calls == 3:
            raise OSError("the disk is full")
        return super().step(episodes, texts)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_a_failed_call_is_repeated_for_each_episode_alone(player, wanted, schedule):
    assert_same(play(player, Broken(STOPS, 0.01), schedule=schedule), wanted, tolerance=5e-5)
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
def test_a_call_that_hangs_costs_only_its_own_episodes(player, wanted, schedule):
    env = Hanging()
    got = play(player, env, schedule=dataclasses.replace(schedule, deadline_s=0.3))
    lost = [t for t in got if t.outcome == Outcome.ENVIRONMENT_ERROR]
    assert len(lost) == len(env.hung) > 0
    error = "Hanging.step: no reply within 0.3 s (config.env.step_deadline_s)"
    assert [t.turns[-1].error for t in lost] == [error] * len(lost)
    for trajectory, whole in zip(got, wanted, strict=True):
        if trajectory.is_scored:
            assert trajectory.token_ids.tolist() == whole.token_ids.tolist()
    assert [thread.daemon for thread in env_threads()] == [True]  # the process can exit
    env.go.set()
    assert player.engine.is_idle
    assert_same(play(player, SlowEnv(STOPS)), wanted, tolerance=5e-5)


def test_a_rollout_is_interrupted_while_a_call_hangs(player, wanted, monkeypatch):
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
    assert_clean(player, wanted)


def test_an_error_in_the_middle_of_a_chunk_leaves_the_engine_usable(player, wanted, monkeypatch):
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
    assert_clean(player, wanted)


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
