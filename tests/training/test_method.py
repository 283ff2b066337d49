"""Estimators by name on trajectories, and what a run knows of itself from step to step."""

import dataclasses
import json
from functools import cache

import numpy as np
import pytest
from jaxrl.objectives.controllers import (
    AdaptiveKL,
    DifficultyBuckets,
    EntropyCoefficients,
    KLBudget,
    LogKL,
    SkipSet,
    StageGate,
)
from jaxrl.training.method import Controllers, k_at, make_estimator

from jaxrl.config import ADVANTAGES, default_config
from jaxrl.objectives.entropy import EntropyThreshold
from jaxrl.training import method
from tests.episodes import make_failure, make_trajectory

pytestmark = pytest.mark.usefixtures("quick_compilation")


def settings(**changes):
    config = default_config()
    config.update_from_flattened_dict(changes)
    return config


NUM_TRAJECTORIES = 10  # in every call, so that each estimator compiles once


@cache
def estimator(name, changes):
    return make_estimator(settings(**{"advantage.name": name, **dict(changes)}))


def estimate(name, trajectories, step=0, k=4, **changes):
    """Advantages by name, of a batch that environment errors fill up."""
    rest = failures(group_id=99, count=NUM_TRAJECTORIES - len(trajectories))
    got = estimator(name, tuple(changes.items()))([*trajectories, *rest], step, k)
    np.testing.assert_array_equal(got[len(trajectories) :], 0)
    return got[: len(trajectories)]


def rewarded(rewards, ids=None, tokens=None):
    """Trajectories of these rewards, two prompt tokens before those that are sampled."""
    ids = [0] * len(rewards) if ids is None else ids
    tokens = [4] * len(rewards) if tokens is None else tokens
    return [
        make_trajectory(reward=reward, group_id=group, sample_index=i, length=2 + count)
        for i, (reward, group, count) in enumerate(zip(rewards, ids, tokens, strict=True))
    ]


def judged(verdicts, group_id=0, entropy=0.5):
    """Trajectories of these verdicts, with rewards that would say the opposite."""
    made = [
        make_trajectory(reward=1.0 - right, group_id=group_id, sample_index=i)
        for i, right in enumerate(verdicts)
    ]
    return [
        dataclasses.replace(
            t,
            is_correct=bool(right),
            rollout_entropies=np.where(t.loss_mask, entropy, 0).astype(np.float32),
        )
        for t, right in zip(made, verdicts, strict=True)
    ]


def failures(group_id=0, count=2):
    """Environment errors, which would be right and richly rewarded."""
    made = [make_failure(group_id=group_id, reward=9.0, sample_index=9) for _ in range(count)]
    return [dataclasses.replace(t, is_correct=True) for t in made]


REWARDS = [2.5, 0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("name", "changes", "ids", "expected"),
    [
        ("grpo", {}, [0] * 4, [1.3568, 0.150756, -0.753778, -0.753778]),
        (
            "grpo",
            {"advantage.ddof": 0, "advantage.epsilon": 1e-8},
            [0] * 4,
            [1.566699, 0.174078, -0.870388, -0.870388],
        ),
        ("grpo", {"advantage.normalize_std": False}, [0] * 4, [2.25, 0.25, -1.25, -1.25]),
        ("rloo", {}, [0] * 4, [3.0, 1 / 3, -5 / 3, -5 / 3]),
        ("reinforce_plus_plus", {}, [0] * 4, [1.660548, 0.247316, -0.812609, -0.812609]),
        (
            "reinforce_plus_plus",
            {"advantage.baseline": True},
            [0, 0, 1, 1],
            [1.490788, -1.219736, 0.135526, 0.135526],
        ),
    ],
)
def test_advantages_of_rewards_by_hand(name, changes, ids, expected):
    made = rewarded(REWARDS, ids, tokens=[2, 3, 1, 4])
    # Errors stand among the others, and count for nothing.
    first, second = failures(ids[0])
    got = estimate(name, [first, *made[:2], second, *made[2:]], **changes)
    np.testing.assert_allclose(got[[1, 2, 4, 5]], expected, atol=2e-6)
    np.testing.assert_array_equal(got[[0, 3]], 0)
    assert got.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("pass_at_k", 0.522233, -0.174078),
        ("pass_at_k_combination", 1.429596, -0.476532),
        ("pass_at_k_exceeding", 0.522233 * 0.436543, -0.174078 * 0.436543),
    ],
)
def test_advantages_of_verdicts_by_hand(name, right, wrong):
    # Eight of which two are right, with k = 4; errors would make it ten of which four are.
    got = estimate(name, [*judged([0, 1, 0, 0, 1, 0, 0, 0]), *failures()])
    expected = np.where([0, 1, 0, 0, 1, 0, 0, 0], right, wrong)
    np.testing.assert_allclose(got[:8], expected, atol=2e-6)
    np.testing.assert_array_equal(got[8:], 0)


