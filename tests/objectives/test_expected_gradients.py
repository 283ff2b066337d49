"""Expected gradients of estimators, summed over all possible groups of samples."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.objectives import losses
from jaxrl.objectives.advantages import (
    grpo,
    pass_at_k,
    pass_at_k_combination,
    pass_at_k_entropy_guided,
    pass_at_k_exceeding,
    pass_at_k_full_sampling,
    reinforce_plus_plus,
    rloo,
    subset_advantages,
)
from jaxrl.objectives.aggregation import AGGREGATIONS
from jaxrl.objectives.kl import KL_ESTIMATORS, kl_estimate
from jaxrl.objectives.turns import compute_turn_returns, estimate_by_turn
from tests.helpers import per_token_of
from tests.objectives.enumerable import (
    binomial,
    enumerate_world,
    expected_loss_gradient,
    expected_policy_gradient,
    expected_turn_gradient,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

cispo_policy_loss = per_token_of(losses.cispo_policy_loss)
clipped_policy_loss = per_token_of(losses.clipped_policy_loss)
gspo_policy_loss = per_token_of(losses.gspo_policy_loss)

ONE, TWO = enumerate_world(1), enumerate_world(2)  # of one token each, of one or two tokens
WORLDS = {1: ONE, 2: TWO}
RNG = np.random.default_rng(3)
LOGITS = {1: RNG.normal(size=ONE.shape), 2: RNG.normal(size=TWO.shape)}
# Near enough for k3, which ends at 10: its limit has a test of its own.
ANCHOR = {
    1: LOGITS[1] + RNG.uniform(-1, 1, ONE.shape),
    2: LOGITS[2] + RNG.uniform(-1, 1, TWO.shape),
}
REWARDS = RNG.normal(size=7)  # any, over TWO's sequences
IS_CORRECT = np.array([0, 1, 0, 0, 0, 1, 0], bool)
SIZE = 4
GROUPS = TWO.groups(SIZE)
IDS = np.full(SIZE, 5)

dr_grpo = functools.partial(grpo, normalize_std=False, ddof=0, epsilon=0.0)
population = functools.partial(grpo, normalize_std=True, ddof=0, epsilon=0.0)
sample = functools.partial(grpo, normalize_std=True, ddof=1, epsilon=0.0)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def assert_equal(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


def assert_close(actual, expected):
    """Compare values that depend on returns, which are float32."""
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


def advantages(estimator, values, groups=GROUPS):
    """Return the advantages [G, n] of each group, computed separately."""
    ids = np.full(groups.shape[1], 5)
    return np.asarray(jax.jit(jax.vmap(lambda row: estimator(row, ids)))(values[groups]))


@functools.cache
def leave_one_out(size):
    return advantages(rloo, REWARDS, TWO.groups(size))


def expected(estimator, values):
    return expected_policy_gradient(TWO, LOGITS[2], GROUPS, advantages(estimator, values))


def gradient(function, logits):
    return np.asarray(jax.jit(jax.grad(function))(logits))


reward_gradient = jax.jit(jax.grad(lambda x, values: TWO.probs(x) @ values))


def gradient_of_reward(values):
    return np.asarray(reward_gradient(LOGITS[2], values))


def success():
    return float(TWO.probs(LOGITS[2]) @ IS_CORRECT)


def cosine(a, b):
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def test_the_world_is_a_probability_space():
    assert_equal(TWO.probs(LOGITS[2]).sum(), 1)
    assert_equal(TWO.group_probs(LOGITS[2], GROUPS).sum(), 1)
    assert sorted(TWO.lengths) == [1, 2, 2, 2, 2, 2, 2]
    # The mean of a score is zero, and its product with the reward the gradient.
    weights = np.asarray(TWO.probs(LOGITS[2]))[:, None, None] * TWO.scores(LOGITS[2])
    assert_equal(weights.sum(axis=0), 0)
    assert_equal(np.tensordot(REWARDS, weights, 1), gradient_of_reward(REWARDS))


def test_rloo_is_the_gradient_of_the_expected_reward():
    assert_equal(expected(rloo, REWARDS), gradient_of_reward(REWARDS))


def test_mean_only_grpo_is_that_gradient_shortened_by_its_own_share_of_the_mean():
    expectation = gradient_of_reward(REWARDS) * (SIZE - 1) / SIZE
    assert_equal(expected(dr_grpo, REWARDS), expectation)


# By turns, each token is one. The first earns by itself alone, whatever follows; the second, where
# there is one, by the whole sequence.
FIRST = RNG.normal(size=3)[TWO.tokens[:, 0]]
SECOND = np.where(TWO.mask[:, 1], RNG.normal(size=7), 0.0)
TURN_REWARDS = np.stack([FIRST, SECOND], axis=1)


def expected_by_turn(estimator, turn_rewards, discount=1.0):
    returns = compute_turn_returns(REWARDS, turn_rewards, discount=discount).astype(np.float64)

    def of_group(rows):
        columns = {"rewards": rows, "group_ids": IDS}
        return estimate_by_turn(estimator, ("rewards", "group_ids"), columns)

    found = np.asarray(jax.jit(jax.vmap(of_group))(returns[GROUPS]))
    return expected_turn_gradient(TWO, LOGITS[2], GROUPS, found)


def test_by_turns_rloo_is_the_gradient_of_all_that_is_earned():
    wanted = gradient_of_reward(REWARDS + TURN_REWARDS.sum(axis=1))
    assert_close(expected_by_turn(rloo, TURN_REWARDS), wanted)
    assert_close(expected_by_turn(dr_grpo, TURN_REWARDS), wanted * (SIZE - 1) / SIZE)
    # The reward of the whole trajectory at every turn has this expectation too.
    assert_close(expected(rloo, REWARDS + TURN_REWARDS.sum(axis=1)), wanted)
    # Discounted, the first turn answers for less of what the second earns.
    assert cosine(expected_by_turn(rloo, TURN_REWARDS, discount=0.3), wanted) < 0.99


# With right and wrong only, let a(c) be the advantage of a correct trajectory where c of n are
# correct. Advantages sum to zero in a group, the mean score of a correct sequence is
# grad p / p, that of a wrong one -grad p / (1 - p). So whatever the estimator, its expectation is
# grad p times E[c a(c)] / (n p (1 - p)), with c binomial.


def reweighting(c_times_a, n, p):
    return sum(binomial(n, c, p) * c_times_a(n, c) for c in range(1, n)) / (n * p * (1 - p))


def failing(n, c, k):
    return math.comb(n - c, k) / math.comb(n, k)


def of_k(n, c, k=2):
    share = failing(n, c, k)
    return c * math.sqrt(share / (1 - share))


LAWS = {  # the estimator and its c a(c); those of pass@k read the verifier's word
    "mean": (dr_grpo, lambda n, c: c * (n - c) / n),
    "leave one out": (rloo, lambda n, c: c * (n - c) / (n - 1)),
    "population": (population, lambda n, c: math.sqrt(c * (n - c))),
    "sample": (sample, lambda n, c: math.sqrt(c * (n - c) * (n - 1) / n)),
    "pass@1": (functools.partial(pass_at_k, k=1), lambda n, c: math.sqrt(c * (n - c))),
    "pass@2": (functools.partial(pass_at_k, k=2), of_k),
    "pass@3": (functools.partial(pass_at_k, k=3), functools.partial(of_k, k=3)),
    "pass@2, combination": (
        functools.partial(pass_at_k_combination, k=2),
        lambda n, c: c / n * of_k(n, c) + (1 - c / n) * of_k(n, c, k=1),
    ),
    "pass@2, exceeding": (
        functools.partial(pass_at_k_exceeding, k=2),
        lambda n, c: of_k(n, c) * 0.4 / math.log(c + 0.5),
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_with_right_and_wrong_only_every_estimator_reweights_the_task(name):
    estimator, c_times_a = LAWS[name]
    values = IS_CORRECT if name.startswith("pass@") else IS_CORRECT * 1.0
    weight = reweighting(c_times_a, SIZE, success())
    assert_equal(expected(estimator, values), weight * gradient_of_reward(IS_CORRECT * 1.0))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_times_its_std_is_the_gradient_of_pass_at_k(k):
    # Times the standard deviation of the subsets' rewards, a correct one's advantage is the share
    # F of subsets that fail; E[c F(c)] = (1 - p)^k (n - k) p.
    shares = np.array([failing(SIZE, c, k) for c in range(SIZE + 1)])
    std = np.sqrt(shares * (1 - shares))[IS_CORRECT[GROUPS].sum(axis=1)]
    values = advantages(functools.partial(pass_at_k, k=k), IS_CORRECT) * std[:, None]
    actual = expected_policy_gradient(TWO, LOGITS[2], GROUPS, values)

    def pass_rate(x):
        return 1 - (1 - TWO.probs(x) @ (IS_CORRECT * 1.0)) ** k

    assert_equal(actual, gradient(pass_rate, LOGITS[2]) * (SIZE - k) / (SIZE * k))


def test_full_sampling_is_grpo_over_subsets():
    # The rewards of the n / k subsets are independent and pass with P: grpo's law, for P.
    k, subsets = 2, SIZE // 2
    p = success()
    passing = 1 - (1 - p) ** k
    law = reweighting(lambda n, c: math.sqrt(c * (n - c)), subsets, passing) / k
    expectation = law * k * (1 - p) ** (k - 1) * gradient_of_reward(IS_CORRECT * 1.0)
    actual = expected(functools.partial(pass_at_k_full_sampling, k=k), IS_CORRECT)
    assert_equal(actual, expectation)


def test_bootstrap_over_all_draws_of_its_subsets():
    # Subsets of a drawn group pass independently with 1 - F; one that passes has k c / n / (1 - F)
    # correct ones on average.
    n, k, p = 3, 2, success()
    groups = TWO.groups(n)
    pairs = list(itertools.combinations(range(n), k))
    draws = np.array(list(itertools.product(pairs, repeat=n)))
    over_draws = jax.vmap(subset_advantages, in_axes=(None, None, 0))
    over_groups = jax.jit(jax.vmap(lambda row: over_draws(row, IDS[:n], draws).mean(axis=0)))
    actual = expected_policy_gradient(
        TWO, LOGITS[2], groups, np.asarray(over_groups(IS_CORRECT[groups]))
    )

    def c_times_a(n, c):
        passing = 1 - failing(n, c, k)
        spread = sum(binomial(n, hits, passing) * math.sqrt(hits * (n - hits)) for hits in range(n))
        return spread * k * c / n / passing

    assert_equal(actual, reweighting(c_times_a, n, p) * gradient_of_reward(IS_CORRECT * 1.0))


def expected_slopes(run, ps, *, size, groups_per_task=1, tokens=(1, 1)):
    """Per task, the expected gradient by the logit of its p, summed over all numbers correct.

    `run(is_correct, ids, counts)` gives the advantages of a batch of the tasks' groups; a wrong
    trajectory has `tokens[0]` tokens and a correct one `tokens[1]`.
    """
    num_groups = groups_per_task * len(ps)
    corrects = np.array(list(itertools.product(range(size + 1), repeat=num_groups)))
    chances = np.repeat(
        [[binomial(size, c, p) for c in range(size + 1)] for p in ps], groups_per_task, 0
    )
    probs = np.take_along_axis(chances[None], corrects[..., None], 2)[..., 0].prod(axis=1)
    rows = (np.arange(size) < corrects[..., None]).reshape(len(corrects), -1)
    ids = np.repeat(np.arange(num_groups), size)
    values = jax.jit(jax.vmap(lambda row, counts: run(row, ids, counts)))(
        rows, np.where(rows, tokens[1], tokens[0])
    )
    scores = rows - np.repeat(ps, groups_per_task * size)  # of a correct one 1 - p, a wrong one -p
    return (probs @ (np.asarray(values) * scores)).reshape(len(ps), -1).mean(axis=1)


PS = (0.1, 0.5)
SLOPES = np.array([0.1 * 0.9, 0.5 * 0.5])  # of the expected reward


def test_entropy_guided_gives_each_task_the_weight_of_its_half():
    entropies = np.repeat([2.0, 1.0], SIZE)
    actual = expected_slopes(
        lambda row, ids, _: pass_at_k_entropy_guided(row, ids, entropies, k=2), PS, size=SIZE
    )
    laws = [
        reweighting(functools.partial(of_k, k=k), SIZE, p) for k, p in zip((1, 2), PS, strict=True)
    ]
    assert_equal(actual, laws * SLOPES)


def imbalance(slopes):
    """Return how much the weights of two tasks differ."""
    weights = slopes / SLOPES
    return abs(weights[0] / weights[1] - 1)


@pytest.mark.parametrize("tokens", [(1, 1), (1, 3)])
def test_reinforce_plus_plus_weighs_tasks_alike_in_large_batches_only(tokens):
    def run(row, ids, counts):
        return reinforce_plus_plus(row * 1.0, ids, counts, baseline=False)

    small, large = (expected_slopes(run, PS, size=size, tokens=tokens) for size in (8, 32))
    assert imbalance(small) > 0.01
    assert imbalance(large) < 0.6**2 * imbalance(small)
    if tokens == (1, 1):  # the limit: over the standard deviation of all rewards
        np.testing.assert_allclose(large, SLOPES / math.sqrt(0.3 * 0.7), rtol=0.03)


@pytest.mark.parametrize("tokens", [(1, 1), (1, 3)])
def test_reinforce_plus_plus_with_baseline_weighs_tasks_alike_with_many_groups(tokens):
    def run(row, ids, counts):
        return reinforce_plus_plus(row * 1.0, ids, counts, baseline=True)

    few, many = (
        imbalance(expected_slopes(run, PS, size=2, groups_per_task=groups, tokens=tokens))
        for groups in (1, 4)
    )
    assert few > 0.09
    assert many < 0.8**2 * few


def clip(logprobs, values, mask, _):
    old = jax.lax.stop_gradient(logprobs)
    settings = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    return clipped_policy_loss(logprobs, old, values, mask, **settings)


def gspo(logprobs, values, mask, segment_ids):
    old = jax.lax.stop_gradient(logprobs)
    return gspo_policy_loss(logprobs, old, values, mask, segment_ids, clip_low=3e-4, clip_high=4e-4)


def cispo(logprobs, values, mask, _):
    old = jax.lax.stop_gradient(logprobs)
    return cispo_policy_loss(logprobs, old, values, mask, clip_low=1.0, clip_high=4.0)


def expected_on_policy(policy_loss, mode):
    """Return the expected gradient of a group's loss in training, with leave-one-out advantages."""

    def loss(x, rows, values):
        logprobs, mask = TWO.compute_token_logprobs(x)[rows], jnp.asarray(TWO.mask)[rows]
        segment_ids = jnp.where(mask, jnp.arange(1, SIZE + 1)[:, None], 0)
        given = {"max_response_tokens": 2} if mode == "seq-mean-token-sum-norm" else {}
        weights = mask * jnp.reshape(AGGREGATIONS[mode](mask.sum(axis=1), **given), (-1, 1))
        return (weights * policy_loss(logprobs, values[:, None] * mask, mask, segment_ids)).sum()

    return expected_loss_gradient(TWO, LOGITS[2], GROUPS, loss, leave_one_out(SIZE))


