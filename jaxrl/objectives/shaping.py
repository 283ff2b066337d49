"""Terms added to rewards before advantages: length, abstention, entropy. On the host, in numpy."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.objectives.filters import group_members

Array = jax.Array | np.ndarray


def overlong_penalty(
    lengths: Int[Array, " N"], *, max_length: int, buffer: int, factor: float = 1.0
) -> Float[np.ndarray, " N"]:
    """Soft overlong punishment: 0 up to the buffer, falling linearly to `-factor` at its end.

    DAPO equation 13 (https://arxiv.org/abs/2503.14476). The buffer is the last part of
    `max_length`, not a margin beyond it.

    Args:
        lengths: tokens of the response, inserted text and end marker included.
        max_length: tokens; from here on the whole `factor` is charged.
        buffer: tokens before `max_length` over which the penalty grows; 0 for no penalty at all.
        factor: the largest penalty, in units of reward.
    """
    lengths = np.asarray(lengths)
    if buffer == 0:
        return np.zeros(len(lengths), np.float32)
    excess = np.clip(lengths - (max_length - buffer), 0, buffer)
    return (-factor * excess / buffer).astype(np.float32)


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
) -> Float[np.ndarray, " N"]:
    """Rewards an abstention in groups that found nothing, and only there.

    BAPO (https://arxiv.org/abs/2601.11037). In a group without any positive score each well-formed
    abstention gains `bonus`; in any other group it is worth 0. Two gates keep the policy from
    giving up early:

    - stage: early on, once at least `max_rate` of the batch abstains, all scores stay as they are.
      The paper's code has 0.05 there.
    - sample: later on, no bonus in a group whose other members still explore, that is, give at
      least half as many distinct answers as there are members (4 of 8).

    Args:
        scores: correctness, at most 0 where there is none, negative for a bad format.
        is_abstention: the answer says that the model does not know. Malformed ones count in the
            rate and earn nothing.
        is_well_formed: the response keeps to the protocol.
        answers: final answers after normalisation, "" where there is none; those of abstentions
            are not read.
        group_ids: trajectories with the same id are compared, wherever they stand. Those with a
            negative id count for nothing and get 0.
        is_late: the stage gate has opened for good; True throughout to do without it.
        sample_level: use the sample gate.
        bonus: what an abstention gains, in units of reward.
        max_rate: the share of abstentions at which the stage gate closes.
    """
    scores, is_abstention = np.asarray(scores), np.asarray(is_abstention)
    valid = np.asarray(group_ids) >= 0
    rewards = np.where(valid, scores, 0.0).astype(np.float32)
    # Dividing keeps 3 of 30 at 0.1, where 0.1 * 30 is more than 3.
    rate = is_abstention[valid].sum() / max(valid.sum(), 1)
    if not is_late and rate >= max_rate:
        return rewards
    paid = is_abstention & np.asarray(is_well_formed)
    for members in group_members(group_ids):
        chosen = members[paid[members]]
        distinct = {answers[i] for i in members if not is_abstention[i]}
        explores = 2 * len(distinct) >= len(members)
        if (scores[members] > 0).any():
            rewards[chosen] = 0.0
        elif not (is_late and sample_level and explores):
            rewards[chosen] += bonus
    return rewards


class _Shape(NamedTuple):
    """Parameters of the entropy reward of one difficulty; ARES's names."""

    margin: float  # phi, as a share of the target
    knee: float  # k, where the penalty turns from quadratic to linear, in tokens
    temperature: float  # t of the sigmoid, in tokens
    scale: float  # kappa, on the coefficient
    wrong: float  # share of the coefficient that a wrong answer can gain


_SHAPES = {
    "easy": _Shape(0.15, 2.0, 2.0, 1.0, 0.6),
    "medium": _Shape(0.25, 3.0, 2.5, 1.0, 0.8),
    "hard": _Shape(0.35, 4.0, 3.0, 1.2, 1.0),
}


def entropy_reward(
    counts: Int[Array, " N"],
    is_correct: Bool[Array, " N"],
    buckets: Sequence[str],
    *,
    targets: Mapping[str, float],
    coefficients: Mapping[str, float],
    centred_gain: bool = False,
) -> Float[np.ndarray, " N"]:
    """Reward for exploring as much as a task's difficulty asks for; added to the accuracy.

    ARES (https://arxiv.org/abs/2510.08457). With `delta` the count less the bucket's target,
    `M = max(1, phi * max(target, 1))` and `C` the bucket's coefficient times `kappa`:

    - easy, correct: a penalty for `delta` beyond `M`, quadratic and then linear, at most `C`;
    - medium, correct: the same for `delta` beyond `M` in either direction;
    - hard, correct: a gain `C * sigmoid((delta + M) / t)` from `-M` upwards, below it half the
      penalty;
    - wrong: a gain of up to `0.6 C`, `0.8 C` or `C` that grows as `delta` exceeds `M`.

    As published, a gain starts at half its size, so that a wrong answer can outscore a correct
    one. `centred_gain` starts it at 0.

    Args:
        counts: tokens of high window entropy in each trajectory.
        is_correct: the verdict on each trajectory.
        buckets: difficulty of each trajectory's task: easy, medium or hard.
        targets: how many such tokens are wanted, by bucket. A bucket without a target is not
            calibrated yet; its trajectories get 0.
        coefficients: ARES's alpha, in units of reward, by bucket.
        centred_gain: gains are `2 * sigmoid - 1` rather than `sigmoid`.
    """
    rewards = np.zeros(len(counts), np.float32)
    for i, bucket in enumerate(buckets):
        if bucket not in _SHAPES:
            raise ValueError(
                f"unknown difficulty {bucket!r}; expected one of {', '.join(_SHAPES)}."
            )
        if bucket not in targets:
            continue
        rewards[i] = _entropy_term(
            bucket, int(counts[i]), bool(is_correct[i]), targets[bucket], coefficients[bucket],
            centred_gain=centred_gain,
        )  # fmt: skip
    return rewards


def _entropy_term(
    bucket: str, count: int, is_correct: bool, target: float, alpha: float, *, centred_gain: bool
) -> float:
    shape = _SHAPES[bucket]
    delta = count - target
    margin = max(1.0, shape.margin * max(target, 1.0))
    size = alpha * shape.scale

    def gain(excess: float) -> float:
        sigmoid = 1.0 / (1.0 + math.exp(-excess / shape.temperature))
        return 2.0 * sigmoid - 1.0 if centred_gain else sigmoid

    def penalty(excess: float) -> float:
        excess, knee = max(excess, 0.0), shape.knee
        huber = excess**2 / (2 * knee) if excess <= knee else excess - knee / 2
        return huber / (margin + knee) * size

    if not is_correct:
        return shape.wrong * size * gain(max(delta - margin, 0.0))
    if bucket == "easy":
        return -min(size, penalty(delta - margin))
    if bucket == "medium":
        return -min(size, penalty(abs(delta) - margin))
    if delta >= -margin:
        return size * gain(delta + margin)
    return -min(size, 0.5 * penalty(-delta - margin))


def relaxed_kl(
    buckets: Sequence[str],
    is_correct: Bool[Array, " N"],
    excess: Float[Array, " N"],
    *,
    minimum: float = 0.5,
    factor: float = 0.67,
) -> Float[np.ndarray, " N"]:
    """Second chance: a weaker pull to the reference where an easy task was missed while exploring.

    ARES (https://arxiv.org/abs/2510.08457), whose released code never feeds it.

    Args:
        buckets: difficulty of each trajectory's task.
        is_correct: the verdict on each trajectory.
        excess: nats, the sum of window entropy above the threshold over a trajectory.
        minimum: nats; from here on the pull is weakened.
        factor: by how much.

    Returns:
        What multiplies each trajectory's KL term: `factor` or 1.
    """
    is_easy = np.array([bucket == "easy" for bucket in buckets], bool)
    relaxed = is_easy & ~np.asarray(is_correct) & (np.asarray(excess) >= minimum)
    return np.where(relaxed, factor, 1.0).astype(np.float32)
