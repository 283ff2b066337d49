"""Signs at their thresholds, and no signs in healthy steps."""

import dataclasses
import math

import numpy as np
import pytest

from jaxrl.envs.base import CallRecord, Outcome, Turn
from jaxrl.extras.sentinel import signs
from jaxrl.training.watch import WatchState, check_step
from jaxrl.types import flatten_groups, replace_fields
from tests.episodes import ANSWER, SEARCH, grouped, make_failure, make_trajectory
from tests.helpers import method_with

METHOD = method_with(**{"watch.name": "sentinel"})
RECORD = {
    **{"actor/grad_norm": 0.2, "actor/ppo_kl": 0.001, "actor/num_skipped": 0},
    **{"rollout_corr/logprob_diff_mean": 1e-6, "rollout_corr/logprob_diff_max": 1e-5},
    "rollout_corr/k3_kl": 1e-12,
}
FOUND = Turn(text="<search>q</search>", tool_call="q", observation="the answer is x")


def step_groups(seed, *, num_tasks=16, size=4, right=0.5, length=22):
    """Return the groups of a healthy step: right and wrong answers, different sampled ids."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for task in range(num_tasks):
        for index in range(size):
            is_right = bool(rng.random() < right)
            ids = rng.integers(1, 1000, length).astype(np.int32)
            ids[:2] = task + 1
            turn = FOUND if rng.random() < 0.8 else SEARCH
            trajectory = make_trajectory(
                task_number=task,
                sample_index=index,
                length=length,
                reward=float(is_right),
                turns=(turn, ANSWER),
            )
            logprobs = np.where(trajectory.loss_mask, -rng.gamma(2.0, 0.5, length), 0.0)
            entropies = np.where(trajectory.loss_mask, rng.gamma(4.0, 0.1, length), 0.0)
            trajectories.append(
                dataclasses.replace(
                    trajectory,
                    token_ids=ids,
                    is_correct=is_right,
                    rollout_logprobs=logprobs.astype(np.float32),
                    rollout_entropies=entropies.astype(np.float32),
                )
            )
    return with_advantages(grouped(trajectories))


def with_advantages(groups):
    """Set the advantages to the rewards minus their group's mean."""
    means = [np.mean([t.reward for t in group.scored_trajectories]) for group in groups]
    return replace_fields(
        groups,
        advantage=[
            float(t.reward - mean)
            for group, mean in zip(groups, means, strict=True)
            for t in group.trajectories
        ],
    )


def play(steps, change=lambda step, groups: groups, record=lambda step: {}):
    """Return the names of signs by step, and the final state of the watch."""
    watched, found = WatchState(), {}
    for step in range(1, steps + 1):
        groups = change(step, step_groups(step))
        metrics = {**RECORD, **record(step)}
        watched, metrics = check_step(METHOD, watched, metrics, groups, step)
        names = {name.removeprefix("sentinel/") for name in metrics} - {"actor/lr_scale"}
        if names:
            found[step] = names
    return found, watched


def test_a_hundred_usual_steps_have_no_sign():
    found, watched = play(100)
    assert found == {}
    assert len(watched.state["steps"]) == signs.BASELINE_STEPS


GAP, LARGEST, K3 = (f"rollout_corr/{n}" for n in ("logprob_diff_mean", "logprob_diff_max", "k3_kl"))


@pytest.mark.parametrize(
    ("record", "name", "first"),
    [
        ({"actor/grad_norm": 2.1}, "gradient_exploded", 10),
        ({"actor/grad_norm": 1.9, "actor/ppo_kl": 0.09}, None, 0),
        ({"actor/num_skipped": 2}, "gradient_not_finite", 10),
        ({"actor/ppo_kl": -0.11}, "update_too_large", 10),
        # Ten times the usual, but too little to matter; more; far more in single tokens.
        ({GAP: 0.0019}, None, 0),
        ({GAP: 0.0021}, "sampler_differs", 11),
        ({GAP: 0.3, LARGEST: 9.0, K3: 0.28}, "ids_differ", 11),
        ({GAP: 0.3, LARGEST: 4.0, K3: 0.28}, "sampler_differs", 11),
        ({GAP: math.nan}, None, 0),
    ],
    ids=str,
)
def test_what_the_update_measures_at_its_bounds(record, name, first):
    found, _ = play(13, record=lambda step: record if step >= 10 else {})
    assert ({name} if name else set()) == set().union(*found.values())
    assert min(found, default=0) == first