@pytest.mark.parametrize("policy_loss", [clip, gspo, cispo])
def test_sums_over_trajectories_have_no_length_bias(policy_loss):
    # Where all ratios are 1 the losses are the same: minus advantage times logprob.
    exact = gradient_of_reward(REWARDS)
    assert_equal(expected_on_policy(policy_loss, "seq-mean-token-sum"), -exact)
    if policy_loss is clip:
        assert_equal(expected_on_policy(policy_loss, "seq-mean-token-sum-norm"), -exact / 2)


def test_means_over_trajectories_climb_the_reward_per_token():
    # Of E[R / length] - J * E[1 / length] with J = E[R] held fixed: what is better than average
    # is pushed up the more the shorter it is, what is worse down the less the longer it is.
    mean = float(TWO.probs(LOGITS[2]) @ REWARDS)
    actual = expected_on_policy(clip, "seq-mean-token-mean")
    assert_equal(actual, -gradient_of_reward((REWARDS - mean) / TWO.lengths))
    assert cosine(-actual, gradient_of_reward(REWARDS)) < 0.98


def over_all_tokens(size):
    groups = TWO.groups(size)
    scaled = leave_one_out(size) * size / TWO.lengths[groups].sum(axis=1, keepdims=True)
    return expected_policy_gradient(TWO, LOGITS[2], groups, scaled)


