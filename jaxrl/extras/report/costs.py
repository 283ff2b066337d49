"""Costs of a run, and the sources of the answers in its last evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.extras.report.reading import mapping
from jaxrl.utils.json_io import number_of

ATTRIBUTED = {
    "searches": "searches an episode",
    "redundant_searches": "redundant searches an episode",
    "answer_in_results": "answer in the results",
    "retrieved_but_ignored": "in the results, and not answered",
    "right_without_evidence": "right without evidence",
}
"""Measures of an evaluation, and what the report calls them."""

USED = {
    "cost": "cost",
    "cache_hits": "answered by the cache",
    "shared": "by the same call of another episode",
    "replayed": "by the recording",
    "retries": "retries",
    "failed": "without an answer",
}
"""Counters of calls, and what the report calls them; what is 0 is left out."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Totals of a run.

    Attributes:
        tools: calls of each tool, and how often it was asked for them.
        used: amounts by what they are called.
        waits: of calls, seconds, by `p50`, `p95`, `mean` and `max`; empty where none is told.
        num_trajectories: that were sampled, in evaluations too.
        observation_tokens: that were inserted.
        sampled_tokens: that the policy wrote.
    """

    tools: dict[str, tuple[int, int]]
    used: dict[str, float]
    waits: dict[str, float]
    num_trajectories: int
    observation_tokens: int
    sampled_tokens: int


def costs_of(records: Sequence[Mapping[str, Any]]) -> Costs | None:
    """The totals of the newest record that has some; None where none does."""
    newest = next((r for r in reversed(records) if "ledger/total/trajectories" in r), None)
    if newest is None:
        return None

    def number(name: str) -> float:
        return number_of(newest.get(name)) or 0.0

    head = "ledger/total/calls/"
    names = [name.removeprefix(head) for name in newest if name.startswith(head)]
    used = {label: number(f"perf/ledger/total/{name}") for name, label in USED.items()}
    waits = {name: newest.get(f"timing_s/ledger/total/{name}") for name in ("p50", "p95", "max")}
    return Costs(
        tools={
            name: (int(number(head + name)), int(number(f"perf/ledger/total/attempts/{name}")))
            for name in names
        },
        used={label: amount for label, amount in used.items() if amount},
        waits={
            name: value for name, wait in waits.items() if (value := number_of(wait)) is not None
        },
        num_trajectories=int(number("ledger/total/trajectories")),
        observation_tokens=int(number("ledger/total/observation_tokens")),
        sampled_tokens=int(number("ledger/total/sampled_tokens")),
    )


def attribution_of(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Measures of the newest evaluation that says where answers come from, by suite.

    Without those of right answers where nobody says which are right.
    """
    for evaluation in reversed(evaluations):
        by_suite = {
            suite: {
                label: number
                for name, label in ATTRIBUTED.items()
                if (number := number_of(mapping(mapping(by_set).get("all")).get(name))) is not None
            }
            for suite, by_set in mapping(evaluation.get("summary")).items()
        }
        needed = ATTRIBUTED["answer_in_results"]
        known = {suite: shares for suite, shares in by_suite.items() if needed in shares}
        if known:
            return known
    return {}
