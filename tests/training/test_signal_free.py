"""Updates that skip trajectories without a signal compute the same numbers.

Losses, gradients and metrics still include the terms of skipped trajectories.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.extras.experts.routing import ROUTED_EXPERTS, select_index_dtype
from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.objectives.losses import PolicyLoss
from jaxrl.runtime.sharding import make_param_shardings
from jaxrl.training.controllers import Controllers, DifficultyBuckets, KLBudget
from jaxrl.training.minibatches import (
    divide_into_minibatches,
    make_minibatch,
    shard_minibatch,
)
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import ScoreStep, UpdateStep, init_state
from jaxrl.types import Divergence, flatten_groups, replace_fields
from tests import helpers
from tests.episodes import grouped
from tests.helpers import NUM_TOKENS, TINY, TINY_MOE, relative_distance, tiny_params
from tests.training.policies import MESH, SHAPE, trajectories

pytestmark = pytest.mark.usefixtures("quick_compilation", "one_size")

OPTIMIZER = optax.adamw(1e-3)
SOME = (0.5, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 2.0)  # of the third and fifth nothing is learned
NONE = (0.0,) * 8

method_with = partial(
    helpers.method_with,
    **{
        "rollout.tasks_per_step": 4,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": 30,
        "rollout.max_total_tokens": 32,
    },
)


def pulling_loss(logprobs, old_logprobs, advantages, loss_mask, *, pull=0.3):
    """A user loss that has gradients even for advantages of 0."""
    loss = jnp.where(loss_mask, -advantages * logprobs + pull * logprobs**2, 0.0)
    return PolicyLoss(loss, {"pull": jnp.where(loss_mask, logprobs**2, 0.0)})


METHODS = {
    "CISPO, observations trained on": {
        "loss.name": "cispo", "loss.mask_observations": False,
        "loss.aggregation": "seq-mean-token-sum-norm",
    },
    "GSPO, corrected, KL in the reward": {
        "loss.name": "gspo", "loss.correction.level": "sequence", "kl.coef": 0.3,
        "kl.apply_to": "reward", "loss.aggregation": "seq-mean-token-sum",
    },
    "two updates, corrected": {
        "optimizer.num_minibatches": 2, "loss.correction.level": "token",
        "loss.correction.mode": "mask", "loss.clip.dual_clip": 10.0,
    },
}  # fmt: skip
CONTROLLERS = Controllers(
    buckets=DifficultyBuckets({"t0": "easy", "t1": "medium"}),
    kl=KLBudget({"easy": 1.0, "medium": 3.0, "hard": 0.5}),
)


@cache
def put_params(model, seed):
    return jax.device_put(tiny_params(model, seed=seed), make_param_shardings(MESH, model))


def groups_of(advantages, method):
    """Four groups; one trajectory is an environment error."""
    members = trajectories()
    if method.replays:
        rng = np.random.default_rng(5)
        members = [
            dataclasses.replace(
                t, token_arrays={ROUTED_EXPERTS: draw_experts(rng, len(t.token_ids))}
            )
            for t in members
        ]
    groups = replace_fields(grouped(members), advantage=advantages)
    rng = np.random.default_rng(3)
    divergences = [
        Divergence(
            old_logprobs=np.float32(-5 + 0.2 * rng.standard_normal(len(t.token_ids))),
            ref_logprobs=np.float32(-5 + 0.2 * rng.standard_normal(len(t.token_ids))),
            per_token=np.zeros(len(t.token_ids), np.float32),
            num_tokens=1,
        )
        for t in flatten_groups(groups)
    ]
    return replace_fields(groups, divergence=divergences)


def draw_experts(rng, length):
    """Return random routed experts of the layers that have experts."""
    sizes = length, len(TINY_MOE.expert_layers), TINY_MOE.top_k
    return rng.integers(0, TINY_MOE.num_experts, sizes).astype(select_index_dtype(8))


def take_step(method, model, advantages, programs, skips):
    """Return each update's gradient, as Adam's first moment, and metrics; and the batches."""
    optimizer = dataclasses.replace(method.optimizer, skip_signal_free=skips)
    method = dataclasses.replace(method, optimizer=optimizer)
    update, score = programs
    groups = groups_of(advantages, method)
    packed = [
        make_minibatch(part, SHAPE, method, controllers=CONTROLLERS)
        for part in divide_into_minibatches(groups, method.optimizer.num_minibatches)
    ]
    params, ref_params = (put_params(model, seed) for seed in (0, 2))
    batches = [shard_minibatch(p, MESH, score, params, ref_params, method) for p in packed]
    measured = []
    for minibatch, batch in zip(packed, batches, strict=True):
        state = init_state(jax.tree.map(jnp.copy, params), MESH, model, OPTIMIZER)
        state, metrics = update(state, batch, minibatch)
        moment = jax.device_get(optax.tree_utils.tree_get(state.opt_state, "mu"))
        measured.append((moment, {name: float(metric.value) for name, metric in metrics.items()}))
    return measured, packed


def compare(method, model, advantages):
    policy = Model(model, MESH, XLA, num_tokens=NUM_TOKENS, remat="none")
    update = UpdateStep(policy, make_policy_loss(method), OPTIMIZER)
    programs = update, ScoreStep(policy, temperature=1.0)
    skipped, packed = take_step(method, model, advantages, programs, True)
    whole, all_packed = take_step(method, model, advantages, programs, False)
    for (moment, metrics), (expected, expected_metrics) in zip(skipped, whole, strict=True):
        if any(np.any(leaf) for leaf in jax.tree.leaves(expected)):
            assert relative_distance(moment, expected) < 1e-4
        else:
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(moment))
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            assert np.isfinite(value), name
            np.testing.assert_allclose(metrics[name], value, rtol=2e-4, atol=1e-5, err_msg=name)
    assert sum(p.num_tokens for p in packed) < sum(p.num_tokens for p in all_packed)
    return skipped


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_the_same_step_with_the_same_metrics(name):
    compare(method_with(**METHODS[name]), TINY, SOME)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss.entropy_coef": 0.1},
        {"kl.coef": 0.3, "kl.controller": "budget"},
        {"kl.coef": 0.3, "kl.anchor": "old"},
        {"model.balance_coef": 0.5},
        {"loss.name": "tests.training.test_signal_free.pulling_loss"},
    ],
    ids=str,
)
def test_terms_that_have_a_gradient_without_an_advantage_keep_all_trajectories(changes):
    method = method_with(**changes)
    groups = groups_of(SOME, method)
    packed = make_minibatch(groups, SHAPE, method, controllers=CONTROLLERS)
    assert packed.rest is None


@pytest.mark.minutes
def test_routers_are_balanced_and_measured_over_every_token():
    [(_, metrics)] = compare(method_with(**{"model.replay": True}), TINY_MOE, SOME)
    assert {"router/balance_loss", "router/load_max", "router/entropy"} <= metrics.keys()


def test_a_step_without_signal_is_measured():
    [(_, metrics)] = compare(method_with(), TINY, NONE)
    assert metrics["actor/entropy"] > 3  # nats, of 250 tokens
    assert metrics["grad_norm"] == 0
