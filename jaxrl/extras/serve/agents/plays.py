"""Sessions of agents: what each was answered, by ids, and what it says it has earned.

An agent talks with the model as its own code wants: it may go on from what it had, cut its history,
begin anew, or have several conversations at once. An answer whose prompt begins with all ids of an
earlier one goes on in that one's context; any other begins a context. So each sampled token stands
in the trajectory once as sampled, and where a later context repeats it, as part of a prompt.
"""

from __future__ import annotations

import dataclasses
import hmac
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.extras.serve.answers import Answer, Question, joined
from jaxrl.extras.serve.engine import Way
from jaxrl.extras.serve.fields import Fields, RefusedError, TooLongError, read_body
from jaxrl.sampling.episodes import Limits
from jaxrl.sampling.sample_keys import context_key
from jaxrl.utils.text import writable


@dataclass(frozen=True, kw_only=True)
class Earned:
    """An agent's word on its episode.

    Attributes:
        reward: finite.
        is_correct: by default whether the reward is 1 or more.
        is_abstention: the answer says that the model does not know.
        final_answer: for people, and for reward parts of one's own.
    """

    reward: float
    is_correct: bool
    is_abstention: bool = False
    final_answer: str = ""


def read_earned(value: Any) -> Earned:
    """Reads a number, true or false, or an object with `reward` and perhaps other fields.

    Raises:
        RefusedError: it is something else.
    """
    if not isinstance(value, Mapping):
        value = {"reward": value}
    if isinstance(value.get("reward"), bool):
        value = {**value, "reward": float(value["reward"])}
    if unknown := set(value) - {one.name for one in dataclasses.fields(Earned)}:
        raise RefusedError(
            400,
            f"the reward has {min(unknown)!r:.40}; expected reward, and perhaps is_correct, "
            "is_abstention and final_answer.",
        )
    fields = Fields(value)
    if "reward" not in fields.values:
        raise fields.refuse("reward", "a number")
    reward = fields.number("reward", math.nan, -1e6, 1e6)
    return Earned(
        reward=reward,
        is_correct=fields.flag("is_correct", reward >= 1),
        is_abstention=fields.flag("is_abstention"),
        final_answer=writable(fields.text("final_answer", "")),
    )


