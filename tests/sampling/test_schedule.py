"""When the environment's replies enter, and how a rollout ends before its time."""

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
LAGS = [1, 2, 3]
ARRIVAL = ReplySchedule(deterministic=False)
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
    """The samples, as one schedule draws them."""
    got = play(player, SlowEnv(STOPS), schedule=ReplySchedule(lag_chunks=1))
    assert max(len(trajectory.turns) for trajectory in got) == 3
    return got


def assert_same(got, wanted, *, tolerance):
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
        np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("schedule", [*(ReplySchedule(lag_chunks=lag) for lag in LAGS), ARRIVAL])
def test_samples_do_not_depend_on_the_schedule(player, wanted, schedule):
    for seed in range(2):
        got = play(player, SlowEnv(STOPS, 0.02, seed), schedule=schedule)
        assert_same(got, wanted, tolerance=5e-5)


@pytest.mark.parametrize("lag", LAGS)
def test_nothing_depends_on_the_clock(player, lag):
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


class Recorder:
    """What happened to the engine, in order: chunks dispatched, rows that stopped or went on."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.stopped, self.waits = engine, {}, []
        self.in_flight = []  # chunks, at each call of the environment
        step, resume = engine.step, engine.resume

        def recorded_step(**settings):
            events = step(**settings)
            self.stopped |= {event.request: event.chunk for event in events if event.status}
            return events

        def recorded_resume(resumed, images):
            for request, *_ in resumed:
                waited = engine.counts.chunks - self.stopped[request]
                self.waits.append((waited, engine.is_stalled))
            resume(resumed, images)

        monkeypatch.setattr(engine, "step", recorded_step)
        monkeypatch.setattr(engine, "resume", recorded_resume)


@pytest.mark.parametrize("lag", LAGS)
def test_replies_enter_after_the_lag(player, monkeypatch, lag):
    recorder = Recorder(player.engine, monkeypatch)
    play(player, SlowEnv(STOPS, 0.01), schedule=ReplySchedule(lag_chunks=lag))
    assert len(recorder.waits) > 10
    # Earlier only where there was nothing else to decode.
    assert {waited for waited, is_stalled in recorder.waits if not is_stalled} == {lag}
    assert all(waited <= lag for waited, _ in recorder.waits)


@pytest.mark.parametrize("overlaps", [False, True], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("lag", LAGS)
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


@pytest.mark.parametrize("schedule", [ReplySchedule(lag_chunks=3), ARRIVAL])
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


def requests(budgets):
    count = np.arange(len(budgets), dtype=np.int32)
    keys = derive_sample_keys(0, 0, 0, count, count, count)
    return [
        Request(prompt_ids=(1, 2, 3), sample_key=key, budget=budget)
        for key, budget in zip(keys, budgets, strict=True)
    ]


def test_the_oldest_rows_are_decoded_and_those_that_wait_keep_their_pages(player):
    engine = player.engine
    engine.set_weights(PARAMS)
    numbers = engine.submit(requests([20] * 8))
    events = engine.step()
    assert [event.request for event in events] == numbers[:NUM_ROWS]
    stopped = {event.request for event in events if event.status}
    assert 0 < len(stopped) < NUM_ROWS
    waiting = sum(len(engine._rows[number].pages) for number in stopped)
    running = [number for number in numbers if number not in stopped]
    assert [event.request for event in engine.step()] == running[:NUM_ROWS]
    assert sum(len(engine._rows[number].pages) for number in stopped) == waiting > 0
    # Those that go on displace the youngest, which go on later.
    engine.resume([(number, [1], 8) for number in stopped])
    going_on = sorted(
        {*running[:NUM_ROWS], *stopped}
        - {number for number, row in engine._rows.items() if row.is_waiting}
    )
    assert [event.request for event in engine.step()] == going_on[:NUM_ROWS]
    engine.clear()
    assert engine.is_idle


def test_no_chunk_is_spent_on_rows_whose_budget_has_ended(player):
    engine = player.engine
    engine.set_weights(PARAMS)
    before = engine.counts.chunks
    engine.submit(requests([1, 4, 3]))  # a chunk has four tokens
    while not engine.is_idle:
        for event in engine.step(ahead=1):
            assert event.status
            engine.finish(event.request)
    assert engine.counts.chunks - before == 1


def test_one_call_serves_all_rows_that_stopped_in_a_chunk(player, monkeypatch):
    recorder, sizes = Recorder(player.engine, monkeypatch), []
    env = SlowEnv(STOPS)
    step = env.step
    monkeypatch.setattr(env, "step", lambda e, texts: sizes.append(len(texts)) or step(e, texts))
    play(player, env)
    assert max(sizes) > 1
    assert sum(sizes) == len(env.texts)
    assert len(sizes) <= player.engine.counts.chunks
    assert len(recorder.stopped) == 9


def env_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("env")]


def assert_clean(player, wanted):
    """No request, no thread and no cache is left, and the next rollout is as if nothing was."""
    assert player.engine.is_idle
    assert player.engine.num_running == 0
    assert env_threads() == []
    assert cache_bytes(player.engine) == 0
    assert_same(play(player, SlowEnv(STOPS)), wanted, tolerance=5e-5)


ALL = [ReplySchedule(lag_chunks=1), ReplySchedule(lag_chunks=3), ARRIVAL]


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("num_asked", [1, 4])
def test_a_rollout_can_be_interrupted(player, wanted, schedule, num_asked):
    answers = iter([False] * (num_asked - 1) + [True])
    with pytest.raises(Interrupted):
        play(player, SlowEnv(STOPS, 0.01), schedule=schedule, should_stop=lambda: next(answers))
    assert_clean(player, wanted)


class Broken(SlowEnv):
    """Fails at its third call."""

    num_calls = 0

    def step(self, episodes, texts):
        self.num_calls += 1
        if self.num_calls == 3:
            raise OSError("the disk is full")
        return super().step(episodes, texts)


@pytest.mark.parametrize("schedule", ALL)
def test_a_call_that_fails_is_made_again_for_each_episode_alone(player, wanted, schedule):
    assert_same(play(player, Broken(STOPS, 0.01), schedule=schedule), wanted, tolerance=5e-5)
    assert player.engine.is_idle


class Hanging(SlowEnv):
    """Does not return from its second call, until it is let go."""

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


@pytest.mark.parametrize("schedule", ALL)
def test_a_call_that_hangs_is_given_up_and_the_others_go_on(player, wanted, schedule):
    env = Hanging()
    got = play(player, env, schedule=dataclasses.replace(schedule, deadline_s=0.3))
    lost = [t for t in got if t.outcome == Outcome.ENVIRONMENT_ERROR]
    assert len(lost) == len(env.hung) > 0
    told = "Hanging.step: no reply within 0.3 s (config.env.step_deadline_s)"
    assert [t.turns[-1].error for t in lost] == [told] * len(lost)
    for trajectory, whole in zip(got, wanted, strict=True):
        if trajectory.is_scored:
            assert trajectory.token_ids.tolist() == whole.token_ids.tolist()
    assert [thread.daemon for thread in env_threads()] == [True]  # nobody waits for it
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
    # Else each look below would go through all that the tests before this one have left: seconds.
    gc.collect()
    gc.freeze()
    params = jax.tree.map(jax.numpy.array, PARAMS)
    num_params = sum(array.size for array in jax.tree.leaves(params))
    before = live_bytes()

    engine.set_weights(params)
    weights = live_bytes() - before
    assert weights == 4 * num_params  # untied: exactly one copy
    engine.set_weights(params)
    assert live_bytes() - before == weights  # the old ones are gone

    played = play(player, SlowEnv(STOPS))
    shape = NUM_ROWS * SMALL.num_kv_heads * 64 * SMALL.head_dim
    cache = 2 * SMALL.num_layers * shape * 4
    assert cache_bytes(engine) == cache
    assert live_bytes() - before >= weights + cache

    engine.release()
    assert live_bytes() == before
    # The trainer's own are untouched, though they are float32 already and on one device.
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
    with pytest.raises(RuntimeError, match="no weights; call set_weights"):
        play_without_weights(player)
    assert_same(play(player, SlowEnv(STOPS)), played, tolerance=0)
    gc.unfreeze()


def play_without_weights(player):
    player.play(SlowEnv(STOPS), QUESTIONS)


def test_memory_is_not_taken_from_running_requests(player):
    engine = player.engine
    with pytest.raises(RuntimeError, match="still has requests"):
        play(player, SlowEnv(STOPS), should_stop=engine.release)
    assert engine.is_idle
