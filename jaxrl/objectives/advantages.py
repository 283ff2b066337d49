"""Advantage estimators, which map rewards and groups to one advantage per trajectory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

Array = jax.Array | np.ndarray


def grpo(
    rewards: Float[Array, " N"],
    group_ids: Int[Array, " N"],
    *,
    normalize_std: bool,
    ddof: int,
    epsilon: float,
) -> Float[Array, " N"]:
    """Compute group-relative advantages: `(reward - mean) / (std + epsilon)` within each group.

    DeepSeekMath section 4.1 (https://arxiv.org/abs/2402.03300). Without the division, this is Dr.
    GRPO (https://arxiv.org/abs/2503.20783). A group with equal rewards gets exact zeros instead of
    a rounding error of the mean divided by a small `epsilon`. A group of size 1 also gets zero,
    while other implementations keep the raw reward.

    Args:
        rewards: One reward per trajectory.
        group_ids: Trajectories with the same id form a group, in any order. A negative id excludes
            the trajectory, and its advantage is 0.
        normalize_std: True to divide by the standard deviation of the group.
        ddof: 0 for the population standard deviation, 1 for the sample standard deviation.
        epsilon: Constant added to the standard deviation, in units of reward.
    """
    # Use N x N comparisons instead of segment sums: N is only a few thousand, and the order of a
    # GPU scatter is not deterministic.
    same = (group_ids[:, None] == group_ids[None, :]) & (group_ids >= 0)
    count = jnp.maximum(same.sum(axis=1), 1)
    table = jnp.broadcast_to(rewards, same.shape)
    lowest = jnp.min(table, axis=1, where=same, initial=jnp.inf)
    highest = jnp.max(table, axis=1, where=same, initial=-jnp.inf)

    # Subtract the group minimum first, so that a large common offset costs no precision.
    gaps = jnp.where(same, table - lowest[:, None], 0.0)
    mean = gaps.sum(axis=1) / count
    advantages = rewards - lowest - mean
    if normalize_std:
        squares = jnp.where(same, (gaps - mean[:, None]) ** 2, 0.0)
        std = jnp.sqrt(squares.sum(axis=1) / jnp.maximum(count - ddof, 1))
        advantages = advantages / (std + epsilon)
    return jnp.where((lowest == highest) | (group_ids < 0), 0.0, advantages)


def rloo(rewards: Float[Array, " N"], group_ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """Compute leave-one-out advantages: `reward - mean of the other rewards in the group`.

    https://arxiv.org/abs/2402.14740. The baseline excludes the trajectory's own reward, so the
    expected gradient is the gradient of the expected reward. Groups of size 1 and groups with equal
    rewards get exact zeros.

    Args:
        rewards: One reward per trajectory.
        group_ids: See `grpo`.
    """
    count = _make_group_mask(group_ids).sum(axis=1)
    from_mean = grpo(rewards, group_ids, normalize_std=False, ddof=0, epsilon=0.0)
    return from_mean * (count / jnp.maximum(count - 1, 1))


def reinforce_plus_plus(
    rewards: Float[Array, " N"],
    group_ids: Int[Array, " N"],
    token_counts: Int[Array, " N"],
    *,
    baseline: bool,
) -> Float[jax.Array, " N"]:
    """Compute advantages normalized over the batch: `(x - mean) / sqrt(var + 1e-8)`.

    REINFORCE++ (https://arxiv.org/abs/2501.03262). `x` is the reward, minus the group mean if
    `baseline` is set. The mean and the sample variance are over sampled tokens, so each trajectory
    is weighted by its token count. If all `x` are equal, the result is exactly zero.

    Args:
        rewards: One reward per trajectory.
        group_ids: See `grpo`. Without `baseline`, only the sign matters: negative ids are excluded.
        token_counts: Number of sampled tokens in each trajectory.
        baseline: True to subtract the group mean first. In a group with equal rewards, `x` is then
            0, and the advantage is `-mean / std`.
    """
    if baseline:
        rewards = grpo(rewards, group_ids, normalize_std=False, ddof=0, epsilon=0.0)
    valid = group_ids >= 0
    weights = jnp.where(valid, token_counts, 0)
    counted = weights > 0
    lowest = jnp.min(rewards, where=counted, initial=jnp.inf)
    highest = jnp.max(rewards, where=counted, initial=-jnp.inf)

    # Subtract the minimum first, so that a large common offset costs no precision.
    gaps = jnp.where(valid, rewards - jnp.where(lowest < jnp.inf, lowest, 0.0), 0.0)
    num_tokens = weights.sum()
    mean = (weights * gaps).sum() / jnp.maximum(num_tokens, 1)
    variance = (weights * (gaps - mean) ** 2).sum() / jnp.maximum(num_tokens - 1, 1)
    advantages = (gaps - mean) / jnp.sqrt(variance + 1e-8)
    return jnp.where((lowest >= highest) | ~valid, 0.0, advantages)


def pass_at_k(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], *, k: int
) -> Float[jax.Array, " N"]:
    """Compute advantages that maximize the probability that any of k trajectories is correct.

    Pass@k training, analytical form (https://arxiv.org/abs/2508.10751). In a group of n
    trajectories, c of them correct, every k-subset gets reward 1 if any member is correct. The
    subset rewards are normalized by their mean and population standard deviation. The advantage of
    a trajectory is the mean over the subsets that contain it. With F the fraction of subsets that
    fail:

        F = C(n - c, k) / C(n, k)
        correct:  sqrt(F / (1 - F))
        wrong:    -c / (n - c) * sqrt(F / (1 - F))

    This equals the paper's formula without its cancellation errors. Groups in which all subsets or
    no subsets fail get exact zeros, as do groups smaller than k. With k = 1 it equals `grpo` with
    the population standard deviation.

    Args:
        is_correct: True if the answer of the trajectory is correct.
        group_ids: See `grpo`. Group sizes may differ.
        k: Subset size, from 1 to the group size.
    """
    count, num_correct = _count_members(is_correct, group_ids)
    return _pass_at_k(is_correct, count, num_correct, k)


def pass_at_k_combination(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], *, k: int
) -> Float[jax.Array, " N"]:
    """Interpolate between pass@k and pass@1 advantages: `c/n * A_k + (1 - c/n) * A_1`.

    Section 4.4 of https://arxiv.org/abs/2508.10751. The weight of pass@k is the fraction of the
    group that is correct. Groups smaller than k get 0. The arguments are those of `pass_at_k`.
    """
    count, num_correct = _count_members(is_correct, group_ids)
    share = num_correct / jnp.maximum(count, 1)
    advantages_at_k = _pass_at_k(is_correct, count, num_correct, k)
    advantages_at_1 = _pass_at_k(is_correct, count, num_correct, 1)
    return jnp.where(count >= k, share * advantages_at_k + (1.0 - share) * advantages_at_1, 0.0)


def pass_at_k_exceeding(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], *, k: int
) -> Float[jax.Array, " N"]:
    """Compute pass@k advantages, weighted toward hard groups: `A_k * 4 / (10 * ln(c + 0.5))`.

    From https://arxiv.org/abs/2508.10751; c is the number of correct trajectories in the group. The
    factor is 0.99 for c = 1, 0.44 for c = 2, and decreases from there. The arguments are those of
    `pass_at_k`.
    """
    count, num_correct = _count_members(is_correct, group_ids)
    # With c = 0 the logarithm is negative, but the advantages are zero anyway.
    factor = 4.0 / (10.0 * jnp.log(jnp.maximum(num_correct, 1) + 0.5))
    return _pass_at_k(is_correct, count, num_correct, k) * factor


def pass_at_k_full_sampling(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], *, k: int
) -> Float[jax.Array, " N"]:
    """Compute pass@k advantages from disjoint subsets: `n // k` subsets of k per group of n.

    From https://arxiv.org/abs/2508.10751. A subset gets reward 1 if any member is correct. Its
    advantage, which all members get, is `grpo` over the subsets of the group, with the population
    standard deviation. Subsets are consecutive in batch order; the remaining trajectories get 0.

    Args:
        is_correct: See `pass_at_k`.
        group_ids: See `grpo`. Group sizes may differ.
        k: Subset size, from 1 to half the group size. A larger k leaves at most one subset, which
            has nothing to be compared with and gets 0.
    """
    same = _make_group_mask(group_ids)
    position = jnp.tril(same, -1).sum(axis=1)  # position within the group
    subset, num_subsets = position // k, same.sum(axis=1) // k
    in_subset = same & (subset[:, None] == subset[None, :])
    is_hit = (in_subset & is_correct).any(axis=1)
    # Each hit is counted by its k members; there are fewer than k leftovers.
    num_hits = (same & is_hit).sum(axis=1) // k
    advantages = _pass_at_k(is_hit, num_subsets, num_hits, 1)
    return jnp.where(subset < num_subsets, advantages, 0.0)


def pass_at_k_bootstrap(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], key: jax.Array, *, k: int
) -> Float[jax.Array, " N"]:
    """Compute pass@k advantages from random subsets: n subsets of k for a group of n.

    From https://arxiv.org/abs/2508.10751. Each subset holds k distinct trajectories of one group.
    Its reward and advantage are defined in `pass_at_k_full_sampling`. The advantage of a trajectory
    is the sum over the subsets that contain it, k on average. Groups smaller than k get 0.

    Args:
        is_correct: See `pass_at_k`.
        group_ids: See `grpo`. Group sizes may differ.
        key: Random key. Use a new key for each call.
        k: Subset size, from 1 to the group size.
    """
    if k > len(group_ids):
        return jnp.zeros(len(group_ids))
    # Row i samples a subset of its own group: the k trajectories with the highest random scores.
    same = _make_group_mask(group_ids)
    scores = jnp.where(same, jax.random.uniform(key, same.shape), -1.0)
    _, subsets = jax.lax.top_k(scores, k)
    return subset_advantages(is_correct, group_ids, subsets)


def subset_advantages(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], subsets: Int[Array, "N k"]
) -> Float[jax.Array, " N"]:
    """Compute the advantages of `pass_at_k_bootstrap` for given subsets.

    Args:
        is_correct: See `pass_at_k`.
        group_ids: See `grpo`.
        subsets: Row i holds k distinct trajectory indices from the group of trajectory i. The row
            is ignored if the group is smaller than k.
    """
    same = _make_group_mask(group_ids)
    count = same.sum(axis=1)
    rows = jnp.arange(len(group_ids))[:, None]
    is_member = jnp.zeros(same.shape, bool).at[rows, subsets].set(True)
    is_hit = (is_member & is_correct).any(axis=1)
    advantages = _pass_at_k(is_hit, count, (same & is_hit).sum(axis=1), 1)
    advantages = jnp.where(count >= subsets.shape[1], advantages, 0.0)
    return jnp.where(is_member, advantages[:, None], 0.0).sum(axis=0)


def pass_at_k_entropy_guided(
    is_correct: Bool[Array, " N"],
    group_ids: Int[Array, " N"],
    mean_entropies: Float[Array, " N"],
    *,
    k: int,
) -> Float[jax.Array, " N"]:
    """Compute pass@1 advantages for high-entropy groups and pass@k advantages for other groups.

    From https://arxiv.org/abs/2508.10751: the half of the groups with the highest entropy exploits
    (pass@1), and the other half explores (pass@k). With an odd number of groups, the middle group
    explores, as do groups that tie at the boundary.

    Args:
        is_correct: See `pass_at_k`.
        group_ids: See `grpo`. Group sizes may differ.
        mean_entropies: Mean entropy of the sampled tokens of each trajectory, in nats. The entropy
            of a group is the mean over its trajectories.
        k: Subset size of the groups that explore; see `pass_at_k`.
    """
    same = _make_group_mask(group_ids)
    count, num_correct = _count_members(is_correct, group_ids)
    # All members use the entropy of the group's first trajectory, so that rounding cannot split a
    # group.
    first = jnp.argmax(same, axis=1)
    is_first = (first == jnp.arange(len(group_ids))) & (group_ids >= 0)
    entropy = jnp.where(same, mean_entropies, 0.0).sum(axis=1) / jnp.maximum(count, 1)
    entropy = entropy[first]
    num_not_below = (is_first & (entropy[None, :] >= entropy[:, None])).sum(axis=1)
    exploits = num_not_below <= is_first.sum() // 2
    advantages_at_1 = _pass_at_k(is_correct, count, num_correct, 1)
    return jnp.where(exploits, advantages_at_1, _pass_at_k(is_correct, count, num_correct, k))


def _make_group_mask(group_ids: Int[Array, " N"]) -> Bool[jax.Array, "N N"]:
    """Return a mask of the pairs of trajectories in the same group, False for negative ids."""
    group_ids = jnp.asarray(group_ids)
    return (group_ids[:, None] == group_ids[None, :]) & (group_ids >= 0)


def _count_members(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"]
) -> tuple[Int[jax.Array, " N"], Int[jax.Array, " N"]]:
    """Return the number of trajectories, and of correct ones, in each trajectory's group."""
    same = _make_group_mask(group_ids)
    return same.sum(axis=1), (same & is_correct).sum(axis=1)


def _pass_at_k(
    is_correct: Bool[Array, " N"],
    group_size: Int[Array, " N"],
    num_correct: Int[Array, " N"],
    k: int,
) -> Float[jax.Array, " N"]:
    """Compute `pass_at_k` from the numbers that `_count_members` returns."""
    num_wrong = group_size - num_correct

    def draw_subset_member(
        i: jax.Array, shares: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        failed, passed = shares
        left = jnp.maximum(group_size - i, 1)
        passed = passed + failed * (num_correct / left)
        return failed * ((num_wrong - i) / left), passed

    # Sample the subset one member at a time; it passes at its first correct member. Every term of
    # `1 - F` is positive, so nothing cancels, and no binomial coefficient overflows. With fewer
    # than k wrong trajectories, as in every group smaller than k, F reaches zero and stays there.
    start = (jnp.ones(group_size.shape), jnp.zeros(group_size.shape))
    failed, passed = jax.lax.fori_loop(0, k, draw_subset_member, start)
    has_signal = (num_correct > 0) & (failed > 0)
    right = jnp.sqrt(failed / jnp.where(has_signal, passed, 1.0))
    wrong = -right * num_correct / jnp.maximum(num_wrong, 1)
    return jnp.where(has_signal, jnp.where(is_correct, right, wrong), 0.0)


ESTIMATORS: dict[str, Callable[..., Any]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "pass_at_k": pass_at_k,
    "pass_at_k_combination": pass_at_k_combination,
    "pass_at_k_exceeding": pass_at_k_exceeding,
    "pass_at_k_full_sampling": pass_at_k_full_sampling,
    "pass_at_k_bootstrap": pass_at_k_bootstrap,
    "pass_at_k_entropy_guided": pass_at_k_entropy_guided,
}
"""Estimators by `advantage.name`. Arrays are bound by parameter name."""

COLUMNS = (
    *("rewards", "is_correct", "group_ids", "token_counts"),
    *("mean_entropies", "is_abstention", "is_well_formed", "key"),
)
"""Arrays that an estimator may request: `types.Columns`, and `key`, the random key of the step."""
