"""Named estimators with fixed trajectories; environment errors have no effect."""

import dataclasses
from functools import cache

import numpy as np
import pytest

from jaxrl.objectives.advantages import ESTIMATORS
from jaxrl.types import Group, flatten_groups, replace_fields
from tests.episodes import (
    grouped,
    in_turns,
    is_same,
    make_failure,
    make_trajectory,
)
from tests.helpers import estimator

pytestmark = pytest.mark.usefixtures("quick_compilation")

NUM_TRAJECTORIES = 10  # in every call, so that each estimator compiles once


@cache
def build_estimator(name, changes):
    return estimator(**{"advantage.name": name, **dict(changes)})


def estimate(name, trajectories, step=0, k=4, **changes):
    """Return the advantages of a named estimator, for a batch padded with environment errors."""
    rest = make_failures(task_number=99, count=NUM_TRAJECTORIES - len(trajectories))
    groups = grouped([*trajectories, *rest])
    changes = {"advantage.pass_at_k.k": k, **changes}
    actual = flatten_groups(build_estimator(name, tuple(changes.items()))(groups, step, 0))
    assert is_same([dataclasses.replace(t, advantage=None) for t in actual], flatten_groups(groups))
    assert all(t.advantage == 0 for t in actual[len(trajectories) :])
    return np.array([t.advantage for t in actual[: len(trajectories)]])


def judged(verdicts, task_number=0, entropy=0.5):
    """Return trajectories with the given verdicts, and rewards that suggest the opposite."""
    members = [
        make_trajectory(reward=1.0 - right, task_number=task_number, sample_index=i)
        for i, right in enumerate(verdicts)
    ]
    return [
        dataclasses.replace(
            t,
            is_correct=bool(right),
            rollout_entropies=np.where(t.loss_mask, entropy, 0).astype(np.float32),
        )
        for t, right in zip(members, verdicts, strict=True)
    ]


def make_failures(task_number=0, count=2):
    """Return environment errors whose fields look right and highly rewarded."""
    failure = make_failure(task_number=task_number, reward=9.0, sample_index=9)
    return [dataclasses.replace(failure, is_correct=True)] * count


@pytest.mark.parametrize(
    ("name", "changes", "ids", "expected"),
    [
        ("grpo", {}, [0] * 4, [1.3568, 0.150756, -0.753778, -0.753778]),
        ("grpo", {"advantage.grpo.normalize_std": False}, [0] * 4, [2.25, 0.25, -1.25, -1.25]),
        ("rloo", {}, [0] * 4, [3.0, 1 / 3, -5 / 3, -5 / 3]),
        (
            "reinforce_plus_plus",
            {"advantage.reinforce_plus_plus.baseline": True},
            [0, 0, 1, 1],
            [1.490788, -1.219736, 0.135526, 0.135526],
        ),
    ],
)
def test_advantages_of_rewards_by_hand(name, changes, ids, expected):
    columns = zip([2.5, 0.5, -1.0, -1.0], ids, [2, 3, 1, 4], strict=True)
    members = [
        make_trajectory(reward=reward, task_number=task, sample_index=i, length=2 + count)
        for i, (reward, task, count) in enumerate(columns)
    ]
    first, second = make_failures(ids[0])
    actual = estimate(name, [first, *members[:2], second, *members[2:]], **changes)
    np.testing.assert_allclose(actual[[1, 2, 4, 5]], expected, atol=2e-6)
    np.testing.assert_array_equal(actual[[0, 3]], 0)
    np.testing.assert_array_equal(actual, actual.astype(np.float32))  # no digit is lost later


def test_groups_of_high_entropy_exploit():
    sure, unsure = judged([1, 0, 0, 0], 3, entropy=0.2), judged([1, 0, 0, 0], 5, entropy=0.8)
    actual = estimate("pass_at_k_entropy_guided", sure + unsure, k=2)
    np.testing.assert_allclose(actual[:4], [1, *[-1 / 3] * 3], atol=1e-6)
    np.testing.assert_allclose(actual[4:], [1.732051, *[-0.57735] * 3], atol=1e-6)


