"""Sessions of agents: the completions that each received, by token ids, and its reward.

An agent may continue a chat, cut its history, start again or have several conversations at once. A
completion whose prompt starts with all ids of an earlier one continues its context; any other
starts a context. So each sampled token is in the trajectory once as sampled, and as part of a
prompt where a later context repeats it.
"""

from __future__ import annotations

import dataclasses
import hmac
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from jaxrl.extras.serve.engine import SamplingParams
from jaxrl.extras.serve.errors import ContextLengthError, RequestError
from jaxrl.extras.serve.generation import Completion
from jaxrl.extras.serve.schemas import Body, parse_body, validate
from jaxrl.extras.serve.worker import CompletionRequest, OutputChunk
from jaxrl.sampling.episodes import Limits
from jaxrl.sampling.sample_keys import context_key
from jaxrl.utils.text import writable

MAX_REWARD = 1e6


class RewardBody(Body, extra="forbid"):
    """Result of an episode, as its agent reports it.

    Attributes:
        reward: A finite number, or true or false.
        is_correct: By default whether the reward is at least 1.
        is_abstention: Whether the answer says that the model does not know.
        final_answer: For people and for custom reward parts.
    """

    reward: Annotated[
        float,
        BeforeValidator(lambda value: float(value) if isinstance(value, bool) else value),
        Field(ge=-MAX_REWARD, le=MAX_REWARD),
    ]
    is_correct: bool = Field(default_factory=lambda fields: fields.get("reward", 0.0) >= 1)
    is_abstention: bool = False
    final_answer: Annotated[str, AfterValidator(writable)] = ""


def parse_reward(value: Any) -> RewardBody:
    """Validate a reward: a number, true or false, or an object with `reward`.

    Raises:
        RequestError: The value is not a reward.
    """
    return validate(value if isinstance(value, dict) else {"reward": value}, RewardBody)


@dataclass(frozen=True)
class SampledTurn:
    """A completion that an agent received: its prompt, what was sampled, and the text of that."""

    prompt_ids: tuple[int, ...]
    sampled: OutputChunk
    text: str

    @property
    def ids(self) -> tuple[int, ...]:
        """Return prompt and sampled ids."""
        return self.prompt_ids + self.sampled.token_ids


AgentContext = tuple[SampledTurn, ...]
"""Turns of which each continues the one before; the last one has all ids."""


