"""Rollouts, which connect the engine's tokens to the environment's text.

Sampled tokens keep their ids; they are decoded for the environment and never encoded again.

The environment is called from threads, one call for all rows that stopped in a chunk, while the
device decodes other rows. `ReplySchedule` decides when its replies are added.
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
from jaxrl.models.aux_arrays import TokenArraySpec
from jaxrl.runtime.compilation import interruptible
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling import decode
from jaxrl.sampling.engine import Engine, Event, Request
from jaxrl.sampling.episodes import BaseRollout, ReplySchedule, RewardFn, TokenLimits
from jaxrl.sampling.interfaces import ImageProcessor, SamplingConfig
from jaxrl.sampling.sample_keys import derive_context_key, derive_sample_keys
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.sampling.trajectory import Sample
from jaxrl.types import Draw, Group
from jaxrl.utils.concurrency import run_in_thread

_ABORT_TIMEOUT_S = 5.0
"""Seconds that pending calls have to finish after a rollout is aborted."""

IDLE_POLL_S, BUSY_POLL_S = 1.0, 0.005
"""Polling intervals of a waiting rollout in seconds, while the device is idle and busy."""

_NO_REQUEST = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class _EnvCall:
    """Pending or finished call to the environment."""

    due: int  # number of the chunk before which its replies are added
    # (request, sample, turn text); the request is `_NO_REQUEST` if it is no longer in the engine.
    members: list[tuple[int, Sample, str]]
    replies: Future[list[StepResult]]
    deadline: float = math.inf  # deadline on the monotonic clock


class Rollout(BaseRollout):
    """Rollout that samples groups of episodes with an engine and an environment."""

    def __init__(
        self,
        engine: Engine,
        env: Env | Mapping[str, Env],
        tokenizer: Tokenizer,
        automaton: StopAutomaton | Mapping[str, StopAutomaton],
        limits: TokenLimits,
        schedule: ReplySchedule | None = None,
        reward_fn: RewardFn | None = None,
        processor: ImageProcessor | None = None,
    ):
        """Store the components. See `BaseRollout`.

        `automaton` is the engine's automaton. With several environments, it is a mapping from
        environment names to automata that share the engine's tables (`join_automata`).
        """
        super().__init__(env, tokenizer, limits, schedule, reward_fn, processor)
        self._engine = engine
        self._automata = automaton if isinstance(automaton, Mapping) else {"": automaton}
        # Unfinished groups that resume in a later call, by stage, stream index and attempt; and
        # their pending calls to the environment.
        self._unfinished: dict[tuple[int, int, int], list[Sample]] = {}
        self._unfinished_calls: deque[_EnvCall] = deque()

    @property
    def _recorded_specs(self) -> Mapping[str, TokenArraySpec]:
        return self._engine.recorded_specs

    def __call__(
        self,
        draws: Sequence[Draw],
        sampling: SamplingConfig,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Group | None]:
        """Sample and score a group of trajectories for every task, in task order.

        The rollout stops between chunks, once at most `SamplingConfig.max_unfinished` groups are
        unfinished. Their entries are None. When their draws are passed again, they continue: their
        tokens are prefilled again, and sampling uses the same keys. If the last chunk finishes more
        groups than required, the extra groups are returned as None too.

        Any exception leaves the engine empty. Pending calls to the environment get
        `_ABORT_TIMEOUT_S` to finish and are then abandoned.

        Args:
            draws: Tasks to sample.
            sampling: Group size, sampling settings, and the number of groups that may be
                unfinished.
            should_stop: Function called before each chunk and during compilation; if it returns
                True, the rollout is interrupted.
            progress: Function called before each chunk with the numbers of finished trajectories
                and of all trajectories.

        Raises:
            Interrupted: `should_stop` returned True.
            OutageError: A service that the environment needs was down for too long.
            ValueError: A prompt leaves no room for a response.
        """
        size, keys = sampling.group_size, make_group_keys(draws, sampling)

        # Combine resumed groups and new ones in task order; calls stay in the order of creation.
        unfinished, calls = self._pop_unfinished(keys, sampling)
        new_draws = [draw for draw, key in zip(draws, keys, strict=True) if key not in unfinished]
        new_samples = self._make_samples(new_draws, size)
        new_groups = (
            new_samples[start : start + size] for start in range(0, len(new_samples), size)
        )
        groups = [unfinished[key] if key in unfinished else next(new_groups) for key in keys]

        # Submit the unfinished samples that are not waiting for the environment.
        waiting = {id(sample) for call in calls for _, sample, _ in call.members}
        active = [
            sample for group in unfinished.values() for sample in group if id(sample) not in waiting
        ]
        active = [sample for sample in active if sample.episode.outcome is None]
        running = self._submit_samples(active, sampling) if active else {}
        # Compute keys on a sampling device: others may be busy with an update.
        for sample, key in zip(
            new_samples, derive_rollout_keys(new_draws, sampling, self._engine.device), strict=True
        ):
            sample.key = key
        started = [sample for sample in new_samples if sample.episode.outcome is None]
        running |= self._submit_samples(started, sampling)
        try:
            with interruptible(should_stop):
                self._decode_until_done(groups, running, calls, sampling, should_stop, progress)
        except BaseException:
            self._engine.clear()
            wait([call.replies for call in calls], timeout=_ABORT_TIMEOUT_S)
            raise

        # Score the finished groups; keep the unfinished and extra ones for a later call.
        finished = [index for index, group in enumerate(groups) if not _has_open_episode(group)]
        finished = finished[: max(len(groups) - sampling.max_unfinished, 0)]
        if len(finished) < len(groups):
            self._engine.clear()
            self._unfinished = {
                keys[i]: group for i, group in enumerate(groups) if i not in finished
            }
            self._unfinished_calls = calls
        scored = iter(
            self._score_groups([sample for index in finished for sample in groups[index]], sampling)
        )
        return [next(scored) if index in finished else None for index in range(len(groups))]

    def _pop_unfinished(
        self, keys: Sequence[tuple[int, int, int]], sampling: SamplingConfig
    ) -> tuple[dict[tuple[int, int, int], list[Sample]], deque[_EnvCall]]:
        """Pop the unfinished groups with these keys and their pending calls; drop other groups.

        If `max_unfinished` is 0, as in an evaluation, pop and drop nothing.
        """
        if not sampling.max_unfinished:
            return {}, deque()
        unfinished = {key: self._unfinished.pop(key) for key in keys if key in self._unfinished}
        for group in self._unfinished.values():  # the run was rolled back to a checkpoint
            for sample in group:
                sample.episode.outcome = Outcome.ENVIRONMENT_ERROR
        chunk = self._engine.counts.chunks
        calls = deque(
            dataclasses.replace(
                call,
                due=chunk,
                members=[(_NO_REQUEST, sample, text) for _, sample, text in call.members],
            )
            for call in self._unfinished_calls
        )
        self._unfinished, self._unfinished_calls = {}, deque()
        return unfinished, calls

    def _decode_until_done(
        self,
        groups: Sequence[Sequence[Sample]],
        samples: dict[int, Sample],
        calls: deque[_EnvCall],
        sampling: SamplingConfig,
        should_stop: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> None:
        """Decode samples until at most `SamplingConfig.max_unfinished` groups are unfinished.

        `samples` holds the samples in the engine, by request; `calls` holds the pending calls,
        oldest first.
        """
        # With a lag of 1, replies are added before the next chunk, so read the current one first.
        is_next = self._schedule.deterministic and self._schedule.lag_chunks == 1
        ahead = 1 if self._engine.overlaps and not is_next else 0
        while calls or not self._engine.is_idle:
            raise_if_stopped(should_stop)
            groups = [group for group in groups if _has_open_episode(group)]
            if len(groups) <= sampling.max_unfinished:
                return
            num_open = [sample.episode.outcome for sample in samples.values()].count(None)
            progress(len(samples) - num_open, len(samples))
            for call in self._select_due_calls(calls, should_stop):
                self._wait_for_reply([call], should_stop)
                calls.remove(call)
                self._apply_replies(call, samples, sampling)
            events = self._engine.step(ahead=ahead)
            members = self._append_events(samples, events, sampling.policy_version)
            for name in self._envs:  # one call each, so that none waits for another environment
                if called := [m for m in members if m[1].episode.task.environment == name]:
                    due = events[0].chunk + self._schedule.lag_chunks
                    calls.append(self._start_call(called, due))

    def _start_call(self, members: list[tuple[int, Sample, str]], due: int) -> _EnvCall:
        """Step the environment in a thread, for stopped rows; replies are due at chunk `due`.

        `members` holds the request, sample and turn text of each row.
        """
        episodes = [sample.episode for _, sample, _ in members]
        texts = [text for _, _, text in members]
        deadline = time.monotonic() + (self._schedule.deadline_s or math.inf)
        replies = run_in_thread(lambda: self._step_episodes(episodes, texts))
        return _EnvCall(due=due, members=members, replies=replies, deadline=deadline)

    def _select_due_calls(
        self, calls: Sequence[_EnvCall], should_stop: Callable[[], bool]
    ) -> list[_EnvCall]:
        """Return the calls whose replies are due.

        If the engine is stalled, return at least one.
        """
        is_stalled = self._engine.is_stalled
        if self._schedule.deterministic:
            chunk = self._engine.counts.chunks
            return [
                call for call in calls if call.due <= chunk or (is_stalled and call is calls[0])
            ]
        if is_stalled:
            self._wait_for_reply(calls, should_stop)
        now = time.monotonic()
        return [call for call in calls if call.replies.done() or call.deadline <= now]

    def _wait_for_reply(self, calls: Sequence[_EnvCall], should_stop: Callable[[], bool]) -> None:
        """Wait until one of the calls finishes or misses its deadline; record the waiting time.

        Only the time during which the device is idle counts.
        """
        deadline = min(call.deadline for call in calls)
        replies = [call.replies for call in calls]
        if any(reply.done() for reply in replies):
            return
        engine, idle_at = self._engine, math.inf
        cause = engine.wait_reason
        while (remaining_s := deadline - (now := time.monotonic())) > 0:
            if idle_at == math.inf and not engine.is_busy:
                idle_at = now
            poll_s = BUSY_POLL_S if idle_at == math.inf else IDLE_POLL_S
            if wait(replies, timeout=min(remaining_s, poll_s), return_when=FIRST_COMPLETED).done:
                break
            raise_if_stopped(should_stop)
        engine.wait_s[cause] += max(time.monotonic() - idle_at, 0.0)

    def _append_events(
        self, samples: dict[int, Sample], events: Sequence[Event], version: int
    ) -> list[tuple[int, Sample, str]]:
        """Append sampled tokens; return the request, sample and turn text of each stopped row."""
        members = []
        for event in events:
            sample = samples[event.request]
            sample.append(event.token_ids.tolist(), event.logprobs, event.entropies, version)
            if event.recorded:
                sample.recorded[-1].append(event.recorded)
            if event.status == decode.RUNNING:
                continue
            text = self._decode_turn(sample, event.status)
            if event.status == decode.OUT_OF_BUDGET:
                self._end_episode(sample, Turn(text=text, is_cut=True), Outcome.OUT_OF_BUDGET)
                self._engine.finish(event.request)
            else:
                members.append((event.request, sample, text))
        return members

    def _submit_samples(
        self, samples: Sequence[Sample], sampling: SamplingConfig
    ) -> dict[int, Sample]:
        """Submit the current context of each sample to the engine; return samples by request."""
        requests = []
        for sample in samples:
            assert sample.key is not None
            number, length = len(sample.contexts), sample.context_length
            automaton = self._automata[sample.episode.task.environment]
            key = (
                derive_context_key(sample.key, number, self._engine.device)
                if number
                else sample.key
            )
            requests.append(
                Request(
                    prompt_ids=tuple(sample.token_ids[-length:]),
                    sample_key=key,
                    budget=self._compute_remaining_budget(sample),
                    attachments=tuple(sample.attachments),
                    stop_state=automaton.compute_state(sample.token_ids[sample.turn_starts[-1] :]),
                    start_state=automaton.start_state,
                )
            )
        numbers = self._engine.submit(
            requests, temperature=sampling.temperature, top_p=sampling.top_p
        )
        return dict(zip(numbers, samples, strict=True))

    def _decode_turn(self, sample: Sample, status: int) -> str:
        """Return the text of the turn up to its stop string, without an end-of-turn id."""
        token_ids = sample.token_ids[sample.turn_starts[-1] :]
        if status == decode.END_OF_TURN:
            token_ids = token_ids[:-1]
        data = list(map(self._tokenizer.vocab_bytes.__getitem__, token_ids))
        automaton = self._automata[sample.episode.task.environment]
        text = automaton.truncate(data) if status == decode.STOP_STRING else b"".join(data)
        return text.decode("utf-8", errors="replace")

    def _apply_replies(
        self, call: _EnvCall, samples: dict[int, Sample], sampling: SamplingConfig
    ) -> None:
        """End or resume the samples of a call that finished or missed its deadline.

        A sample that continues in a new context becomes a new request, which is added to `samples`.
        """
        # Resumed rows stay in the engine; samples in a new context become new requests.
        resumed, attachments, resubmitted = [], {}, []
        is_late = not call.replies.done()
        replies = (
            [self._make_timeout_result(call.members[0][1].episode.task)] * len(call.members)
            if is_late
            else call.replies.result()
        )
        for (request, sample, text), result in zip(call.members, replies, strict=True):
            is_detached = request == _NO_REQUEST
            if is_detached and sample.episode.outcome is not None:
                continue  # dropped since the call was made
            num_before, num_contexts = len(sample.attachments), len(sample.contexts)
            token_ids = self._apply_step_result(sample, text, result)
            if token_ids is None:
                if not is_detached:
                    self._engine.finish(request)
                continue
            if is_detached:
                resubmitted.append(sample)
                continue
            if len(sample.contexts) > num_contexts:
                self._engine.finish(request)
                del samples[request]
                resubmitted.append(sample)
                continue
            resumed.append((request, token_ids, self._compute_remaining_budget(sample)))
            attachments[request] = sample.attachments[num_before:]
        self._engine.resume(resumed, attachments)
        if resubmitted:
            samples |= self._submit_samples(resubmitted, sampling)


def make_group_keys(draws: Sequence[Draw], sampling: SamplingConfig) -> list[tuple[int, int, int]]:
    """Return the (stage, stream index, attempt) of each draw, the key of an unfinished group."""
    return [(sampling.seeds.stage, draw.stream_index, draw.attempt) for draw in draws]


def derive_rollout_keys(draws: Sequence[Draw], sampling: SamplingConfig, device: Any) -> np.ndarray:
    """Return the random keys of all samples, group by group: uint32 [draws * group_size, 2]."""
    seeds, size = sampling.seeds, sampling.group_size
    return derive_sample_keys(
        seeds.seed,
        seeds.stage,
        seeds.step,
        np.repeat([draw.stream_index for draw in draws], size),
        np.tile(np.arange(size), len(draws)),
        np.repeat([draw.attempt for draw in draws], size),
        device=device,
    )


def _has_open_episode(group: Sequence[Sample]) -> bool:
    """Return True if any episode of the group has not ended."""
    return None in [sample.episode.outcome for sample in group]


def raise_if_stopped(should_stop: Callable[[], bool]) -> None:
    """Raise `Interrupted` if `should_stop` returns True."""
    if should_stop():
        raise Interrupted("the rollout was asked to stop")
