"""Rollouts: connect the engine's tokens to the environment's text.

Sampled tokens keep their ids; they are decoded for the environment and never encoded again.

The environment is called from threads, one call for all rows that stopped in a chunk, while the
device decodes other rows. `Schedule` decides when its replies are added.
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
"""Seconds that pending calls have to finish when a rollout is aborted."""

LOOK_S, GLANCE_S = 1.0, 0.005
"""Polling intervals while a rollout waits, in seconds: once the device is idle, and before."""

_NOBODY = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class _Call:
    """A call of the environment, pending or finished."""

    due: int  # number of the chunk before which its replies are added
    # (request, sample, turn text); the request is `_NOBODY` if it is no longer in the engine.
    members: list[tuple[int, Sample, str]]
    replies: Future[list[StepResult]]
    ends: float = math.inf  # deadline on the monotonic clock


class Rollout(EpisodePlayer):
    """Rollout of groups of episodes with an engine and an environment."""

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
        """Store the components; `automaton` must be the engine's. See `EpisodePlayer`."""
        super().__init__(env, tokenizer, limits, schedule, pay, processor)
        self._engine = engine
        self._automaton = automaton
        # Unfinished groups that resume in a later call, by stage, stream index and attempt; and
        # their pending calls of the environment.
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
        """Sample and score a group of trajectories for every task, in task order.

        The rollout ends before a chunk, once at most `Sampling.unfinished` groups are open. These
        are returned as None and resume from their tokens when their draws are passed again: their
        tokens are prefilled again, and sampling continues with the same keys. If more groups than
        required finish in the last chunk, the surplus is None too.

        Any exception leaves the engine empty. Pending calls of the environment get `_PATIENCE_S` to
        finish and are then abandoned.

        Args:
            draws: Tasks to sample.
            sampling: Group size, sampling settings, and the number of groups that may be
                unfinished.
            should_stop: Function called before each chunk and during compilation; True interrupts.
            progress: Function called before each chunk with the finished and total trajectory
                counts.

        Raises:
            Interrupted: `should_stop` returned True.
            OutageError: A service that the environment needs was down for too long.
            ValueError: A prompt leaves no room for an answer.
        """
        size, keys = sampling.group_size, places_of(draws, sampling)

        # Combine resumed groups and new ones in task order; calls stay in the order of creation.
        held, calls = self._take_held(keys, sampling)
        new = [draw for draw, key in zip(draws, keys, strict=True) if key not in held]
        fresh = self._make_samples(new, size)
        made = (fresh[start : start + size] for start in range(0, len(fresh), size))
        groups = [held[key] if key in held else next(made) for key in keys]

        # Submit the open samples that are not waiting for the environment.
        asking = {id(sample) for call in calls for _, sample, _ in call.members}
        going = [one for group in held.values() for one in group if id(one) not in asking]
        going = [one for one in going if one.episode.outcome is None]
        playing = self._begin(going, sampling) if going else {}
        # Compute keys on a sampling device: others may be busy with an update.
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

        # Score the finished groups; hold the open and surplus ones for a later call.
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
        """Return the held groups with these keys and their pending calls; drop other held groups.

        An evaluation, which has none, leaves those of the training run in place.
        """
        if not sampling.unfinished:
            return {}, deque()
        held = {key: self._held.pop(key) for key in keys if key in self._held}
        for group in self._held.values():  # the run was rolled back to a checkpoint
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
        """Decode samples until at most `Sampling.unfinished` groups are open.

        `samples` are those in the engine, by request; `calls` are pending calls, oldest first.
        """
        # With a lag of 1, replies enter the very next chunk, so this one must be read first.
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
        """Return the calls to add now; at least one if nothing else is left to do."""
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
        """Wait until one of the calls finishes or misses its deadline; count the waiting time.

        It counts from when the device is idle.
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
        """Append sampled tokens; return (request, sample, turn text) of the rows that stopped."""
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
        """Submit samples to the engine from their current context; return them by request."""
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
        """Return the text of the turn up to its stop string, without an end-of-turn id."""
        token_ids = sample.token_ids[sample.turn_starts[-1] :]
        if status == decode.END_OF_TURN:
            token_ids = token_ids[:-1]
        data = list(map(self._tokenizer.vocab_bytes.__getitem__, token_ids))
        text = self._automaton.cut(data) if status == decode.STOP_STRING else b"".join(data)
        return text.decode("utf-8", errors="replace")

    def _advance(self, call: _Call, samples: dict[int, Sample], sampling: Sampling) -> None:
        """End or resume the samples of a call that finished or missed its deadline.

        A sample that continues in a new context becomes a new request, which is added to `samples`.
        """
        # Resumed rows stay in the engine; renewed samples are submitted as new requests.
        resumed, attachments, renewed = [], {}, []
        is_late = not call.replies.done()
        replies = [self._give_up()] * len(call.members) if is_late else call.replies.result()
        for (request, sample, text), result in zip(call.members, replies, strict=True):
            is_held = request == _NOBODY
            if is_held and sample.episode.outcome is not None:
                continue  # dropped since the call was made
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
    """Return (stage, stream index, attempt) of each draw, which identifies an unfinished group."""
    return [(sampling.seeds.stage, draw.stream_index, draw.attempt) for draw in draws]


def keys_of(draws: Sequence[Draw], sampling: Sampling, device: Any) -> np.ndarray:
    """Return the keys of all samples, group by group: uint32 [draws * group_size, 2]."""
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
    """Return True while some episode of a group has not ended."""
    return None in [sample.episode.outcome for sample in group]


def check_stop(should_stop: Callable[[], bool]) -> None:
    """Raise `Interrupted` if `should_stop` returns True."""
    if should_stop():
        raise Interrupted("the rollout was asked to stop")
