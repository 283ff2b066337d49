"""Losses and masks against collapse, compared with loops over tokens and trajectories."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.envs.base import Outcome, Turn
from jaxrl.extras.stability.dppo import dppo_policy_loss
from jaxrl.extras.stability.first_occurrence import first_occurrence
from jaxrl.extras.stability.likelihood import likelihood_loss
from jaxrl.extras.stability.masks import has_no_void_turn, off_policy_sequence_mask
from jaxrl.objectives.losses import clipped_policy_loss
from tests.episodes import ANSWER, SEARCH, make_trajectory

pytestmark = pytest.mark.usefixtures("quick_compilation")


@dataclasses.dataclass
class Rows:
    """Two rows of three trajectories each, with observations, padding and signs of all kinds."""

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    loss_mask: np.ndarray
    segment_ids: np.ndarray


def rows(seed, spread=0.8):
    rng = np.random.default_rng(seed)
    shape = (2, 40)
    old = -rng.exponential(1.0, shape).astype(np.float32)
    ids = np.repeat([[1, 2, 3, 0]], [11, 9, 14, 6], axis=1).repeat(2, 0).astype(np.int32)
    mask = (rng.random(shape) < 0.75) & (ids > 0)
    of_trajectory = rng.choice([-1.5, 0.0, 0.7], (2, 4)).astype(np.float32)
    return Rows(
        np.minimum(old + spread * rng.standard_normal(shape), -1e-3).astype(np.float32),
        old,
        np.minimum(old + 0.1 * rng.standard_normal(shape), -1e-3).astype(np.float32),
        np.take_along_axis(of_trajectory, ids, 1),
        mask,
        ids,
    )


def loss_and_gradient(function, batch, names, **settings):
    """Return per-token losses, metrics, and the gradient of the summed loss for `logprobs`."""

    def total(logprobs):
        arrays = (logprobs if name == "logprobs" else getattr(batch, name) for name in names)
        loss = function(*arrays, **settings)
        return loss.per_token.sum(), loss

    (_, loss), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(batch.logprobs))
    return np.asarray(loss.per_token), loss.metrics, np.asarray(gradient)


TOKENS = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "loss_mask")
DPPO = {"clip_low": 0.15, "clip_high": 0.2, "cap": 2.0}


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_dppo_is_the_loop_over_its_tokens(divergence, anchor):
    batch = rows(0)
    settings = DPPO | {"divergence": divergence, "anchor": anchor}
    loss, metrics, gradient = loss_and_gradient(dppo_policy_loss, batch, TOKENS, **settings)
    expected, slopes, clipped = (np.zeros(loss.shape) for _ in range(3))
    for place in zip(*np.nonzero(batch.loss_mask), strict=True):
        now = float(batch.logprobs[place])
        before = float((batch.old_logprobs if anchor == "old" else batch.rollout_logprobs)[place])
        advantage, p, q = float(batch.advantages[place]), math.exp(now), math.exp(before)
        far = abs(p - q)
        if divergence == "kl":
            far = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        away = (advantage > 0 and p > q and far > 0.2) or (advantage < 0 and p < q and far > 0.15)
        clipped[place] = away
        slopes[place] = 0.0 if away else -min(p / q, 2.0) * advantage
        expected[place] = slopes[place] * now
    np.testing.assert_allclose(loss, expected, rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(gradient, slopes, rtol=2e-4, atol=1e-6)
    np.testing.assert_array_equal(metrics["pg_clipfrac"], clipped)
    assert clipped.any()
    assert (slopes[batch.loss_mask & (batch.advantages > 0)] != 0).any()


def one_token(now, before, advantage):
    arrays = [np.log([[now]]), np.log([[before]]), np.log([[before]]), np.array([[advantage]])]
    return Rows(*(x.astype(np.float32) for x in arrays), np.array([[True]]), np.array([[1]]))


@pytest.mark.parametrize(
    ("now", "before", "advantage", "ratio_learns", "dppo_learns"),
    [
        (1e-4, 1e-5, 1.0, False, True),  # rare and ten times likelier: no move in probability
        (0.75, 0.5, 1.0, False, False),
        (0.95, 0.8, 1.0, True, False),  # within a ratio of 1.28, and 0.15 of all probability
        (1e-6, 1e-5, -1.0, False, True),
        (0.75, 0.5, -1.0, True, True),  # leads back
    ],
)
def test_a_trust_region_of_probabilities_is_another_one(
    now, before, advantage, ratio_learns, dppo_learns
):
    batch = one_token(now, before, advantage)
    settings = {"divergence": "tv", "anchor": "old", "cap": 20.0, "clip_low": 0.1, "clip_high": 0.1}
    _, _, gradient = loss_and_gradient(dppo_policy_loss, batch, TOKENS, **settings)
    names = ("logprobs", "old_logprobs", "advantages", "loss_mask")
    by_ratio = {"clip_low": 0.2, "clip_high": 0.28}
    _, _, clipped = loss_and_gradient(clipped_policy_loss, batch, names, **by_ratio)
    assert (bool(clipped[0, 0]), bool(gradient[0, 0])) == (ratio_learns, dppo_learns)


MARGIN = 0.1
LLDS = ("logprobs", "old_logprobs", "advantages", "loss_mask", "segment_ids")


def find_actions(batch, row, level):
    """Return, for each action, the positions of its tokens with an advantage of at least 0."""
    actions, last = [], None
    for t in range(batch.loss_mask.shape[1]):
        if not (batch.loss_mask[row, t] and batch.advantages[row, t] >= 0):
            continue
        segment = batch.segment_ids[row, t]
        is_next = (
            last is not None and last[1] == segment and (level == "response" or last[0] == t - 1)
        )
        if not is_next:
            actions.append([])
        actions[-1].append(t)
        last = t, segment
    return actions


@pytest.mark.parametrize("level", ["action", "response"])
@pytest.mark.parametrize("seed", [0, 2])
def test_llds_is_the_loop_over_actions(level, seed):
    batch = rows(seed)
    loss, metrics, gradient = loss_and_gradient(
        likelihood_loss, batch, LLDS, level=level, margin=MARGIN
    )
    expected = np.zeros(loss.shape)
    for row in range(len(loss)):
        for action in find_actions(batch, row, level):
            lost = [
                float(batch.old_logprobs[row, t]) - float(batch.logprobs[row, t]) for t in action
            ]
            if sum(lost) > MARGIN:
                expected[row, action] = [x if x > MARGIN else 0 for x in lost]
    np.testing.assert_allclose(loss, expected, atol=1e-6)
    np.testing.assert_array_equal(gradient, np.where(expected > 0, -1.0, 0.0))
    np.testing.assert_array_equal(metrics["llds_share"], expected > 0)
    assert (expected > 0).any()
    if seed == 2:  # some gates are shut
        assert (expected > 0).sum() < (metrics["llds_lost"] > 0).sum()


def test_llds_is_zero_before_the_first_update_but_for_rounding():
    batch = rows(0)
    batch.logprobs = batch.old_logprobs - np.float32(MARGIN / 1000)
    loss, _, gradient = loss_and_gradient(
        likelihood_loss, batch, LLDS, level="action", margin=MARGIN
    )
    assert not loss.any()
    assert not gradient.any()


@pytest.mark.parametrize("delta", [0.0, 0.1])
def test_the_off_policy_gate_is_the_loop_over_trajectories(delta):
    batch = rows(3, spread=0.5)
    names = ("logprobs", "rollout_logprobs", "advantages", "loss_mask", "segment_ids")
    is_open = np.asarray(off_policy_sequence_mask(*(getattr(batch, n) for n in names), delta=delta))
    expected = np.ones(is_open.shape, bool)
    for row in range(len(expected)):
        for segment in (1, 2, 3):
            places = batch.segment_ids[row] == segment
            own = places & batch.loss_mask[row]
            moved = (batch.rollout_logprobs[row] - batch.logprobs[row])[own].mean()
            if batch.advantages[row][places][0] < 0 and moved > delta:
                expected[row, places] = False
    sampled = batch.loss_mask
    np.testing.assert_array_equal(is_open[sampled], expected[sampled])


VOID = Turn(text="Let me think about")
CUT = Turn(text="Let me think about", is_cut=True)
FAILED_CALL = Turn(text="<search></search>", observation="nothing to search for")
UNANSWERED = Turn(text="<search>once more</search>")  # beyond rollout.max_turns


@pytest.mark.parametrize(
    ("turns", "outcome", "is_sound"),
    [
        ((SEARCH, ANSWER), Outcome.ANSWERED, True),
        ((VOID,), Outcome.MALFORMED, False),
        ((SEARCH, CUT), Outcome.OUT_OF_BUDGET, False),
        ((VOID, SEARCH, ANSWER), Outcome.ANSWERED, False),
        ((SEARCH, UNANSWERED), Outcome.OUT_OF_BUDGET, True),
        ((FAILED_CALL, ANSWER), Outcome.ANSWERED, True),
        ((), Outcome.OUT_OF_BUDGET, False),
    ],
)
def test_void_turns_by_hand(turns, outcome, is_sound):
    assert has_no_void_turn(make_trajectory(turns=turns, outcome=outcome)) == is_sound


def shown(text):
    return Turn(text="<search>q</search>", tool_call="q", observation=text)


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        (["a river", "by Ada Kerr in 1871", "Ada Kerr again", None], [0, 1, 0, 0]),
        (["the ADA KERR!", "Ada Kerr"], [1, 0]),
        (["a river", None], [0, 0]),
        (["Adana Kerrison"], [0]),
        (["A. Kerr made it", "Ada Kerr"], [1, 0]),
    ],
)
def test_the_first_result_with_the_answer_by_hand(observations, expected):
    turns = [shown(text) for text in observations]
    assert first_occurrence(turns, ("Ada Kerr", "A. Kerr")) == expected
