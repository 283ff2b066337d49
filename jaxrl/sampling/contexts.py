"""Contexts: what becomes of an episode that is longer than what the model reads at once.

A context grows until the next turn has no room in it. Then the episode goes on in another one,
which begins with the prompt and with what the policy here keeps of the turns so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

OMITTED = "…"
"""Stands for the body of an observation that is left out, between its tags."""


@dataclass(frozen=True, kw_only=True)
class PlayedTurn:
    """Token ids of a turn that has got its reply.

    Attributes:
        sampled: by the policy.
        observation: the reply, as it was inserted.
        omitted: the reply with `OMITTED` as its body.
    """

    sampled: Sequence[int]
    observation: Sequence[int]
    omitted: Sequence[int]


Keep = Callable[[Sequence[PlayedTurn], int], list[int]]
"""From the turns so far and a number from 1 to what follows the prompt in the next context; it ends
with the newest observation."""


def drop_observations(turns: Sequence[PlayedTurn], count: int) -> list[int]:
    """All that was sampled, and the newest `count` observations; of older ones their tags."""
    first = len(turns) - count  # whose observation stays
    parts = (
        (*turn.sampled, *(turn.observation if i >= first else turn.omitted))
        for i, turn in enumerate(turns)
    )
    return [token for part in parts for token in part]


def last_turns(turns: Sequence[PlayedTurn], count: int) -> list[int]:
    """The newest `count` turns, whole."""
    return [token for turn in turns[-count:] for token in (*turn.sampled, *turn.observation)]


POLICIES: Mapping[str, Keep] = {"drop_observations": drop_observations, "last_turns": last_turns}
"""Policies by `rollout.context.name`."""


@dataclass(frozen=True, kw_only=True)
class Contexts:
    """Rule by which a context ends and the next one begins.

    Attributes:
        name: out of `POLICIES`.
        max_tokens: of a context: prompt, sampled tokens and observations.
        keep: observations or turns that the policy keeps at most; fewer where they have no room.
        turn_tokens: that a turn must have room for, or the next context begins.
    """

    name: str
    max_tokens: int
    keep: int
    turn_tokens: int

    def has_room(self, length: int) -> bool:
        """True if another turn fits behind so many tokens."""
        return length + self.turn_tokens <= self.max_tokens

    def following(
        self, prompt: Sequence[int], turns: Sequence[PlayedTurn]
    ) -> tuple[list[int], int] | None:
        """The ids of the next context, and how many of them the episode had before.

        None if not even one observation leaves room for another turn.
        """
        for count in range(min(self.keep, len(turns)), 0, -1):
            token_ids = [*prompt, *POLICIES[self.name](turns, count)]
            if self.has_room(len(token_ids)):
                return token_ids, len(token_ids) - len(turns[-1].observation)
        return None
