"""Rollouts that agents play: started together, answered by the run's own engine, trained by ids.

The server listens for as long as the run lasts. Between rollouts the engine's thread rests, and
what agents ask then waits for its turn. `Sampling.unfinished` groups may go on so into the next
rollout: their tokens so far stay, with the version of the weights that drew them, and they come
back whole, never a part of a group.
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
from functools import partial
from typing import Any

import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Outcome, Task, Turn
from jaxrl.extras.serve.agents.environment import AgentEnv, AgentEpisode
from jaxrl.extras.serve.agents.plays import (
    RolloutPlay,
    RolloutPlays,
    contexts_of,
    num_common,
    read_earned,
)
from jaxrl.extras.serve.agents.programs import Programs
from jaxrl.extras.serve.engine import ServedEngine, Way
from jaxrl.extras.serve.fields import RefusedError
from jaxrl.extras.serve.server import MAX_CONNECTIONS, Endpoint, Server, Settings, take_port
from jaxrl.extras.serve.worker import Worker
from jaxrl.sampling.episodes import EpisodePlayer, Limits, Pay, Schedule
from jaxrl.sampling.interfaces import Processor, Sampling
from jaxrl.sampling.rollout import LOOK_S, check_stop, keys_of, places_of
from jaxrl.sampling.trajectory import Sample
from jaxrl.types import Draw, Group
from jaxrl.utils.concurrency import MAX_ERROR
from jaxrl.utils.text import writable

MODEL = "policy"
"""Name of the model for agents."""


MAX_ANSWERS = 1 << 14
"""Answers that are kept for agents that ask again; a lost one would be drawn twice."""


@dataclass(eq=False, kw_only=True)
class _Member:
    """An episode: its session, and how far it is.

    Attributes:
        play: its session.
        task: of which it is.
        sample_index: in its group.
        served_s: seconds of earlier rollouts in which it was played.
        since: time from which it is played in this one, on the monotonic clock; None where it is
            not.
        is_started: its agent was.
        error: why it came to nothing.
        over: time at which it was known what comes of it; None before.
        has_ended: its agent is gone too.
    """

    play: RolloutPlay
    task: Task
    sample_index: int
    served_s: float = 0.0
    since: float | None = None
    is_started: bool = False
    error: str = ""
    over: float | None = None
    has_ended: bool = False

    def end(self, error: str = "") -> None:
        """Ends it, so that nothing more comes of it; the first word counts."""
        self.play.end()
        if self.over is None:
            self.error, self.over = error, time.monotonic()


@dataclass(eq=False, kw_only=True)
class _Game:
    """A group that is played."""

    draw: Draw
    members: list[_Member]

    @property
    def is_over(self) -> bool:
        return all(member.over is not None for member in self.members)

    @property
    def ended(self) -> float:
        """Time at which it was over."""
        return max(member.over or 0.0 for member in self.members)


class AgentRollout(EpisodePlayer):
    """Plays groups of episodes of tasks by agents that ask the engine over HTTP."""

    def __init__(
        self,
        env: AgentEnv,
        engine: ServedEngine,
        tokenizer: Tokenizer,
        limits: Limits,
        schedule: Schedule,
        pay: Pay,
        processor: Processor | None = None,
        *,
        log: Callable[[str], None],
    ):
        """Takes the port and loads the agent; the server starts with the first rollout.

        The arguments are those of `EpisodePlayer`, behind the environment and its sampler. `log`
        prints a line of the run.

        Raises:
            ValueError: the port cannot be had, the agent not be loaded, or the model not be served.
        """
        super().__init__(env, tokenizer, limits, schedule, pay, processor)
        if engine.recorded or processor is not None or limits.context is not None:
            raise ValueError(
                "config.env.name is 'agents'; expected a model of text alone, with "
                "config.model.replay=False and config.rollout.context.name='none': an "
                "agent's history is its own business."
            )
        if "reward" not in getattr(pay, "weights", ("reward",)):
            raise ValueError(
                f"config.reward.weights is {dict(getattr(pay, 'weights', {}))!r}; expected a "
                "weight of 'reward', which is what agents give, 0 if nothing is paid for it."
            )
        self._settings, self._max_turns, self._engine = env.settings, env.max_turns, engine
        self._log = log
        self._plays = RolloutPlays()
        self._games: dict[tuple[int, int, int], _Game] = {}  # that go on into the next rollout
        # Those whose agents are there. Agents' processes name an episode by its reward key, so
        # that code which knows only the key of the model cannot report an end in their place.
        self._members: dict[str, _Member] = {}
        self._lock, self._changed = threading.Lock(), threading.Event()
        self._worker: Worker | None = None
        self._programs = Programs(
            agent=env.settings.place,
            command=env.settings.command,
            python=env.settings.python,
            settings=env.settings.settings,
            processes=env.settings.processes,
            ended=_weakly(self._take_end),
        )
        self._servers: list[Server] = []  # one, once it is started
        host, port = env.settings.host, env.settings.port
        try:
            self._taken = take_port(host, port, key="that of each episode")
        except OSError as error:  # its text names options of `jaxrl serve`
            raise ValueError(
                f"config.env.agents.port is {port} and host {host!r}, which cannot be had: "
                f"{getattr(error.__cause__, 'strerror', error)}; expected a port that is free, or "
                "0 for any, and an address of this machine."
            ) from error
        # Threads of both go on by themselves: they end with this, or with the process.
        self._finalizer = weakref.finalize(self, _end, self._programs, self._servers, self._taken)
        self._programs.open()

    def prompt_fits(self, task: Task) -> bool:
        """Returns True for any task: its agent makes the prompts."""
        return True

    def __call__(
        self,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Group | None]:
        """Plays a group of every draw; None for those that go on into the next call.

        A draw that is given again goes on where it was.

        Args:
            draws: the tasks.
            sampling: how many trajectories of each, how they are drawn, and how many groups may
                come back unfinished.
            should_stop: asked about once a second.
            progress: told how many trajectories have ended, of how many.

        Raises:
            Interrupted: `should_stop` said so.
            RuntimeError: the engine has failed.
            ValueError: the agent cannot be started again.
        """
        worker = self._listening()
        keys = places_of(draws, sampling)
        if sampling.unfinished:  # else an evaluation, which leaves those of the training alone
            for key in [k for k in self._games if k not in keys]:  # the run has gone back
                self._close(self._games.pop(key))
        games = self._opened(draws, keys, sampling)
        members = [member for game in games for member in game.members]
        names = {member.play.name for member in members}
        worker.serve(
            names.__contains__,
            version=sampling.policy_version,
            deadline_s=self._settings.deadline_s,
        )
        now = time.monotonic()
        for member in members:
            member.since = now if member.is_started else None
        try:
            self._play(games, members, worker, sampling.unfinished, should_stop, progress)
        except BaseException:
            for game in games:
                self._close(game)
            raise
        finally:
            now = time.monotonic()
            for member in members:
                member.served_s += now - (now if member.since is None else member.since)
                member.since = None  # another rollout may come before it goes on
            worker.pause()
        # As many as are waited for, those that ended first; others that have are there next time.
        over = sorted((game for game in games if game.is_over), key=lambda game: game.ended)
        over = over[: max(len(games) - sampling.unfinished, 0)]
        self._games |= {k: g for k, g in zip(keys, games, strict=True) if g not in over}
        over = [game for game in games if game in over]
        samples = []
        for game in over:
            samples += [self._sample(member, game.draw.attempt) for member in game.members]
            self._close(game)
        scored = iter(self._score(samples, sampling))
        return [next(scored) if game in over else None for game in games]

    def _listening(self) -> Worker:
        """The engine's worker, paused; the first call starts it and the server."""
        if self._worker is None:
            settings, tokenizer = self._settings, self._tokenizer
            self._worker = Worker(
                self._engine,
                tokenizer.vocab_bytes,
                tokenizer.eos_ids,
                max_queue=MAX_CONNECTIONS,
                is_paused=True,
            )
            served = Settings(
                name=MODEL,
                template_arguments=tokenizer.template_arguments,
                deadline_s=settings.deadline_s,
                max_answers=MAX_ANSWERS,
            )
            endpoint = Endpoint(self._worker, tokenizer, served, self._plays)
            self._servers.append(Server(endpoint, settings.host, self._taken))
        return self._worker

    def _opened(
        self,
        draws: Sequence[Draw],
        keys: Sequence[tuple[int, int, int]],
        sampling: Sampling,
    ) -> list[_Game]:
        """The groups of all draws: those under way, and new ones."""
        new = [draw for draw, key in zip(draws, keys, strict=True) if key not in self._games]
        of_new = iter(keys_of(new, sampling, self._engine.device))
        games = []
        for draw, key in zip(draws, keys, strict=True):
            if key in self._games:
                games.append(self._games.pop(key))
                continue
            members = []
            for index in range(sampling.group_size):
                play = RolloutPlay(
                    key=next(of_new),
                    way=Way(sampling.temperature, sampling.top_p),
                    limits=self._limits,
                    max_turns=self._max_turns,
                    read_text=partial(_text, self._tokenizer.vocab_bytes),
                )
                members.append(_Member(play=play, task=draw.task, sample_index=index))
            games.append(_Game(draw=draw, members=members))
        return games

    def _play(
        self,
        games: Sequence[_Game],
        members: Sequence[_Member],
        worker: Worker,
        unfinished: int,
        should_stop: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> None:
        """Starts agents and waits for them, until no more than `unfinished` groups are left."""
        waiting = deque(member for member in members if not member.is_started)
        most = self._settings.max_concurrent or self._engine.num_rows
        while True:
            self._changed.clear()
            progress(sum(member.over is not None for member in members), len(members))
            if worker.failure is not None or not worker.is_alive:
                raise RuntimeError(
                    "the engine failed while agents asked it; its error stands above."
                ) from worker.failure
            if sum(not game.is_over for game in games) <= unfinished:
                return
            check_stop(should_stop)
            self._hurry()
            while waiting and self._num_playing() < most:
                self._launch(waiting.popleft())
            self._changed.wait(LOOK_S)

    def _num_playing(self) -> int:
        """Number of agents that run, without those that wait until their groups go on."""
        with self._lock:
            members = list(self._members.values())
        return sum(one.over is not None or one.since is not None for one in members)

    def _launch(self, member: _Member) -> None:
        task, name, key = member.task, member.play.name, member.play.reward_key
        root = f"{self._servers[0].address}/r/{name}"
        self._plays.by_name[name] = member.play
        with self._lock:
            self._members[key] = member
        member.is_started, member.since = True, time.monotonic()
        self._programs.play(
            {
                "episode": key,
                "task": {
                    "id": task.id,
                    "question": task.question,
                    "messages": [dict(message) for message in task.messages or ()],
                    "answers": list(task.answers),
                    "data_source": task.data_source,
                    "metadata": dict(task.metadata),
                },
                "base_url": f"{root}/v1",
                "reward_url": f"{root}/reward",
                "api_key": name,
                "model": MODEL,
            }
        )

    def _hurry(self) -> None:
        """Gives up episodes that are late."""
        now, deadline_s = time.monotonic(), self._settings.deadline_s
        with self._lock:
            members = list(self._members.items())
        for key, member in members:
            if member.over is not None or member.since is None:
                continue
            if member.served_s + now - member.since > deadline_s:
                member.end(
                    f"the agent has not ended after {deadline_s:g} s (config.env.agents.deadline_s)"
                )
                self._programs.stop(key)
        self._programs.look()

    def _take_end(self, key: str, reward: Any, error: str) -> None:
        """Takes note that an agent is gone; called from threads."""
        with self._lock:
            member = self._members.pop(key, None)
        if member is None:
            return
        play = member.play
        self._plays.by_name.pop(play.name, None)
        if reward is not None and not error:
            try:
                play.earn(read_earned(reward))
            except RefusedError as refusal:
                error = f"the agent's reward is refused: {refusal}"
        play.end()  # before the rewards are compared: none may come later
        if not error and play.earned is None:
            error = "the agent ended and gave no reward"
        member.end(play.conflict or error)
        member.has_ended = True
        self._changed.set()

    def _close(self, game: _Game) -> None:
        """Ends a group; agents that have not ended are given up once nothing more comes of it."""
        for member in game.members:
            if member.over is None:
                member.end("it was given up")
                if member.is_started and not member.has_ended:
                    self._programs.stop(member.play.reward_key)

    def _sample(self, member: _Member, attempt: int) -> Sample:
        """An episode as it is trained on."""
        play = member.play
        contexts = contexts_of(play.calls())
        episode = AgentEpisode(task=member.task, earned=play.earned)
        if play.warning:
            place = f"task {member.task.id!r}, sample {member.sample_index}"
            self._log(f"warning: {place}: {play.warning}")
        sample = Sample(
            episode=episode,
            sample_index=member.sample_index,
            attempt=attempt,
            token_ids=[],
            prompt_length=0,
        )
        error = member.error
        if not contexts and not error:
            error = "the agent has a reward, and never asked the model"
        texts: list[str] = []  # of each turn
        between: list[str] = []  # what was inserted before each, but the first
        for number, (_, calls) in enumerate(contexts):
            before: tuple[int, ...] = ()
            for call in calls:
                new = call.prompt_ids[len(before) :]
                if not texts:
                    sample.token_ids, sample.prompt_length = list(new), len(new)
                    sample.begin_first_turn()
                elif not before:
                    count = num_common(new, [ids for ids, _ in contexts[:number]])
                    sample.begin_context(new, count)
                    between.append(self._tokenizer.decode(new[count:]))
                else:
                    sample.append_observation(new)
                    between.append(self._tokenizer.decode(new))
                logprobs, entropies = np.array([call.logprobs, call.entropies], np.float32)
                sample.append(call.token_ids, logprobs, entropies, call.versions)
                texts.append(call.text)
                before = call.ids
        for text, shown in zip(texts, [*between, None], strict=False):
            episode.turns.append(Turn(text=text, observation=shown))
        if error:
            error = writable(error)[:MAX_ERROR]
            if episode.turns:
                episode.turns[-1] = dataclasses.replace(episode.turns[-1], error=error)
            else:
                episode.turns.append(Turn(text="", error=error))
                sample.begin_first_turn()
            episode.outcome = Outcome.ENVIRONMENT_ERROR
        elif play.earned is not None and play.earned.is_abstention:
            episode.outcome = Outcome.ABSTAINED
        else:
            episode.outcome = Outcome.OUT_OF_BUDGET if play.is_spent else Outcome.ANSWERED
        return sample

    def close(self) -> None:
        """Ends server and agents."""
        self._finalizer()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps a method so that its object is not kept alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if bound := reference():
            bound(*arguments)

    return call


def _end(programs: Programs, servers: Sequence[Server], taken: socket.socket) -> None:
    programs.close()
    for server in servers:
        server.end(0.0)
    taken.close()


def _text(vocab_bytes: Sequence[bytes], token_ids: Sequence[int], num_bytes: int) -> str:
    data = b"".join(vocab_bytes[id] for id in token_ids)
    return data[:num_bytes].decode("utf-8", "replace")