def all_of(**fields):
    """Return the groups with some fields of every trajectory changed."""

    def change(groups):
        changed = [
            dataclasses.replace(group, trajectories=tuple(
                dataclasses.replace(t, **fields) for t in group.trajectories
            ))
            for group in groups
        ]  # fmt: skip
        return with_advantages(changed)

    return change


def repeat_key(groups):
    """Make sample 1 of each group equal to sample 0, as if both had the same random key."""
    twins = []
    for group in groups:
        first, second, *others = group.trajectories
        twin = dataclasses.replace(first, sample_index=second.sample_index)
        twins.append(dataclasses.replace(group, trajectories=(first, twin, *others)))
    return with_advantages(twins)


def praise_every_answer(groups):
    """Change the judge's score of every answer to 1."""
    parts = {**groups[0].trajectories[0].reward_parts, "judge": 1.0}
    records = (CallRecord(call="is it right?", tool="judge"),)
    return all_of(reward_parts=parts, reward_records=records)(groups)


def change_prompts(groups):
    """Give the samples of a group two different prompts."""
    for trajectory in flatten_groups(groups):
        trajectory.token_ids[0] += trajectory.sample_index % 2
    return groups


LOOP = np.array([1, 1, *([7, 8, 9] * 20)], np.int32)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (all_of(reward=0.0, is_correct=False), {"reward_fell"}),
        (all_of(outcome=Outcome.MALFORMED), {"responses_malformed", "turns_void"}),
        (all_of(outcome=Outcome.OUT_OF_BUDGET), {"responses_cut"}),
        (all_of(turns=(Turn(text="…"), ANSWER)), {"turns_void", "search_changed"}),
        (all_of(turns=(SEARCH, ANSWER)), {"search_changed"}),
        (all_of(rollout_entropies=np.full(22, 2.0, np.float32)), {"entropy_rose"}),
        (all_of(rollout_entropies=np.full(22, 0.01, np.float32)), {"entropy_collapsed"}),
        (all_of(rollout_logprobs=np.full(22, -3.0, np.float32)), {"likelihood_fell"}),
        (all_of(reward=1.0, is_correct=True), {"suddenly_right"}),
        (all_of(reward=0.5), {"rewards_constant"}),
        (repeat_key, {"keys_repeat"}),
        (praise_every_answer, {"judge_says_yes"}),
        (change_prompts, {"prompts_differ"}),
    ],
)
def test_what_the_groups_show_within_five_steps(change, names):
    found, _ = play(14, lambda step, groups: change(groups) if step >= 10 else groups)
    early = set().union(*(found.get(step, set()) for step in range(10, 15)))
    if names == {"turns_void", "search_changed"}:
        names = {"turns_void"}  # nobody searches, so nothing is said of results
    assert names <= early
    assert min(found) >= 10


def test_loops_and_lengths():
    def change(step, groups):
        if step < 10:
            return groups
        grown = [
            dataclasses.replace(
                t,
                token_ids=np.concatenate([LOOP, t.token_ids[2:6]]),
                loss_mask=np.arange(66) >= 2,
                rollout_logprobs=np.full(66, -1.0, np.float32),
                rollout_entropies=np.full(66, 0.4, np.float32),
            )
            for t in flatten_groups(groups)
        ]
        return with_advantages(grouped(grown))

    found, _ = play(14, change)
    assert set().union(*found.values()) == {"responses_loop", "length_jumped"}


