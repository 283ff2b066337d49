"""Policies of a few numbers: their expected pushes by hand, and what the claims come to on them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import conditions
from jaxrl.objectives.losses import clipped_policy_loss


@pytest.mark.parametrize("good", [0.02, 0.4])
def test_what_the_ceiling_leaves_of_the_push_on_a_token(good):
    # GRPO's advantages in a large group: sqrt((1 - p) / p), and -sqrt(p / (1 - p)) for the others.
    # The logit of the right token moves by p(1 - p) times the first, less the second: by (1 - p)
    # and p of the whole. Past the ceiling, the part of the others, p, is what is left.
    chances = np.array([good, 1 - good])
    advantages = np.array([np.sqrt((1 - good) / good), -np.sqrt(good / (1 - good))])

    def push(ratio):
        def loss(logits):
            got = clipped_policy_loss(
                jax.nn.log_softmax(logits)[None],
                np.log(chances)[None],
                advantages[None],
                np.ones((1, 2), bool),
                clip_low=0.2,
                clip_high=0.28,
            )
            return (chances * got.per_token).sum()

        # A rise of the odds after which the right token's ratio is the one asked for.
        rise = np.log(ratio * (1 - good) / (1 - ratio * good))
        logits = jnp.asarray(np.log(chances) + np.array([rise, 0.0]))
        return -jax.grad(loss)(logits)[0]

    whole, left = push(1.0), push(1.29)
    # The gradient is taken a little further on, where ratios and chances are others.
    moved = 1.29 * good
    expected = (1 - good) * (1 - moved) / (1 - good) * moved * np.sqrt(good / (1 - good))
    assert whole == pytest.approx(np.sqrt(good * (1 - good)), rel=1e-4)
    assert left == pytest.approx(expected, rel=1e-4)


def test_a_push_against_every_group_there_can_be():
    """Groups of 16 are too many to list; of 4, each trajectory does one of three things."""
    share, look, skill, size = 0.6, 0.3, 0.25, 4
    ways = {"habit": 1 - look, "right": look * skill, "wrong": look * (1 - skill)}
    for k in (1, 2):
        expected = 0.0
        for weight, is_open in ((share, True), (1 - share, False)):
            for group in itertools.product(ways, repeat=size):
                is_right = np.array(
                    [way == "right" or (is_open and way == "habit") for way in group]
                )
                made = subset_advantages(is_right, k)
                looked = np.array([way != "habit" for way in group])
                chance = np.prod([ways[way] for way in group])
                expected += weight * chance * (made * looked).mean()
        got = conditions.push_on_looking(share, k, look=look, skill=skill, size=size)
        assert got == pytest.approx(expected, abs=1e-6)


def subset_advantages(is_right, k):
    """Each trajectory's mean normalised reward over all sets of k that it is in."""
    sets = list(itertools.combinations(range(len(is_right)), k))
    rewards = np.array([is_right[list(own)].any() for own in sets], float)
    if rewards.std() == 0:
        return np.zeros(len(is_right))
    normal = (rewards - rewards.mean()) / rewards.std()
    return np.array(
        [np.mean([value for own, value in zip(sets, normal, strict=True) if i in own])
         for i in range(len(is_right))]
    )  # fmt: skip


def test_looking_is_unlearnt_with_one_try_and_learnt_with_four():
    assert conditions.push_on_looking(0.6, 1) < 0 < conditions.push_on_looking(0.6, 4)
    assert conditions.push_on_looking(0.07, 1) > 0  # no reason for several tries


def played(claim, **changes):
    """Every measure of a claim with one seed, by world and arm."""
    [comparison] = [c for c in conditions.COMPARISONS if c.claim == claim]

    def measured(world, settings):
        run = conditions.train(dataclasses.replace(world, **changes), 1, **settings)
        return [of(run) for of in comparison.report.values()]

    return [
        [measured(world(), settings) for settings in comparison.arms.values()]
        for world in comparison.worlds.values()
    ]


def test_a_higher_ceiling_matters_to_rare_tokens():
    rare, common, fast = played("clip-higher")
    (low, _, low_entropy, _), (high, _, high_entropy, _) = rare
    assert high > 1.2 * low  # the chance after ten steps
    assert high_entropy > 1.05 * low_entropy  # meanwhile
    for (low, _, low_entropy, _), (high, _, high_entropy, _) in (common, fast):
        assert high == pytest.approx(low, rel=0.02)
        assert high_entropy == pytest.approx(low_entropy, rel=0.02)


def test_overlong_shaping_matters_where_most_groups_are_all_wrong():
    (plain, shaped), (easy_plain, easy_shaped) = played("overlong shaping")
    assert shaped[0] < 0.5 * plain[0]
    assert easy_shaped[0] == pytest.approx(easy_plain[0], rel=0.1)


def test_a_second_phase_ends_higher_where_a_habit_hides_what_can_be_learnt():
    (one, both), (rare_one, rare_both), (stuck_one, stuck_both) = played("Pass@k, then Pass@1")
    assert both[2] > one[2] + 0.05
    assert rare_both[2] == pytest.approx(rare_one[2], abs=0.03)
    assert stuck_both[2] == pytest.approx(stuck_one[2], abs=0.03)


@pytest.mark.minutes
def test_ares_tells_lengths_apart_while_tasks_are_hard():
    (plain, ares), (soon_plain, soon_ares) = played("ARES", num_steps=40)
    assert ares[0] < plain[0] - 0.2  # tokens of easy tasks
    assert ares[1] > plain[1] + 0.2  # and of hard ones
    assert soon_ares[1] < soon_plain[1]


def test_a_table_has_every_world_arm_and_seed(monkeypatch, capsys):
    short = conditions.COMPARISONS[1]
    worlds = {name: lambda: dataclasses.replace(conditions.lengths(0.5), num_steps=1)
              for name in short.worlds}  # fmt: skip
    report = {"cut": conditions.at("cut"), "steps": conditions.steps_to("cut", 0.0)}
    short = dataclasses.replace(short, worlds=worlds, report=report)
    monkeypatch.setattr(conditions, "COMPARISONS", (short,))
    conditions.main(["--seeds=1,2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "| overlong shaping | arm | cut | steps |"
    rows = [line for line in lines if "| GRPO |" in line or "| overlong shaping | 0" in line]
    assert len(rows) == 4
    assert all(row.endswith("| 0, 0 |") for row in rows)  # reached before the first step
