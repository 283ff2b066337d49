"""Statistics of a training step for the sentinel's rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from jaxrl.envs.base import Outcome
from jaxrl.envs.rewards.attribution import shows_answer
from jaxrl.training.method import Method
from jaxrl.types import Group, Trajectory, flatten_groups

ZERO_SUM_ESTIMATORS = ("grpo", "rloo", "pass_at_k")
"""Estimators whose advantages sum to 0 in every group, for any settings."""

METRICS = {
    "gradient": "actor/grad_norm",
    "moved": "actor/ppo_kl",
    "skipped": "actor/num_skipped",
    "gap": "rollout_corr/logprob_diff_mean",
    "gap_max": "rollout_corr/logprob_diff_max",
    "gap_k3": "rollout_corr/k3_kl",
}
"""Metric name of each statistic that is read from the step's metrics."""

MIN_LOOP_TOKENS = 32
"""Minimum number of sampled tokens in a repetitive response."""

_NGRAM_SIZE = 4  # tokens in an n-gram
_NUM_CHECKED_TOKENS = 128  # number of last sampled tokens to check for repetition
_MIN_DISTINCT = 0.4  # fraction of distinct n-grams below which a response is repetitive

StepStats = dict[str, Any]
"""Statistics of a step by name; None if undefined. See `compute_step_stats`."""


def compute_step_stats(
    record: Mapping[str, Any], groups: Sequence[Group], method: Method
) -> StepStats:
    """Compute the statistics of a step. Fractions are of the scored trajectories.

    Args:
        record: Metrics of the step, keyed by name.
        groups: Groups that the step trained on, with advantages.
        method: Training method.

    Returns:
        reward, reward_sd, reward_min: Mean, standard deviation and minimum of the rewards.
        num, groups: Number of scored trajectories, and number of groups that contain any.
        correct: Fraction of correct trajectories.
        is_constant: 1 if all rewards are equal, else 0.
        entropy: Mean entropy per sampled token under the sampler, in nats.
        likelihood: Mean logprob of tokens sampled in trajectories with a positive advantage.
        length: Mean number of sampled tokens.
        malformed: Fraction that ended with neither a search nor an answer.
        cut: Fraction truncated by a token or turn limit.
        void: Fraction with a turn that has neither a tool call nor the answer.
        loops: Fraction with a repetitive response.
        alike: Fraction whose response is identical to that of another sample in the group.
        signal: Fraction of groups with a nonzero advantage.
        searching, searches: Fraction that called a tool, and mean number of calls.
        found: Among trajectories with a tool call, fraction whose results contain an accepted
            answer.
        prompts: Number of groups whose samples have different prompts.
        uneven: Maximum over groups of |sum of advantages| / max |advantage|.
        yes: Fraction of scores equal to 1, for each judge.
        twins: Result of `find_duplicate_pairs`.
        Keys of `METRICS`: Metrics from `record`.
    """
    # Trajectories with environment errors have no reward and are excluded.
    scored = [t for t in flatten_groups(groups) if t.is_scored]
    rewards = np.array([t.reward for t in scored])
    positive = [t for t in scored if (t.advantage or 0.0) > 0]
    with_calls = [t for t in scored if any(turn.tool_call is not None for turn in t.turns)]
    stats: StepStats = {
        "num": len(scored),
        "groups": sum(bool(group.scored_trajectories) for group in groups),
        "reward": _mean(rewards),
        "reward_sd": float(rewards.std()) if len(scored) else None,
        "reward_min": float(rewards.min()) if len(scored) else None,
        "correct": _mean([t.is_correct for t in scored]),
        "is_constant": float(len(scored) > 0 and rewards.min() == rewards.max()),
        "entropy": _compute_mean_per_token(scored, "rollout_entropies"),
        "likelihood": _compute_mean_per_token(positive, "rollout_logprobs"),
        "length": _mean([t.num_sampled for t in scored]),
        "malformed": _mean([t.outcome == Outcome.MALFORMED for t in scored]),
        "cut": _mean([t.outcome == Outcome.OUT_OF_BUDGET for t in scored]),
        "void": _mean([t.has_void_turn for t in scored]),
        "loops": _mean([is_repetitive(t.token_ids[t.loss_mask]) for t in scored]),
        "alike": _mean([is_alike for group in groups for is_alike in flag_duplicates(group)]),
        "signal": _mean([any(t.has_signal for t in group.trajectories) for group in groups]),
        "searching": len(with_calls) / max(len(scored), 1),
        "searches": _mean([sum(turn.tool_call is not None for turn in t.turns) for t in scored]),
        "found": _mean([has_found_answer(t) for t in with_calls if t.task.answers]),
        "prompts": sum(
            len({t.token_ids[: t.prompt_length].tobytes() for t in group.scored_trajectories}) > 1
            for group in groups
        ),
        "uneven": max((compute_advantage_imbalance(group) for group in groups), default=0.0)
        if method.advantage.estimator.name in ZERO_SUM_ESTIMATORS and not method.advantage.by_turn
        else 0.0,
        "yes": compute_judge_approval_rates(scored),
        "twins": find_duplicate_pairs(groups),
    }
    # The state is saved as JSON, which cannot represent NaN or infinity.
    stats |= {name: record.get(metric) for name, metric in METRICS.items()}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in stats.items()
    }


