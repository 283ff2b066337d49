"""Payment of episodes: parts of the reward, the environment's and others, weighted and summed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol

from jaxrl.envs.base import CallRecord, Finished, OutageError, Reward, Task
from jaxrl.utils.concurrency import LateError, new_loop, started

MAX_THREADS = 32
"""Threads in which functions that are not async are called at a time."""

LARGEST_REWARD = (2 - 2.0**-23) * 2.0**127
"""The largest number of float32."""

_PATIENCE_S = 1.0  # in which a loop that is not blocked does something


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of a reward part for one episode.

    Attributes:
        score: the part's value; None where it does not apply, so that nothing is paid for it.
        turns: an amount for each turn, where the part is earned turn by turn; `score` is their sum.
        others: further numbers, by name, that are measured and not paid.
    """

    score: float | None
    turns: tuple[float, ...] | None = None
    others: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a reward part.

    Attributes:
        members: which episodes of a group it is about.
        make: makes it; of an async function, its coroutine.
        read: from what came back to what is measured in each of these episodes; raises where
            that cannot be told.
        records: what it took of tools that cost something, once it is over or given up; counted
            with the first of the episodes.
    """

    members: tuple[int, ...]
    make: Callable[[], Any]
    read: Callable[[Any], list[Measured]]
    records: Callable[[], Sequence[CallRecord]] = tuple


class RewardPart(Protocol):
    """A part of the reward beside those of the environment."""

    @property
    def is_async(self) -> bool:
        """True if calls give coroutines."""
        ...

    def calls(self, group: Sequence[Finished]) -> list[Call]:
        """The calls for the episodes of one task; each episode is in one call."""
        ...

    def lacks(self, task: Task) -> list[str]:
        """Names of what it asks for and a task does not offer."""
        ...


def number(name: str, value: Any) -> float:
    """Reads a part's value: a finite number, or a scalar array that holds one.

    Raises:
        ValueError: it is something else.
    """
    plain = value.item() if callable(getattr(value, "item", None)) else value
    if not (isinstance(plain, Real) and math.isfinite(plain)):
        raise ValueError(f"the reward part {name!r} gave {value!r:.200}; expected a finite number")
    return float(plain)


Found = Measured | BaseException


class EventLoop:
    """Runs coroutines in a thread of its own that no exit of the interpreter waits for.

    It is one for the whole run, as clients that code of the user's has opened belong to theirs.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs a coroutine beside the others; returns its future."""
        if self._loop is None:
            self._loop = new_loop("rewards")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def leave_if_stuck(self) -> None:
        """Goes on with another loop where a coroutine that does not await blocks this one."""
        if wait([self.submit(asyncio.sleep(0))], timeout=_PATIENCE_S).not_done:
            self._loop = None


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A call of a part, about a group of those that are paid."""

    part: str
    group: int
    call: Call


@dataclass(frozen=True, kw_only=True)
class Payment:
    """Computes rewards: parts by their weights.

    Attributes:
        weights: of the environment's parts and of those below, summed in this order; a part
            without a weight adds nothing.
        own_parts: measured beside the environment's, by name.
        correct: the one of them by which an answer is correct, where it is above 0 and the answer
            does not abstain; "" where the environment says what is.
        deadline_s: seconds for all functions of a batch together, after which what has not come
            back is an error; 0: never, and functions that are not async are called one after
            another in the thread of the run.
    """

    weights: Mapping[str, float]
    own_parts: Mapping[str, RewardPart] = field(default_factory=dict)
    correct: str = ""
    deadline_s: float = 600.0
    _loop: EventLoop = field(default_factory=EventLoop, repr=False)

    def __call__(self, groups: Sequence[Sequence[Finished]]) -> list[list[Reward | BaseException]]:
        """The reward of each episode with its parts and its total, or why it has none.

        Fills the `records` of the episodes.

        Raises:
            OutageError: what a part asks has answered nobody for too long.
        """
        asked = [
            _Asked(part=name, group=g, call=call)
            for name, part in self.own_parts.items()
            for g, group in enumerate(groups)
            if group  # a task whose episodes have all failed has nobody to ask about
            for call in part.calls(group)
        ]
        answers = self._ask(asked)
        # Where a call about several episodes has failed, each is asked about by itself.
        again = [
            replace(one, call=replace(call, members=(member,)))
            for one, answer in zip(asked, answers, strict=True)
            if isinstance(answer, BaseException) and not isinstance(answer, LateError)
            if len(one.call.members) > 1
            for member in one.call.members
            for call in self.own_parts[one.part].calls([groups[one.group][member]])
        ]
        measured: list[list[dict[str, Found]]] = [[{} for _ in group] for group in groups]
        for one, answer in zip([*asked, *again], [*answers, *self._ask(again)], strict=True):
            groups[one.group][one.call.members[0]].records.extend(one.call.records())
            for place, member in enumerate(one.call.members):
                result = answer if isinstance(answer, BaseException) else answer[place]
                measured[one.group][member][one.part] = result
        return [
            [self._paid(one, measured[g][i]) for i, one in enumerate(group)]
            for g, group in enumerate(groups)
        ]

    def check(self, task: Task, key: str) -> None:
        """Refuses parts that ask for what a task does not offer.

        Args:
            task: one of those that will be played.
            key: the configuration key that named its file.

        Raises:
            ValueError: names the part, and what it asks for.
        """
        for name, part in self.own_parts.items():
            if missing := part.lacks(task):
                raise ValueError(
                    f"config.reward.weights names {name!r}, which asks for {missing[0]!r}; the "
                    f"tasks of {key} offer no such field ({task.id!r} has the metadata "
                    f"{', '.join(task.metadata) or 'none'}). Give it a default, or set it in "
                    "config.reward.settings."
                )

    def _ask(self, asked: Sequence[_Asked]) -> list[list[Measured] | BaseException]:
        """Makes the calls; gives the result of each, or its exception."""
        # Async functions run in the loop, others in threads; without a deadline here, one by one.
        later = [self.own_parts[one.part].is_async for one in asked]
        plain = [one.call.make for one, is_async in zip(asked, later, strict=True) if not is_async]
        if self.deadline_s:
            in_turn = iter(started(plain, max_threads=MAX_THREADS))
        else:
            in_turn = iter(list(map(_called, plain)))
        futures = [
            self._loop.submit(_awaited(one.call)) if is_async else next(in_turn)
            for one, is_async in zip(asked, later, strict=True)
        ]
        if wait(futures, timeout=self.deadline_s or None).not_done and any(later):
            self._loop.leave_if_stuck()
        return [self._answer(one, future) for one, future in zip(asked, futures, strict=True)]

    def _answer(self, asked: _Asked, future: Future[Any]) -> list[Measured] | BaseException:
        try:
            if not future.done():
                future.cancel()
                raise LateError(
                    f"no answer of the reward part {asked.part!r} within {self.deadline_s:g} s "
                    "(config.reward.deadline_s)"
                )
            return asked.call.read(future.result())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: no code of the user's ends a run so
            if isinstance(error, OutageError) and error.fallback is None:
                raise
            error.add_note(f"in the reward part {asked.part!r}")
            return error

    def _paid(self, one: Finished, measured: Mapping[str, Found]) -> Reward | BaseException:
        """The reward with all parts and its total, or the first error among them."""
        reward = one.reward
        try:
            parts, turn_parts = self._parts(one, measured)
            # A part that does not apply to an episode pays nothing; but the environment has to
            # measure all of its own, and one with a weight has to be left.
            wanted = {name: weight for name, weight in self.weights.items() if weight}
            missing = [name for name in wanted if name not in parts]
            foreign = [name for name in missing if name not in self.own_parts]
            if foreign or len(missing) == len(wanted):
                raise ValueError(
                    f"the reward parts {', '.join(map(repr, foreign or missing))} have a weight "
                    "and were not measured"
                )
            paid = {name: weight for name, weight in wanted.items() if name in parts}
            amounts = {name: weight * parts[name] for name, weight in paid.items()}
            total = sum(amounts.values())
            if not abs(total) <= LARGEST_REWARD:  # in float32, in which advantages are computed
                name = max(amounts, key=lambda name: abs(amounts[name]))
                raise ValueError(
                    f"the reward part {name!r} gave {parts[name]:g}, which its weight "
                    f"{paid[name]:g} in config.reward.weights makes {amounts[name]:g}; expected "
                    f"a sum of at most {LARGEST_REWARD:.2g}"
                )
        except BaseException as error:
            note = f"of the task {one.episode.task.id!r}"
            if note not in getattr(error, "__notes__", ()):  # an error may be several episodes'
                error.add_note(note)
            return error
        turns = [
            [w * amount for amount in turn_parts[n]] for n, w in paid.items() if n in turn_parts
        ]
        is_correct = reward.is_correct
        if self.correct:
            is_correct = parts.get(self.correct, 0.0) > 0 and not reward.is_abstention
        return replace(
            reward,
            parts=parts,
            total=total,
            turn_parts=turn_parts,
            turn_totals=tuple(map(math.fsum, zip(*turns, strict=True))),
            rest=sum(
                weight * parts[name] for name, weight in paid.items() if name not in turn_parts
            ),
            is_correct=is_correct,
        )

    def _parts(
        self, one: Finished, measured: Mapping[str, Found]
    ) -> tuple[dict[str, float], dict[str, Sequence[float]]]:
        """Collects all parts, and those by turns.

        Raises:
            Exception: what one of them failed with; of a part by turns that it has not a finite
                number for each turn.
        """
        num_turns = len(one.episode.turns)
        turn_parts: dict[str, Sequence[float]] = {}
        for name, amounts in one.reward.turn_parts.items():
            turn_parts[name] = tuple(number(name, amount) for amount in amounts)
            if len(turn_parts[name]) != num_turns:
                raise ValueError(
                    f"the reward's turn_parts have {len(turn_parts[name])} amounts of {name!r} for "
                    f"{num_turns} turns; expected one for each"
                )
        parts = {**one.reward.parts, **{n: math.fsum(x) for n, x in turn_parts.items()}}
        for name, result in measured.items():
            if isinstance(result, BaseException):
                raise result
            if result.score is not None:
                parts[name] = result.score
            parts |= {f"{name}/{other}": value for other, value in result.others.items()}
            if result.turns is not None:
                turn_parts[name] = result.turns
        return parts, turn_parts


def _called(make: Callable[[], Any]) -> Future[Any]:
    """Makes a call here and now; returns its future."""
    future: Future[Any] = Future()
    try:
        future.set_result(make())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        future.set_exception(error)
    return future


async def _awaited(call: Call) -> Any:
    return await call.make()  # made in the loop's thread, as clients it opens belong to that


JUDGE = ("jaxrl.extras.endpoints.judges:Judge", "jaxrl.extras.endpoints.judges:JudgeSettings")
"""Grader of responses by a language model, and its settings."""

REWARD_PARTS: Mapping[str, str] = {"math_verify": "jaxrl.extras.symbolic_math.part.MathVerify"}
"""Parts that any environment can have beside its own, by where they are; their settings stand in
the section of `reward` that has their name."""