def test_full_sampling_by_hand():
    verdicts = judged([1, 0, 0, 0, 0, 0, 0, 0])
    got = estimate("pass_at_k_full_sampling", [*verdicts[:3], *failures(), *verdicts[3:]])
    np.testing.assert_allclose(got, [1, 1, 1, 0, 0, 1, -1, -1, -1, -1], atol=1e-6)


def test_the_entropy_of_sampled_tokens_says_which_groups_exploit():
    sure, unsure = judged([1, 0, 0, 0], 3, entropy=0.2), judged([1, 0, 0, 0], 5, entropy=0.8)
    got = estimate("pass_at_k_entropy_guided", sure + unsure, k=2)
    np.testing.assert_allclose(got[:4], [1, *[-1 / 3] * 3], atol=1e-6)
    np.testing.assert_allclose(got[4:], [1.732051, *[-0.57735] * 3], atol=1e-6)


def test_bootstrap_draws_anew_at_every_step_and_repeats():
    verdicts = judged([1, 0, 0, 1, 0, 0, 0, 0])
    draws = [estimate("pass_at_k_bootstrap", verdicts, step, k=2) for step in range(6)]
    again = estimate("pass_at_k_bootstrap", verdicts, 3, k=2)
    np.testing.assert_array_equal(again, draws[3])
    assert len({draw.tobytes() for draw in draws}) > 3
    other = estimate("pass_at_k_bootstrap", verdicts, 3, k=2, seed=1)
    assert not np.array_equal(other, draws[3])
    for draw in draws:  # every subset's members share its advantage, and these add up to zero
        assert draw.sum() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_pass_at_k_reads_verdicts_only_and_the_others_rewards_only(name):
    verdicts = judged([1, 1, 0, 0, 0, 0, 1, 0])
    priced = [dataclasses.replace(t, reward=0.1 * i) for i, t in enumerate(verdicts)]
    turned = [dataclasses.replace(t, is_correct=not t.is_correct) for t in priced]
    of_verdicts, of_prices, of_turned = (estimate(name, x, k=2) for x in (verdicts, priced, turned))
    reads_verdicts = name.startswith("pass_at_k")
    assert np.array_equal(of_verdicts, of_prices) == reads_verdicts
    assert np.array_equal(of_prices, of_turned) != reads_verdicts


@pytest.mark.parametrize("name", ADVANTAGES)
def test_only_environment_errors_are_nothing(name):
    np.testing.assert_array_equal(estimate(name, failures(count=8), k=2), 0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [((), [4, 4, 4, 4]), (((0, 3),), [3, 3, 3, 3]), (((0, 3), (1, 2), (3, 1)), [3, 2, 2, 1])],
)
def test_k_follows_its_schedule_by_the_step_of_the_stage(schedule, expected):
    advantage = settings(**{"advantage.k_schedule": schedule}).advantage
    assert [k_at(advantage, stage_step) for stage_step in range(4)] == expected


@pytest.mark.parametrize("name", ["pass_at_k", "pass_at_k_combination"])
def test_with_k_of_one_pass_at_k_is_grpo_with_the_deviation_of_the_population(name):
    got = estimate(name, judged([1, 0, 0, 0]), k=1)
    np.testing.assert_allclose(got, [1.732051, *[-0.57735] * 3], atol=2e-6)


def test_each_k_compiles_once(monkeypatch):
    traced = []

    def traces(is_correct, group_ids, *, k):
        traced.append(k)
        return is_correct * k

    monkeypatch.setitem(method._ESTIMATORS, "pass_at_k", traces)
    estimate = make_estimator(settings(**{"advantage.name": "pass_at_k"}))
    for step, k in enumerate([4, 4, 1, 1, 1, 4]):
        np.testing.assert_array_equal(estimate(judged([0, 1]), step, k), [0, k])
    assert traced == [4, 1]


# Controllers.

ALL = {
    "shaping.boundary_aware": True,
    "shaping.entropy_reward": True,
    "filter.skip_solved": True,
    "kl.coef": 0.02,
    "kl.controller": "budget",
    "shaping.alpha_init": 0.25,
}
MOVED = Controllers(
    gate=StageGate(best=1 / 3, tolerance=2, is_late=False),
    threshold=EntropyThreshold(value=0.1 + 0.2),
    buckets=DifficultyBuckets({"q0": "easy", "q1": "hard"}),
    coefficients=EntropyCoefficients({"easy": 0.6, "medium": 0.0, "hard": 0.65}, {"easy": 12}),
    kl=KLBudget({"easy": 1.004, "medium": 0.0, "hard": 1e-17}),
    skipped=SkipSet({"q0": 0.05}),
)


def through_json(controllers, **changes):
    saved = json.loads(json.dumps(dataclasses.asdict(controllers)))
    return Controllers.from_json(saved, settings(**{**ALL, **changes}))


