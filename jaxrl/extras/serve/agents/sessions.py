"""Agent sessions, which record an agent's completions and reward.

An agent may continue a chat, truncate its history, start over or run several conversations at once.
A completion continues a context if its prompt starts with all ids of that context; otherwise it
starts a new context. Each sampled token is therefore marked as sampled exactly once in a
trajectory, although it may reappear as a prompt token in a later context.
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
from jaxrl.extras.serve.schemas import RequestModel, parse_body, parse_value
from jaxrl.extras.serve.worker import CompletionRequest, OutputChunk
from jaxrl.sampling.episodes import TokenLimits
from jaxrl.sampling.sample_keys import derive_context_key
from jaxrl.utils.text import replace_surrogates

MAX_REWARD = 1e6


class RewardRequest(RequestModel, extra="forbid"):
    """Result of an episode, reported by its agent.

    Attributes:
        reward: Finite number; true counts as 1 and false as 0.
        is_correct: True if the answer is correct. The default is `reward >= 1`.
        is_abstention: True if the model declined to answer, for example with "I don't know".
        final_answer: Answer for logs and custom reward parts.
    """

    reward: Annotated[
        float,
        BeforeValidator(lambda value: float(value) if isinstance(value, bool) else value),
        Field(ge=-MAX_REWARD, le=MAX_REWARD),
    ]
    is_correct: bool = Field(default_factory=lambda fields: fields.get("reward", 0.0) >= 1)
    is_abstention: bool = False
    final_answer: Annotated[str, AfterValidator(replace_surrogates)] = ""


def parse_reward(value: Any) -> RewardRequest:
    """Parse a reward: a number, a boolean, or an object with the key `reward`.

    Raises:
        RequestError: The value is not a valid reward.
    """
    return parse_value(value if isinstance(value, dict) else {"reward": value}, RewardRequest)


@dataclass(frozen=True)
class SampledTurn:
    """Completion that an agent received: prompt ids, sampled output and text."""

    prompt_ids: tuple[int, ...]
    output: OutputChunk
    text: str

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt ids and sampled ids."""
        return self.prompt_ids + self.output.token_ids


AgentContext = tuple[SampledTurn, ...]
"""Consecutive turns of one conversation. The last turn contains the ids of all turns."""