def test_means_over_all_tokens_have_a_length_bias_that_fades_with_the_batch():
    # The samples are in the denominator too. The weights are float32: fifths are rounded.
    actual = expected_on_policy(clip, "token-mean")
    np.testing.assert_allclose(actual, -over_all_tokens(SIZE), rtol=1e-6, atol=1e-8)
    target = gradient_of_reward(REWARDS) / float(TWO.probs(LOGITS[2]) @ TWO.lengths)
    gaps = [np.abs(over_all_tokens(size) - target).max() for size in (2, 3, 4)]
    assert gaps[0] > gaps[1] > gaps[2] > 1e-3


@functools.cache
def expected_kl_gradient(estimator, n):
    """Return the expected gradient of the KL term, summed over tokens, on samples of the policy."""
    world = WORLDS[n]
    anchor, mask = world.compute_token_logprobs(ANCHOR[n]), jnp.asarray(world.mask)

    def loss(x, rows):
        return kl_estimate(
            world.compute_token_logprobs(x)[rows],
            anchor[rows],
            mask[rows],
            estimator=KL_ESTIMATORS[estimator],
        ).sum()

    return expected_loss_gradient(world, LOGITS[n], world.groups(1), loss)


def kl(world, x, anchor):
    """Compute the divergence over whole sequences."""
    gap = world.compute_token_logprobs(x).sum(axis=1) - world.compute_token_logprobs(anchor).sum(
        axis=1
    )
    return world.probs(x) @ gap


