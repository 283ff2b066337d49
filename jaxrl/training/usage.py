"""Costs of trajectories: calls, tokens, waits and money; summed for a step and for a run.

A ledger has two parts. What the policy asked for is a function of weights and seeds, and the same
when a run is repeated. Its `usage` is what that took outside: caches, servers and clocks decide it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxrl.envs.base import CallRecord
from jaxrl.envs.tools.budget import SEARCH, calls_of
from jaxrl.types import Trajectory

ASKED = ("tool", "fallback")
"""Sources of answers for which the tool was asked, so that its price was to pay."""


Number = TypeVar("Number", int, float)


class BudgetSpentError(RuntimeError):
    """The run has spent what it may; it goes on once it may spend more."""


def _summed(one: Mapping[str, Number], other: Mapping[str, Number]) -> dict[str, Number]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in sorted({*one, *other})}


PER_OCTAVE = 16  # buckets in which a wait doubles; their middles are within 2.2% of what is in them
_LEAST_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waiting times of calls, seconds; sums of it tell percentiles to within 2.2%.

    Attributes:
        counts: calls by `floor(16 * log2(seconds))`, as text, since JSON has no other keys.
        total_s: of all of them.
        max_s: the longest.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    total_s: float = 0.0
    max_s: float = 0.0

    @classmethod
    def of(cls, waits: Sequence[float]) -> Waits:
        """Sums up some calls, in seconds."""
        buckets = [math.floor(PER_OCTAVE * math.log2(max(wait, _LEAST_S))) for wait in waits]
        counts = Counter(map(str, buckets))
        return cls(counts=dict(counts), total_s=math.fsum(waits), max_s=max(waits, default=0.0))

    def __add__(self, other: Waits) -> Waits:
        return Waits(
            counts=_summed(self.counts, other.counts),
            total_s=self.total_s + other.total_s,
            max_s=max(self.max_s, other.max_s),
        )

    @property
    def num_calls(self) -> int:
        """Calls that waited."""
        return sum(self.counts.values())

    def percentile(self, share: float) -> float:
        """The shortest wait that at least this share of the calls did not exceed; NaN of none."""
        seen = 0
        for bucket, count in sorted((int(name), count) for name, count in self.counts.items()):
            seen += count
            if seen >= share * self.num_calls:
                return float(min(2 ** ((bucket + 0.5) / PER_OCTAVE), self.max_s))
        return math.nan

    def metrics(self) -> dict[str, float]:
        """Mean, median, 95th percentile and longest."""
        if not self.num_calls:
            return {}
        ends = {"mean": self.total_s / self.num_calls, "max": self.max_s}
        return {"p50": self.percentile(0.5), "p95": self.percentile(0.95), **ends}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Costs of calls outside.

    Attributes:
        attempts: how often each tool was asked, by its name; each is paid.
        sources: calls by who answered them, one of `envs.base.SOURCES`.
        num_retries: attempts after the first of their call.
        num_failed: calls without an answer.
        cost: of all attempts, and of the tokens of a model behind an endpoint, in the unit of
            `ledger.prices`.
        waits: of all calls, those that a cache answered too.
        policy: calls, attempts, tokens and their cost, of a model behind an endpoint; {} of the
            run's own.
    """

    attempts: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, int] = field(default_factory=dict)
    num_retries: int = 0
    num_failed: int = 0
    cost: float = 0.0
    waits: Waits = field(default_factory=Waits)
    policy: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: Sequence[CallRecord], prices: Mapping[str, float]) -> Usage:
        """Sums up some calls."""
        attempts = {call.tool or SEARCH: 0 for call in calls}
        asked = [call for call in calls if call.source in ASKED]
        for call in asked:
            attempts[call.tool or SEARCH] += call.attempts
        return cls(
            attempts=attempts,
            sources=dict(Counter(call.source for call in calls)),
            num_retries=sum(max(call.attempts - 1, 0) for call in asked),
            num_failed=sum(call.error is not None for call in calls),
            cost=math.fsum(prices.get(name, 0.0) * count for name, count in attempts.items()),
            waits=Waits.of([call.waited_s for call in calls]),
        )

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            attempts=_summed(self.attempts, other.attempts),
            sources=_summed(self.sources, other.sources),
            num_retries=self.num_retries + other.num_retries,
            num_failed=self.num_failed + other.num_failed,
            cost=self.cost + other.cost,
            waits=self.waits + other.waits,
            policy=_summed(self.policy, other.policy),
        )


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Costs of some trajectories; two ledgers add up to that of all their trajectories.

    Attributes:
        num_trajectories: environment errors too.
        num_calls: of each tool and judge, by its name; that of the search engine is `search`.
        observation_tokens: that were inserted.
        sampled_tokens: that the policy wrote.
        usage: what may differ when a run is repeated.
    """

    num_trajectories: int = 0
    num_calls: Mapping[str, int] = field(default_factory=dict)
    observation_tokens: int = 0
    sampled_tokens: int = 0
    usage: Usage = field(default_factory=Usage)

    @classmethod
    def of(
        cls,
        trajectories: Iterable[Trajectory],
        prices: Mapping[str, float],
        *,
        is_control: bool = False,
    ) -> Ledger:
        """Sums up some trajectories.

        Args:
            trajectories: of any outcome.
            prices: of an attempt, by tool; the others are free.
            is_control: leave searches out, as a stand-in for the search engine answered them.
        """
        trajectories = list(trajectories)
        calls = [call for t in trajectories for turn in t.turns for call in calls_of(turn)]
        calls += [call for t in trajectories for call in t.reward_records]
        calls = [call for call in calls if not (is_control and call.tool is None)]
        policy: Mapping[str, float] = functools.reduce(_summed, (t.usage for t in trajectories), {})
        usage = Usage.of(calls, prices)
        return cls(
            num_trajectories=len(trajectories),
            num_calls=dict(Counter(call.tool or SEARCH for call in calls)),
            observation_tokens=sum(t.response_length - t.num_sampled for t in trajectories),
            sampled_tokens=sum(t.num_sampled for t in trajectories),
            usage=dataclasses.replace(
                usage, policy=policy, cost=usage.cost + policy.get("cost", 0.0)
            ),
        )

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(
            num_trajectories=self.num_trajectories + other.num_trajectories,
            num_calls=_summed(self.num_calls, other.num_calls),
            observation_tokens=self.observation_tokens + other.observation_tokens,
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
            usage=self.usage + other.usage,
        )

    def to_json(self) -> dict[str, Any]:
        """Converts to plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Ledger:
        """The inverse of `to_json`."""
        usage = dict(saved["usage"])
        return cls(**{**saved, "usage": Usage(**{**usage, "waits": Waits(**usage["waits"])})})

    def asked(self, head: str = "", run: Ledger | None = None) -> dict[str, float]:
        """Numbers for a record that are the same when a run is repeated.

        Args:
            head: stands within the names, as `total/`.
            run: whose tools are told although none was called.
        """
        names = sorted({*self.num_calls, *(run.num_calls if run else ())})
        return {
            f"ledger/{head}trajectories": self.num_trajectories,
            f"ledger/{head}observation_tokens": self.observation_tokens,
            f"ledger/{head}sampled_tokens": self.sampled_tokens,
            **{f"ledger/{head}calls/{name}": self.num_calls.get(name, 0) for name in names},
        }

    def used(self, head: str) -> dict[str, float]:
        """Numbers that may differ when a run is repeated; named as `search_metrics` names its own.

        Args:
            head: stands within the names, as `total/`.
        """
        usage = self.usage
        policy: dict[str, float] = {}
        policy |= {f"perf/ledger/{head}policy/{name}": n for name, n in usage.policy.items()}
        if not usage.attempts:
            costs = {f"perf/ledger/{head}cost": usage.cost} if "cost" in usage.policy else {}
            return policy | costs
        numbers = {
            "cost": usage.cost,
            **{f"attempts/{name}": count for name, count in sorted(usage.attempts.items())},
            "cache_hits": usage.sources.get("cache", 0),
            "shared": usage.sources.get("shared", 0),
            "replayed": usage.sources.get("replay", 0),
            "retries": usage.num_retries,
            "failed": usage.num_failed,
        }
        waits = usage.waits.metrics()
        return {
            **policy,
            **{f"perf/ledger/{head}{name}": number for name, number in numbers.items()},
            **{f"timing_s/ledger/{head}{name}": wait for name, wait in waits.items()},
        }


def check_budget(spent: Ledger, *, max_cost: float, max_calls: int) -> None:
    """Refuses to spend more where a run has spent what it may.

    Args:
        spent: by the run so far.
        max_cost: `ledger.max_cost`; 0: no limit.
        max_calls: `ledger.max_calls`, attempts of all tools together; 0: no limit.

    Raises:
        BudgetSpentError: names the key to raise.
    """
    cost, num_calls = spent.usage.cost, sum(spent.usage.attempts.values())
    for key, limit, value in (("max_cost", max_cost, cost), ("max_calls", max_calls, num_calls)):
        if 0 < limit <= value:
            raise BudgetSpentError(
                f"the run has spent {value:g} of config.ledger.{key}={limit:g}; to go on, raise it "
                "and run the same command again."
            )
