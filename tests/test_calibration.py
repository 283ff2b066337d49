"""The schedule of a run, chosen once: by hand, by a clock of its own, and in runs."""

import contextlib
import dataclasses
import itertools
import json
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import schedule as simulation
from benchmarks.schedule import Times, Work, chosen_for, idle_shares
from jaxrl import calibration, run
from jaxrl.calibration import Chosen, Measured, choose, slowest, telling
from jaxrl.components import assemble, settings_of
from jaxrl.envs.base import Observation, OutageError, StepResult, Task
from jaxrl.logs.display import Display
from jaxrl.runtime.stopping import Interrupted
from jaxrl.sampling.episodes import Schedule
from jaxrl.sampling.protocol import WAITS
from jaxrl.session import Progress
from tests.helpers import tiny_params
from tests.runs import killed, lasting, records, run_settings, saved_progress
from tests.toys import ROOMY, SMALL, Player, ScriptedEnv, script, toy_tokenizer

OPEN = Chosen()
SEARCH = Measured(
    call_s=0.2, chunk_s=0.1, host_s=0.01, turn_tokens=120, chunk_tokens=16, num_calls=64
)


def found(given=OPEN, longest=4096, **changes):
    chosen = choose(dataclasses.replace(SEARCH, **changes), given, longest=longest)
    return chosen.chunk_tokens, chosen.observation_lag_chunks


def test_a_schedule_by_hand():
    # An eighth of 120 tokens is 15, so chunks of 8 steps, 50 ms each. A call of 200 ms, with the
    # margin 220, needs five chunks of the device's time, and the reply enters before the sixth.
    assert found() == (8, 6)
    assert found(turn_tokens=128) == (16, 4)  # 2.2 chunks of 100 ms
    assert found(turn_tokens=1000) == (32, 3)  # 1.1 chunks of 200 ms
    # The host's 50 ms are more than 4/5 of a chunk of 8, and less of one of 16.
    assert found(host_s=0.05) == (16, 4)
    # The host takes longer than any chunk, and is what a chunk takes then: 0.22 / 0.3 of one.
    assert found(host_s=0.3) == (32, 2)
    # Nothing to hide, or nothing that was seen: as much overlap as the default has.
    assert found(call_s=0.0) == (8, 2)
    # What is given stays, and the other is chosen for it.
    assert found(Chosen(chunk_tokens=64)) == (64, 2)
    assert found(Chosen(observation_lag_chunks=9)) == (8, 9)
    assert found(longest=6) == (6, 7)  # 37.5 ms, 5.9 of them


def test_a_lag_is_enough_for_each_process():
    other = dataclasses.replace(SEARCH, call_s=0.5, chunk_s=0.2, host_s=0.05, turn_tokens=80)
    assert slowest([SEARCH, other]) == Measured(
        call_s=0.5, chunk_s=0.1, host_s=0.05, turn_tokens=100, chunk_tokens=16, num_calls=128
    )


CELLS = [*itertools.product((0.02, 0.2, 2.0), (64, 512), (32, 128))]


@pytest.mark.parametrize(("latency_s", "rows", "turn"), CELLS)
def test_the_device_does_not_wait_where_rows_could_run(latency_s, rows, turn):
    """See `benchmarks.schedule` for which these are."""
    times = Times(latency_s=latency_s, step_s=0.006, host_s=0.01)
    work = Work(num_rows=rows, num_samples=2 * rows, turn_tokens=turn, num_turns=2)
    shares = idle_shares(chosen_for(work, times), times)
    assert shares["waits"] + shares["host"] <= 0.1


@pytest.mark.parametrize("latency_s", [0.2, 2.0])
def test_the_device_hardly_waits_at_all_where_there_are_many_rows(latency_s):
    # A turn of 128 tokens takes 0.77 s, so beside each row that runs up to 2.6 others wait: of 320,
    # 32 run until the last wave.
    times = Times(latency_s=latency_s, step_s=0.006, host_s=0.01)
    work = Work(num_rows=32, num_samples=320, turn_tokens=128, num_turns=3)
    shares = idle_shares(chosen_for(work, times), times)
    assert sum(shares[name] for name in ("waits", "few rows", "host")) <= 0.1
    before = idle_shares(work, times)
    assert before["waits"] > 0.4  # by the schedule that was fixed before


