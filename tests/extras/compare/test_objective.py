"""Objectives on a batch against all logits of the two-layer model, and numbers worked by hand."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.components import make_stages
from jaxrl.extras.compare.objective import Measured, Objective, inner_products, relate, token_terms
from jaxrl.method import method_of
from jaxrl.training.controllers import Controllers
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.types import Batch, members, with_fields
from tests import helpers
from tests.episodes import grouped
from tests.helpers import TINY, TINY_MOE, dense_logprobs, method_with, tiny_params
from tests.training import policies

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = {
    "rollout.tasks_per_step": 4,
    "rollout.group_size": 2,
    "rollout.max_prompt_tokens": 8,
    "rollout.max_total_tokens": 32,
    "rollout.max_response_tokens": 30,
    "optimizer.micro_rows": 2,
    "advantage.grpo.normalize_std": False,
    "model.remat": "none",
    "loss.clip_high": 0.3,
}
REWARDS = [1.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.25, 0.25]  # the sixth is an environment error
ADVANTAGES = [0.5, -0.5, -0.25, 0.25, 0.0, 0.0, 0.0, 0.0]


def measured(*, is_moved=False, **changes):
    """An objective at the policy, or at its reference with the policy's old log-probabilities."""
    config = helpers.settings(**SIZES, **changes)
    method, model = method_of(config), policies.score().model
    objective = Objective(
        method=method,
        model=model,
        stage=make_stages(config, model, method)["train"],
        controllers=Controllers(),
        is_trigger=None,
        charges_kl=True,
    )
    policy, other = policies.policies()
    groups = with_fields(grouped(policies.trajectories()), reward=REWARDS)
    prepared = objective.prepare(groups, policy, other, step=0, stage_step=0, is_moved=is_moved)
    assert [t.advantage for t in members(prepared.groups)] == ADVANTAGES
    return objective.measure(prepared, other if is_moved else policy)


def by_hand(is_moved, kl_coef):
    """The gradient of the loss as it is written down, from all logits; its value, its clipped."""
    policy, other = policies.policies()
    made, rows = policies.trajectories(), []
    width = max(policies.LENGTHS)
    for index, t in enumerate(made):
        length = len(t.token_ids)
        row = {
            "ids": np.pad(t.token_ids, (0, width - length)),
            "mask": np.pad(t.loss_mask & (index != 5), (0, width - length)),
            "old": np.pad(policies.dense()[0][index], (0, width - length)),
            "ref": np.pad(policies.dense()[1][index], (0, width - length)),
            "advantage": np.float32(ADVANTAGES[index]),
        }
        rows.append(row)
    rows = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    weight = 1 / rows["mask"].sum()

    def loss(params):
        def of_one(row):
            logprobs = dense_logprobs(params, TINY, row["ids"])[0]
            ratio = jnp.exp(logprobs - row["old"])
            clipped = jnp.clip(ratio, 0.8, 1.3)
            values = -jnp.minimum(ratio * row["advantage"], clipped * row["advantage"])
            gap = row["ref"] - logprobs
            values += kl_coef * gap**2 / 2
            beyond = ((ratio > 1.3) & (row["advantage"] > 0)) | (
                (ratio < 0.8) & (row["advantage"] < 0)
            )
            mask = row["mask"]
            return jnp.where(mask, values, 0).sum(), jnp.where(mask, beyond, False).sum()

        values, beyond = jax.vmap(of_one)(rows)
        return weight * values.sum(), weight * beyond.sum()

    params = other if is_moved else policy
    (value, clipped), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return gradient, float(value), float(clipped)


@pytest.mark.parametrize(("is_moved", "kl_coef"), [(False, 0.0), (False, 0.05), (True, 0.0)])
def test_the_gradient_is_that_of_all_logits(is_moved, kl_coef):
    got = measured(is_moved=is_moved, **{"kl.coef": kl_coef, "kl.estimator": "k2"})
    wanted, loss, clipped = by_hand(is_moved, kl_coef)
    assert helpers.relative_distance(got.gradient, wanted) < 2e-5
    assert got.numbers["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert got.numbers["actor/pg_clipfrac"] == pytest.approx(clipped, abs=1e-6)
    assert (clipped > 0) == is_moved


def test_numbers_by_hand():
    got = measured().numbers
    # Of seven trajectories that did not fail, four have a signal, ± 1/2 and ± 1/4.
    assert got["advantages/mean"] == 0
    assert got["advantages/std"] == pytest.approx(math.sqrt(2 * (0.25 + 0.0625) / 7))
    assert (got["advantages/min"], got["advantages/max"]) == (-0.5, 0.5)
    assert got["advantages/nonzero_share"] == pytest.approx(4 / 7)
    counts = [t.num_sampled for t in policies.trajectories()]
    total = sum(counts) - counts[5]
    assert got["weights/sum"] == pytest.approx(1.0)
    assert got["weights/max"] == pytest.approx(1 / total)
    assert got["weights/share/answered"] == pytest.approx(1.0)
    assert got["coefficients/nonzero_share"] == pytest.approx(sum(counts[:4]) / total)
    moved = 0.5 * (counts[0] + counts[1]) + 0.25 * (counts[2] + counts[3])
    assert got["coefficients/abs_sum"] == pytest.approx(moved / total, rel=1e-5)


def test_of_several_mini_batches_it_is_the_mean():
    halves = measured(**{"optimizer.num_minibatches": 2})
    counts = [t.num_sampled for t in policies.trajectories()]
    first = sum(counts[:4])  # all that has a signal is in the first two groups
    assert halves.numbers["weights/max"] == pytest.approx(
        max(1 / first, 1 / (sum(counts[4:]) - counts[5])) / 2
    )
    whole = measured()
    ratio = (sum(counts) - counts[5]) / first / 2  # of what the mean over tokens divides by
    scaled = jax.tree.map(lambda leaf: leaf * ratio, whole.gradient)
    assert helpers.relative_distance(halves.gradient, scaled) < 2e-5
    np.testing.assert_allclose(halves.coefficients, whole.coefficients * ratio, rtol=1e-5)


def test_a_loss_and_its_negation_point_to_opposite_sides():
    one = measured()
    other = measured(**{"loss.name": "tests.extras.compare.losses.negated"})
    found = relate(one, other, policies.score().model)
    assert found["cosine"] == pytest.approx(-1.0, abs=1e-6)
    assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-6)
    assert (found["opposite_share"], found["one_only_share"]) == (1.0, 0.0)
    assert other.numbers["loss"] == pytest.approx(-one.numbers["loss"], abs=1e-7)


