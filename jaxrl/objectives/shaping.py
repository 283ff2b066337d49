"""Reward shaping by length, abstention and entropy, in numpy on the host."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.objectives.filters import list_group_members

Array = jax.Array | np.ndarray


def overlong_penalty(
    lengths: Int[Array, " N"], *, max_length: int, buffer: int, factor: float = 1.0
) -> Float[np.ndarray, " N"]:
    """Compute the soft overlong punishment: 0 up to the buffer, then linear down to `-factor`.

    DAPO equation 13 (https://arxiv.org/abs/2503.14476). The buffer is the last part of
    `max_length`, not an addition to it.

    Args:
        lengths: Response lengths in tokens, including inserted text and the end marker.
        max_length: Length in tokens at which the penalty reaches `factor`.
        buffer: Number of tokens before `max_length` over which the penalty grows; 0 disables it.
        factor: Largest penalty, in units of reward.
    """
    lengths = np.asarray(lengths)
    if buffer == 0:
        return np.zeros(len(lengths), np.float32)
    excess = np.clip(lengths - (max_length - buffer), 0, buffer)
    return (-factor * excess / buffer).astype(np.float32)


ENCOURAGED, PENALIZED = "IDK encouraged", "IDK penalized"
"""Reasons for which the reward of an abstention ("I don't know") differs from its score."""


def boundary_aware_rewards(
    scores: Float[Array, " N"],
    is_abstention: Bool[Array, " N"],
    is_well_formed: Bool[Array, " N"],
    answers: Sequence[str],
    group_ids: Int[Array, " N"],
    *,
    is_late: bool,
    sample_level: bool,
    bonus: float = 0.5,
    max_rate: float = 0.1,
) -> tuple[Float[np.ndarray, " N"], list[str]]:
    """Reward abstentions, but only in groups without a positive score.

    BAPO (https://arxiv.org/abs/2601.11037). A well-formed abstention gains `bonus` in a group
    without a positive score, and gets reward 0 in any other group. Two gates keep the policy from
    giving up too early:

    - Stage gate: in the early stage, if at least `max_rate` of the batch abstains, all scores are
      unchanged. The paper's code uses 0.05.
    - Sample gate: in the late stage, a group that still explores gets no bonus. A group of size n
      explores if its members that do not abstain give at least n/2 distinct answers.

    Args:
        scores: Correctness, at most 0 for a wrong answer, negative for a bad format.
        is_abstention: True if the answer says that the model does not know. Malformed abstentions
            count toward the rate but earn nothing.
        is_well_formed: True if the response follows the protocol.
        answers: Normalized final answers, "" if there is none. Answers of abstentions are ignored.
        group_ids: Trajectories with the same id form a group, in any order. A negative id excludes
            the trajectory, and its reward is 0.
        is_late: True once the late stage has begun. To disable the stage gate, pass True.
        sample_level: True to use the sample gate.
        bonus: Bonus for an abstention, in units of reward.
        max_rate: Abstention rate, from 0 to 1, at which the stage gate withholds the bonus.

    Returns:
        The rewards, and for each trajectory `ENCOURAGED` if it gained the bonus, `PENALIZED` if its
        reward was set to 0, else "".
    """
    scores, is_abstention = np.asarray(scores), np.asarray(is_abstention)
    valid = np.asarray(group_ids) >= 0
    rewards = np.where(valid, scores, 0.0).astype(np.float32)
    reasons = np.full(len(rewards), "", object)
    # Compare the quotient: 3 / 30 is 0.1, but 0.1 * 30 is more than 3.
    rate = is_abstention[valid].sum() / max(valid.sum(), 1)
    if not is_late and rate >= max_rate:
        return rewards, reasons.tolist()
    is_eligible = is_abstention & np.asarray(is_well_formed)
    for members in list_group_members(group_ids):
        eligible = members[is_eligible[members]]
        distinct = {answers[i] for i in members if not is_abstention[i]}
        explores = 2 * len(distinct) >= len(members)
        if (scores[members] > 0).any():
            rewards[eligible] = 0.0
            reasons[eligible] = PENALIZED
        elif not (is_late and sample_level and explores):
            rewards[eligible] += bonus
            reasons[eligible] = ENCOURAGED
    return rewards, reasons.tolist()


BUCKETS = ("easy", "medium", "hard")
"""Difficulty buckets of tasks, under the current policy."""


class _RewardParams(NamedTuple):
    """Parameters of the entropy reward for one difficulty. The comments give ARES's symbols."""

    margin: float  # phi, as a fraction of the target
    knee: float  # k, where the penalty changes from quadratic to linear, in tokens
    temperature: float  # t, of the sigmoid, in tokens
    scale: float  # kappa, factor on the coefficient
    wrong: float  # maximum gain of a wrong answer, as a fraction of the coefficient


_SCALES = (1.0, 1.0, 1.2)
_WRONG_SHARES = (0.6, 0.8, 1.0)


def entropy_reward(
    counts: Int[Array, " N"],
    is_correct: Bool[Array, " N"],
    buckets: Sequence[str],
    *,
    targets: Mapping[str, float],
    coefficients: Mapping[str, float],
    margins: Sequence[float] = (0.15, 0.25, 0.35),
    huber_knees: Sequence[float] = (2.0, 3.0, 4.0),
    sigmoid_temperatures: Sequence[float] = (2.0, 2.5, 3.0),
    centered_gain: bool = False,
) -> Float[np.ndarray, " N"]:
    """Compute a reward for exploration that matches the difficulty of the task.

    ARES (https://arxiv.org/abs/2510.08457) adds it to the accuracy reward. Let `delta` be the count
    minus the bucket's target, `M = max(1, phi * max(target, 1))`, and `C` the bucket's coefficient
    times `kappa`:

    - easy, correct: a penalty on `delta` beyond `M`, first quadratic, then linear, at most `C`;
    - medium, correct: the same penalty on `|delta|` beyond `M`;
    - hard, correct: a gain `C * sigmoid((delta + M) / t)` for `delta >= -M`, else half the penalty;
    - wrong: a gain of up to `0.6 C`, `0.8 C` or `C` that grows as `delta` exceeds `M`.

    As published, a gain starts at half its maximum, so a wrong answer can score higher than a
    correct one. With `centered_gain`, it starts at 0.

    Args:
        counts: Number of tokens with high window entropy in each trajectory.
        is_correct: True if the answer of the trajectory is correct.
        buckets: Difficulty of each trajectory's task: easy, medium or hard.
        targets: Target count of each bucket. Trajectories of a bucket without a target get 0.
        coefficients: Coefficient of each bucket (alpha in ARES), in units of reward.
        margins: Phi for easy, medium and hard tasks, as a fraction of the target.
        huber_knees: Excess in tokens at which each difficulty's penalty becomes linear.
        sigmoid_temperatures: Temperature t of each difficulty, in tokens.
        centered_gain: True to compute gains as `2 * sigmoid - 1` instead of `sigmoid`.
    """
    columns = zip(margins, huber_knees, sigmoid_temperatures, _SCALES, _WRONG_SHARES, strict=True)
    params = dict(zip(BUCKETS, itertools.starmap(_RewardParams, columns), strict=True))
    rewards = np.zeros(len(counts), np.float32)
    for i, bucket in enumerate(buckets):
        if bucket in targets:
            rewards[i] = _compute_entropy_reward(
                bucket, params[bucket], int(counts[i]), bool(is_correct[i]), targets[bucket],
                coefficients[bucket], centered_gain=centered_gain,
            )  # fmt: skip
    return rewards


def _compute_entropy_reward(
    bucket: str,
    params: _RewardParams,
    count: int,
    is_correct: bool,
    target: float,
    alpha: float,
    *,
    centered_gain: bool,
) -> float:
    delta = count - target
    margin = max(1.0, params.margin * max(target, 1.0))
    size = alpha * params.scale

    def compute_gain(excess: float) -> float:
        sigmoid = 1.0 / (1.0 + math.exp(-excess / params.temperature))
        return 2.0 * sigmoid - 1.0 if centered_gain else sigmoid

    def compute_penalty(excess: float) -> float:
        excess, knee = max(excess, 0.0), params.knee
        huber = excess**2 / (2 * knee) if excess <= knee else excess - knee / 2
        return huber / (margin + knee) * size

    if not is_correct:
        return params.wrong * size * compute_gain(max(delta - margin, 0.0))
    if bucket == "easy":
        return -min(size, compute_penalty(delta - margin))
    if bucket == "medium":
        return -min(size, compute_penalty(abs(delta) - margin))
    if delta >= -margin:
        return size * compute_gain(delta + margin)
    return -min(size, 0.5 * compute_penalty(-delta - margin))


def relaxed_kl_factors(
    buckets: Sequence[str],
    is_correct: Bool[Array, " N"],
    excess: Float[Array, " N"],
    *,
    minimum: float = 0.5,
    factor: float = 0.67,
) -> Float[np.ndarray, " N"]:
    """Compute KL factors that are lower for wrong, exploratory answers to easy tasks.

    From ARES (https://arxiv.org/abs/2510.08457). The released code never relaxes the KL term.

    Args:
        buckets: Difficulty of each trajectory's task.
        is_correct: True if the answer of the trajectory is correct.
        excess: Window entropy above the threshold, summed over each trajectory, in nats.
        minimum: Smallest `excess` at which the KL term is relaxed, in nats.
        factor: Factor for relaxed KL terms; 1 for all others.

    Returns:
        The factor for each trajectory's KL term.
    """
    is_easy = np.array([bucket == "easy" for bucket in buckets], bool)
    relaxed = is_easy & ~np.asarray(is_correct) & (np.asarray(excess) >= minimum)
    return np.where(relaxed, factor, 1.0).astype(np.float32)