def test_bootstrap_draws_by_seed_and_step():
    verdicts = judged([1, 0, 0, 1, 0, 0, 0, 0])
    draws = [estimate("pass_at_k_bootstrap", verdicts, step, k=2) for step in range(4)]
    again = estimate("pass_at_k_bootstrap", verdicts, 3, k=2)
    np.testing.assert_array_equal(again, draws[3])
    assert len({draw.tobytes() for draw in draws}) > 2
    reseeded = estimate("pass_at_k_bootstrap", verdicts, 3, k=2, seed=1)
    assert not np.array_equal(reseeded, draws[3])
    for draw in draws:  # every subset's members share its advantage, and these add up to zero
        assert draw.sum() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_pass_at_k_reads_verdicts_only_and_the_others_rewards_only(name):
    verdicts = judged([1, 1, 0, 0, 0, 0, 1, 0])
    priced = [dataclasses.replace(t, reward=0.1 * i) for i, t in enumerate(verdicts)]
    turned = [dataclasses.replace(t, is_correct=not t.is_correct) for t in priced]
    of_verdicts, of_prices, of_turned = (estimate(name, x, k=2) for x in (verdicts, priced, turned))
    reads_verdicts = name.startswith("pass_at_k")
    assert np.array_equal(of_verdicts, of_prices) == reads_verdicts
    assert np.array_equal(of_prices, of_turned) != reads_verdicts
    np.testing.assert_array_equal(estimate(name, make_failures(count=8), k=2), 0)


SIZE, NUM_GROUPS = 5, 3


def draw_groups(seed):
    """Return groups with rewards, verdicts and lengths of all kinds; any member may fail."""
    rng = np.random.default_rng(seed)
    groups = []
    for task in range(NUM_GROUPS):
        members = []
        for index in range(SIZE):
            fields = {"task_number": task, "sample_index": index, "length": int(rng.integers(4, 9))}
            if rng.random() < 0.35:
                member = make_failure(reward=99.0, **fields)  # which must count nowhere
            else:
                member = make_trajectory(reward=float(rng.integers(-2, 3)), **fields)
            entropies = np.where(member.loss_mask, rng.random(), 0).astype(np.float32)
            verdict = {"is_correct": bool(rng.random() < 0.5), "rollout_entropies": entropies}
            members.append(dataclasses.replace(member, **verdict))
        groups.append(Group(trajectories=tuple(members)))
    return groups


def without_failures(groups):
    """Return the groups without failures, dropping groups that contain only failures."""
    left = [Group(trajectories=tuple(group.scored_trajectories)) for group in groups]
    return [group for group in left if group.trajectories]


def padded(groups):
    """Append a failed group, so that batches have the same shape and compile once."""
    count = SIZE * NUM_GROUPS - len(flatten_groups(groups))
    rest = [make_failure(task_number=99, sample_index=i) for i in range(count)]
    return [*groups, *([Group(trajectories=tuple(rest))] if rest else [])]


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "pass_at_k_bootstrap"])
def test_advantages_are_those_of_the_group_that_is_left(name):
    estimate = estimator(**{"advantage.name": name, "advantage.pass_at_k.k": 2})
    has_signal = False
    for seed in range(4):
        groups = draw_groups(seed)
        whole = flatten_groups(estimate(groups, 0, 0))
        alone = flatten_groups(estimate(padded(without_failures(groups)), 0, 0))
        actual = [t.advantage for t in whole if t.is_scored]
        np.testing.assert_allclose(actual, [t.advantage for t in alone if t.is_scored], atol=1e-6)
        assert all(t.advantage == 0 for t in whole if not t.is_scored)
        has_signal |= any(actual)
    assert has_signal


def test_random_subsets_hold_no_failure():
    """Only failures are correct, so a subset that includes a failure would pass."""
    estimate = estimator(**{"advantage.name": "pass_at_k_bootstrap", "advantage.pass_at_k.k": 2})
    groups = draw_groups(0)
    wrong = replace_fields(groups, is_correct=[not t.is_scored for t in flatten_groups(groups)])
    assert not any(t.advantage for t in flatten_groups(estimate(wrong, 0, 0)))


def test_k_follows_its_schedule_and_each_k_compiles_once(monkeypatch):
    traced = []

    def trace(is_correct, group_ids, *, k):
        traced.append(k)
        return is_correct * k

    monkeypatch.setitem(ESTIMATORS, "pass_at_k", trace)
    schedule = {"advantage.pass_at_k.k_schedule": ((0, 4), (2, 1), (5, 4))}
    estimate = estimator(**{"advantage.name": "pass_at_k"}, **schedule)
    for step, k in enumerate([4, 4, 1, 1, 1, 4]):
        [group] = estimate(grouped(judged([0, 1])), step, step)
        assert [t.advantage for t in group.trajectories] == [0, k]
        assert estimate.metrics(step) == {"advantage/k": k}
    assert traced == [4, 1]


