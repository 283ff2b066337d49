r"""The host's part of a rollout, without a device: how long a device would wait, and what it costs.

    python -m benchmarks.schedule --case=idle|host

The engine and the rollout are the real ones. Their programs are replaced: what stands for the
device draws tokens by key and place, as the real one does, and ends turns by chance about every
`turn_tokens` tokens.

`idle` runs by a clock of its own, which moves only where something takes time: `step_ms` a decoding
step, `latency_ms` a call of the environment, `host_ms` the host's work between two chunks. So
nothing sleeps and figures are exact. For each latency, number of rows and length of turns it prints
the share of the time in which the device has nothing to do, under the present defaults, under what
`calibration.choose` makes of the same measurements, and with replies as they arrive.

There are rows to hide a latency behind, at a moment at which a reply is waited for, if some row may
be decoded then: one runs, comes back, or is in the queue and there is room for it
(`Engine.wait_cause` is "lag"). `waits` is the share of the time in which the device is idle at such
moments, which another schedule would avoid; `few rows` that in which no row may be decoded, which
only more rows avoid, as the last episodes of a rollout have none beside them.

`host` measures processor time, of the threads that ask the environment too, less what the replaced
programs take: for each number of rows, length of turns and length of chunks microseconds a token
and milliseconds a chunk, the least of some repetitions.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import common, searching
from jaxrl import calibration
from jaxrl.calibration import Chosen, Measured
from jaxrl.envs.base import Env, Episode, Observation, Outcome, Reward, StepResult
from jaxrl.models.attention.reference import XLA
from jaxrl.runtime.stopping import Interrupted
from jaxrl.sampling import decode, next_token
from jaxrl.sampling.engine import Engine, Event
from jaxrl.sampling.episodes import Limits, Schedule
from jaxrl.sampling.protocol import Sampling, Seeds
from jaxrl.sampling.rollout import Rollout
from jaxrl.sampling.samples import Sample
from jaxrl.sampling.stop_strings import StopAutomaton

STOP = "?"
PROMPT, OBSERVATION = 24, 32
"""Tokens, each a byte."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Episodes that are played.

    Attributes:
        num_rows: decoded side by side.
        num_samples: trajectories, in groups of eight.
        turn_tokens: mean length of a turn.
        num_turns: of an episode, unless its tokens end before.
        chunk_tokens: decoding steps of a chunk.
        lag_chunks: after which replies enter; 0: as they arrive.
    """

    num_rows: int
    num_samples: int
    turn_tokens: int
    num_turns: int = 4
    chunk_tokens: int = 16
    lag_chunks: int = 2


class Clock:
    """A clock that moves where something takes time, and counts what the device waited for."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0  # seconds; when the device has done all it was given
        self.spent = 0.0  # by the host
        self.ready: deque[float] = deque()  # of the chunks in flight
        self.idle = {"waits": 0.0, "few rows": 0.0, "host": 0.0}

    def dispatch(self, seconds: float) -> None:
        """Gives the device work that takes so long."""
        self.idle["host"] += max(self.now - self.free_at, 0.0)
        self.free_at = max(self.now, self.free_at) + seconds

    def wait_for_reply(self, at: float, *, is_alone: bool) -> None:
        """Waits for a reply."""
        if at > self.now:
            idle = max(at - max(self.free_at, self.now), 0.0)
            self.idle["few rows" if is_alone else "waits"] += idle
            self.now = at
            self.free_at += max(at - self.free_at, 0.0) if idle else 0.0