def test_a_method_without_states_has_none():
    assert Controllers.init(settings()) == Controllers()
    assert Controllers().metrics() == {}
    assert Controllers().is_late
    assert Controllers().level is None
    assert Controllers().bucket("q0") == "hard"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"shaping.boundary_aware": True}, ["gate"]),
        ({"shaping.boundary_aware": True, "shaping.stage_level": False}, []),
        ({"shaping.entropy_reward": True}, ["threshold", "buckets", "coefficients"]),
        ({"kl.coef": 0.1, "kl.low_factor": 0.5}, ["threshold"]),
        ({"kl.coef": 0.1, "kl.second_chance": True}, ["threshold", "buckets"]),
        ({"kl.coef": 0.1, "kl.controller": "budget"}, ["buckets", "kl"]),
        ({"kl.coef": 0.1, "kl.controller": "adaptive"}, ["kl"]),
        ({"kl.coef": 0.1, "kl.place": "reward"}, []),
        ({"filter.skip_solved": True}, ["skipped"]),
    ],
    ids=str,
)
def test_a_method_has_the_states_that_it_reads(changes, names):
    made = Controllers.init(settings(**changes))
    states = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    assert {name for name, state in states.items() if state is not None} == set(names)


def test_first_states_are_those_of_the_configuration():
    made = Controllers.init(settings(**ALL))
    assert made.coefficients.alphas == {"easy": 0.25, "medium": 0.25, "hard": 0.25}
    assert made.kl_coef(settings(**ALL)) == 0.02
    for name, kind in (("adaptive", AdaptiveKL), ("log", LogKL)):
        config = settings(**{**ALL, "kl.controller": name})
        assert Controllers.init(config).kl == kind(0.02)
        assert dataclasses.replace(MOVED, kl=kind(0.07)).kl_coef(config) == 0.07


@pytest.mark.parametrize(
    "kl", [MOVED.kl, AdaptiveKL(0.1 + 0.2), LogKL(1e-4, -1 / 3, 7)], ids=lambda kl: str(type(kl))
)
def test_states_survive_json_bit_for_bit(kl):
    names = {KLBudget: "budget", AdaptiveKL: "adaptive", LogKL: "log"}
    moved = dataclasses.replace(MOVED, kl=kl)
    assert through_json(moved, **{"kl.controller": names[type(kl)]}) == moved
    assert through_json(Controllers.init(settings(**ALL))) == Controllers.init(settings(**ALL))


def test_a_changed_configuration_keeps_what_it_still_reads():
    # Another controller of the KL term starts afresh; the rest goes on.
    got = through_json(MOVED, **{"kl.controller": "log"})
    assert got == dataclasses.replace(MOVED, kl=LogKL(0.02))
    # What is turned off is dropped; what is turned on starts afresh.
    off = through_json(MOVED, **{"shaping.entropy_reward": False, "shaping.boundary_aware": False})
    assert off == Controllers(buckets=MOVED.buckets, kl=MOVED.kl, skipped=MOVED.skipped)
    saved = json.loads(json.dumps(dataclasses.asdict(off)))
    again = Controllers.from_json(saved, settings(**ALL))
    assert again.buckets == MOVED.buckets
    assert (again.gate, again.threshold) == (StageGate.init(), EntropyThreshold.init())
    # So does all of a checkpoint that knows of no controllers.
    assert Controllers.from_json({}, settings(**ALL)) == Controllers.init(settings(**ALL))


def test_every_state_is_a_metric():
    assert MOVED.metrics() == {
        "controller/gate/best": 1 / 3,
        "controller/gate/tolerance": 2,
        "controller/gate/is_late": False,
        "controller/threshold/value": 0.1 + 0.2,
        "controller/buckets/easy": 1,
        "controller/buckets/medium": 0,
        "controller/buckets/hard": 1,
        "controller/coefficients/alphas/easy": 0.6,
        "controller/coefficients/alphas/medium": 0.0,
        "controller/coefficients/alphas/hard": 0.65,
        "controller/coefficients/targets/easy": 12,
        "controller/kl/multipliers/easy": 1.004,
        "controller/kl/multipliers/medium": 0.0,
        "controller/kl/multipliers/hard": 1e-17,
        "controller/skipped/count": 1,
    }
    moved = dataclasses.replace(MOVED, kl=LogKL(1e-4, 0.5, 7))
    assert moved.metrics()["controller/kl/average"] == 0.5


def test_of_tasks_only_their_count_is_a_metric():
    for count in (0, 1, 3, 4):
        skipped = SkipSet({f"q{i}": 0.0 for i in range(count)})
        buckets = DifficultyBuckets({f"q{i}": "easy" for i in range(count)})
        assert Controllers(skipped=skipped, buckets=buckets).metrics() == {
            "controller/skipped/count": count,
            "controller/buckets/easy": count,
            "controller/buckets/medium": 0,
            "controller/buckets/hard": 0,
        }


def test_what_is_read_of_the_states():
    assert not MOVED.is_late
    assert dataclasses.replace(MOVED, gate=StageGate(is_late=True)).is_late
    assert MOVED.level == 0.1 + 0.2
    assert [MOVED.bucket(task) for task in ("q0", "q1", "new")] == ["easy", "hard", "hard"]