def test_a_turn_carries_what_is_earned_from_it_on():
    # As in the test of the objective: 1.5, 1.5, 0.5 against 2, 2, 2.
    searching = in_turns([0.0, 1.0, 0.0], 0.5, lengths=[1, 2, 1])
    answering = in_turns([], 2.0, lengths=[3], index=1)
    estimate = estimator(**{"advantage.name": "rloo", "advantage.by_turn": True})
    first, second, failed = flatten_groups(
        estimate(grouped([searching, answering, make_failure(task_number=9)]), 0, 0)
    )
    assert first.turn_advantages == (-0.5, -0.5, -1.5)
    assert second.turn_advantages == (0.5,)
    assert first.advantage == pytest.approx((-0.5 * 3 - 1.5) / 4)
    assert (first.has_signal, failed.has_signal, failed.advantage) == (True, False, 0.0)
    # Prompt, then each turn's tokens with what the environment said after them.
    np.testing.assert_array_equal(first.token_advantages, [-0.5] * 4 + [-0.5] * 3 + [-1.5] * 2)


def test_turns_may_have_signals_that_add_up_to_none():
    # Both earn 1 in all and the same by the last turn; by the second, one has it behind itself.
    early = in_turns([1.0, 0.0], 0.0, lengths=[1, 1])
    late = in_turns([0.0, 1.0], 0.0, lengths=[1, 1], index=1)
    estimate = estimator(**{"advantage.name": "rloo", "advantage.by_turn": True})
    actual = flatten_groups(estimate(grouped([early, late]), 0, 0))
    assert [t.turn_advantages for t in actual] == [(0.0, -1.0), (0.0, 1.0)]
    assert all(t.has_signal for t in actual)
    whole = estimator(**{"advantage.name": "rloo"})
    assert not any(t.has_signal for t in flatten_groups(whole(grouped([early, late]), 0, 0)))


def test_tokens_are_counted_by_turn():
    groups = grouped(
        [in_turns([1.0, 0.0], 0.0, lengths=[1, 3]), in_turns([], 2.0, lengths=[2], index=1)]
    )
    estimate = estimator(**{"advantage.name": "reinforce_plus_plus", "advantage.by_turn": True})
    first, second = flatten_groups(estimate(groups, 0, 0))
    # From the first turn on 1 and 2, of 1 and 2 tokens: mean 5/3, variance (4/9 + 2/9) / 2 = 1/3.
    assert first.turn_advantages[0] == pytest.approx(-2 / 3 * 3**0.5)
    assert second.turn_advantages[0] == pytest.approx(1 / 3 * 3**0.5)
    assert first.turn_advantages[1] == 0  # alone with tokens there


def test_a_user_estimator_is_traced_again(tmp_path, monkeypatch):
    """Functions that the estimator calls may change and be reloaded between two runs."""
    (tmp_path / "share.py").write_text("OF_REWARD = 1.0")
    (tmp_path / "shared.py").write_text(
        "import share\n\ndef advantage(rewards):\n    return share.OF_REWARD * rewards\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    groups = grouped([make_trajectory(reward=2.0)])

    def advantage():
        [trajectory] = flatten_groups(
            estimator(**{"advantage.name": "shared.advantage"})(groups, 0, 0)
        )
        return trajectory.advantage

    assert advantage() == 2.0
    monkeypatch.setattr("share.OF_REWARD", 3.0)
    assert advantage() == 6.0


PER_GROUP = ("grpo", "rloo", "pass_at_k", "pass_at_k_combination", "pass_at_k_exceeding")
PER_GROUP += ("pass_at_k_full_sampling",)


@pytest.mark.parametrize("name", PER_GROUP)
def test_an_environment_does_not_change_the_advantages_of_another(name):
    rng = np.random.default_rng(0)

    def sample_group(number, scale):
        rewards = scale * rng.integers(0, 3, 4)
        return [
            dataclasses.replace(
                make_trajectory(reward=float(reward), task_number=number, sample_index=i),
                is_correct=bool(reward > 0),
            )
            for i, reward in enumerate(rewards)
        ]

    for _ in range(10):
        # The rewards of the second environment are larger by orders of magnitude.
        first, second = sample_group(0, 1.0), sample_group(1, 1000.0)
        mixed = estimate(name, [*first, *second], k=2)
        alone = [*estimate(name, first, k=2), *estimate(name, second, k=2)]
        np.testing.assert_allclose(mixed, alone, atol=1e-5)
