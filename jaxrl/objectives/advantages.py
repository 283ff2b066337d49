"""Advantage estimators: from one reward a trajectory to one advantage a trajectory, or a turn."""

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
    """Group-relative advantages: `(reward - mean) / (std + epsilon)` within each group.

    DeepSeekMath section 4.1 (https://arxiv.org/abs/2402.03300); without the division it is
    Dr. GRPO (https://arxiv.org/abs/2503.20783). A group whose rewards are all equal gets exact
    zeros, where a rounded mean over a small `epsilon` would make advantages out of nothing. So
    does a group of one, whose raw reward other implementations keep.

    Args:
        rewards: one a trajectory.
        group_ids: trajectories with the same id are compared, wherever they stand. Those with a
            negative id count for nothing and get 0.
        normalize_std: divide by the group's standard deviation.
        ddof: 0 for the population's standard deviation, 1 for the sample's.
        epsilon: added to the standard deviation, in units of reward.
    """
    # N x N rather than segment sums: N is some thousands, and a GPU scatters in any order.
    same = (group_ids[:, None] == group_ids[None, :]) & (group_ids >= 0)
    count = jnp.maximum(same.sum(axis=1), 1)
    table = jnp.broadcast_to(rewards, same.shape)
    lowest = jnp.min(table, axis=1, where=same, initial=jnp.inf)
    highest = jnp.max(table, axis=1, where=same, initial=-jnp.inf)

    # Measured from the group's lowest, so that a large common offset costs no precision.
    gaps = jnp.where(same, table - lowest[:, None], 0.0)
    mean = gaps.sum(axis=1) / count
    advantages = rewards - lowest - mean
    if normalize_std:
        squares = jnp.where(same, (gaps - mean[:, None]) ** 2, 0.0)
        std = jnp.sqrt(squares.sum(axis=1) / jnp.maximum(count - ddof, 1))
        advantages = advantages / (std + epsilon)
    return jnp.where((lowest == highest) | (group_ids < 0), 0.0, advantages)


def rloo(rewards: Float[Array, " N"], group_ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """Leave-one-out advantages: `reward - mean of the group's other rewards`.

    https://arxiv.org/abs/2402.14740. The baseline knows nothing of the trajectory it judges, so
    the expected gradient is that of the expected reward. A group of one and a group whose
    rewards are all equal get exact zeros.

    Args:
        rewards: one a trajectory.
        group_ids: as in `grpo`.
    """
    count = _in_group(group_ids).sum(axis=1)
    from_mean = grpo(rewards, group_ids, normalize_std=False, ddof=0, epsilon=0.0)
    return from_mean * (count / jnp.maximum(count - 1, 1))


def reinforce_plus_plus(
    rewards: Float[Array, " N"],
    group_ids: Int[Array, " N"],
    token_counts: Int[Array, " N"],
    *,
    baseline: bool,
) -> Float[jax.Array, " N"]:
    """Advantages normalised over the batch: `(x - mean) / sqrt(var + 1e-8)`.

    REINFORCE++ (https://arxiv.org/abs/2501.03262). `x` is the reward, or with `baseline` the
    reward less its group's mean. The mean and the sample variance are the sampled tokens': a
    trajectory counts as often as it has tokens. Where all `x` are equal, exact zeros.

    Args:
        rewards: one a trajectory.
        group_ids: as in `grpo`. Without `baseline`, only their signs are read.
        token_counts: sampled tokens of each trajectory.
        baseline: take off the group's mean first. A trajectory of a group without differences is
            then at 0, and its advantage at `-mean / std`.
    """
    if baseline:
        rewards = grpo(rewards, group_ids, normalize_std=False, ddof=0, epsilon=0.0)
    valid = group_ids >= 0
    weights = jnp.where(valid, token_counts, 0)
    counted = weights > 0
    lowest = jnp.min(rewards, where=counted, initial=jnp.inf)
    highest = jnp.max(rewards, where=counted, initial=-jnp.inf)

    # Measured from the lowest, so that a large common offset costs no precision.
    gaps = jnp.where(valid, rewards - jnp.where(lowest < jnp.inf, lowest, 0.0), 0.0)
    num_tokens = weights.sum()
    mean = (weights * gaps).sum() / jnp.maximum(num_tokens, 1)
    variance = (weights * (gaps - mean) ** 2).sum() / jnp.maximum(num_tokens - 1, 1)
    advantages = (gaps - mean) / jnp.sqrt(variance + 1e-8)
    return jnp.where((lowest >= highest) | ~valid, 0.0, advantages)


def pass_at_k(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], *, k: int
) -> Float[jax.Array, " N"]:
    """Advantages for the chance that at least one of k trajectories is correct.

    Pass@k training, analytical form (https://arxiv.org/abs/2508.10751). All k-subsets of a group
    of n, c of them correct, are rewarded with 1 if any member is correct, and normalised by the
    mean and population standard deviation of these rewards; a trajectory's advantage is the mean
    over the subsets that it is in. With F the share of subsets that fail:

        F = C(n - c, k) / C(n, k)
        correct:  sqrt(F / (1 - F))
        wrong:    -c / (n - c) * sqrt(F / (1 - F))

    This equals the paper's form without its cancellations. Groups where no subset or every
    subset fails get exact zeros, and so do groups of fewer than k. With k = 1 it is `grpo` with
    the population's standard deviation.

    Args:
        is_correct: the verifier's word, one a trajectory.
        group_ids: as in `grpo`. Groups may be of different sizes.
        k: trajectories in a subset, at least 1 and at most the group size.
    """
    count, num_correct = _group_counts(is_correct, group_ids)
    return _pass_at_k(is_correct, count, num_correct, k)


