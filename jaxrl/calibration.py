"""The schedule of a run's rollouts, chosen once at its start from what its parts take.

A reply of the environment enters a fixed number of chunks after its row stopped, so that a run
repeats. Too few of them, and the device waits for the reply; too many, and the row does. Which are
enough depends on the tools, the model and the device. So where `config.rollout` leaves them open
and an accelerator samples, the first tasks are played until enough is measured, before the train
stage begins. What is chosen stands in `schedule.json` of the run's folder, which every later start
reads, and in its checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import CHUNK_TOKENS, LAG_CHUNKS
from jaxrl.envs.base import OutageError, Outcome
from jaxrl.envs.json_text import parse_json
from jaxrl.runtime import distributed
from jaxrl.runtime.files import written_whole
from jaxrl.runtime.stopping import Interrupted
from jaxrl.sampling.engine import Engine, Event
from jaxrl.sampling.episodes import Schedule
from jaxrl.sampling.protocol import RolloutFunction, Sampling, Seeds
from jaxrl.sampling.rollout import Rollout
from jaxrl.sampling.samples import Sample, trajectory_of
from jaxrl.session import Session
from jaxrl.settings import STAGES
from jaxrl.training.ledger import Ledger
from jaxrl.types import Draw, Group, Params

FILE = "schedule.json"

STEP = 2**31 - 2
"""Step number in the sampling seeds of what is played to measure; no real step has it."""

MARGIN = 1.1
"""Part of a chunk's time that a reply may take beyond the measured latency."""

NUM_TURNS, MIN_CHUNKS, MAX_CHUNKS = 64, 32, 256
"""Replies and chunks after which enough is measured, or the attempt ends."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Times of a rollout's parts.

    Attributes:
        call_s: of a call of the environment, the 95th percentile; 0 without any.
        chunk_s: between the reports of two chunks, the median.
        host_s: of this, processor time of the host's thread, the median.
        turn_tokens: sampled in a turn, the median.
        chunk_tokens: decoding steps of these chunks.
        num_calls: of the environment that were measured.
    """

    call_s: float
    chunk_s: float
    host_s: float
    turn_tokens: float
    chunk_tokens: int
    num_calls: int


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Values of the keys of `config.rollout`; 0: not chosen."""

    chunk_tokens: int = 0
    observation_lag_chunks: int = 0

    def over(self, other: Chosen) -> Chosen:
        """These values, and the other's where there are none."""
        return Chosen(
            chunk_tokens=self.chunk_tokens or other.chunk_tokens,
            observation_lag_chunks=self.observation_lag_chunks or other.observation_lag_chunks,
        )


def choose(measured: Measured, given: Chosen, *, longest: int) -> Chosen:
    """Chooses what is not given.

    A row that stops is computed to the end of its chunk and through the next one, so a chunk should
    be at most an eighth of a turn. But the device must be busy for longer than the host, or it
    waits for the host after each chunk; the host's work hardly depends on a chunk's length. Out of
    `CHUNK_TOKENS` this takes the shortest of which the host's work is at most 4/5, and not a longer
    one than that unless it is at most an eighth of a turn.

    A row that stopped in chunk n is reported when the device begins n + 1. A reply that enters
    before chunk n + lag may so take lag - 1 chunks.

    Args:
        measured: by the default schedule.
        given: by the configuration.
        longest: tokens of the longest trajectory, which no chunk is longer than.
    """
    step_s = measured.chunk_s / measured.chunk_tokens
    chunk = given.chunk_tokens
    if not chunk:
        sizes = [size for size in CHUNK_TOKENS if size <= longest] or [longest]
        fits = [size for size in sizes if measured.host_s <= 0.8 * size * step_s]
        least = fits[0] if fits else sizes[-1]
        short = [size for size in sizes if size <= measured.turn_tokens / 8]
        chunk = max([least, *short])
    lag = given.observation_lag_chunks
    if not lag:
        period_s = max(chunk * step_s, measured.host_s)
        lag = 1 + max(math.ceil(MARGIN * measured.call_s / period_s), 1)
    return Chosen(chunk_tokens=chunk, observation_lag_chunks=lag)