def step_by_step(world, x, logits, distance):
    """`distance` of the next token's probabilities, over the contexts that `logits` come to."""
    return world.reach(logits) @ distance(
        jax.nn.softmax(x), jax.nn.softmax(ANCHOR[world.mask.shape[1]])
    )


def divergence(p, q):
    """KL(p || q)."""
    return (p * (jnp.log(p) - jnp.log(q))).sum(axis=1)


def difference(p, q):
    """Twice the total variation."""
    return jnp.abs(p - q).sum(axis=1)


@pytest.mark.parametrize("n", [1, 2])
def test_k1_and_k3_are_worth_the_kl_divergence_and_the_others_are_not(n):
    world = WORLDS[n]
    logprobs, anchor = (
        world.compute_token_logprobs(LOGITS[n]),
        world.compute_token_logprobs(ANCHOR[n]),
    )
    values = {
        name: float(
            world.probs(LOGITS[n])
            @ kl_estimate(
                logprobs, anchor, jnp.asarray(world.mask), estimator=KL_ESTIMATORS[name]
            ).sum(axis=1)
        )
        for name in ("k1", "k2", "k3", "abs")
    }
    exact = float(kl(world, LOGITS[n], ANCHOR[n]))
    assert_equal([values["k1"], values["k3"]], [exact, exact])
    assert abs(values["k2"] / exact - 1) > 0.01
    assert values["abs"] > 1.5 * exact


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("estimator", "distance"),
    [
        ("k2", divergence),
        ("k3", lambda p, q: divergence(q, p)),
        ("abs", difference),
    ],
)
def test_what_the_kl_estimators_descend_as_losses(estimator, distance, n):
    # Token by token: that a token leads to contexts nearer the anchor or farther off, no loss sees.
    world = WORLDS[n]
    exact = gradient(lambda x: step_by_step(world, x, LOGITS[n], distance), LOGITS[n])
    assert_equal(expected_kl_gradient(estimator, n), exact)


