"""Upper bound on the cost of a trajectory's tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxrl.envs.base import CallRecord, Episode, Turn

SEARCH = "search"
"""Tool name of the search engine; a `CallRecord` uses None instead."""


def get_call_records(turn: Turn) -> tuple[CallRecord, ...]:
    """Return the call records of a turn; if there are none, build one from its call."""
    if turn.records or turn.tool_call is None:
        return turn.records
    error = turn.error if turn.observation is None else None
    return (CallRecord(call=turn.tool_call, tool=turn.tool, waited_s=turn.latency_s, error=error),)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Upper bound on the cost of one trajectory's calls.

    Every call counts once, regardless of its source and number of attempts, so only the policy
    determines when an episode ends.

    Attributes:
        prices: Price per call, by tool name; other tools are free.
        max_cost: Maximum cost, in the unit of `prices`; 0 for no limit.
    """

    prices: Mapping[str, float] = field(default_factory=dict)
    max_cost: float = 0.0

    def allows(self, episode: Episode, tools: Iterable[str]) -> bool:
        """Return True if the episode can afford one more call of each of these tools."""
        if not self.max_cost:
            return True
        past = [call.tool or SEARCH for turn in episode.turns for call in get_call_records(turn)]
        cost = sum(self.prices.get(name, 0.0) for name in (*past, *tools))
        return cost <= self.max_cost * (1 + 1e-9)  # ten calls at 0.1 are within 1