class Measuring(Rollout):
    """Plays episodes to see how long their parts take; replies enter as they arrive."""

    now: Callable[[], float] = staticmethod(time.perf_counter)
    spent: Callable[[], float] = staticmethod(time.thread_time)

    def __init__(self, *arguments: Any):
        """Arguments as of `Rollout`."""
        super().__init__(*arguments)
        self.calls_s: list[float] = []  # of those with a reply, not errors alone
        self.num_failed = 0
        self.begun: dict[Future[Any], float] = {}  # calls under way, or given up
        self.turns: list[int] = []  # tokens of each
        self.marks: list[tuple[int, float, float]] = []  # chunks, time and processor time
        self.samples: list[Sample] = []

    @property
    def is_enough(self) -> bool:
        """True once there is enough to choose by, or it took too long."""
        # The engine counts all chunks it ever decoded, in an evaluation before say.
        count = self._engine.counts.chunks - self.marks[0][0] if self.marks else 0
        has_all = len(self.turns) >= NUM_TURNS and len(self.calls_s) > 0
        return count >= (MIN_CHUNKS if has_all else MAX_CHUNKS)

    def measured(self) -> Measured | None:
        """Times seen so far; None without two chunks."""
        steps = np.diff(np.array(self.marks or [(0, 0.0, 0.0)]), axis=0)
        steps = steps[steps[:, 0] == 1]  # in which a chunk was dispatched
        if not len(steps):
            return None
        if self.num_failed and not self.calls_s and not self.begun:
            return None  # an environment that is mended takes longer
        chunk_s, host_s = np.median(steps[:, 1:], axis=0)
        # A call that has no reply takes at least as long as it has been under way, but for one
        # that was given up, which nobody waits for.
        now, most_s = self.now(), self._schedule.deadline_s or math.inf
        under_way = [min(now - begun, most_s) for begun in list(self.begun.values())]
        calls_s = [*self.calls_s, *under_way]
        return Measured(
            call_s=float(np.quantile(calls_s, 0.95)) if calls_s else 0.0,
            chunk_s=float(chunk_s),
            host_s=float(host_s),
            # Where no turn ended in all these chunks, turns are longer than they.
            turn_tokens=float(np.median(self.turns or [MAX_CHUNKS])),
            chunk_tokens=self._engine.programs.num_steps,
            num_calls=len(calls_s),
        )

    def _play(self, groups: Sequence[Sequence[Sample]], *rest: Any) -> None:
        self.samples = [sample for group in groups for sample in group]
        super()._play(groups, *rest)

    def _call(self, members: list[tuple[int, Sample, str]], due: int) -> Any:
        call = super()._call(members, due)
        self._time(call.replies)
        return call

    def _time(self, replies: Future[Any]) -> None:
        def ended(call: Future[Any]) -> None:
            took_s = self.now() - self.begun.pop(call)
            if call.exception() or all(
                reply.outcome == Outcome.ENVIRONMENT_ERROR for reply in call.result()
            ):
                self.num_failed += 1
            else:
                self.calls_s.append(took_s)

        self.begun[replies] = self.now()
        replies.add_done_callback(ended)

    def _append(
        self, samples: dict[int, Sample], events: Sequence[Event], version: int
    ) -> list[tuple[int, Sample, str]]:
        self.marks.append((self._engine.counts.chunks, self.now(), self.spent()))
        members = super()._append(samples, events, version)
        stopped = [samples[event.request] for event in events if event.status]
        self.turns += [len(one.token_ids) - one.turn_starts[-1] for one in stopped]
        return members