def test_the_simulation_counts_what_the_device_waits_for():
    # Eight rows whose turns end at once. A chunk takes 4 s, the next one is dispatched before the
    # host knows that nothing runs in it, and a call takes 10 s, of which 6 are left then. So it
    # goes three times.
    work = Work(num_rows=8, num_samples=8, turn_tokens=1, num_turns=3, chunk_tokens=4, lag_chunks=2)
    rollout, device = simulation.make(work, step_s=1.0)
    rollout.device, rollout.latency_s = device, lambda: 10.0
    simulation.play(rollout, work)
    assert device.clock.now == pytest.approx(3 * 4 + 3 * 10)
    assert device.clock.idle == pytest.approx({"waits": 0, "few rows": 18, "host": 0})


SETTINGS = {
    "stages": ("train",),
    "num_steps": 2,
    "rollout.chunk_tokens": 0,
    "rollout.observation_lag_chunks": 0,
    "rollout.tasks_per_step": 2,
    "rollout.group_size": 2,
    "eval.suites": (),
    "eval.max_tasks": 2,
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 100,
}


def play(config, workdir):
    workdir.mkdir(exist_ok=True)
    parts, display, said = assemble(config), Display(), []
    display.log = said.append
    run.run(settings_of(config), workdir, parts, display)
    return said, parts


def scheduled(parts):
    lag = parts.calibrate.schedule.lag_chunks
    return {"chunk_tokens": parts.engine.programs.num_steps, "observation_lag_chunks": lag}


@pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")
def test_a_schedule_is_chosen_once_and_a_run_goes_on_by_it(tiny_world, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "is_open", lambda *_: True)
    monkeypatch.setattr(calibration, "MIN_CHUNKS", 2)
    monkeypatch.setattr(calibration, "NUM_TURNS", 2)
    config, one = run_settings(tiny_world, **SETTINGS), tmp_path / "one"
    said, parts = play(config, one)
    [told] = [line for line in said if line.startswith("schedule: ")]
    kept = json.loads((one / "schedule.json").read_text())
    measured = kept.pop("measured")
    assert kept == scheduled(parts)
    assert f"config.rollout.observation_lag_chunks={kept['observation_lag_chunks']}" in told
    # The model is random, and its turns end where their tokens do.
    assert (measured["num_calls"], measured["turn_tokens"]) == (0, 40)
    assert measured["chunk_s"] > measured["host_s"] > 0
    assert saved_progress(parts, one)[0].schedule == kept
    assert {f"timing_s/wait_{name}" for name in WAITS} <= records(one)[-1].keys()

    # Another schedule than this machine would choose, so that a start which measures is found out.
    other = {"chunk_tokens": 5, "observation_lag_chunks": 3}
    again = killed(one, tmp_path / "again", after=0)
    (again / "schedule.json").write_text(json.dumps(other))
    said, parts = play(config, again)
    assert scheduled(parts) == other
    assert not any(line.startswith("schedule: ") for line in said)

    # A start that goes on reads the file; where it is gone, the checkpoint's values come back.
    third = killed(again, tmp_path / "third", after=1)
    (third / "schedule.json").unlink()
    said, parts = play(config, third)
    assert any("schedule.json is missing; the checkpoint has it as" in line for line in said)
    assert scheduled(parts) == other
    assert calibration.read(third / "schedule.json", longest=112) == Chosen(**other)
    assert lasting(third) == lasting(again)

    # One that says something else is followed, and told.
    fourth = killed(again, tmp_path / "fourth", after=1)
    (fourth / "schedule.json").write_text(json.dumps({**other, "observation_lag_chunks": 4}))
    said, parts = play(config, fourth)
    assert scheduled(parts)["observation_lag_chunks"] == 4
    assert any("the file holds" in line for line in said)

    # A key of the configuration holds in any case; a damaged file is refused.
    config.rollout.observation_lag_chunks = 1
    fifth = killed(again, tmp_path / "fifth", after=1)
    _, parts = play(config, fifth)
    assert scheduled(parts) == {"chunk_tokens": 5, "observation_lag_chunks": 1}
    sixth = killed(again, tmp_path / "sixth", after=1)
    (sixth / "schedule.json").write_text('{"chunk_tokens": 0}')
    with pytest.raises(ValueError, match="does not hold the schedule of this run"):
        play(config, sixth)


