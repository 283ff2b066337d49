"""Usage of a run in calls, tokens and cost, and the budget limits that end a run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxrl.envs.tools.budget import SEARCH, get_call_records
from jaxrl.types import Trajectory

BILLED_SOURCES = ("tool", "fallback")
"""Values of `CallRecord.source` for calls that reached a tool. Their attempts are billed."""


Number = TypeVar("Number", int, float)


class BudgetSpentError(RuntimeError):
    """Error raised when a run has spent its budget. The run can resume with a higher budget."""


def _add_counts(left: Mapping[str, Number], right: Mapping[str, Number]) -> dict[str, Number]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in sorted({*left, *right})}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Requests to tools, judges and endpoint models, and their cost."""

    # Requests by tool or judge. Retries count, since each is billed.
    attempts: Mapping[str, int] = field(default_factory=dict)
    cost: float = 0.0  # cost of attempts and endpoint tokens, in the unit of `ledger.prices`
    # Calls, attempts, tokens and cost of a policy behind an endpoint.
    policy: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            attempts=_add_counts(self.attempts, other.attempts),
            cost=self.cost + other.cost,
            policy=_add_counts(self.policy, other.policy),
        )


@dataclass(frozen=True, kw_only=True)
class UsageStats:
    """Usage of a set of trajectories. Instances can be added.

    Calls and tokens depend only on weights and seeds, so a repeated run has the same counts.
    `usage` also depends on caches, servers and clocks.
    """

    num_trajectories: int = 0  # environment errors included
    # Calls by tool or judge; `search` for the search engine.
    num_calls: Mapping[str, int] = field(default_factory=dict)
    observation_tokens: int = 0  # tokens that the environment inserted
    sampled_tokens: int = 0  # tokens that the policy sampled
    usage: Usage = field(default_factory=Usage)  # requests behind the calls, and their cost

    @classmethod
    def from_trajectories(
        cls,
        trajectories: Iterable[Trajectory],
        prices: Mapping[str, float],
        *,
        is_control: bool = False,
    ) -> UsageStats:
        """Count the usage of trajectories.

        Args:
            trajectories: Trajectories of any outcome.
            prices: Price per attempt, by tool name; other tools are free.
            is_control: True to skip searches, because a control engine answered them.
        """
        trajectories = list(trajectories)
        calls = [call for t in trajectories for turn in t.turns for call in get_call_records(turn)]
        calls += [call for t in trajectories for call in t.reward_records]
        calls = [call for call in calls if not (is_control and call.tool is None)]
        num_calls = Counter(call.tool or SEARCH for call in calls)
        attempts = dict.fromkeys(num_calls, 0)
        for call in calls:
            if call.source in BILLED_SOURCES:
                attempts[call.tool or SEARCH] += call.attempts
        policy: Mapping[str, float] = functools.reduce(
            _add_counts, (t.usage for t in trajectories), {}
        )
        cost = math.fsum(prices.get(name, 0.0) * count for name, count in attempts.items())
        return cls(
            num_trajectories=len(trajectories),
            num_calls=dict(num_calls),
            observation_tokens=sum(t.response_length - t.num_sampled for t in trajectories),
            sampled_tokens=sum(t.num_sampled for t in trajectories),
            usage=Usage(attempts=attempts, cost=cost + policy.get("cost", 0.0), policy=policy),
        )

    def __add__(self, other: UsageStats) -> UsageStats:
        return UsageStats(
            num_trajectories=self.num_trajectories + other.num_trajectories,
            num_calls=_add_counts(self.num_calls, other.num_calls),
            observation_tokens=self.observation_tokens + other.observation_tokens,
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
            usage=self.usage + other.usage,
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> UsageStats:
        """Create an instance from the result of `to_json`."""
        return cls(**{**saved, "usage": Usage(**saved["usage"])})

    def metrics(self) -> dict[str, float]:
        """Return the counters as metrics; metrics under `perf/` may differ in a repeated run."""
        usage = self.usage
        counts = {
            "trajectories": self.num_trajectories,
            "observation_tokens": self.observation_tokens,
            "sampled_tokens": self.sampled_tokens,
            **{f"calls/{name}": count for name, count in sorted(self.num_calls.items())},
        }
        usage_metrics: dict[str, float] = {f"policy/{name}": n for name, n in usage.policy.items()}
        usage_metrics |= {
            f"attempts/{name}": count for name, count in sorted(usage.attempts.items())
        }
        if usage.attempts or "cost" in usage.policy:
            usage_metrics["cost"] = usage.cost
        return {
            **{f"ledger/total/{name}": number for name, number in counts.items()},
            **{f"perf/ledger/total/{name}": number for name, number in usage_metrics.items()},
        }


def check_budget(spent: UsageStats, *, max_cost: float, max_calls: int) -> None:
    """Raise an error if a run has spent its budget.

    Args:
        spent: Usage of the run so far.
        max_cost: Limit on the cost, `ledger.max_cost`; 0 for no limit.
        max_calls: Limit on the total number of tool attempts, `ledger.max_calls`; 0 for no limit.

    Raises:
        BudgetSpentError: The cost or the attempts have reached their limit.
    """
    cost, num_calls = spent.usage.cost, sum(spent.usage.attempts.values())
    for key, limit, value in (("max_cost", max_cost, cost), ("max_calls", max_calls, num_calls)):
        if 0 < limit <= value:
            raise BudgetSpentError(
                f"the run has spent {value:g} of config.ledger.{key}={limit:g}; to resume, raise "
                "it and run the same command again."
            )