@dataclass(kw_only=True)
class Calibration:
    """Chooses the schedule of a run, or finds what was chosen.

    Attributes:
        engine: samples in chunks of the chosen length.
        schedule: of all rollouts of the run; its lag is set.
        given: values of the configuration, 0 where it leaves one open.
        make: makes the rollout that measures.
        longest: see `choose`.
    """

    engine: Engine
    schedule: Schedule
    given: Chosen
    make: Callable[[], Measuring]
    longest: int
    _chosen: Chosen | None = field(default=None, init=False)

    def __call__(self, session: Session, params: Params, stage: str) -> None:
        """Called before each stage of a run, with the parameters that it begins with.

        The values of the workdir's file hold. Where there is none, those of the checkpoint do, and
        become its; where that has none either, they are measured before the train stage, and what
        runs before it has the defaults. The configuration's own hold in any case.

        Raises:
            ValueError: the file cannot be read.
            Interrupted, OutageError: as rollouts do.
        """
        progress, log = session.progress, session.display.log
        if self._chosen is None:
            path = session.workdir / FILE
            chosen, saved = read(path, self.longest), Chosen(**progress.schedule)
            measured: dict[str, Any] = {}
            if chosen is None and saved != Chosen():
                log(f"warning: {path} is missing; the checkpoint has it as {_shown(saved)}")
                chosen = saved
            elif chosen is None and stage == "train" and not _is_past(session):
                chosen, measured = self._measure(session, params)
            if chosen is None:
                return
            if distributed.is_main() and (measured or not path.exists()):
                with written_whole(path) as file:
                    record = {**dataclasses.asdict(chosen), "measured": measured}
                    file.write(json.dumps(record, indent=1) + "\n")
            if saved not in (Chosen(), chosen):
                log(
                    f"warning: {path} says {_shown(chosen)}, the checkpoint {_shown(saved)}; the "
                    "file holds. Numbers differ from here on by rounding from those of the run "
                    "without the change"
                )
            self._chosen = chosen
            values = self.given.over(chosen)
            self.engine.set_chunk(values.chunk_tokens)
            self.schedule.lag_chunks = values.observation_lag_chunks
        progress.schedule = dataclasses.asdict(self._chosen)

    def _measure(self, session: Session, params: Params) -> tuple[Chosen | None, dict[str, Any]]:
        """Plays the first tasks, and chooses by all processes' measurements; None without any."""
        session.compile_sampler()
        session.display.activity("measuring what a call of the environment and a chunk take")
        components, rollout = session.components, self.make()
        method, size = components.method, components.method.group_size
        mine = distributed.share(method.tasks_per_step)
        tasks = components.tasks[: method.tasks_per_step][mine]
        draws = [Draw(task=one, stream_index=mine.start + i) for i, one in enumerate(tasks)]
        sampling = Sampling(
            group_size=size,
            temperature=method.temperature,
            top_p=method.top_p,
            seeds=Seeds(seed=session.settings.seed, stage=STAGES.index("train"), step=STEP),
        )
        self.engine.set_weights(components.model.whole(params))
        outage = ""
        try:
            rollout(
                draws,
                sampling,
                should_stop=lambda: session.should_stop() or rollout.is_enough,
            )
        except Interrupted:
            pass  # with enough, or the run is to end
        except OutageError as error:
            outage = str(error)
        self.engine.clear()
        self.engine.release()
        played = [trajectory_of(sample, {}) for sample in rollout.samples]
        ledger = Ledger.of(played, session.settings.ledger.prices)
        times = rollout.measured()
        here = (times and dataclasses.asdict(times), session.should_stop(), outage)
        gathered = distributed.gather((*here, ledger.to_json()))
        every, stops, outages, ledgers = zip(*gathered, strict=True)
        # Of all processes, which decide alike whether the run has spent what it may.
        for spent in map(Ledger.from_json, ledgers):
            session.progress.ledger += spent
        if any(outages) or any(stops):
            session.progress.num_broken_off += 1
        if any(outages):
            raise OutageError(next(filter(None, outages)))
        if any(stops):
            raise Interrupted("the run was asked to stop")
        if not any(every):
            session.display.log(
                "warning: no schedule could be measured, as hardly anything was sampled or every "
                "call of the environment failed; this start has the defaults, and the next one "
                "measures"
            )
            return None, {}
        measured = slowest([Measured(**one) for one in every if one])
        chosen = choose(measured, self.given, longest=self.longest)
        session.display.log(
            f"schedule: a call of the environment takes {measured.call_s:.3f} s (95th percentile "
            f"of {measured.num_calls}), a chunk of {measured.chunk_tokens} steps "
            f"{measured.chunk_s:.3f} s, of it the host {measured.host_s:.3f} s, a turn has "
            f"{measured.turn_tokens:g} tokens: {_shown(chosen)} (kept in {FILE})"
        )
        return chosen, dataclasses.asdict(measured)


def _is_past(session: Session) -> bool:
    """True once nothing is left to train."""
    progress, num_steps = session.progress, session.components.num_steps
    if progress.stage == "train":
        return not progress.is_under_way(num_steps)
    return bool(progress.stage) and STAGES.index(progress.stage) > STAGES.index("train")