def test_k1_as_a_loss_does_nothing():
    np.testing.assert_allclose(expected_kl_gradient("k1", 2), 0, atol=1e-12)


def test_k2_as_a_loss_is_the_gradient_of_the_kl_divergence_for_one_token_only():
    one = gradient(lambda x: kl(ONE, x, ANCHOR[1]), LOGITS[1])
    assert_equal(expected_kl_gradient("k2", 1), one)
    two = gradient(lambda x: kl(TWO, x, ANCHOR[2]), LOGITS[2])
    gap = two - expected_kl_gradient("k2", 2)
    # Missing is how the first token chooses the second's context.
    assert np.abs(gap[0]).max() > 1e-3
    np.testing.assert_allclose(gap[1:], 0, atol=1e-11)


def test_kl_in_the_reward_is_the_whole_gradient():
    beta = 0.3
    logprobs, anchor = TWO.compute_token_logprobs(LOGITS[2]), TWO.compute_token_logprobs(ANCHOR[2])
    rewards = REWARDS - beta * np.asarray((logprobs - anchor).sum(axis=1))
    exact = gradient(lambda x: TWO.probs(x) @ REWARDS - beta * kl(TWO, x, ANCHOR[2]), LOGITS[2])
    assert_equal(expected(rloo, rewards), exact)
