"""Turns: the engine's tokens to the environment's text and back. Tokens meet text only here.

What the policy sampled stays as the ids it sampled; it is decoded for the environment and never
encoded again. What the environment says is encoded once, when it is appended.

The environment is called from threads, one call for all rows that stopped in a chunk, and the
device decodes other rows meanwhile. `Schedule` says when its replies enter.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.envs.base import (
    Env,
    Episode,
    Observation,
    Outcome,
    Reward,
    StepResult,
    Task,
    Turn,
)
from jaxrl.sampling import decode
from jaxrl.sampling.engine import Engine, Event, Request, sample_keys
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.tokenizer import Tokenizer
from jaxrl.types import Draw, Trajectory


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Token budgets of one trajectory.

    Attributes:
        max_prompt_tokens: a longer prompt is refused, or cut.
        max_response_tokens: sampled tokens, over all turns.
        max_total_tokens: prompt, sampled tokens and observations together.
        max_observation_tokens: of the body of one observation; what is beyond is cut off inside
            the tags.
        overlong_prompts: what becomes of a longer prompt: `refuse`, `drop` (whoever draws tasks
            leaves it out) or `truncate_left` (its first tokens are cut off).
    """

    max_prompt_tokens: int
    max_response_tokens: int
    max_total_tokens: int
    max_observation_tokens: int
    overlong_prompts: str = "refuse"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When the environment's replies enter.

    Attributes:
        deterministic: by the number of chunks, waiting for the environment where need be, so that
            nothing depends on the clock; else at the first chunk after they have arrived.
        lag_chunks: of the deterministic schedule. The replies to rows that stopped in a chunk
            enter before the chunk so many after it. With 1 the device waits for host and
            environment between chunks; with more it decodes meanwhile.
    """

    deterministic: bool = True
    lag_chunks: int = 2


class Interrupted(Exception):  # noqa: N818, nothing went wrong
    """A rollout ended early because it was asked to; its engine is empty and can be used again."""


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """What, beside task, sample and attempt, the draws depend on."""

    seed: int
    stage: int
    step: int


@dataclass(kw_only=True)
class _Sample:
    """A trajectory while it grows."""

    episode: Episode
    group_id: int
    sample_index: int
    attempt: int
    token_ids: list[int]
    prompt_length: int
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    turn_start: int = 0

    def append_prompt(self) -> None:
        self.turn_start = self.prompt_length
        self._append_unsampled(self.prompt_length)

    def append_sampled(self, event: Event) -> None:
        self.token_ids.extend(event.token_ids.tolist())
        self.loss_mask.extend([True] * len(event.token_ids))
        self.logprobs.extend(event.logprobs.tolist())
        self.entropies.extend(event.entropies.tolist())

    def append_observation(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self._append_unsampled(len(token_ids))
        self.turn_start = len(self.token_ids)

    def _append_unsampled(self, count: int) -> None:
        self.loss_mask.extend([False] * count)
        self.logprobs.extend([0.0] * count)
        self.entropies.extend([0.0] * count)

    @property
    def num_sampled(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Call:
    """A call of the environment, made or under way."""

    due: int  # number of the chunk before which its replies enter
    members: list[tuple[int, _Sample, str]]  # of each: request, sample, text of its turn
    replies: Future[list[StepResult]]


def encode_observation(
    tokenizer: Tokenizer, observation: Observation, *, max_body_tokens: int
) -> tuple[list[int], str]:
    """Ids of an observation whose body is cut to fit inside its tags, and its text as inserted."""
    body = tokenizer.encode_plain(observation.body)
    text = observation.text
    if len(body) > max_body_tokens:
        body = body[:max_body_tokens]
        text = observation.prefix + tokenizer.decode(body) + observation.suffix
    return [
        *tokenizer.encode(observation.prefix),
        *body,
        *tokenizer.encode(observation.suffix),
    ], text


class Rollout:
    """Plays groups of episodes of tasks through an engine and an environment."""

    def __init__(
        self,
        engine: Engine,
        env: Env,
        tokenizer: Tokenizer,
        automaton: StopAutomaton,
        limits: Limits,
        schedule: Schedule | None = None,
    ):
        """`automaton` must be the one the engine stops by; `schedule` defaults to `Schedule()`."""
        self._engine = engine
        self._env = env
        self._tokenizer = tokenizer
        self._automaton = automaton
        self._limits = limits
        self._schedule = schedule or Schedule()

    def __call__(
        self,
        draws: Sequence[Draw],
        *,
        group_size: int,
        seeds: Seeds,
        policy_version: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Trajectory]:
        """Samples `group_size` trajectories of every task, scored, in task order.

        Whatever is raised here or in the environment leaves the engine empty, and no thread runs
        on: calls of the environment that are under way are waited for.

        Args:
            draws: the tasks.
            group_size: trajectories of each.
            seeds: of the samples.
            policy_version: recorded with every sampled token.
            should_stop: asked before each chunk.

        Raises:
            Interrupted: `should_stop` said so.
            ValueError: a prompt leaves no room for an answer.
        """
        samples = self._submit(draws, group_size, seeds)
        try:
            # A call has a row at least, which keeps its slot: none waits for a thread.
            with ThreadPoolExecutor(self._engine.num_slots, thread_name_prefix="env") as pool:
                self._play(samples, pool, should_stop)
        except BaseException:
            self._engine.clear()
            raise
        return self._score(list(samples.values()), group_size, policy_version)

    def _play(
        self, samples: dict[int, _Sample], pool: Executor, should_stop: Callable[[], bool]
    ) -> None:
        """Decodes all samples to their ends."""
        ahead = 0 if self._schedule.deterministic and self._schedule.lag_chunks == 1 else 1
        calls: deque[_Call] = deque()  # in the order in which they were made
        while not self._engine.is_idle:
            if should_stop():
                raise Interrupted("the rollout was asked to stop")
            for call in self._take_due(calls):
                self._advance(call)
            events = self._engine.step(ahead=ahead)
            members = self._append(samples, events)
            if members:
                episodes = [sample.episode for _, sample, _ in members]
                texts = [text for _, _, text in members]
                replies = pool.submit(self._env.step, episodes, texts)
                due = events[0].chunk + self._schedule.lag_chunks
                calls.append(_Call(due=due, members=members, replies=replies))

    def _take_due(self, calls: deque[_Call]) -> list[_Call]:
        """Takes the calls whose replies enter now; one of them, if nothing else is left to do."""
        is_stalled = self._engine.is_stalled
        if self._schedule.deterministic:
            chunk = self._engine.counts.chunks
            due = [call for call in calls if call.due <= chunk or (is_stalled and call is calls[0])]
        else:
            if is_stalled:
                wait([call.replies for call in calls], return_when=FIRST_COMPLETED)
            due = [call for call in calls if call.replies.done()]
        for call in due:
            calls.remove(call)
        return due

    def _append(
        self, samples: dict[int, _Sample], events: Sequence[Event]
    ) -> list[tuple[int, _Sample, str]]:
        """Appends what was sampled; the samples that stopped and their turns' texts."""
        members = []
        for event in events:
            sample = samples[event.request]
            sample.append_sampled(event)
            if event.status == decode.RUNNING:
                continue
            text = self._turn_text(sample, event.status)
            if event.status == decode.OUT_OF_BUDGET:
                self._end(event.request, sample, Turn(text=text), Outcome.OUT_OF_BUDGET)
            else:
                members.append((event.request, sample, text))
        return members

    def _submit(self, draws: Sequence[Draw], group_size: int, seeds: Seeds) -> dict[int, _Sample]:
        tasks = [draw.task for draw in draws]
        prompts = [self._prompt(task) for task in tasks]
        keys = sample_keys(
            seeds.seed,
            seeds.stage,
            seeds.step,
            np.repeat([draw.position for draw in draws], group_size),
            np.tile(np.arange(group_size), len(draws)),
            np.repeat([draw.attempt for draw in draws], group_size),
        )
        requests, samples = [], []
        for index, key in enumerate(keys):
            group_id = index // group_size
            prompt = prompts[group_id]
            budget = self._budget(len(prompt), num_sampled=0)
            requests.append(Request(prompt_ids=tuple(prompt), sample_key=key, budget=budget))
            sample = _Sample(
                episode=Episode(task=tasks[group_id]),
                group_id=group_id,
                sample_index=index % group_size,
                attempt=draws[group_id].attempt,
                token_ids=list(prompt),
                prompt_length=len(prompt),
            )
            sample.append_prompt()
            samples.append(sample)
        return dict(zip(self._engine.submit(requests), samples, strict=True))

    def prompt_fits(self, task: Task) -> bool:
        """Whether the prompt of a task is within its limit.

        Raises:
            ValueError: it is longer, and that is refused; or it is empty.
        """
        prompt, limit = self._render_prompt(task), self._prompt_limit
        if not prompt or (len(prompt) > limit and self._limits.overlong_prompts == "refuse"):
            raise self._unfit(task, len(prompt))
        return len(prompt) <= limit

    def _prompt(self, task: Task) -> list[int]:
        """The ids of a task's prompt, cut if that is wanted."""
        prompt, limit = self._render_prompt(task), self._prompt_limit
        if self._limits.overlong_prompts == "truncate_left":
            prompt = prompt[-limit:]
        if not 0 < len(prompt) <= limit:
            raise self._unfit(task, len(prompt))
        return prompt

    @property
    def _prompt_limit(self) -> int:
        return min(self._limits.max_prompt_tokens, self._limits.max_total_tokens - 1)

    def _render_prompt(self, task: Task) -> list[int]:
        return self._tokenizer.render_prompt(self._env.start([task])[0])

    def _unfit(self, task: Task, length: int) -> ValueError:
        return ValueError(
            f"the prompt of task {task.id!r} has {length} tokens; expected 1 to "
            f"{self._prompt_limit}. Raise config.rollout.max_prompt_tokens and max_total_tokens, "
            "or set config.rollout.overlong_prompts to 'drop' (leaves such tasks out) or "
            "'truncate_left' (cuts their first tokens off)."
        )

    def _budget(self, length: int, *, num_sampled: int) -> int:
        limits = self._limits
        return min(limits.max_response_tokens - num_sampled, limits.max_total_tokens - length)

    def _turn_text(self, sample: _Sample, status: int) -> str:
        """What the environment sees: the turn up to its stop string, without an end-of-turn id."""
        token_ids = sample.token_ids[sample.turn_start :]
        if status == decode.END_OF_TURN:
            token_ids = token_ids[:-1]
        data = [self._tokenizer.vocab_bytes[token] for token in token_ids]
        text = self._automaton.cut(data) if status == decode.STOP_STRING else b"".join(data)
        return text.decode("utf-8", errors="replace")

    def _advance(self, call: _Call) -> None:
        """Ends or resumes the samples of a call, whose replies it waits for."""
        resumed = []
        replies = call.replies.result()
        self._check_count("step", len(replies), len(call.members))
        for (request, sample, text), result in zip(call.members, replies, strict=True):
            turn = Turn(
                text=text,
                tool_call=result.tool_call,
                latency_s=result.latency_s,
                error=result.error,
            )
            if result.outcome is not None:
                self._end(request, sample, turn, result.outcome)
                continue
            token_ids, shown = self._fit_observation(sample, result.observation)
            length = len(sample.token_ids) + len(token_ids)
            budget = self._budget(length, num_sampled=sample.num_sampled)
            if budget <= 0:
                self._end(request, sample, turn, Outcome.OUT_OF_BUDGET)
                continue
            sample.append_observation(token_ids)
            sample.episode.turns.append(dataclasses.replace(turn, observation=shown))
            resumed.append((request, token_ids, budget))
        self._engine.resume(resumed)

    def _fit_observation(
        self, sample: _Sample, observation: Observation | None
    ) -> tuple[list[int], str | None]:
        """Ids and text of an observation, cut to its limit and to what the row has room for."""
        if observation is None:
            return [], None
        tags = Observation(prefix=observation.prefix, body="", suffix=observation.suffix)
        num_tags = len(encode_observation(self._tokenizer, tags, max_body_tokens=0)[0])
        room = self._limits.max_total_tokens - len(sample.token_ids) - num_tags - 1
        limit = max(min(self._limits.max_observation_tokens, room), 0)
        return encode_observation(self._tokenizer, observation, max_body_tokens=limit)

    def _check_count(self, method: str, found: int, expected: int) -> None:
        if found != expected:
            raise ValueError(
                f"{type(self._env).__name__}.{method} gave {found} results for {expected} "
                "episodes; expected one for each, in their order."
            )

    def _end(self, request: int, sample: _Sample, turn: Turn, outcome: Outcome) -> None:
        sample.episode.turns.append(turn)
        sample.episode.outcome = outcome
        self._engine.finish(request)

    def _score(
        self, samples: Sequence[_Sample], group_size: int, policy_version: int
    ) -> list[Trajectory]:
        trajectories = []
        for start in range(0, len(samples), group_size):
            group = samples[start : start + group_size]
            scored = [s for s in group if s.episode.outcome != Outcome.ENVIRONMENT_ERROR]
            by_index = self._rewards(scored) if scored else {}
            for sample in group:
                reward = by_index.get(sample.sample_index)
                trajectories.append(_trajectory(sample, reward, policy_version))
        return trajectories

    def _rewards(self, samples: Sequence[_Sample]) -> dict[int, Reward]:
        """By sample index; a sample that cannot be scored ends as an environment error instead."""
        try:
            rewards = self._env.score([sample.episode for sample in samples])
        except Exception as error:  # of whatever the environment scores with
            if len(samples) > 1:  # one of them, maybe
                return {i: r for sample in samples for i, r in self._rewards([sample]).items()}
            [episode] = (sample.episode for sample in samples)
            episode.outcome = Outcome.ENVIRONMENT_ERROR
            message = f"score: {type(error).__name__}: {error}"
            episode.turns[-1] = dataclasses.replace(episode.turns[-1], error=message)
            return {}
        self._check_count("score", len(rewards), len(samples))
        return {s.sample_index: r for s, r in zip(samples, rewards, strict=True)}


def _trajectory(sample: _Sample, reward: Reward | None, policy_version: int) -> Trajectory:
    loss_mask = np.array(sample.loss_mask, bool)
    scored: dict[str, Any] = {}
    if reward is not None:
        scored = {
            "reward": reward.total,
            "reward_parts": dict(reward.parts),
            "final_answer": reward.final_answer,
            "is_correct": reward.is_correct,
            "is_abstention": reward.is_abstention,
            "is_well_formed": reward.is_well_formed,
        }
    return Trajectory(
        token_ids=np.array(sample.token_ids, np.int32),
        loss_mask=loss_mask,
        rollout_logprobs=np.array(sample.logprobs, np.float32),
        rollout_entropies=np.array(sample.entropies, np.float32),
        policy_versions=np.where(loss_mask, policy_version, -1).astype(np.int32),
        prompt_length=sample.prompt_length,
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        attempt=sample.attempt,
        task=sample.episode.task,
        turns=tuple(sample.episode.turns),
        outcome=sample.episode.outcome or Outcome.OUT_OF_BUDGET,
        **scored,
    )
