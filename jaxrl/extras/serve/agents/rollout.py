"""Rollouts of external agents that call the run's engine over HTTP.

The server runs for the entire run. Between rollouts, the engine's thread is paused and requests
wait. Up to `SamplingConfig.max_unfinished` groups continue in the next rollout. They keep their
tokens, each with its weights version, and are returned once complete.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Outcome, Task, Turn
from jaxrl.extras.serve.agents.environment import AgentEnv, AgentEpisode
from jaxrl.extras.serve.agents.processes import AgentProcesses
from jaxrl.extras.serve.agents.sessions import (
    AgentSession,
    compute_common_prefix_length,
    group_into_contexts,
    parse_reward,
)
from jaxrl.extras.serve.engine import SamplingParams, ServedEngine
from jaxrl.extras.serve.errors import RequestError
from jaxrl.extras.serve.server import MAX_CONNECTIONS, Endpoint, Server, bind_port
from jaxrl.extras.serve.worker import Worker
from jaxrl.sampling.episodes import BaseRollout, ReplySchedule, RewardFn, TokenLimits
from jaxrl.sampling.interfaces import ImageProcessor, SamplingConfig
from jaxrl.sampling.rollout import (
    IDLE_POLL_S,
    derive_rollout_keys,
    make_group_keys,
    raise_if_stopped,
)
from jaxrl.sampling.trajectory import Sample
from jaxrl.types import Draw, Group
from jaxrl.utils.text import MAX_ERROR_CHARS, replace_surrogates

MODEL_NAME = "policy"
"""Model name in the requests of agents."""

MAX_CACHED = 1 << 14
"""Number of completions cached for repeated requests."""


@dataclass(eq=False, kw_only=True)
class _RunningEpisode:
    """Episode that may span several rollouts.

    Attributes:
        sample_index: Index of the sample in its group.
        elapsed_s: Seconds spent in earlier rollouts.
        resumed_at: Monotonic time at which this rollout started or resumed the episode; None while
            the episode is on hold.
        is_started: True if the agent was started.
        error: Reason that the episode has no result; "" if it has a result.
        ended_at: Monotonic time at which the episode ended; None until then.
    """

    session: AgentSession
    task: Task
    sample_index: int
    elapsed_s: float = 0.0
    resumed_at: float | None = None
    is_started: bool = False
    error: str = ""
    ended_at: float | None = None

    def end(self, error: str = "") -> None:
        """End the episode; later calls have no effect."""
        self.session.close()
        if self.ended_at is None:
            self.error, self.ended_at = error, time.monotonic()


@dataclass(eq=False, kw_only=True)
class _RunningGroup:
    """Episodes of one task."""

    draw: Draw
    episodes: list[_RunningEpisode]

    @property
    def is_done(self) -> bool:
        return all(episode.ended_at is not None for episode in self.episodes)

    @property
    def ended_at(self) -> float:
        """Monotonic time at which the last episode ended."""
        return max(episode.ended_at or 0.0 for episode in self.episodes)


class AgentRollout(BaseRollout):
    """Rollout of external agents that call the engine over HTTP."""

    def __init__(
        self,
        env: AgentEnv,
        engine: ServedEngine,
        tokenizer: Tokenizer,
        limits: TokenLimits,
        schedule: ReplySchedule,
        reward_fn: RewardFn,
        processor: ImageProcessor | None = None,
        *,
        log: Callable[[str], None],
    ):
        """Bind the port and load the agent. The server starts with the first rollout.

        `log` writes a line to the run's log. For the other arguments, see `BaseRollout`.

        Raises:
            OSError: The port or the agent's interpreter is not available.
            ValueError: The agent cannot be loaded, or a setting is not supported.
        """
        super().__init__(env, tokenizer, limits, schedule, reward_fn, processor)
        if engine.recorded_specs or processor is not None or limits.context is not None:
            raise ValueError(
                "config.env.name is 'agents'; expected a text-only model, with "
                "config.model.replay=False and config.rollout.context.name='none', since agents "
                "manage their own history."
            )
        if "reward" not in getattr(reward_fn, "weights", ("reward",)):
            raise ValueError(
                f"config.reward.weights is {dict(getattr(reward_fn, 'weights', {}))!r}; expected a "
                "weight of 'reward', the part that agents give; it may be 0."
            )
        self._settings, self._max_turns, self._engine = env.settings, env.max_turns, engine
        self._log = log
        self._sessions: dict[str, AgentSession] = {}  # sessions of running agents, by name
        self._groups: dict[tuple[int, int, int], _RunningGroup] = {}  # unfinished
        # Episodes with running agents, by reward key: code that has only the model's API key cannot
        # report the end of an episode.
        self._running: dict[str, _RunningEpisode] = {}
        self._lock, self._wakeup = threading.Lock(), threading.Event()
        self._worker: Worker | None = None
        self._processes = AgentProcesses(env.settings, _make_weak_callback(self._record_end))
        self._servers: list[Server] = []  # empty before the first rollout
        self._listener = bind_port(env.settings.host, env.settings.port, key="that of each episode")
        # Stop the threads of the server and the agents when this object is deleted, or at exit.
        self._finalizer = weakref.finalize(
            self, _stop_processes_and_servers, self._processes, self._servers, self._listener
        )
        self._processes.open()

    def prompt_fits(self, task: Task) -> bool:
        """Return True, since agents build the prompts."""
        return True

    def __call__(
        self,
        draws: Sequence[Draw],
        sampling: SamplingConfig,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Group | None]:
        """Return a group per draw; None for groups that continue in the next call.

        A draw with an unfinished group continues that group.

        Args:
            draws: Tasks to run, one group per task.
            sampling: Group size, sampling settings and maximum number of unfinished groups.
            should_stop: Function that returns True to interrupt the rollout, polled every second.
            progress: Callback that receives the finished and total numbers of trajectories.

        Raises:
            Interrupted: `should_stop` returned True.
            RuntimeError: The engine failed.
            OSError, ValueError: An agent process cannot be restarted.
        """
        worker = self._get_or_start_worker()
        keys = make_group_keys(draws, sampling)
        if sampling.max_unfinished:  # evaluations must not drop training groups
            for key in [key for key in self._groups if key not in keys]:  # after a rollback
                self._abort_group(self._groups.pop(key))
        groups = self._get_or_create_groups(draws, keys, sampling)
        episodes = [episode for group in groups for episode in group.episodes]
        names = {episode.session.name for episode in episodes}
        worker.resume(
            names.__contains__,
            version=sampling.policy_version,
            deadline_s=self._settings.deadline_s,
        )
        now = time.monotonic()
        for episode in episodes:
            episode.resumed_at = now if episode.is_started else None
        try:
            self._run_episodes(
                groups, episodes, worker, sampling.max_unfinished, should_stop, progress
            )
        except BaseException:
            for group in groups:
                self._abort_group(group)
            raise
        finally:
            now = time.monotonic()
            for episode in episodes:
                if episode.resumed_at is not None:
                    episode.elapsed_s += now - episode.resumed_at
                episode.resumed_at = None
            worker.pause()
        # Return the groups that ended first, as many as this call waited for.
        done = sorted(
            (group for group in groups if group.is_done), key=lambda group: group.ended_at
        )
        done = done[: max(len(groups) - sampling.max_unfinished, 0)]
        for key, group in zip(keys, groups, strict=True):
            if group not in done:
                self._groups[key] = group
        done = [group for group in groups if group in done]
        samples = []
        for group in done:
            samples += [self._build_sample(e, group.draw.attempt) for e in group.episodes]
            self._abort_group(group)
        scored = iter(self._score_groups(samples, sampling))
        return [next(scored) if group in done else None for group in groups]

    def _get_or_start_worker(self) -> Worker:
        """Return the worker. The first call starts the worker and the server."""
        if self._worker is None:
            settings, tokenizer = self._settings, self._tokenizer
            self._worker = Worker(
                self._engine,
                tokenizer.vocab_bytes,
                tokenizer.eos_ids,
                max_queue=MAX_CONNECTIONS,
                is_paused=True,
            )
            endpoint = Endpoint(
                self._worker,
                tokenizer,
                name=MODEL_NAME,
                deadline_s=settings.deadline_s,
                max_cached=MAX_CACHED,
                sessions=self._sessions,
            )
            self._servers.append(Server(endpoint, settings.host, self._listener))
        return self._worker

    def _get_or_create_groups(
        self,
        draws: Sequence[Draw],
        keys: Sequence[tuple[int, int, int]],
        sampling: SamplingConfig,
    ) -> list[_RunningGroup]:
        """Return a group per draw: its unfinished group from the last rollout, or a new group."""
        new = [draw for draw, key in zip(draws, keys, strict=True) if key not in self._groups]
        random_keys = iter(derive_rollout_keys(new, sampling, self._engine.device))
        groups = []
        for draw, key in zip(draws, keys, strict=True):
            if key in self._groups:
                groups.append(self._groups.pop(key))
                continue
            episodes = []
            for index in range(sampling.group_size):
                session = AgentSession(
                    key=next(random_keys),
                    params=SamplingParams(sampling.temperature, sampling.top_p),
                    limits=self._limits,
                    max_turns=self._max_turns,
                )
                episodes.append(
                    _RunningEpisode(session=session, task=draw.task, sample_index=index)
                )
            groups.append(_RunningGroup(draw=draw, episodes=episodes))
        return groups

    def _run_episodes(
        self,
        groups: Sequence[_RunningGroup],
        episodes: Sequence[_RunningEpisode],
        worker: Worker,
        max_unfinished: int,
        should_stop: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> None:
        """Start agents and wait until at most `max_unfinished` groups are incomplete."""
        waiting = deque(episode for episode in episodes if not episode.is_started)
        max_concurrent = self._settings.max_concurrent or self._engine.num_rows
        while True:
            self._wakeup.clear()
            progress(sum(episode.ended_at is not None for episode in episodes), len(episodes))
            if worker.failure is not None or not worker.is_alive:
                raise RuntimeError(
                    "the engine failed while agents used it; see its error above."
                ) from worker.failure
            if sum(not group.is_done for group in groups) <= max_unfinished:
                return
            raise_if_stopped(should_stop)
            self._stop_overdue_episodes()
            while waiting and self._count_active_agents() < max_concurrent:
                self._launch_episode(waiting.popleft())
            self._wakeup.wait(IDLE_POLL_S)

    def _count_active_agents(self) -> int:
        """Return the number of running agents, not counting episodes that are on hold."""
        with self._lock:
            running = list(self._running.values())
        return sum(e.ended_at is not None or e.resumed_at is not None for e in running)

    def _launch_episode(self, episode: _RunningEpisode) -> None:
        task, session = episode.task, episode.session
        url = f"{self._servers[0].address}/r/{session.name}"
        self._sessions[session.name] = session
        with self._lock:
            self._running[session.reward_key] = episode
        episode.is_started, episode.resumed_at = True, time.monotonic()
        self._processes.start_episode(
            {
                "episode": session.reward_key,
                "task": {
                    "id": task.id,
                    "question": task.question,
                    "messages": [dict(message) for message in task.messages or ()],
                    "answers": list(task.answers),
                    "data_source": task.data_source,
                    "metadata": dict(task.metadata),
                },
                "base_url": f"{url}/v1",
                "reward_url": f"{url}/reward",
                "api_key": session.name,
                "model": MODEL_NAME,
            }
        )

    def _stop_overdue_episodes(self) -> None:
        """Stop episodes past the time limit, and kill unresponsive processes."""
        now, deadline_s = time.monotonic(), self._settings.deadline_s
        with self._lock:
            running = list(self._running.items())
        for key, episode in running:
            if episode.ended_at is not None or episode.resumed_at is None:
                continue
            if episode.elapsed_s + now - episode.resumed_at > deadline_s:
                episode.end(
                    f"the agent has not ended after {deadline_s:g} s (config.env.agents.deadline_s)"
                )
                self._processes.stop(key)
        self._processes.kill_unresponsive()

    def _record_end(self, key: str, reward: Any, error: str) -> None:
        """Record the result of a finished agent. Called on other threads."""
        with self._lock:
            episode = self._running.pop(key, None)
        if episode is None:
            return
        session = episode.session
        self._sessions.pop(session.name, None)
        if reward is not None and not error:
            try:
                session.set_reward(parse_reward(reward))
            except RequestError as refusal:
                error = f"the agent's reward is rejected: {refusal}"
        session.close()  # rejects rewards that arrive after this check
        if not error and session.reward is None:
            error = "the agent ended and gave no reward"
        episode.end(session.conflict or error)
        self._wakeup.set()

    def _abort_group(self, group: _RunningGroup) -> None:
        """End a group's unfinished episodes and stop their agents."""
        for episode in group.episodes:
            if episode.ended_at is None:
                episode.end("it was stopped")
                self._processes.stop(episode.session.reward_key)

    def _build_sample(self, running: _RunningEpisode, attempt: int) -> Sample:
        """Concatenate the contexts of an episode into one trajectory."""
        session = running.session
        contexts = group_into_contexts(session.list_turns())
        episode = AgentEpisode(task=running.task, reward=session.reward)
        if session.warning:
            self._log(
                f"warning: task {running.task.id!r}, sample {running.sample_index}: "
                f"{session.warning}"
            )
        sample = Sample(
            episode=episode,
            sample_index=running.sample_index,
            attempt=attempt,
            token_ids=[],
            prompt_length=0,
        )
        # Only sampled ids are trained on: new prompt ids are observations, and the start of a
        # context repeats ids of earlier contexts.
        observations: list[str] = []  # text before each turn except the first
        earlier_contexts: list[Sequence[int]] = []  # ids of earlier contexts
        for context in contexts:
            context_ids: tuple[int, ...] = ()
            for turn in context:
                new = turn.prompt_ids[len(context_ids) :]
                if not episode.turns:
                    sample.token_ids, sample.prompt_length = list(new), len(new)
                    sample.begin_first_turn()
                elif not context_ids:
                    count = compute_common_prefix_length(new, earlier_contexts)
                    sample.begin_context(new, count)
                    observations.append(self._tokenizer.decode(new[count:]))
                else:
                    sample.append_observation(new)
                    observations.append(self._tokenizer.decode(new))
                output = turn.output
                logprobs, entropies = np.array([output.logprobs, output.entropies], np.float32)
                sample.append(output.token_ids, logprobs, entropies, output.versions)
                episode.turns.append(Turn(text=turn.text))
                context_ids = turn.ids
            earlier_contexts.append(context_ids)
        # A turn's observation is the text before the next turn, so it is set last.
        for index, observation in enumerate(observations):
            turn_before = episode.turns[index]
            episode.turns[index] = dataclasses.replace(turn_before, observation=observation)
        # An episode without turns gets an empty turn for its error.
        error = running.error
        if not contexts and not error:
            error = "the agent gave a reward and never called the model"
        if error:
            error = replace_surrogates(error)[:MAX_ERROR_CHARS]
            if episode.turns:
                episode.turns[-1] = dataclasses.replace(episode.turns[-1], error=error)
            else:
                episode.turns.append(Turn(text="", error=error))
                sample.begin_first_turn()
            episode.outcome = Outcome.ENVIRONMENT_ERROR
        elif session.reward is not None and session.reward.is_abstention:
            episode.outcome = Outcome.ABSTAINED
        else:
            episode.outcome = (
                Outcome.OUT_OF_BUDGET if session.is_out_of_budget else Outcome.ANSWERED
            )
        return sample

    def close(self) -> None:
        """Stop the server and all agents."""
        self._finalizer()


def _make_weak_callback(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method in a callback that does not keep the method's object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if bound := reference():
            bound(*arguments)

    return call


def _stop_processes_and_servers(
    processes: AgentProcesses, servers: Sequence[Server], bound: socket.socket
) -> None:
    processes.close()
    for server in servers:
        server.shutdown(0.0)
    bound.close()
