"""Context management for episodes that are longer than the model's context.

A context grows until the next turn does not fit. The episode then continues in a new context,
which starts with the prompt and the parts of earlier turns that a context policy selects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

OMITTED = "…"
"""Replacement for the body of an omitted observation, between its tags."""


@dataclass(frozen=True, kw_only=True)
class TurnIds:
    """Token ids of a turn and of the environment's reply.

    Attributes:
        sampled: Ids sampled by the model.
        observation: Ids of the reply, as appended to the context.
        placeholder: Ids of the reply with `OMITTED` as its body.
    """

    sampled: Sequence[int]
    observation: Sequence[int]
    placeholder: Sequence[int]


ContextPolicy = Callable[[Sequence[TurnIds], int], list[int]]
"""Function that returns the next context's ids after the prompt, from the turns so far and the
number of recent turns to preserve (at least 1). The ids end with the newest observation.
"""


def drop_observations(turns: Sequence[TurnIds], num_recent: int) -> list[int]:
    """Return the ids of all turns, omitting observation bodies before the last `num_recent`."""
    first = len(turns) - num_recent  # first turn that keeps its observation
    parts = (
        (*turn.sampled, *(turn.observation if i >= first else turn.placeholder))
        for i, turn in enumerate(turns)
    )
    return [token for part in parts for token in part]


def keep_last_turns(turns: Sequence[TurnIds], num_recent: int) -> list[int]:
    """Return the ids of the last `num_recent` turns, including their observations."""
    return [token for turn in turns[-num_recent:] for token in (*turn.sampled, *turn.observation)]


CONTEXT_POLICIES: Mapping[str, ContextPolicy] = {
    "drop_observations": drop_observations,
    "last_turns": keep_last_turns,
}
"""Context policies by `rollout.context.name`."""


@dataclass(frozen=True, kw_only=True)
class ContextRule:
    """Settings that decide when a context ends and how the next context begins.

    Attributes:
        name: Key of `CONTEXT_POLICIES`.
        max_tokens: Maximum length of a context: prompt, sampled tokens and observations.
        keep: Maximum number of observations or turns that the policy keeps; it keeps fewer if they
            do not fit.
        turn_tokens: Number of tokens that a turn needs. If fewer are left, the next context begins.
    """

    name: str
    max_tokens: int
    keep: int
    turn_tokens: int

    def has_room(self, length: int) -> bool:
        """Return True if another turn fits after `length` tokens."""
        return length + self.turn_tokens <= self.max_tokens

    def build_next_context(
        self, prompt: Sequence[int], turns: Sequence[TurnIds]
    ) -> tuple[list[int], int] | None:
        """Return the ids of the next context, and the number of ids that repeat earlier tokens.

        The result is None if no turn fits, even when only one observation or turn is kept.
        """
        for num_recent in range(min(self.keep, len(turns)), 0, -1):
            token_ids = [*prompt, *CONTEXT_POLICIES[self.name](turns, num_recent)]
            if self.has_room(len(token_ids)):
                return token_ids, len(token_ids) - len(turns[-1].observation)
        return None
