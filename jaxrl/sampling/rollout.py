"""Turns: the engine's tokens to the environment's text and back.

What the policy sampled stays as the ids it sampled; it is decoded for the environment and never
encoded again.

The environment is called from threads, one call for all rows that stopped in a chunk, and the
device decodes other rows meanwhile. `Schedule` says when its replies enter.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Env, Outcome, StepResult, Turn
from jaxrl.models.aux_arrays import TokenArray
from jaxrl.runtime.compilation import stopped_by
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling import decode
from jaxrl.sampling.engine import Engine, Event, Request
from jaxrl.sampling.episodes import EpisodePlayer, Limits, Pay, Schedule
from jaxrl.sampling.interfaces import Processor, Sampling
from jaxrl.sampling.sample_keys import context_key, sample_keys
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.sampling.trajectory import Sample
from jaxrl.types import Draw, Group
from jaxrl.utils.concurrency import Threads

_PATIENCE_S = 5.0
"""Seconds in which calls under way may end when a rollout is broken off."""

LOOK_S, GLANCE_S = 1.0, 0.005
"""Seconds between two checks whether to stop while a rollout waits, and between two whether the
device has become idle; its waiting is counted from the check that finds it so."""

_NOBODY = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class _Call:
    """A call of the environment, made or under way."""

    due: int  # number of the chunk before which its replies enter
    # Each is a request (`_NOBODY` where the engine has forgotten it), its sample, its turn's text.
    members: list[tuple[int, Sample, str]]
    replies: Future[list[StepResult]]
    ends: float = math.inf  # on the monotonic clock, when it is given up


class Rollout(EpisodePlayer):
    """Plays groups of episodes of tasks through an engine and an environment."""

    def __init__(
        self,
        engine: Engine,
        env: Env,
        tokenizer: Tokenizer,
        automaton: StopAutomaton,
        limits: Limits,
        schedule: Schedule | None = None,
        pay: Pay | None = None,
        processor: Processor | None = None,
    ):
        """`automaton` must be the one the engine stops by; the others as of `EpisodePlayer`."""
        super().__init__(env, tokenizer, limits, schedule, pay, processor)
        self._engine = engine
        self._automaton = automaton
        # Groups that go on in a later call, by stage, place and attempt, and what the environment
        # was asked for them.
        self._held: dict[tuple[int, int, int], list[Sample]] = {}
        self._held_calls: deque[_Call] = deque()

    @property
    def _recorded(self) -> Mapping[str, TokenArray]:
        return self._engine.recorded

    def __call__(
        self,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Group | None]:
        """Samples a group of trajectories of every task, scored, in task order.

        It ends before a chunk, once no more than `Sampling.unfinished` groups are open. These are
        None here, and go on from their tokens where their draws are given again: what stands
        in the engine then is read anew, and drawn from the same keys. Groups that end in the same
        chunk beyond the number that is waited for are None too.

        Whatever is raised here leaves the engine empty. Calls of the environment that are under
        way then get `_PATIENCE_S` to end, and are left to themselves after.

        Args:
            draws: the tasks.
            sampling: how many trajectories of each, how they are drawn, and how many groups may
                come back unfinished.
            should_stop: asked before each chunk, and while a program is compiled.
            progress: told before each chunk how many trajectories have ended, of how many.

        Raises:
            Interrupted: `should_stop` said so.
            OutageError: what the environment asks has answered nobody for too long.
            ValueError: a prompt leaves no room for an answer.
        """
        size, keys = sampling.group_size, places_of(draws, sampling)
        held, calls = self._take_held(keys, sampling)  # calls in the order in which they were made
        new = [draw for draw, key in zip(draws, keys, strict=True) if key not in held]
        fresh = self._make_samples(new, size)
        made = (fresh[start : start + size] for start in range(0, len(fresh), size))
        groups = [held[key] if key in held else next(made) for key in keys]
        asking = {id(sample) for call in calls for _, sample, _ in call.members}
        going = [one for group in held.values() for one in group if id(one) not in asking]
        going = [one for one in going if one.episode.outcome is None]
        playing = self._begin(going, sampling) if going else {}
        # Keys from a device that samples: another may be busy with an update.
        for sample, key in zip(fresh, keys_of(new, sampling, self._engine.device), strict=True):
            sample.key = key
        opened = [sample for sample in fresh if sample.episode.outcome is None]
        playing |= self._begin(opened, sampling)
        self._threads = Threads()
        try:
            with stopped_by(should_stop):
                self._play(groups, playing, calls, sampling, should_stop, progress)
        except BaseException:
            self._engine.clear()
            wait([call.replies for call in calls], timeout=_PATIENCE_S)
            raise
        finally:
            self._threads.close()
        over = [place for place, group in enumerate(groups) if not _is_open(group)]
        over = over[: max(len(groups) - sampling.unfinished, 0)]
        if len(over) < len(groups):
            self._engine.clear()
            self._held = {keys[i]: group for i, group in enumerate(groups) if i not in over}
            self._held_calls = calls
        scored = iter(self._score([one for place in over for one in groups[place]], sampling))
        return [next(scored) if place in over else None for place in range(len(groups))]

    def _take_held(
        self, keys: Sequence[tuple[int, int, int]], sampling: Sampling
    ) -> tuple[dict[tuple[int, int, int], list[Sample]], deque[_Call]]:
        """The groups of these keys that go on, and calls for them; others are forgotten.

        An evaluation, which has none, leaves those of the training alone.
        """
        if not sampling.unfinished:
            return {}, deque()
        held = {key: self._held.pop(key) for key in keys if key in self._held}
        for group in self._held.values():  # the run has gone back to a checkpoint
            for sample in group:
                sample.episode.outcome = Outcome.ENVIRONMENT_ERROR
        chunk = self._engine.counts.chunks
        calls = deque(
            dataclasses.replace(
                call, due=chunk, members=[(_NOBODY, one, text) for _, one, text in call.members]
            )
            for call in self._held_calls
        )
        self._held, self._held_calls = {}, deque()
        return held, calls

    def _play(
        self,
        groups: Sequence[Sequence[Sample]],
        samples: dict[int, Sample],
        calls: deque[_Call],
        sampling: Sampling,
        should_stop: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> None:
        """Decodes samples until no more groups are open than may be.

        Args:
            groups: all samples.
            samples: those in the engine, by request.
            calls: under way, in the order in which they were made.
            sampling: as `__call__` takes it.
            should_stop: likewise.
            progress: likewise.
        """
        # With a lag of 1 replies enter before the very next chunk, so this one must be read first.
        is_next = self._schedule.deterministic and self._schedule.lag_chunks == 1
        ahead = 1 if self._engine.overlaps and not is_next else 0
        while calls or not self._engine.is_idle:
            check_stop(should_stop)
            groups = [group for group in groups if _is_open(group)]
            if len(groups) <= sampling.unfinished:
                return
            open_ones = [sample.episode.outcome for sample in samples.values()].count(None)
            progress(len(samples) - open_ones, len(samples))
            for call in self._due(calls, should_stop):
                self._await([call], should_stop)
                calls.remove(call)
                self._advance(call, samples, sampling)
            events = self._engine.step(ahead=ahead)
            members = self._append(samples, events, sampling.policy_version)
            if members:
                calls.append(self._call(members, events[0].chunk + self._schedule.lag_chunks))

    def _call(self, members: list[tuple[int, Sample, str]], due: int) -> _Call:
        episodes = [sample.episode for _, sample, _ in members]
        texts = [text for _, _, text in members]
        ends = time.monotonic() + (self._schedule.deadline_s or math.inf)
        replies = self._threads.start(lambda: self._step(episodes, texts))
        return _Call(due=due, members=members, replies=replies, ends=ends)

    def _due(self, calls: Sequence[_Call], should_stop: Callable[[], bool]) -> list[_Call]:
        """The calls whose replies enter now; one of them, if nothing else is left to do."""
        is_stalled = self._engine.is_stalled
        if self._schedule.deterministic:
            chunk = self._engine.counts.chunks
            return [
                call for call in calls if call.due <= chunk or (is_stalled and call is calls[0])
            ]
        if is_stalled:
            self._await(calls, should_stop)
        now = time.monotonic()
        return [call for call in calls if call.replies.done() or call.ends <= now]

    def _await(self, calls: Sequence[_Call], should_stop: Callable[[], bool]) -> None:
        """Waits until one of the calls has its replies or is given up, and counts the time.

        It counts from when the device has nothing to do.
        """
        ends = min(call.ends for call in calls)
        replies = [call.replies for call in calls]
        if any(reply.done() for reply in replies):
            return
        engine, idle_at = self._engine, math.inf
        cause = engine.wait_cause
        while (left := ends - (now := time.monotonic())) > 0:
            if idle_at == math.inf and not engine.is_busy:
                idle_at = now
            pause = GLANCE_S if idle_at == math.inf else LOOK_S
            if wait(replies, timeout=min(left, pause), return_when=FIRST_COMPLETED).done:
                break
            check_stop(should_stop)
        engine.waits[cause] += max(time.monotonic() - idle_at, 0.0)

    def _append(
        self, samples: dict[int, Sample], events: Sequence[Event], version: int
    ) -> list[tuple[int, Sample, str]]:
        """Appends what was sampled; the samples that stopped and their turns' texts."""
        members = []
        for event in events:
            sample = samples[event.request]
            sample.append_sampled(event, version)
            if event.status == decode.RUNNING:
                continue
            text = self._turn_text(sample, event.status)
            if event.status == decode.OUT_OF_BUDGET:
                self._end(sample, Turn(text=text, is_cut=True), Outcome.OUT_OF_BUDGET)
                self._engine.finish(event.request)
            else:
                members.append((event.request, sample, text))
        return members

    def _begin(self, samples: Sequence[Sample], sampling: Sampling) -> dict[int, Sample]:
        """Hands samples to the engine where they stand in a context; each by its request."""
        requests = []
        for sample in samples:
            assert sample.key is not None
            number, length = len(sample.contexts), sample.context_length
            key = context_key(sample.key, number, self._engine.device) if number else sample.key
            requests.append(
                Request(
                    prompt_ids=tuple(sample.token_ids[-length:]),
                    sample_key=key,
                    budget=self._budget(sample),
                    attachments=tuple(sample.attachments),
                    stop_state=self._automaton.state(sample.token_ids[sample.turn_starts[-1] :]),
                )
            )
        numbers = self._engine.submit(
            requests, temperature=sampling.temperature, top_p=sampling.top_p
        )
        return dict(zip(numbers, samples, strict=True))

    def _turn_text(self, sample: Sample, status: int) -> str:
        """The turn as the environment sees it: up to its stop string, without an end-of-turn id."""
        token_ids = sample.token_ids[sample.turn_starts[-1] :]
        if status == decode.END_OF_TURN:
            token_ids = token_ids[:-1]
        data = list(map(self._tokenizer.vocab_bytes.__getitem__, token_ids))
        text = self._automaton.cut(data) if status == decode.STOP_STRING else b"".join(data)
        return text.decode("utf-8", errors="replace")

    def _advance(self, call: _Call, samples: dict[int, Sample], sampling: Sampling) -> None:
        """Ends or resumes the samples of a call that has its replies or is given up.

        One that goes on in another context does so as another request, which is put into `samples`.
        """
        resumed, attachments, renewed = [], {}, []
        is_late = not call.replies.done()
        replies = [self._give_up()] * len(call.members) if is_late else call.replies.result()
        for (request, sample, text), result in zip(call.members, replies, strict=True):
            is_held = request == _NOBODY
            if is_held and sample.episode.outcome is not None:
                continue  # nobody wants it any more
            num_before, num_contexts = len(sample.attachments), len(sample.contexts)
            token_ids = self._take(sample, text, result)
            if token_ids is None:
                if not is_held:
                    self._engine.finish(request)
                continue
            if is_held:
                renewed.append(sample)
                continue
            if len(sample.contexts) > num_contexts:
                self._engine.finish(request)
                del samples[request]
                renewed.append(sample)
                continue
            resumed.append((request, token_ids, self._budget(sample)))
            attachments[request] = sample.attachments[num_before:]
        self._engine.resume(resumed, attachments)
        if renewed:
            samples |= self._begin(renewed, sampling)


def places_of(draws: Sequence[Draw], sampling: Sampling) -> list[tuple[int, int, int]]:
    """Stage, place in the stream and attempt of each draw, by which its group goes on later."""
    return [(sampling.seeds.stage, draw.stream_index, draw.attempt) for draw in draws]


def keys_of(draws: Sequence[Draw], sampling: Sampling, device: Any) -> np.ndarray:
    """Keys of all samples, group by group: uint32 [draws * group_size, 2]."""
    seeds, size = sampling.seeds, sampling.group_size
    return sample_keys(
        seeds.seed,
        seeds.stage,
        seeds.step,
        np.repeat([draw.stream_index for draw in draws], size),
        np.tile(np.arange(size), len(draws)),
        np.repeat([draw.attempt for draw in draws], size),
        device=device,
    )


def _is_open(group: Sequence[Sample]) -> bool:
    """True while some episode of a group has not ended."""
    return None in [sample.episode.outcome for sample in group]


def check_stop(should_stop: Callable[[], bool]) -> None:
    """Raises `Interrupted` where the rollout is asked to stop."""
    if should_stop():
        raise Interrupted("the rollout was asked to stop")