def test_on_a_cpu_and_where_all_is_given_nothing_is_measured(tiny_world):
    assert jax.default_backend() == "cpu"
    config = run_settings(tiny_world, **SETTINGS)
    parts = assemble(config)
    assert not isinstance(parts.calibrate, calibration.Calibration)
    assert parts.engine.programs.num_steps == 16
    assert calibration.defaults(OPEN, longest=112) == Chosen(
        chunk_tokens=16, observation_lag_chunks=2
    )


STOPS = tuple("abcdefghijklmnop")  # a random policy stops about every tenth token


@pytest.fixture(scope="module")
def player():
    return Player(SMALL, toy_tokenizer(), STOPS, num_rows=8, chunk_tokens=2)


@pytest.fixture
def quick_to_measure(monkeypatch, quick_compilation):
    monkeypatch.setattr(calibration, "MIN_CHUNKS", 4)
    monkeypatch.setattr(calibration, "NUM_TURNS", 6)


def env_of(before):
    """Observations without end, of calls that begin with this."""
    env = ScriptedEnv(STOPS, script(NOTE))
    step = env.step
    env.step = lambda episodes, texts: before() or step(episodes, texts)
    return env


NOTE = StepResult(observation=Observation(prefix="[", body="ok", suffix="]"))


@pytest.mark.usefixtures("quick_to_measure")
def test_what_a_rollout_takes_is_measured(player, monkeypatch):
    env = env_of(lambda: time.sleep(0.1))
    player.engine.set_weights(tiny_params(SMALL, seed=11))
    player.engine.counts.chunks += calibration.MAX_CHUNKS  # of an evaluation before
    made = []

    def measuring(*arguments):
        made.append(calibration.Measuring(*arguments, None))
        return made[-1]

    monkeypatch.setattr("tests.toys.Rollout", measuring)
    with pytest.raises(Interrupted):
        player.play(
            env,
            ["where?"] * 8,
            schedule=Schedule(deterministic=False),
            should_stop=lambda: bool(made) and made[0].is_enough,
        )
    [rollout] = made
    found = rollout.measured()
    assert 0.1 <= found.call_s < 0.5
    assert found.chunk_tokens == 2
    assert found.num_calls == len(rollout.calls_s) >= 1
    assert len(rollout.turns) >= 6
    assert found.turn_tokens == np.median(rollout.turns)
    assert 0 < found.host_s < found.chunk_s
    played = [calibration.trajectory_of(one, {}) for one in rollout.samples]
    assert sum(one.num_sampled for one in played) >= sum(rollout.turns)


class Session:
    """As much of a run as a calibration looks at."""

    def __init__(self, player, env, tasks, workdir, **ways):
        self.said, self.workdir, self.progress = [], workdir, Progress()
        method = SimpleNamespace(group_size=4, tasks_per_step=2, temperature=1.0, top_p=1.0)
        model = SimpleNamespace(whole=lambda params: params)
        self.components = SimpleNamespace(
            method=method, tasks=tasks, num_steps={"train": 2}, model=model
        )
        self.settings = SimpleNamespace(seed=0, ledger=SimpleNamespace(prices={}))
        self.display = SimpleNamespace(log=self.said.append, activity=lambda text: None)
        self.compile_sampler, self.should_stop = lambda: None, lambda: False
        ways = Schedule(deterministic=False, **ways)
        around = player.engine, env, player.tokenizer, player.automaton, ROOMY, ways
        self.calibrate = calibration.Calibration(
            engine=player.engine,
            schedule=Schedule(),
            given=OPEN,
            make=lambda: calibration.Measuring(*around),
            longest=ROOMY.max_total_tokens,
        )


TASKS = [Task(id=str(number), question="where?", answers=("here",)) for number in range(2)]