def test_coefficients_are_finite_differences():
    """In float64, of the loss as it is written down, where ratios have moved."""
    rng = np.random.default_rng(0)
    shape, mask = (2, 24), rng.random((2, 24)) < 0.7
    logprobs, old, ref = (-rng.random(shape) * 2 for _ in range(3))
    advantages, weights = rng.standard_normal(shape), np.where(mask, rng.random(shape), 0.0)

    def value(logprobs):
        ratio = np.exp(logprobs - old)
        surrogate = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.3) * advantages)
        gap = ref - logprobs
        return (weights * (surrogate + 0.3 * (np.exp(gap) - gap - 1))).sum()

    wanted = np.zeros(shape)
    for place in np.ndindex(shape):
        step = np.zeros(shape)
        step[place] = 1e-6
        wanted[place] = (value(logprobs + step) - value(logprobs - step)) / 2e-6
    fields = {"token_weights": weights, "advantages": advantages, "old_logprobs": old}
    fields |= {"ref_logprobs": ref, "rollout_logprobs": old}
    ids = jnp.ones(shape, jnp.int32)
    micro = Batch(
        token_ids=ids,
        segment_ids=ids,
        positions=ids,
        loss_mask=jnp.asarray(mask),
        **{name: jnp.asarray(x, jnp.float32) for name, x in fields.items()},
    )
    loss = make_policy_loss(method_with(**{"kl.coef": 0.3, "loss.clip_high": 0.3}))
    given = jnp.asarray(logprobs, jnp.float32), jnp.zeros(shape, jnp.float32)
    losses, coefficients = token_terms(loss, *given, micro)
    np.testing.assert_allclose(coefficients, wanted, rtol=1e-4, atol=1e-6)
    assert float(losses.sum()) == pytest.approx(value(logprobs), rel=1e-5)
    is_flat = np.exp(ref - logprobs) * 0.3 * weights  # where it is clipped, the KL term is left
    assert (np.abs(wanted - (0.3 * weights - is_flat)) < 1e-7)[mask].any()


@pytest.mark.parametrize(("config", "layer", "of_stack"), [(TINY, 1, 1), (TINY_MOE, 2, 1)])
def test_layers_add_up_to_the_whole(config, layer, of_stack):
    """Also where some layers alone have experts: the third layer has the second ones."""
    model = types.SimpleNamespace(architecture=config)
    gradient, other = tiny_params(config, seed=0), tiny_params(config, seed=1)
    squares = inner_products(gradient, gradient, model)
    layers = {f"layer {i}" for i in range(config.num_layers)}
    assert squares.keys() == layers | (gradient.keys() - {"blocks"})
    norm = float(optax.tree.norm(gradient))
    assert math.sqrt(sum(squares.values())) == pytest.approx(norm, rel=1e-5)
    found, wanted = inner_products(gradient, other, model), 0.0
    for name, entry in gradient["blocks"].items():
        if layer in config.stacks.get(name, [layer]):
            place = of_stack if name in config.stacks else layer
            pairs = zip(jax.tree.leaves(entry), jax.tree.leaves(other["blocks"][name]), strict=True)
            wanted += sum(np.vdot(a[place], b[place]) for a, b in pairs)
    assert found[f"layer {layer}"] == pytest.approx(wanted, rel=1e-4)
    assert found["embed"] == pytest.approx(
        np.vdot(gradient["embed"]["embedding"], other["embed"]["embedding"]), rel=1e-4
    )


def test_how_two_gradients_relate():
    model = policies.score().model
    gradient = tiny_params(seed=0)
    signs = np.array([1.0, -2.0, 0.0, 3.0, 0.0], np.float32)
    one = Measured(numbers={}, gradient=gradient, coefficients=signs)
    same = relate(one, one, model)
    assert same["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert (same["opposite_share"], same["one_only_share"]) == (0, 0)
    assert all(row["cosine"] == pytest.approx(1.0, abs=1e-5) for row in same["layers"].values())
    # Twice as long and turned round; of the five tokens four have a coefficient in either.
    turned = Measured(
        numbers={},
        gradient=jax.tree.map(lambda leaf: -2 * leaf, gradient),
        coefficients=np.array([-1.0, -1.0, 1.0, -3.0, 0.0], np.float32),
    )
    found = relate(one, turned, model)
    assert found["cosine"] == pytest.approx(-1.0, abs=1e-6)
    assert found["norm"][1] == pytest.approx(2 * found["norm"][0])
    assert (found["opposite_share"], found["one_only_share"]) == (2 / 4, 1 / 4)
    nothing = Measured(
        numbers={}, gradient=jax.tree.map(np.zeros_like, gradient), coefficients=0 * signs
    )
    assert math.isnan(relate(one, nothing, model)["cosine"])
