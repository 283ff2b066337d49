"""Costs of calls of tools, and the end of a trajectory that may make no more of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxrl.envs.base import CallRecord, Episode, Turn

SEARCH = "search"
"""Name of the search engine among the tools; a `CallRecord` has None in its place."""


def calls_of(turn: Turn) -> tuple[CallRecord, ...]:
    """The calls that a turn made; of an environment that keeps no records, its one call."""
    if turn.records or turn.tool_call is None:
        return turn.records
    error = turn.error if turn.observation is None else None
    return (CallRecord(call=turn.tool_call, tool=turn.tool, waited_s=turn.latency_s, error=error),)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Upper bound on the cost of one trajectory's calls.

    Every call counts once and at its price, whether a cache answered it, a server needed several
    tries, or nobody answered: when an episode ends must be the policy's doing.

    Attributes:
        prices: of a call, by tool; the others are free.
        max_cost: in the unit of the prices; 0: no limit.
    """

    prices: Mapping[str, float] = field(default_factory=dict)
    max_cost: float = 0.0

    def allows(self, episode: Episode, tools: Iterable[str]) -> bool:
        """Return True if an episode may make one more call of each of these tools."""
        if not self.max_cost:
            return True
        made = [call.tool or SEARCH for turn in episode.turns for call in calls_of(turn)]
        cost = sum(self.prices.get(name, 0.0) for name in (*made, *tools))
        return cost <= self.max_cost * (1 + 1e-9)  # ten calls at 0.1 are within 1