def _mean(values: Sequence[Any] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _compute_mean_per_token(trajectories: Sequence[Trajectory], name: str) -> float | None:
    """Return the sum of a per-token array divided by the number of sampled tokens."""
    count = sum(t.num_sampled for t in trajectories)
    return sum(float(getattr(t, name).sum()) for t in trajectories) / count if count else None


def _get_sampled_bytes(trajectory: Trajectory) -> bytes:
    return trajectory.token_ids[trajectory.loss_mask].tobytes()


def is_repetitive(ids: np.ndarray) -> bool:
    """Return True if fewer than 40% of the 4-grams in the last 128 sampled ids are distinct."""
    if len(ids) < MIN_LOOP_TOKENS:
        return False
    ngrams = np.lib.stride_tricks.sliding_window_view(ids[-_NUM_CHECKED_TOKENS:], _NGRAM_SIZE)
    return len(np.unique(ngrams, axis=0)) < _MIN_DISTINCT * len(ngrams)


def flag_duplicates(group: Group) -> list[bool]:
    """Return a flag per scored trajectory: True if its sampled ids occur twice in the group."""
    texts = list(map(_get_sampled_bytes, group.scored_trajectories))
    return [texts.count(text) > 1 for text in texts]


def has_found_answer(trajectory: Trajectory) -> bool:
    """Return True if a search result contains an accepted answer."""
    return any(shows_answer(turn, trajectory.task.answers) for turn in trajectory.turns)


def compute_advantage_imbalance(group: Group) -> float:
    """Return |sum of the group's advantages| / max |advantage|; 0 if all advantages are 0."""
    advantages = [t.advantage or 0.0 for t in group.scored_trajectories]
    largest = max(map(abs, advantages), default=0.0)
    return abs(sum(advantages)) / largest if largest else 0.0


def compute_judge_approval_rates(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return each judge's fraction of scores equal to 1."""
    shares = {}
    for judge in sorted({str(call.tool) for t in trajectories for call in t.reward_records}):
        parts = [t.reward_parts[judge] for t in trajectories if judge in t.reward_parts]
        if parts:
            shares[judge] = parts.count(1) / len(parts)
    return shares


def find_duplicate_pairs(groups: Sequence[Group]) -> dict[str, float]:
    """Find pairs of sample indices with identical responses in every group of the step.

    Samples i and j of a group have different random keys. The probability that j repeats i is the
    likelihood of the response.

    Returns:
        Log-likelihood of the repeated responses, summed over groups, in nats, keyed by `i-j`.
    """
    group_pairs: list[dict[str, float]] = []
    for group in groups:
        samples = sorted(group.scored_trajectories, key=lambda t: t.sample_index)
        group_pairs.append(
            {
                f"{a.sample_index}-{b.sample_index}": float(a.rollout_logprobs.sum())
                for a, b in combinations(samples, 2)
                if a.num_sampled and _get_sampled_bytes(a) == _get_sampled_bytes(b)
            }
        )
    pairs = (
        [pair for pair in group_pairs[0] if all(pair in g for g in group_pairs)]
        if group_pairs
        else []
    )
    sums = {pair: sum(group[pair] for group in group_pairs) for pair in pairs}
    return {pair: value for pair, value in sums.items() if math.isfinite(value)}