class Device:
    """Stands for the device of an engine, whose programs it replaces."""

    def __init__(self, engine: Engine, turn_tokens: int, stop_id: int, step_s: float = 0.0) -> None:
        """`step_s` is what a decoding step takes by `clock`."""
        self.clock, self.step_s = Clock(), step_s
        self._calls: dict[Any, list[Any]] = {}  # by program and variant: number, program, arguments
        self._engine, self._stop, self._share = engine, stop_id, 1 / turn_tokens
        self._last = self._nobody()
        engine.overlaps = True
        engine._weights = {}
        engine._make_cache = lambda *sizes: ()
        engine._make_start = lambda _: (None, None)
        engine._append = lambda weights, cache, *rest, variant: (cache, {})
        engine._copy = lambda cache, *places: cache
        engine._swap = lambda cache, *rest: (cache, ())
        engine._decode = self._counted(self._decode)
        collect = engine._collect

        def collect_when_done(chunk: Any) -> list[Event]:
            self.clock.now = max(self.clock.now, self.clock.ready.popleft())
            return collect(chunk)

        engine._collect = collect_when_done

    def _counted(self, program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, variant: Any) -> Any:
            counted = self._calls.setdefault(variant, [0, program, arguments])
            counted[0] += 1
            return program(*arguments)

        return call

    def spent_s(self) -> float:
        """Processor time of the calls so far, which are then forgotten: each is made once more.

        To look at the clock at each call takes as long as the calls do.
        """
        total = 0.0
        for count, program, arguments in self._calls.values():
            begun = time.thread_time()
            for _ in range(_REPLAYS):
                self._last = self._nobody()
                program(*arguments)
            total += count * (time.thread_time() - begun) / _REPLAYS
        self._calls.clear()
        self.clock.ready.clear()
        return total

    def _nobody(self) -> decode.State:
        zeros = np.zeros(self._engine.programs.num_rows, np.int32)
        return decode.State(
            pending=zeros, length=zeros, budget=zeros, stop_state=zeros, active=zeros > 0
        )

    def _decode(
        self, weights: Any, cache: Any, state: None, rows: decode.Rows, *rest: Any
    ) -> tuple[Any, None, decode.Packed]:
        steps, source = self._engine.programs.num_steps, rows.source
        last, given = self._last, rows.state

        def go_on(name: str) -> np.ndarray:
            return np.where(source >= 0, getattr(last, name)[source], getattr(given, name))

        length, budget, active = go_on("length"), go_on("budget"), go_on("active")
        drawn = _draws(rows.keys, length[:, None] + 1 + np.arange(steps))
        stops = drawn < self._share
        first = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, steps)
        counts = np.where(active, np.minimum(first, budget), 0)
        letters = ord("a") + (drawn * 2**20).astype(np.int32) % 26
        token_ids = np.where(stops, self._stop, _LETTERS[letters]).astype(np.int32)
        token_ids[np.arange(steps) >= counts[:, None]] = -1
        has_stopped = active & (counts > 0) & stops[np.arange(len(counts)), counts - 1]
        is_out = active & ~has_stopped & (counts >= budget)
        status = has_stopped * decode.STOP_STRING + is_out * decode.OUT_OF_BUDGET
        self._last = decode.State(
            pending=token_ids[np.arange(len(counts)), counts - 1],
            length=length + counts,
            budget=budget - counts,
            stop_state=np.zeros_like(counts),
            active=active & (status == decode.RUNNING),
        )
        values = np.where(token_ids >= 0, drawn, 0).astype(np.float32)
        numbers = values.view(np.int32)
        ends = np.stack([status, np.zeros_like(status)], axis=1).astype(np.int32)
        whole = np.concatenate([token_ids, numbers, numbers, ends], axis=1)
        report = decode.Packed(values=_array(whole), recorded={})
        self.clock.dispatch(steps * self.step_s)
        self.clock.ready.append(self.clock.free_at)
        return cache, None, report


_REPLAYS = 20


class _Array(np.ndarray):
    """An array as a program returns it."""

    def copy_to_host_async(self) -> None:
        """Is there already."""

    def is_ready(self) -> bool:
        """True."""
        return True


def _array(values: np.ndarray) -> np.ndarray:
    return values.view(_Array)