class AgentSession:
    """Session of one episode, written by the event loop and read by the rollout. Thread-safe.

    Attributes:
        name: Secret name of the session, used in its URL and as its API key.
        reward_key: Secret required to post a reward. It is never sent to the agent.
        reward: Reward of the episode; None until it is set.
        conflict: Description of two conflicting rewards; "" if there is no conflict.
        warning: Description of a rejected reward, for the run's log; "" if none was rejected.
        is_out_of_budget: True if a request was rejected because tokens or turns were used up.
    """

    def __init__(
        self,
        *,
        key: np.ndarray,
        params: SamplingParams,
        limits: TokenLimits,
        max_turns: int,
    ):
        """Create an open session.

        Args:
            key: Random key of the episode, uint32 [2].
            params: Sampling settings, which override the settings in requests.
            limits: Token limits of the episode.
            max_turns: Maximum number of completions in the episode.
        """
        self.name, self.reward_key = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self.reward: RewardRequest | None = None
        self.conflict = self.warning = ""
        self.is_out_of_budget = self._is_closed = False
        self._key, self._params, self._limits, self._max_turns = key, params, limits, max_turns
        self._turns: dict[Completion, SampledTurn] = {}  # in order of completion
        self._num_requests = 0
        self._lock = threading.Lock()

    def prepare_request(
        self, request: CompletionRequest
    ) -> tuple[CompletionRequest, Sequence[np.ndarray]]:
        """Apply the run's sampling settings and the remaining budget to a request.

        Returns:
            The new request and its random keys.

        Raises:
            RequestError: The episode is over, its budget is used up, or `n` is not 1.
        """
        with self._lock:
            self._check_open()
            if request.num_samples != 1:
                message = f"n is {request.num_samples}; expected 1 while a run trains."
                raise RequestError(400, message, param="n")
            if self._num_requests >= self._max_turns:
                self.is_out_of_budget = True
                raise RequestError(
                    400,
                    f"the episode has had {self._num_requests} completions; expected at most "
                    "config.rollout.max_turns.",
                    code="max_turns",
                )
            contexts = group_into_contexts(self._list_delivered_turns())
            num_used, num_sampled = _count_tokens(contexts)
            index = _find_context(contexts, request.prompt_ids)
            if index is not None:  # the prompt contains the context's ids
                num_used -= len(contexts[index][-1].ids)
            num_prompt = len(request.prompt_ids)
            num_left = self._limits.max_total_tokens - num_used
            num_available = min(
                num_left - num_prompt, self._limits.max_response_tokens - num_sampled
            )
            if num_available < 1:
                self.is_out_of_budget = True
                raise ContextLengthError(num_prompt, min(num_left, num_prompt))
            self._num_requests += 1
            key = derive_context_key(self._key, self._num_requests)
        max_tokens = min(request.max_tokens, num_available)
        return dataclasses.replace(request, params=self._params, max_tokens=max_tokens), [key]

    def record_completion(self, completion: Completion) -> None:
        """Record a completion that is about to be sent to the agent.

        Raises:
            RequestError: Concurrent completions have used up the budget.
        """
        with self._lock:
            is_new = completion not in self._turns
            if self._is_closed or not (is_new or completion.is_undelivered):
                return
            if is_new:
                output = completion.choices[0].merge_chunks()
                text = completion.model.decode_text(output)
                turn = SampledTurn(completion.request.prompt_ids, output, text)
                self._turns[completion] = turn
            num_used, num_sampled = _count_tokens(
                group_into_contexts(self._list_delivered_turns(completion))
            )
            excess = num_used - self._limits.max_total_tokens
            if excess > 0 or num_sampled > self._limits.max_response_tokens:
                turn = self._turns.pop(completion)
                self.is_out_of_budget = True
                raise ContextLengthError(len(turn.ids), max(len(turn.ids) - max(excess, 1), 0))

    def post_reward(self, keys: Sequence[str], data: bytes) -> None:
        """Record a reward that was posted over HTTP.

        Raises:
            RequestError: The reward key does not match, or the reward is rejected.
        """
        if not any(hmac.compare_digest(key.encode(), self.reward_key.encode()) for key in keys):
            self.warning = self.warning or "rejected a reward that was posted with a wrong key"
            message = "the key does not match; expected reward.key from the input."
            raise RequestError(401, message)
        self.set_reward(parse_body(data, RewardRequest))

    def set_reward(self, reward: RewardRequest) -> None:
        """Set the reward. The episode continues until the agent exits.

        Raises:
            RequestError: The episode is over or already has a different reward.
        """
        with self._lock:
            self._check_open()
            if self.reward is None:
                self.reward = reward
            if self.reward == reward:
                return
            self.conflict = self.warning = (
                f"the agent gave {self.reward!r:.200} and {reward!r:.200}; expected one reward"
            )
        raise RequestError(409, f"{self.conflict}.", code="another_reward")

    def close(self) -> None:
        """Close the session: reject all further requests and rewards."""
        with self._lock:
            self._is_closed = True

    def list_turns(self) -> list[SampledTurn]:
        """Return the completions that the agent received, in order of completion.

        A completion whose delivery failed is included if a later prompt contains it.
        """
        with self._lock:
            return self._list_delivered_turns()

    def _list_delivered_turns(self, about_to_send: Completion | None = None) -> list[SampledTurn]:
        """Return the delivered turns, including the one in `about_to_send`."""
        turns = list(self._turns.values())
        return [
            turn
            for index, (completion, turn) in enumerate(self._turns.items())
            if not completion.is_undelivered
            or completion is about_to_send
            or any(later.prompt_ids[: len(turn.ids)] == turn.ids for later in turns[index + 1 :])
        ]

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError(409, "the episode is over.", code="episode_over")


def group_into_contexts(turns: Sequence[SampledTurn]) -> list[AgentContext]:
    """Group turns into contexts. A turn joins the longest context that its prompt extends."""
    contexts: list[AgentContext] = []
    for turn in turns:
        index = _find_context(contexts, turn.prompt_ids)
        if index is None:
            contexts.append((turn,))
        else:
            contexts[index] = (*contexts[index], turn)
    return contexts


def _find_context(contexts: Sequence[AgentContext], prompt_ids: tuple[int, ...]) -> int | None:
    """Return the index of the longest context that is a prefix of the prompt, or None."""
    lengths = {}
    for index, context in enumerate(contexts):
        ids = context[-1].ids
        if prompt_ids[: len(ids)] == ids:
            lengths[index] = len(ids)
    return max(lengths, key=lambda index: (lengths[index], index), default=None)


def _count_tokens(contexts: Sequence[AgentContext]) -> tuple[int, int]:
    """Return the total number of tokens in all contexts, and the number of sampled tokens."""
    num_all = sum(len(context[-1].ids) for context in contexts)
    return num_all, sum(len(turn.output.token_ids) for context in contexts for turn in context)


def compute_common_prefix_length(token_ids: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest prefix that `token_ids` shares with any of `others`."""
    longest = 0
    for other in others:
        count = min(len(token_ids), len(other))
        is_same = np.equal(token_ids[:count], other[:count])
        longest = max(longest, count if is_same.all() else int(is_same.argmin()))
    return longest