@dataclass(frozen=True, kw_only=True)
class Call:
    """An answer that an agent was given.

    Attributes:
        prompt_ids: what it goes on from.
        token_ids: that were sampled.
        logprobs: of these, nats.
        entropies: likewise.
        versions: of the weights that drew them.
        text: of the answer, up to the string that stops it.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    versions: tuple[int, ...]
    text: str

    @property
    def ids(self) -> tuple[int, ...]:
        """All of its ids."""
        return self.prompt_ids + self.token_ids


class RolloutPlay:
    """One episode's session. The event loop asks and records, the rollout reads; both under a lock.

    Attributes:
        name: by which its client reaches it, unguessable.
        reward_key: Secret that a posted reward needs. Neither `name` nor an answer tells it.
        earned: The reward so far; None before there is one.
        conflict: How two rewards of the episode differ; "" while they agree.
        warning: The first refused reward that the run's log reports; "" for none.
        is_spent: it was refused an answer, since the episode has no tokens or turns left.
    """

    def __init__(
        self,
        *,
        key: np.ndarray,
        way: Way,
        limits: Limits,
        max_turns: int,
        read_text: Callable[[Sequence[int], int], str],
    ):
        """Begins the session; nothing has been asked yet.

        Args:
            key: uint32 [2], on which the draws of the episode depend.
            way: in which its tokens are drawn, whatever its client says.
            limits: tokens of the episode.
            max_turns: answers of it.
            read_text: makes the text of so many bytes of some ids.
        """
        self.name, self.reward_key = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self.earned: Earned | None = None
        self.conflict = self.warning = ""
        self.is_spent = self._is_over = False
        self._key, self._way, self._limits, self._max_turns = key, way, limits, max_turns
        self._read_text = read_text
        self._answers: dict[Answer, Call] = {}  # in the order in which they ended
        self._num_asked = 0
        self._lock = threading.Lock()

    def ask(self, question: Question) -> tuple[Question, Sequence[np.ndarray]]:
        """Returns the question with the run's way to draw and what budget is left, and its key.

        Raises:
            RefusedError: the episode has ended, or nothing is left of it.
        """
        with self._lock:
            self._check()
            if question.count != 1:
                raise RefusedError(
                    400, f"n is {question.count}; expected 1 while a run trains.", param="n"
                )
            if self._num_asked >= self._max_turns:
                self.is_spent = True
                raise RefusedError(
                    400,
                    f"the episode has had {self._num_asked} answers; expected at most "
                    "config.rollout.max_turns.",
                    code="max_turns",
                )
            contexts = contexts_of(self._calls())
            used = sum(len(ids) for ids, _ in contexts)
            place = _goes_on(contexts, question.prompt_ids)
            if place is not None:  # whose ids are in the prompt
                used -= len(contexts[place][0])
            sampled = sum(len(call.token_ids) for _, calls in contexts for call in calls)
            length = used + len(question.prompt_ids)
            room = min(
                self._limits.max_total_tokens - length, self._limits.max_response_tokens - sampled
            )
            if room < 1:
                self.is_spent = True
                most = self._limits.max_total_tokens - used
                raise TooLongError(len(question.prompt_ids), min(most, len(question.prompt_ids)))
            self._num_asked += 1
            key = context_key(self._key, self._num_asked)
        changed = dataclasses.replace(question, way=self._way, budget=min(question.budget, room))
        return changed, [key]

    def record(self, answer: Answer) -> None:
        """Records an answer before it is sent.

        Raises:
            RefusedError: others that were under way beside it have left no room for it.
        """
        with self._lock:
            is_new = answer not in self._answers
            if self._is_over or not (is_new or answer.is_lost):
                return
            if is_new:
                self._answers[answer] = self._call(answer)
            contexts = contexts_of(self._calls(answer))
            length = sum(len(ids) for ids, _ in contexts)
            sampled = sum(len(call.token_ids) for _, calls in contexts for call in calls)
            beyond = length - self._limits.max_total_tokens
            if beyond > 0 or sampled > self._limits.max_response_tokens:
                call = self._answers.pop(answer)
                self.is_spent = True
                raise TooLongError(len(call.ids), max(len(call.ids) - max(beyond, 1), 0))

    def post_reward(self, keys: Sequence[str], data: bytes) -> None:
        """Record a reward that came over HTTP; see `server.Play`."""
        if not any(hmac.compare_digest(key.encode(), self.reward_key.encode()) for key in keys):
            self.warning = self.warning or "refused a reward that was posted with a wrong key"
            raise RefusedError(
                401,
                "the key is not the reward key of this episode; expected reward.key of the "
                "program's input, as Authorization: Bearer.",
                headers={"WWW-Authenticate": "Bearer"},
                code="invalid_api_key",
            )
        self.earn(read_earned(read_body(data).values))

    def earn(self, earned: Earned) -> None:
        """Record a reward of the episode, which goes on until its agent ends.

        Raises:
            RefusedError: The episode is over, or has another reward.
        """
        with self._lock:
            self._check()
            if self.earned is None:
                self.earned = earned
            if self.earned == earned:
                return
            names = [
                field.name
                for field in dataclasses.fields(Earned)
                if getattr(earned, field.name) != getattr(self.earned, field.name)
            ]
            self.conflict = (
                f"the rewards {self.earned.reward:g} and {earned.reward:g} were given, which "
                f"differ in {', '.join(names)}; expected one reward"
            )
            self.warning = self.conflict
        raise RefusedError(409, f"{self.conflict}.", code="another_reward")

    def end(self) -> None:
        """Refuses everything from here."""
        with self._lock:
            self._is_over = True

    def calls(self) -> list[Call]:
        """Answers that the agent was given, in the order in which they ended.

        One whose client was away when it was sent counts where a later one goes on from it.
        """
        with self._lock:
            return self._calls()

    def _calls(self, sent: Answer | None = None) -> list[Call]:
        """The answers that count; `sent` too, which its client is about to be given."""
        calls = list(self._answers.values())
        return [
            call
            for place, (answer, call) in enumerate(self._answers.items())
            if not answer.is_lost
            or answer is sent
            or any(later.prompt_ids[: len(call.ids)] == call.ids for later in calls[place + 1 :])
        ]

    def _call(self, answer: Answer) -> Call:
        [sample] = answer.samples
        piece = joined(sample.pieces)
        versions = [one.version for one in sample.pieces for _ in one.token_ids]
        return Call(
            prompt_ids=answer.question.prompt_ids,
            token_ids=piece.token_ids,
            logprobs=piece.logprobs,
            entropies=piece.entropies,
            versions=tuple(versions),
            text=self._read_text(piece.token_ids, piece.text_bytes),
        )

    def _check(self) -> None:
        if self._is_over:
            raise RefusedError(409, "the episode is over.", code="episode_over")


@dataclass
class RolloutPlays:
    """The sessions of a run that are open, by name."""

    by_name: dict[str, RolloutPlay] = field(default_factory=dict)

    def find(self, name: str) -> RolloutPlay:
        """Returns a session.

        Raises:
            RefusedError: there is none of that name.
        """
        play = self.by_name.get(name)
        if play is None:
            raise RefusedError(
                404,
                "there is no such episode here; expected the base URL or the key that its agent "
                "was given, while the episode is played.",
                code="no_episode",
            )
        return play


def contexts_of(calls: Sequence[Call]) -> list[tuple[tuple[int, ...], list[Call]]]:
    """Ids of each context, and the calls in it, in their order.

    A call goes on in the longest context that its prompt begins with.
    """
    contexts: list[tuple[tuple[int, ...], list[Call]]] = []
    for call in calls:
        place = _goes_on(contexts, call.prompt_ids)
        if place is None:
            contexts.append((call.ids, [call]))
        else:
            contexts[place] = call.ids, [*contexts[place][1], call]
    return contexts


def _goes_on(
    contexts: Sequence[tuple[tuple[int, ...], list[Call]]], prompt_ids: tuple[int, ...]
) -> int | None:
    """The longest context that a prompt begins with; None: it begins another."""
    fitting = [
        (len(ids), index)
        for index, (ids, _) in enumerate(contexts)
        if prompt_ids[: len(ids)] == ids
    ]
    return max(fitting)[1] if fitting else None


def num_common(token_ids: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """Length of the longest beginning that some ids share with one of the others."""
    longest = 0
    for other in others:
        count = min(len(token_ids), len(other))
        same = np.equal(token_ids[:count], other[:count])
        longest = max(longest, count if same.all() else int(same.argmin()))
    return longest
