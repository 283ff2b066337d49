"""Weighted sum of reward parts from the environment, functions and judges."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, Protocol

from jaxrl.envs.base import CallRecord, OutageError, Reward, ScoredEpisode, Task
from jaxrl.utils.concurrency import (
    DeadlineError,
    call_once,
    parallel_map,
    start_calls,
    start_event_loop,
)

MAX_THREADS = 32
"""Maximum number of threads that call sync functions."""

LARGEST_REWARD = (2 - 2.0**-23) * 2.0**127
"""Largest finite float32."""


@dataclass(frozen=True, kw_only=True)
class RewardPartResult:
    """Result of a reward part for one episode.

    Attributes:
        score: Value of the part; None if it does not apply to the episode.
        turns: For a per-turn part, one value per turn; `score` is their sum.
        extra_values: Additional values to log, by name. They do not affect the reward.
    """

    score: float | None
    turns: tuple[float, ...] | None = None
    extra_values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardPartCall:
    """Call of a reward part.

    Attributes:
        members: Indices of the call's episodes in their group.
        invoke: Function that runs the call; returns a coroutine if the part is async.
        parse: Function that converts the result to one `RewardPartResult` per episode, or raises.
        records: Function that returns the records of the priced tool calls, once the call has
            ended. The records are attributed to the first episode.
    """

    members: tuple[int, ...]
    invoke: Callable[[], Any]
    parse: Callable[[Any], list[RewardPartResult]]
    records: Callable[[], Sequence[CallRecord]] = tuple


class RewardPart(Protocol):
    """Reward part that does not come from the environment."""

    @property
    def is_async(self) -> bool:
        """True if calls return coroutines."""
        ...

    def requests(self, group: Sequence[ScoredEpisode]) -> list[RewardPartCall]:
        """Return the calls that score one task's episodes. Each episode is in exactly one call."""
        ...

    def missing_fields(self, task: Task) -> list[str]:
        """Return the names of required fields that the task lacks."""
        ...


class AnswerPart(ABC):
    """Base class of reward parts that compare each final answer with the accepted answers."""

    is_async = False

    @abstractmethod
    def score_answer(self, sample: ScoredEpisode) -> RewardPartResult:
        """Score the final answer of an episode."""

    def requests(self, group: Sequence[ScoredEpisode]) -> list[RewardPartCall]:
        """Return one scoring call per episode."""
        return [
            RewardPartCall(
                members=(index,),
                invoke=partial(self.score_answer, sample),
                parse=lambda value: [value],
            )
            for index, sample in enumerate(group)
        ]

    def missing_fields(self, task: Task) -> list[str]:
        """Return `["answers"]` if the task has no accepted answers, else []."""
        return [] if task.answers else ["answers"]


def to_number(name: str, value: Any) -> float:
    """Convert the value of a reward part (a finite number or scalar array) to a float.

    Raises:
        ValueError: The value is not a finite number.
    """
    plain = value.item() if callable(getattr(value, "item", None)) else value
    if not (isinstance(plain, Real) and math.isfinite(plain)):
        raise ValueError(
            f"the reward part {name!r} returned {value!r:.200}; expected a finite number"
        )
    return float(plain)