class AgentSession:
    """The session of one episode. The event loop writes and the rollout reads, under a lock.

    Attributes:
        name: Secret name by which its client reaches it.
        reward_key: Secret that a posted reward needs. Neither `name` nor a completion reveals it.
        reward: The reward; None before there is one.
        conflict: How two rewards of the episode differ; "" while they agree.
        warning: The first refused reward, for the run's log; "" for none.
        is_spent: Whether a request was refused because no tokens or turns are left.
    """

    def __init__(
        self,
        *,
        key: np.ndarray,
        params: SamplingParams,
        limits: Limits,
        max_turns: int,
    ):
        """Open the session.

        Args:
            key: Random key uint32 [2] of the episode.
            params: How tokens are drawn, whatever the client asks for.
            limits: Token limits of the episode.
            max_turns: Completions that the episode may have.
        """
        self.name, self.reward_key = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self.reward: RewardBody | None = None
        self.conflict = self.warning = ""
        self.is_spent = self._is_over = False
        self._key, self._params, self._limits, self._max_turns = key, params, limits, max_turns
        self._turns: dict[Completion, SampledTurn] = {}  # in the order of their ends
        self._num_requests = 0
        self._lock = threading.Lock()

    def admit(self, request: CompletionRequest) -> tuple[CompletionRequest, Sequence[np.ndarray]]:
        """Return the request with the run's sampling and the budget that is left, and its key.

        Raises:
            RequestError: The episode is over, or nothing is left of its budget.
        """
        with self._lock:
            self._check_open()
            if request.num_samples != 1:
                message = f"n is {request.num_samples}; expected 1 while a run trains."
                raise RequestError(400, message, param="n")
            if self._num_requests >= self._max_turns:
                self.is_spent = True
                raise RequestError(
                    400,
                    f"the episode has had {self._num_requests} completions; expected at most "
                    "config.rollout.max_turns.",
                    code="max_turns",
                )
            contexts = contexts_of(self._delivered_turns())
            num_used, num_sampled = _num_tokens(contexts)
            index = _find_context(contexts, request.prompt_ids)
            if index is not None:  # its ids are part of the prompt
                num_used -= len(contexts[index][-1].ids)
            num_prompt = len(request.prompt_ids)
            num_left = self._limits.max_total_tokens - num_used
            room = min(num_left - num_prompt, self._limits.max_response_tokens - num_sampled)
            if room < 1:
                self.is_spent = True
                raise ContextLengthError(num_prompt, min(num_left, num_prompt))
            self._num_requests += 1
            key = context_key(self._key, self._num_requests)
        max_tokens = min(request.max_tokens, room)
        return dataclasses.replace(request, params=self._params, max_tokens=max_tokens), [key]

    def record(self, completion: Completion) -> None:
        """Record a completion before it is sent.

        Raises:
            RequestError: Completions that ran side by side have left no room for it.
        """
        with self._lock:
            is_new = completion not in self._turns
            if self._is_over or not (is_new or completion.is_undelivered):
                return
            if is_new:
                sampled = completion.choices[0].joined()
                text = completion.model.text_of(sampled)
                turn = SampledTurn(completion.request.prompt_ids, sampled, text)
                self._turns[completion] = turn
            num_used, num_sampled = _num_tokens(contexts_of(self._delivered_turns(completion)))
            excess = num_used - self._limits.max_total_tokens
            if excess > 0 or num_sampled > self._limits.max_response_tokens:
                turn = self._turns.pop(completion)
                self.is_spent = True
                raise ContextLengthError(len(turn.ids), max(len(turn.ids) - max(excess, 1), 0))

    def post_reward(self, keys: Sequence[str], data: bytes) -> None:
        """Record a reward that came over HTTP.

        Raises:
            RequestError: No key is the reward key, or the reward is refused.
        """
        if not any(hmac.compare_digest(key.encode(), self.reward_key.encode()) for key in keys):
            self.warning = self.warning or "refused a reward that was posted with a wrong key"
            message = "the key is not that of the reward; expected reward.key of the input."
            raise RequestError(401, message)
        self.set_reward(parse_body(data, RewardBody))

    def set_reward(self, reward: RewardBody) -> None:
        """Set the reward of the episode, which continues until its agent ends.

        Raises:
            RequestError: The episode is over, or has another reward.
        """
        with self._lock:
            self._check_open()
            if self.reward is None:
                self.reward = reward
            if self.reward == reward:
                return
            old, new = self.reward.model_dump(), reward.model_dump()
            names = ", ".join(name for name in old if old[name] != new[name])
            self.conflict = self.warning = (
                f"the agent gave the rewards {self.reward.reward:g} and {reward.reward:g}, which "
                f"differ in {names}; expected one reward"
            )
        raise RequestError(409, f"{self.conflict}.", code="another_reward")

    def close(self) -> None:
        """Refuse everything from now on."""
        with self._lock:
            self._is_over = True

    def turns(self) -> list[SampledTurn]:
        """Return the completions that the agent received, in the order of their ends.

        One whose client left before it was sent counts if a later one continues it.
        """
        with self._lock:
            return self._delivered_turns()

    def _delivered_turns(self, sent: Completion | None = None) -> list[SampledTurn]:
        """Return the turns that count, with `sent`, which is about to be sent."""
        turns = list(self._turns.values())
        return [
            turn
            for index, (completion, turn) in enumerate(self._turns.items())
            if not completion.is_undelivered
            or completion is sent
            or any(later.prompt_ids[: len(turn.ids)] == turn.ids for later in turns[index + 1 :])
        ]

    def _check_open(self) -> None:
        if self._is_over:
            raise RequestError(409, "the episode is over.", code="episode_over")


def contexts_of(turns: Sequence[SampledTurn]) -> list[AgentContext]:
    """Sort turns into contexts; each turn continues the longest context that it can."""
    contexts: list[AgentContext] = []
    for turn in turns:
        index = _find_context(contexts, turn.prompt_ids)
        if index is None:
            contexts.append((turn,))
        else:
            contexts[index] = (*contexts[index], turn)
    return contexts


def _find_context(contexts: Sequence[AgentContext], prompt_ids: tuple[int, ...]) -> int | None:
    """Return the index of the longest context that a prompt starts with, if any."""
    lengths = {}
    for index, context in enumerate(contexts):
        ids = context[-1].ids
        if prompt_ids[: len(ids)] == ids:
            lengths[index] = len(ids)
    return max(lengths, key=lambda index: (lengths[index], index), default=None)


def _num_tokens(contexts: Sequence[AgentContext]) -> tuple[int, int]:
    """Return the number of all tokens, and of sampled ones."""
    num_all = sum(len(context[-1].ids) for context in contexts)
    return num_all, sum(len(turn.sampled.token_ids) for context in contexts for turn in context)


def num_common(token_ids: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest prefix that some ids share with one of the others."""
    longest = 0
    for other in others:
        count = min(len(token_ids), len(other))
        is_same = np.equal(token_ids[:count], other[:count])
        longest = max(longest, count if is_same.all() else int(is_same.argmin()))
    return longest