@pytest.fixture
def calibrated(player, tmp_path):
    """Files that a calibration leaves in a run's folder, and the run."""

    def play(before, tasks=TASKS, error=None, **ways):
        session = Session(player, env_of(before), tasks, tmp_path, **ways)
        with pytest.raises(error) if error else contextlib.nullcontext():
            session.calibrate(session, tiny_params(SMALL, seed=11), "train")
        path = tmp_path / calibration.FILE
        return session, json.loads(path.read_text())["measured"] if path.exists() else None

    yield play
    player.engine.set_chunk(2)


@pytest.mark.usefixtures("quick_to_measure")
def test_a_call_that_was_given_up_took_as_long(calibrated):
    over = threading.Event()
    _, measured = calibrated(over.wait, deadline_s=0.2)
    over.set()
    assert measured["num_calls"] >= 1
    assert measured["call_s"] == 0.2  # after which nobody waits for it


@pytest.mark.usefixtures("quick_to_measure")
def test_an_environment_that_fails_at_once_says_nothing_of_its_calls(calibrated):
    def fail():
        raise OSError("no route to the host")

    session, measured = calibrated(fail)
    assert measured is None
    [line] = session.said
    assert "or every call of the environment failed; this start has the defaults" in line
    assert session.progress.schedule == {}


@pytest.mark.usefixtures("quick_to_measure")
def test_what_was_measured_before_an_outage_is_in_the_ledger(calibrated):
    def before():
        raise OutageError("nobody answers")

    session, measured = calibrated(before, error=OutageError)
    assert measured is None
    assert session.progress.ledger.sampled_tokens > 0
    assert session.progress.num_broken_off == 1


@pytest.mark.usefixtures("quick_to_measure")
def test_where_nothing_was_sampled_nothing_is_kept(calibrated):
    session, measured = calibrated(lambda: None, tasks=[])
    assert measured is None
    assert session.progress.schedule == {}
    assert ["no schedule could be measured" in line for line in session.said] == [True]


def test_a_file_of_longer_chunks_than_a_trajectory_is_refused(tmp_path):
    path = tmp_path / calibration.FILE
    path.write_text('{"chunk_tokens": 65, "observation_lag_chunks": 2}')
    with pytest.raises(ValueError, match="expected chunks of at most 64 tokens"):
        calibration.read(path, longest=64)
    assert calibration.read(path, longest=65) == Chosen(chunk_tokens=65, observation_lag_chunks=2)


class Accelerator:
    """As much of an engine as `telling` looks at."""

    overlaps = True

    def __init__(self):
        self.waits = {}


@pytest.fixture
def played(monkeypatch):
    """Plays rollouts of so many seconds in which the device waited; returns what was said."""
    engine, said, clock = Accelerator(), [], [100.0]
    monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def rollout(cause, seconds, *, took_s):
        clock[0] += took_s
        engine.waits[cause] = engine.waits.get(cause, 0.0) + seconds
        return []

    playing = telling(rollout, engine, Schedule(lag_chunks=4), said.append)

    def play(*rollouts):
        for cause, seconds, took_s in rollouts:
            playing(cause, seconds, took_s=took_s)
        return said

    return play


def test_what_the_device_waits_for_is_told_once_with_the_key_to_change(played):
    said = played(("lag", 0, 2), ("lag", 0.3, 2), ("lag", 0.3, 2), ("cache", 1, 2), ("tasks", 1, 2))
    assert len(said) == 3
    assert said[0].startswith("warning: for 0.3 of 2.0 s of a rollout the device waited for")
    assert "config.rollout.observation_lag_chunks higher than 4" in said[0]
    assert "config.rollout.cache_gib" in said[1]
    assert "config.rollout.tasks_per_step" in said[2]


def test_a_rollout_of_less_than_a_second_tells_nothing(played):
    # Nor does a tenth of a second; a rollout whose seconds count is still told of afterwards.
    assert not played(("lag", 0.04, 0.2), ("lag", 0.9, 0.99), ("lag", 0.1, 1), ("lag", 0.9, 10))
    assert len(played(("lag", 0.11, 1))) == 1