@call_once
def _get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all async reward functions, whose HTTP clients are bound to it."""
    return start_event_loop("rewards")


@dataclass(frozen=True, kw_only=True)
class _GroupCall:
    """Call of one reward part for one group."""

    part: str
    group: int
    call: RewardPartCall


@dataclass(frozen=True, kw_only=True)
class RewardCombiner:
    """Reward function of a run: the weighted sum of reward parts.

    Attributes:
        weights: Weight of each part, summed in this order. Parts without a weight are only logged.
        custom_parts: Parts that do not come from the environment, by name.
        correct: Name of the part that decides correctness: an answer is correct if the part is
            above 0 and the answer is not an abstention. "" to use the environment's decision.
        deadline_s: Time limit in seconds for all functions of a batch; late results are errors. If
            0, there is no limit, and sync functions run in sequence in the calling thread.
    """

    weights: Mapping[str, float]
    custom_parts: Mapping[str, RewardPart] = field(default_factory=dict)
    correct: str = ""
    deadline_s: float = 600.0

    def __call__(
        self, groups: Sequence[Sequence[ScoredEpisode]]
    ) -> list[list[Reward | BaseException]]:
        """Return the reward of each episode, including its total, or an exception.

        Also set the `records` of the episodes.

        Raises:
            OutageError: A judge or tool has been down for too long.
        """
        calls = [
            _GroupCall(part=name, group=g, call=call)
            for name, part in self.custom_parts.items()
            for g, group in enumerate(groups)
            if group
            for call in part.requests(group)
        ]
        outcomes = self._run_calls(calls)
        # Retry a failed call one episode at a time, so that one episode cannot fail the others.
        retries = [
            replace(failed, call=replace(call, members=(member,)))
            for failed, outcome in zip(calls, outcomes, strict=True)
            if isinstance(outcome, BaseException) and not isinstance(outcome, DeadlineError)
            if len(failed.call.members) > 1
            for member in failed.call.members
            for call in self.custom_parts[failed.part].requests([groups[failed.group][member]])
        ]
        results: list[list[dict[str, RewardPartResult | BaseException]]]
        results = [[{} for _ in group] for group in groups]
        for group_call, outcome in zip(
            [*calls, *retries], [*outcomes, *self._run_calls(retries)], strict=True
        ):
            members = group_call.call.members
            groups[group_call.group][members[0]].records.extend(group_call.call.records())
            for index, member in enumerate(members):
                result = outcome if isinstance(outcome, BaseException) else outcome[index]
                results[group_call.group][member][group_call.part] = result
        return [
            [self._build_reward(episode, result) for episode, result in zip(*pair, strict=True)]
            for pair in zip(groups, results, strict=True)
        ]

    def check_task(self, task: Task, key: str) -> None:
        """Check that a task has the fields that the reward parts require.

        Args:
            task: A task of the run.
            key: Config key that names the task's file.

        Raises:
            ValueError: A field is missing. The message names the part and the field.
        """
        for name, part in self.custom_parts.items():
            if missing := part.missing_fields(task):
                raise ValueError(
                    f"config.reward.weights names {name!r}, which requires {missing[0]!r}; the "
                    f"tasks of {key} have no such field ({task.id!r} has the metadata "
                    f"{', '.join(task.metadata) or 'none'}). Give it a default, or set it in "
                    "config.reward.settings."
                )

    def _run_calls(
        self, calls: Sequence[_GroupCall]
    ) -> list[list[RewardPartResult] | BaseException]:
        """Run async calls in the event loop, and all other calls in threads."""
        are_async = [self.custom_parts[call.part].is_async for call in calls]
        sync_calls = [
            c.call.invoke for c, is_async in zip(calls, are_async, strict=True) if not is_async
        ]
        if self.deadline_s:
            sync_futures = iter(start_calls(sync_calls, max_threads=MAX_THREADS))
        else:
            sync_futures = iter(list(map(_run_now, sync_calls)))
        futures = [
            asyncio.run_coroutine_threadsafe(_invoke_in_loop(call.call), _get_event_loop())
            if is_async
            else next(sync_futures)
            for call, is_async in zip(calls, are_async, strict=True)
        ]
        wait(futures, timeout=self.deadline_s or None)
        return [self._get_result(call, future) for call, future in zip(calls, futures, strict=True)]

    def _get_result(
        self, call: _GroupCall, future: Future[Any]
    ) -> list[RewardPartResult] | BaseException:
        """Return the results of a call, or its error; a call that has not finished is canceled."""
        try:
            if not future.done():
                future.cancel()
                raise DeadlineError(
                    f"no result from the reward part {call.part!r} within {self.deadline_s:g} s "
                    "(config.reward.deadline_s)"
                )
            return call.call.parse(future.result())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: user code must not end the run
            if isinstance(error, OutageError) and error.fallback is None:
                raise
            error.add_note(f"in the reward part {call.part!r}")
            return error

    def _build_reward(
        self, episode: ScoredEpisode, results: Mapping[str, RewardPartResult | BaseException]
    ) -> Reward | BaseException:
        """Return the reward with all parts and its total, or the first error of a part."""
        try:
            parts, turn_parts = self._collect_parts(episode, results)
            # The environment must provide all of its parts. Custom parts may not apply.
            nonzero_weights = {name: weight for name, weight in self.weights.items() if weight}
            missing = [name for name in nonzero_weights if name not in parts]
            unscored = [name for name in missing if name not in self.custom_parts]
            if unscored or len(missing) == len(nonzero_weights):
                raise ValueError(
                    f"the reward parts {', '.join(map(repr, unscored or missing))} have a weight "
                    "but no value"
                )
            weights = {name: weight for name, weight in nonzero_weights.items() if name in parts}
            amounts = {name: weight * parts[name] for name, weight in weights.items()}
            total = sum(amounts.values())
            # Advantages are float32, so a larger total would become infinite.
            if not abs(total) <= LARGEST_REWARD:
                raise ValueError(
                    f"the weighted reward parts {amounts} sum to {total:g}; expected at most "
                    f"{LARGEST_REWARD:.2g}"
                )
        except BaseException as error:
            note = f"of the task {episode.episode.task.id!r}"
            if note not in getattr(error, "__notes__", ()):  # several episodes may share an error
                error.add_note(note)
            return error
        turns = [[w * x for x in turn_parts[n]] for n, w in weights.items() if n in turn_parts]
        is_correct = episode.reward.is_correct
        if self.correct:
            is_correct = parts.get(self.correct, 0.0) > 0 and not episode.reward.is_abstention
        return replace(
            episode.reward,
            parts=parts,
            total=total,
            turn_parts=turn_parts,
            turn_totals=tuple(map(math.fsum, zip(*turns, strict=True))),
            rest=sum(amount for name, amount in amounts.items() if name not in turn_parts),
            is_correct=is_correct,
        )

    def _collect_parts(
        self, episode: ScoredEpisode, results: Mapping[str, RewardPartResult | BaseException]
    ) -> tuple[dict[str, float], dict[str, Sequence[float]]]:
        """Collect the value of each part, and the values of per-turn parts.

        Raises:
            BaseException: A part failed, or a per-turn part lacks a finite value for a turn.
        """
        num_turns = len(episode.episode.turns)
        turn_parts: dict[str, Sequence[float]] = {}
        for name, amounts in episode.reward.turn_parts.items():
            turn_parts[name] = tuple(to_number(name, amount) for amount in amounts)
            if len(turn_parts[name]) != num_turns:
                raise ValueError(
                    f"the reward's turn_parts have {len(turn_parts[name])} values of {name!r} for "
                    f"{num_turns} turns; expected one per turn"
                )
        parts = {**episode.reward.parts, **{n: math.fsum(x) for n, x in turn_parts.items()}}
        for name, result in results.items():
            if isinstance(result, BaseException):
                raise result
            if result.score is not None:
                parts[name] = result.score
            parts |= {f"{name}/{other}": value for other, value in result.extra_values.items()}
            if result.turns is not None:
                turn_parts[name] = result.turns
        return parts, turn_parts


@dataclass(frozen=True)
class EnvironmentRewards:
    """Reward function of a run with several environments, each with a `RewardCombiner`."""

    combiners: Mapping[str, RewardCombiner]

    def __call__(
        self, groups: Sequence[Sequence[ScoredEpisode]]
    ) -> list[list[Reward | BaseException]]:
        """Compute the rewards of all groups concurrently, each with its environment's combiner."""
        indices: dict[str, list[int]] = {}
        for index, group in enumerate(groups):
            if group:
                indices.setdefault(group[0].episode.task.environment, []).append(index)
        by_environment = parallel_map(
            lambda name: self.combiners[name]([groups[i] for i in indices[name]]),
            list(indices),
            max_threads=len(indices),
        )
        rewards: list[list[Reward | BaseException]] = [[] for _ in groups]
        for positions, results in zip(indices.values(), by_environment, strict=True):
            for position, result in zip(positions, results, strict=True):
                rewards[position] = result
        return rewards


def _run_now(invoke: Callable[[], Any]) -> Future[Any]:
    """Run a call in this thread and return a completed future."""
    future: Future[Any] = Future()
    try:
        future.set_result(invoke())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        future.set_exception(error)
    return future


async def _invoke_in_loop(call: RewardPartCall) -> Any:
    """Invoke an async call in the event loop's thread, which owns its clients."""
    return await call.invoke()


JUDGE = ("jaxrl.extras.endpoints.judges:Judge", "jaxrl.extras.endpoints.judges:JudgeSettings")
"""Import paths of the LLM-judge reward part and its settings."""

REWARD_PARTS: Mapping[str, str] = {
    "bleu": "jaxrl.extras.text_metrics.part.Bleu",
    "math_verify": "jaxrl.extras.symbolic_math.part.MathVerify",
    "rouge_l": "jaxrl.extras.text_metrics.part.RougeL",
}
"""Optional reward parts for any environment. Their settings, if any, are in `reward.<name>`."""
