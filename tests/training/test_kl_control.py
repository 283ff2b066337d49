"""The divergence in rewards, and the coefficients that it moves, on trajectories made by hand."""

import numpy as np
import pytest
from jaxrl.objectives.controllers import AdaptiveKL, DifficultyBuckets, KLBudget, LogKL
from jaxrl.training.method import Controllers

from jaxrl.config import default_config
from jaxrl.training import kl_control
from jaxrl.training.minibatches import Divergence
from tests.episodes import make_failure, make_trajectory


def settings(**changes):
    config = default_config()
    config.update_from_flattened_dict({"kl.coef": 0.5, **changes})
    return config


def strayed(*values):
    """A divergence of so much at each token, the two of the prompt first."""
    per_token = np.array([0, 0, *values], np.float32)
    return Divergence(
        old_logprobs=np.zeros_like(per_token),
        ref_logprobs=np.zeros_like(per_token),
        per_token=per_token,
        num_tokens=len(values),
    )


IN_REWARD = {"kl.place": "reward", "kl.estimator": "k1"}
BATCH = [
    make_trajectory(reward=1.0, length=6),
    make_failure(sample_index=1),
    make_trajectory(reward=0.25, group_id=1, length=4),
]
FOUND = [strayed(0.5, -0.25, 1.0, 0.75), None, strayed(0.25, 0.75)]


def test_the_penalty_by_hand():
    # Sums of 2 and 1 nat, times a coefficient of 0.5.
    config = settings(**IN_REWARD)
    controllers = Controllers.init(config)
    np.testing.assert_allclose(kl_control.penalties(FOUND, controllers, config), [1, 0, 0.5])
    got, metrics = kl_control.penalize(BATCH, FOUND, controllers, config)
    assert [t.reward for t in got] == [0.0, 0.0, -0.25]
    assert got[0].reward_parts["kl"] == -1
    assert got[2].reward_parts["kl"] == -0.5
    assert got[1] is BATCH[1]
    # Half a nat a token in either trajectory.
    assert metrics == {"actor/kl_coef": 0.5, "actor/kl_measured": 0.5}


def test_the_penalty_has_the_coefficient_as_it_stands():
    config = settings(**IN_REWARD, **{"kl.controller": "adaptive"})
    got, metrics = kl_control.penalize(BATCH, FOUND, Controllers(kl=AdaptiveKL(2.0)), config)
    assert [t.reward for t in got] == [-3.0, 0.0, -1.75]
    assert metrics["actor/kl_coef"] == 2.0


def test_a_term_in_the_loss_leaves_rewards_alone():
    config = settings(**{"kl.controller": "log"})
    got, metrics = kl_control.penalize(BATCH, FOUND, Controllers(kl=LogKL(0.125)), config)
    assert got == BATCH
    assert metrics == {"actor/kl_coef": 0.125, "actor/kl_measured": 0.5}
    assert kl_control.penalize(BATCH, None, Controllers(), settings()) == (BATCH, {})


def test_means_per_token_leave_out_what_has_no_token():
    got = kl_control.mean_divergences([*FOUND, strayed()])
    assert got == {0: pytest.approx(0.5), 2: pytest.approx(0.5)}


def test_adaptive_by_hand():
    # 0.2 nats a token are twice the target; the error counts as 0.2, for 512 of 10,000 samples.
    config = settings(**{"kl.coef": 0.001, "kl.controller": "adaptive"})
    batch, found = [make_trajectory(length=4)] * 512, [strayed(0.1, 0.3)] * 512
    got = kl_control.advance(Controllers(kl=AdaptiveKL(0.001)), batch, found, config)
    assert got.kl.coef == pytest.approx(0.00101024)
    # Errors are no samples; trajectories count alike, however long they are.
    got = kl_control.advance(
        Controllers(kl=AdaptiveKL(1.0)),
        [*BATCH, make_trajectory(length=3)],
        [*FOUND, strayed(-0.85)],
        settings(**{"kl.controller": "adaptive", "kl.horizon": 30}),
    )
    # A mean of 0.05, half the target: the error counts as -0.2, for three of thirty samples.
    assert got.kl.coef == pytest.approx(1 - 0.2 * 3 / 30)


def test_adaptive_goes_by_its_target():
    config = settings(**{"kl.controller": "adaptive", "kl.target": 0.625, "kl.horizon": 10})
    got = kl_control.advance(Controllers(kl=AdaptiveKL(1.0)), BATCH, FOUND, config)
    assert got.kl.coef == pytest.approx(1 - 0.2 * 2 / 10)


def test_log_by_hand():
    # The mean of 0.5 is four times the target above it: the average rises by 0.03 of 4.
    config = settings(**{"kl.controller": "log", "kl.target": 0.1})
    state = LogKL(0.02, average=1.0, num_updates=98)
    got = kl_control.advance(Controllers(kl=state), BATCH, FOUND, config)
    assert got.kl.average == pytest.approx(0.97 + 0.03 * 4)
    assert (got.kl.coef, got.kl.num_updates) == (0.02, 99)
    # At the hundredth update the coefficient follows, by at most 0.05 * 0.2 of its logarithm.
    got = kl_control.advance(got, BATCH, FOUND, config)
    assert got.kl.coef == pytest.approx(0.02 * np.exp(0.01))


def test_budgets_by_hand():
    # Easy tasks strayed 0.45 nats a token on average, 0.4 beyond their budget; hard ones 0.1 less
    # than theirs; of medium ones there were none.
    config = settings(**{"kl.controller": "budget"})
    buckets = DifficultyBuckets({"t0": "easy", "t1": "hard"})
    batch = [*BATCH, make_trajectory(sample_index=2, length=3)]
    found = [strayed(0.4, 0.2, 0.4, 0.2), None, strayed(0.0, 0.2), strayed(0.6)]
    controllers = Controllers(buckets=buckets, kl=KLBudget.init())
    got = kl_control.advance(controllers, batch, found, config)
    assert got.kl.multipliers == pytest.approx({"easy": 1.004, "medium": 1.0, "hard": 0.999})
    assert got.buckets == buckets
    tight = settings(
        **{"kl.controller": "budget", "kl.budgets.hard": 0.05, "kl.budget_step": 100.0}
    )
    got = kl_control.advance(controllers, batch, found, tight)
    assert got.kl.multipliers == pytest.approx({"easy": 41.0, "medium": 1.0, "hard": 6.0})
    idle = settings(**{"kl.controller": "budget", "kl.budget_step": 100.0})
    got = kl_control.advance(controllers, batch, found, idle)
    assert got.kl.multipliers["hard"] == 0  # never below


def test_where_nothing_was_measured_nothing_moves():
    for name, state in (
        ("adaptive", AdaptiveKL(0.1)),
        ("log", LogKL(0.1)),
        ("budget", KLBudget.init()),
    ):
        config = settings(**{"kl.controller": name})
        controllers = Controllers(kl=state)
        lost = kl_control.advance(controllers, [BATCH[1]], [None], config)
        assert lost == controllers
    fixed = Controllers.init(settings())
    assert kl_control.advance(fixed, BATCH, None, settings()) == fixed
    assert kl_control.advance(fixed, BATCH, FOUND, settings(**IN_REWARD)) == fixed