def slowest(every: Sequence[Measured]) -> Measured:
    """Combines the measurements of processes, so that the lag is enough for each of them."""
    return Measured(
        call_s=max(one.call_s for one in every),
        chunk_s=min(one.chunk_s for one in every),
        host_s=max(one.host_s for one in every),
        turn_tokens=float(np.median([one.turn_tokens for one in every])),
        chunk_tokens=every[0].chunk_tokens,
        num_calls=sum(one.num_calls for one in every),
    )


def _shown(chosen: Chosen) -> str:
    values = dataclasses.asdict(chosen).items()
    return ", ".join(f"config.rollout.{name}={value}" for name, value in values)


def read(path: Path, longest: int) -> Chosen | None:
    """Reads the chosen values in the first process, which shares them; None without a file.

    Raises:
        ValueError: it holds something else, or chunks longer than `longest`.
    """
    saved: Any = None
    error = ""
    if distributed.is_main() and path.exists():
        try:
            record = parse_json(path.read_bytes(), str(path))
            saved = {name: record[name] for name in _NAMES}
            if not all(type(value) is int and value > 0 for value in saved.values()):
                raise ValueError(f"{saved}; expected whole numbers above 0")
            if saved["chunk_tokens"] > longest:
                raise ValueError(f"{saved}; expected chunks of at most {longest} tokens")
        except (OSError, ValueError, KeyError, TypeError) as failure:
            error = str(failure) or type(failure).__name__
    saved, error = distributed.from_main((saved, error))
    if error:
        raise ValueError(
            f"{path} does not hold the schedule of this run ({error}). Remove it, and the "
            "checkpoint's holds or it is measured anew; or set config.rollout.chunk_tokens and "
            "config.rollout.observation_lag_chunks."
        )
    return None if saved is None else Chosen(**saved)


_NAMES = [one.name for one in dataclasses.fields(Chosen)]


ADVICE = {
    "lag": "replies were due too early for this environment: set config.rollout."
    "observation_lag_chunks higher than {lag}",
    "cache": "the cache has no room for more rows beside those that wait for their replies: raise "
    "config.rollout.cache_gib, or lower config.rollout.max_total_tokens",
    "tasks": "all trajectories of the step waited, and there were no others: raise "
    "config.rollout.tasks_per_step or config.rollout.group_size, or let config.filter."
    "unfinished_tasks go on in the next step",
}
"""Ways to keep the device busy, by cause of `Engine.waits`."""

TOLD_SHARE = 0.1
"""Share of a rollout's time that the device waits, from which on a user is warned."""

TOLD_S = 1.0
"""Seconds from which on a rollout is long enough for that share to mean something."""


def telling(
    rollout: RolloutFunction, engine: Engine, schedule: Schedule, log: Callable[[str], None]
) -> RolloutFunction:
    """Wraps a rollout to warn, once for each cause, that the device waited for the environment."""
    told: set[str] = set()

    def play(draws: Sequence[Draw], sampling: Sampling, **settings: Any) -> Sequence[Group | None]:
        before, begun = dict(engine.waits), time.monotonic()
        groups = rollout(draws, sampling, **settings)
        took_s = time.monotonic() - begun
        for cause, total in engine.waits.items():
            seconds = total - before.get(cause, 0.0)
            if cause not in told and took_s >= TOLD_S and seconds > TOLD_SHARE * took_s:
                told.add(cause)
                advice = ADVICE[cause].format(lag=schedule.lag_chunks)
                log(
                    f"warning: for {seconds:.1f} of {took_s:.1f} s of a rollout the device waited "
                    f"for replies of the environment with nothing to decode; {advice}"
                )
        return groups

    return play if engine.overlaps else rollout


def is_open(given: Chosen, engine: Engine, schedule: Schedule) -> bool:
    """True where something is to be chosen: on an accelerator, by a fixed lag."""
    is_given = bool(given.chunk_tokens and given.observation_lag_chunks)
    return schedule.deterministic and engine.device.platform != "cpu" and not is_given


def defaults(given: Chosen, longest: int) -> Chosen:
    """The values of a run for which nothing is chosen, or not yet."""
    chunk = min(CHUNK_TOKENS[1], longest)
    return given.over(Chosen(chunk_tokens=chunk, observation_lag_chunks=LAG_CHUNKS))