def _draws(keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Uniform numbers of keys and places, float64 [r, C]."""
    mixed = (keys[:, :1].astype(np.uint64) << np.uint64(32)) ^ keys[:, 1:].astype(np.uint64)
    mixed = mixed + places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Notes(Env):
    """Answers each turn with a note of `OBSERVATION` tokens, the last with its end."""

    stop_strings = (STOP,)
    reward_parts = ()

    def __init__(self, num_turns: int) -> None:
        """The episode ends with turn `num_turns`."""
        self._num_turns = num_turns

    def start(self, tasks: Any) -> Any:
        """The question of `PROMPT` tokens."""
        return [[{"role": "user", "content": task.question.ljust(PROMPT)}] for task in tasks]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """One note a turn."""
        del texts
        note = Observation(prefix="[", body="n" * (OBSERVATION - 2), suffix="]")
        return [
            StepResult(outcome=Outcome.ANSWERED)
            if len(episode.turns) + 1 >= self._num_turns
            else StepResult(observation=note)
            for episode in episodes
        ]

    def score(self, episodes: Sequence[Episode]) -> list[Reward]:
        """Nothing is worth anything."""
        return [Reward(total=0.0, parts={}, final_answer="") for _ in episodes]


class ByTheClock(Rollout):
    """A rollout whose calls take `latency_s` by the clock of a `Device`."""

    device: Device
    latency_s: Callable[[], float]
    host_s = 0.0

    def _call(self, members: Any, due: int) -> Any:
        call = super()._call(members, due)
        call.replies.result()
        self._ready = getattr(self, "_ready", {})
        self._ready[call] = self.device.clock.now + self.latency_s()
        return call

    def _await(self, calls: Any, should_stop: Any) -> None:
        at = min(self._ready[call] for call in calls)
        self.device.clock.wait_for_reply(at, is_alone=self._engine.wait_cause != "lag")

    def _due(self, calls: Any, should_stop: Any) -> Any:
        if self._schedule.deterministic:
            return super()._due(calls, should_stop)
        if self._engine.is_stalled:
            self._await(calls, should_stop)
        return [call for call in calls if self._ready[call] <= self.device.clock.now]

    def _append(self, samples: dict[int, Sample], events: Sequence[Event], version: int) -> Any:
        self.device.clock.now += self.host_s
        self.device.clock.spent += self.host_s
        return super()._append(samples, events, version)


class MeasuringByTheClock(ByTheClock, calibration.Measuring):
    """The rollout that measures, by the same clock."""

    def now(self) -> float:
        """Seconds."""
        return self.device.clock.now

    def spent(self) -> float:
        """Seconds of the host's thread."""
        return self.device.clock.spent

    def _time(self, replies: Any) -> None:
        self.calls_s.append(self.latency_s())


TOKENIZER = searching.byte_tokenizer()
_LETTERS = np.array([TOKENIZER.encode(chr(i))[0] if 97 <= i < 123 else 0 for i in range(123)])


def make(work: Work, *, step_s: float = 0.0, kind: type[Rollout] = ByTheClock) -> Any:
    """A rollout of a kind on a device that takes `step_s` a step, and the device."""
    response = 3 * work.num_turns * work.turn_tokens
    total = PROMPT + response + work.num_turns * OBSERVATION
    model = common.MODELS["small"]
    kernels = dataclasses.replace(XLA, past=None, page_tokens=64)  # of an accelerator
    env = Notes(work.num_turns)
    automaton = StopAutomaton(TOKENIZER.vocab_bytes, env.stop_strings)
    engine = Engine(
        model.architecture,
        common.one_device(),
        automaton,
        num_tokens=TOKENIZER.num_tokens,
        eos_ids=(),
        num_rows=work.num_rows,
        num_pages=4 * work.num_rows * -(-total // 64),
        max_prompt_tokens=PROMPT,
        max_total_tokens=total,
        chunk_tokens=work.chunk_tokens,
        kernels=kernels,
        kinds=(next_token.PLAIN,),
    )
    device = Device(engine, work.turn_tokens, TOKENIZER.encode(STOP)[0], step_s)
    limits = Limits(
        max_prompt_tokens=PROMPT,
        max_response_tokens=response,
        max_total_tokens=total,
        max_observation_tokens=OBSERVATION,
    )
    schedule = Schedule(deterministic=work.lag_chunks > 0, lag_chunks=max(work.lag_chunks, 1))
    return kind(engine, env, TOKENIZER, automaton, limits, schedule), device


def play(rollout: Rollout, work: Work, step: int = 0, **settings: Any) -> Any:
    """All episodes."""
    sampling = Sampling(
        group_size=8, temperature=1.0, top_p=1.0, seeds=Seeds(seed=0, stage=0, step=step)
    )
    return rollout(searching.questions(work.num_samples // 8), sampling, **settings)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that parts take.

    Attributes:
        latency_s: of a call of the environment, the mean; each takes up to a fifth more or less.
        step_s: of a decoding step.
        host_s: of the host between two chunks.
    """

    latency_s: float
    step_s: float
    host_s: float = 0.0

    def put_into(self, rollout: ByTheClock, device: Device) -> None:
        """The rollout takes so long."""
        drawn = random.Random(0)
        rollout.device, rollout.host_s = device, self.host_s
        rollout.latency_s = lambda: self.latency_s * drawn.uniform(0.8, 1.2)


def measured(work: Work, times: Times) -> Measured:
    """Times that the calibration of a run sees, which plays by the default chunks."""
    work = dataclasses.replace(work, chunk_tokens=16, lag_chunks=0)
    rollout, device = make(work, step_s=times.step_s, kind=MeasuringByTheClock)
    times.put_into(rollout, device)
    with contextlib.suppress(Interrupted):
        play(rollout, work, calibration.STEP, should_stop=lambda: rollout.is_enough)
    seen = rollout.measured()
    assert seen is not None
    return seen


def chosen_for(work: Work, times: Times) -> Work:
    """The work by the schedule that a run would choose."""
    schedule = calibration.choose(measured(work, times), Chosen(), longest=10**6)
    return dataclasses.replace(
        work, chunk_tokens=schedule.chunk_tokens, lag_chunks=schedule.observation_lag_chunks
    )


def idle_shares(work: Work, times: Times) -> dict[str, float]:
    """Shares of the time in which the device has nothing to do, by why; and what came of it."""
    rollout, device = make(work, step_s=times.step_s)
    times.put_into(rollout, device)
    play(rollout, work)
    clock, counts = device.clock, rollout._engine.counts
    return {
        **{name: seconds / clock.now for name, seconds in clock.idle.items()},
        "tokens/s": counts.sampled / clock.now,
        "occupancy": counts.sampled / counts.row_steps,
    }


def idle(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """The table of `idle`."""
    cells = []
    for latency_ms, rows, turn in itertools.product(flags.latency_ms, flags.rows, flags.turns):
        times = Times(
            latency_s=latency_ms / 1e3, step_s=flags.step_ms / 1e3, host_s=flags.host_ms / 1e3
        )
        base = Work(num_rows=rows, num_samples=flags.samples_a_row * rows, turn_tokens=turn)
        ways = {
            "default": base,
            "chosen": chosen_for(base, times),
            "arrival": dataclasses.replace(base, lag_chunks=0),
        }
        for name, work in ways.items():
            sizes = {"chunk": work.chunk_tokens, "lag": work.lag_chunks}
            cell = {"latency ms": latency_ms, "rows": rows, "turn": turn, "schedule": name, **sizes}
            cells.append(cell | idle_shares(work, times))
    return cells


def host_cost(work: Work, repetitions: int) -> dict[str, float]:
    """Processor time: microseconds a token, milliseconds a chunk."""
    rollout, device = make(work, kind=Rollout)
    engine, best = rollout._engine, math.inf
    for number in range(repetitions):
        counts = dataclasses.replace(engine.counts)
        begun = time.process_time()
        play(rollout, work, number)
        spent_s = time.process_time() - begun
        spent_s -= device.spent_s()
        sampled, chunks = (
            getattr(engine.counts, name) - getattr(counts, name) for name in ("sampled", "chunks")
        )
        if spent_s / sampled < best:
            best, a_chunk = spent_s / sampled, spent_s / chunks
    return {"us a token": 1e6 * best, "ms a chunk": 1e3 * a_chunk}


def host(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """The table of `host`."""
    cells = []
    for rows, turn, chunk in itertools.product(flags.rows, flags.turns, flags.chunks):
        work = Work(
            num_rows=rows,
            num_samples=flags.samples_a_row * rows,
            turn_tokens=turn,
            chunk_tokens=chunk,
            lag_chunks=3,
        )
        cell = {"rows": rows, "turn": turn, "chunk": chunk}
        cells.append(cell | host_cost(work, flags.repetitions))
    return cells


CASES = {"idle": idle, "host": host}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Prints the table of a case as Markdown; its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, default="idle")
    many: dict[str, Any] = {"type": lambda text: [int(one) for one in text.split(",")]}
    parser.add_argument("--rows", default=[64, 256, 512], **many)
    parser.add_argument("--turns", default=[32, 128, 512], help="mean tokens of a turn", **many)
    parser.add_argument("--chunks", default=[8, 16, 32], **many)
    parser.add_argument("--latency_ms", default=[20, 200, 1000, 2000], **many)
    parser.add_argument("--samples_a_row", type=int, default=4, help="trajectories over rows")
    parser.add_argument("--step_ms", type=float, default=6.0)
    parser.add_argument("--host_ms", type=float, default=10.0)
    parser.add_argument("--repetitions", type=int, default=3)
    flags = parser.parse_args(argv)
    table = CASES[flags.case](flags)
    names = list(table[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in table:
        shown = [f"{v:.4g}" if isinstance(v, float) and v >= 10 else v for v in row.values()]
        shown = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in shown]
        print("| " + " | ".join(shown) + " |")
    return table


if __name__ == "__main__":
    main()