@pytest.mark.parametrize(("right", "has_collapsed"), [(0.85, False), (0.6, True)])
def test_a_policy_that_is_sure_has_collapsed_only_where_it_is_wrong(right, has_collapsed):
    def sure(step, groups):
        rng = np.random.default_rng(step)
        # One batch of wrong answers is no trend.
        share = right if step % 15 else right - 0.3
        trajectories = []
        for group in groups:
            first, is_right = group.trajectories[0], bool(rng.random() < share)
            for index in range(len(group.trajectories)):
                changed = {"sample_index": index, "reward": float(is_right), "is_correct": is_right}
                quiet = np.full(len(first.token_ids), 0.2, np.float32)
                same = {"rollout_entropies": quiet, "rollout_logprobs": np.zeros_like(quiet)}
                trajectories.append(dataclasses.replace(first, **changed, **same))
        return with_advantages(grouped(trajectories))

    found, _ = play(32, sure)
    assert any("entropy_collapsed" in names for names in found.values()) == has_collapsed


def test_groups_without_a_signal_are_reported_after_eight_steps():
    rewards = all_of(reward=0.0, is_correct=False)
    found, _ = play(10, lambda _, groups: rewards(groups))
    assert found == {step: {"no_signal"} for step in range(8, 11)}


def test_advantages_that_do_not_add_up():
    def change(step, groups):
        trajectories = flatten_groups(groups)
        shifted = [t.advantage + (0.1 if step == 7 else 0.0) for t in trajectories]
        return replace_fields(groups, advantage=shifted)

    found, _ = play(8, change)
    assert found == {7: {"advantages_uneven"}}


def test_the_reward_fell_since_its_best():
    change = all_of(reward=0.0, is_correct=False)
    watched, acting = WatchState(), []
    for step in range(1, 13):
        groups = change(step_groups(step)) if step >= 10 else step_groups(step)
        watched, _ = check_step(METHOD, watched, RECORD, groups, step)
        acting += watched.acting
    [sign] = [sign for sign in acting if sign["name"] == "reward_fell"]
    means = [np.mean([t.reward for t in flatten_groups(step_groups(s))]) for s in range(1, 10)]
    assert sign["since"] == max(range(5, 10), key=lambda s: np.mean(means[s - 5 : s]))


# The numbers of a step, against loops.


def test_samples_that_are_the_same_by_chance_are_no_twins():
    def sure(step, groups):
        """Sample two answers with probabilities 0.9 and 0.1, so that samples are often equal."""
        rng = np.random.default_rng(step)
        return grouped(
            dataclasses.replace(
                t,
                token_ids=np.array([t.token_ids[0]] * 2 + [5 if rng.random() < 0.9 else 6] * 20),
                rollout_logprobs=np.where(t.loss_mask, math.log(0.9) / 20, 0.0),
            )
            for t in flatten_groups(groups)
        )

    found, _ = play(30, sure)
    assert not any("keys_repeat" in names for names in found.values())


def test_a_step_without_any_score_has_no_sign():
    groups = grouped(make_failure(sample_index=i) for i in range(4))
    groups = replace_fields(groups, advantage=[0.0] * 4)
    watched, metrics = check_step(METHOD, WatchState(), {}, groups, 1)
    assert metrics == {"actor/lr_scale": 1.0}
    assert watched.state["best"] == {}


def test_numbers_that_are_not_finite_are_left_out():
    nan = np.full(22, np.nan, np.float32)
    groups = all_of(rollout_logprobs=nan, rollout_entropies=nan)(step_groups(1))
    watched = WatchState()
    for step in range(1, 9):
        record = {name: math.inf for name in RECORD}
        watched, metrics = check_step(METHOD, watched, record, groups, step)
        assert metrics == {"actor/lr_scale": 1.0}
    assert watched.state["steps"][-1]["entropy"] is None
    assert watched.state["steps"][-1]["gradient"] is None