def pass_at_k_combination(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], *, k: int
) -> Float[jax.Array, " N"]:
    """Interpolates between pass@k and pass@1: `c/n * A_k + (1 - c/n) * A_1`.

    Section 4.4 of https://arxiv.org/abs/2508.10751: the more of a group's n trajectories are
    correct, the more pass@k counts. Groups of fewer than k get 0. Arguments as in `pass_at_k`.
    """
    count, num_correct = _group_counts(is_correct, group_ids)
    share = num_correct / jnp.maximum(count, 1)
    of_k = _pass_at_k(is_correct, count, num_correct, k)
    of_one = _pass_at_k(is_correct, count, num_correct, 1)
    return jnp.where(count >= k, share * of_k + (1.0 - share) * of_one, 0.0)


def pass_at_k_exceeding(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], *, k: int
) -> Float[jax.Array, " N"]:
    """Pass@k with more weight on hard groups: `A_k * 4 / (10 * ln(c + 0.5))`.

    From https://arxiv.org/abs/2508.10751; c is the group's number of correct trajectories. The
    factor is 0.99 for one, 0.44 for two, and falls from there. Arguments as in `pass_at_k`.
    """
    count, num_correct = _group_counts(is_correct, group_ids)
    # Without a correct one the advantages are zero, and the logarithm is negative.
    factor = 4.0 / (10.0 * jnp.log(jnp.maximum(num_correct, 1) + 0.5))
    return _pass_at_k(is_correct, count, num_correct, k) * factor


def pass_at_k_full_sampling(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], *, k: int
) -> Float[jax.Array, " N"]:
    """Pass@k from disjoint subsets: each group of n is cut into `n // k` of k trajectories.

    From https://arxiv.org/abs/2508.10751: a subset is rewarded with 1 if any member is correct,
    its advantage is `grpo` with the population's standard deviation over the group's subsets,
    and every member gets it. The cut follows the order in the batch; what is left over gets 0.

    Args:
        is_correct: as in `pass_at_k`.
        group_ids: as in `grpo`. Groups may be of different sizes.
        k: trajectories in a subset, at least 1 and at most half the group size: a single subset
            has nothing to be compared with and gets 0.
    """
    same = _in_group(group_ids)
    place = jnp.tril(same, -1).sum(axis=1)  # in its group
    subset, num_subsets = place // k, same.sum(axis=1) // k
    in_subset = same & (subset[:, None] == subset[None, :])
    is_hit = (in_subset & is_correct).any(axis=1)
    # Each hit was counted by k members, and what is left over is fewer than k.
    num_hits = (same & is_hit).sum(axis=1) // k
    advantages = _pass_at_k(is_hit, num_subsets, num_hits, 1)
    return jnp.where(subset < num_subsets, advantages, 0.0)


def pass_at_k_bootstrap(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], key: jax.Array, *, k: int
) -> Float[jax.Array, " N"]:
    """Pass@k from random subsets: as many as the group has trajectories.

    From https://arxiv.org/abs/2508.10751: each subset holds k different trajectories of one
    group. Subsets are rewarded and compared as in `pass_at_k_full_sampling`; a trajectory gets
    the sum over the subsets that it is in, on average k of them. Groups of fewer than k get 0.

    Args:
        is_correct: as in `pass_at_k`.
        group_ids: as in `grpo`. Groups may be of different sizes.
        key: a new one for every call.
        k: trajectories in a subset, at least 1 and at most the group size.
    """
    if k > len(group_ids):
        return jnp.zeros(len(group_ids))
    # Row i draws a subset of its own group: the k trajectories with the highest random scores.
    same = _in_group(group_ids)
    scores = jnp.where(same, jax.random.uniform(key, same.shape), -1.0)
    _, subsets = jax.lax.top_k(scores, k)
    return advantages_of_subsets(is_correct, group_ids, subsets)


def advantages_of_subsets(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"], subsets: Int[Array, "N k"]
) -> Float[jax.Array, " N"]:
    """`pass_at_k_bootstrap` for given subsets.

    Args:
        is_correct: as in `pass_at_k`.
        group_ids: as in `grpo`.
        subsets: row i holds k different indices of trajectories in the group of trajectory i.
            Not read where that group has fewer than k.
    """
    same = _in_group(group_ids)
    count = same.sum(axis=1)
    rows = jnp.arange(len(group_ids))[:, None]
    is_member = jnp.zeros(same.shape, bool).at[rows, subsets].set(True)
    is_hit = (is_member & is_correct).any(axis=1)
    advantages = _pass_at_k(is_hit, count, (same & is_hit).sum(axis=1), 1)
    advantages = jnp.where(count >= subsets.shape[1], advantages, 0.0)
    return jnp.where(is_member, advantages[:, None], 0.0).sum(axis=0)


def entropy_guided(
    is_correct: Bool[Array, " N"],
    group_ids: Int[Array, " N"],
    mean_entropies: Float[Array, " N"],
    *,
    k: int,
) -> Float[jax.Array, " N"]:
    """Pass@1 for the half of the groups with the highest entropy, pass@k for the others.

    From https://arxiv.org/abs/2508.10751: where the policy is undecided it may exploit, where it
    is sure it should explore. Of an odd number of groups, the middle one explores; so do groups
    that tie across the middle.

    Args:
        is_correct: as in `pass_at_k`.
        group_ids: as in `grpo`. Groups may be of different sizes.
        mean_entropies: nats, the mean over each trajectory's sampled tokens. A group's entropy is
            the mean over its trajectories.
        k: as in `pass_at_k`; for the groups that explore.
    """
    same = _in_group(group_ids)
    count, num_correct = _group_counts(is_correct, group_ids)
    # A group's first trajectory stands for all, so that rounding cannot part a group.
    first = jnp.argmax(same, axis=1)
    is_first = (first == jnp.arange(len(group_ids))) & (group_ids >= 0)
    entropy = jnp.where(same, mean_entropies, 0.0).sum(axis=1) / jnp.maximum(count, 1)
    entropy = entropy[first]
    num_not_below = (is_first & (entropy[None, :] >= entropy[:, None])).sum(axis=1)
    exploits = num_not_below <= is_first.sum() // 2
    of_one = _pass_at_k(is_correct, count, num_correct, 1)
    return jnp.where(exploits, of_one, _pass_at_k(is_correct, count, num_correct, k))


def _in_group(group_ids: Int[Array, " N"]) -> Bool[jax.Array, "N N"]:
    """True where two trajectories are of one group; never for negative ids."""
    group_ids = jnp.asarray(group_ids)
    return (group_ids[:, None] == group_ids[None, :]) & (group_ids >= 0)


def _group_counts(
    is_correct: Bool[Array, " N"], group_ids: Int[Array, " N"]
) -> tuple[Int[jax.Array, " N"], Int[jax.Array, " N"]]:
    """Trajectories and correct trajectories in each one's group; zeros for negative ids."""
    same = _in_group(group_ids)
    return same.sum(axis=1), (same & is_correct).sum(axis=1)


def _pass_at_k(
    is_correct: Bool[Array, " N"], count: Int[Array, " N"], num_correct: Int[Array, " N"], k: int
) -> Float[jax.Array, " N"]:
    """`pass_at_k` from the counts of each trajectory's group."""
    num_wrong = count - num_correct

    def draw(i: jax.Array, shares: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        failed, passed = shares
        left = jnp.maximum(count - i, 1)
        passed = passed + failed * (num_correct / left)
        return failed * ((num_wrong - i) / left), passed

    # A subset is drawn one by one and passes with its first correct member. Every term of 1 - F is
    # then positive: nothing cancels, and no binomial coefficient overflows. With fewer than k wrong
    # ones, which is so in groups of fewer than k, F has passed through zero and stays there.
    start = (jnp.ones(count.shape), jnp.zeros(count.shape))
    failed, passed = jax.lax.fori_loop(0, k, draw, start)
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
    "pass_at_k_entropy_guided": entropy_guided,
}
"""Estimators by `advantage.name`. Arrays are bound by the names of their parameters."""

COLUMNS = (
    *("rewards", "is_correct", "group_ids", "token_counts"),
    *("mean_entropies", "is_abstention", "is_well_formed", "key"),
)
"""Arrays an estimator may ask for: `types.Columns` has all but `key`, a random key of the step."""
