"""Invariance of updates for every loss, KL form and correction, and what disabled terms cost.

`test_update.py` compares a few variants with plain arithmetic; here, all of them with themselves.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.builders.validation import validate
from jaxrl.config import default_config
from jaxrl.envs.base import Outcome
from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.objectives.advantages import ESTIMATORS
from jaxrl.runtime.sharding import make_mesh, make_param_shardings
from jaxrl.training.controllers import Controllers
from jaxrl.training.minibatches import make_minibatch
from jaxrl.training.packing import BatchShape, SequenceSize, balance_rows
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import GradientStep
from jaxrl.types import Batch, replace_fields
from tests.choices import (
    CORRECTIONS,
    EVERY,
    KL_TERMS,
    LOSSES,
    SLOTS,
    WHOLE,
    configured,
    estimator,
    flat,
    loss_gradient,
    loss_of,
    mode_of,
    sequences,
    whole_gradient,
)
from tests.episodes import grouped, make_failure, make_trajectory
from tests.helpers import (
    NUM_TOKENS,
    TINY,
    method_of,
    pack_all,
    relative_distance,
    scatter,
    tiny_params,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "one_size")


def kl_weights_of(sequence):
    rng = np.random.default_rng(sequence.token_ids)
    return rng.choice([0.1, 0.2, 0.4], len(sequence.token_ids)).astype(np.float32)


def packed_batch(members, shape, mode, *, is_weighed=True, **changes):
    """Pack these sequences with all that a method may want to know of their tokens."""
    packed = pack_all(members, shape, aggregation=mode, **changes)
    if not is_weighed:
        return packed
    weights = scatter(packed.batch, [kl_weights_of(member) for member in members])
    return dataclasses.replace(packed, batch=dataclasses.replace(packed.batch, kl_weights=weights))


# Of the loss alone: every combination.


@pytest.fixture(scope="module")
def logprobs_of():
    """What the current policy says of each sequence, near what the old one said."""
    rng = np.random.default_rng(6)
    return [
        member.old_logprobs + 0.3 * rng.standard_normal(len(member.token_ids)).astype(np.float32)
        for member in sequences()
    ]


WILD = (np.nan, np.inf, -np.inf, 3e38, -1e30)
FIELDS = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "kl_weights")
TIGHT = BatchShape(num_micro=1, micro_rows=8, row_tokens=32)

# Every loss, KL form and correction; all combinations take minutes.
CHOICES = [
    (list(LOSSES)[i % len(LOSSES)], kl, list(CORRECTIONS)[(i + 2) % len(CORRECTIONS)])
    for i, kl in enumerate(KL_TERMS)
]
compiled_gradient = cache(lambda *choice: loss_gradient(loss_of(*choice)))


def tight_batch(members, choice, **changes):
    loss, kl, _ = choice
    is_weighed = kl == "weighed k3"
    return flat(packed_batch(members, TIGHT, mode_of(loss), is_weighed=is_weighed, **changes).batch)


@pytest.mark.parametrize("choice", CHOICES, ids=", ".join)
def test_masked_tokens_have_no_gradient_and_no_influence(choice, logprobs_of):
    check_masked_tokens(choice, logprobs_of)


@pytest.mark.slow(
    instead="test_properties.py::test_masked_tokens_have_no_gradient_and_no_influence"
)
@pytest.mark.parametrize("choice", [x for x in EVERY if x not in CHOICES], ids=", ".join)
def test_masked_tokens_have_no_influence_in_any_other_combination(choice, logprobs_of):
    check_masked_tokens(choice, logprobs_of)


def check_masked_tokens(choice, logprobs_of):
    """Put wild values at masked tokens and on padding: not a bit of any gradient changes."""
    batch = tight_batch(sequences(), choice)
    mask = batch.loss_mask
    logprobs = scatter(batch, logprobs_of)
    entropies = np.ones_like(logprobs)
    gradient = compiled_gradient(*choice)
    wanted, of_entropies = (np.asarray(x) for x in gradient(logprobs, entropies, batch))
    assert np.isfinite(wanted).all()
    assert not wanted[~mask].any()
    np.testing.assert_array_equal(of_entropies != 0, mask)
    assert np.count_nonzero(wanted[mask]) > 0.3 * mask.sum()
    for number, value in enumerate(WILD):
        # Each field gets another one of the wild values in turn.
        values = dict(zip(FIELDS, np.roll(WILD, number), strict=True))
        changed = {
            name: np.where(mask, getattr(batch, name), wild)
            for name, wild in values.items()
            if getattr(batch, name) is not None
        }
        got = gradient(
            np.where(mask, logprobs, value),
            np.where(mask, entropies, value),
            dataclasses.replace(batch, **changed),
        )
        np.testing.assert_array_equal(got[0], wanted, err_msg=str(value))
        np.testing.assert_array_equal(got[1], of_entropies, err_msg=str(value))


@pytest.mark.parametrize("choice", CHOICES, ids=", ".join)
def test_neighbors_in_a_row_have_no_influence(choice, logprobs_of):
    """A trajectory's gradient is the same alone, packed tightly, and in any order."""
    members = sequences()
    gradient = compiled_gradient(*choice)

    def gradients_by_member(order, batch):
        logprobs = scatter(batch, [logprobs_of[i] for i in order])
        values = np.asarray(gradient(logprobs, np.ones_like(logprobs), batch)[0])
        return {i: values[batch.segment_ids == n + 1] for n, i in enumerate(order)}

    orders = (range(8), [5, 2, 7, 0, 6, 3, 1, 4], range(7, -1, -1))
    together = [
        gradients_by_member(order, tight_batch([members[i] for i in order], choice))
        for order in orders
    ]
    for i, member in enumerate(members):
        alone = gradients_by_member([i], tight_batch([member], choice, counted=members))
        for each in together:
            np.testing.assert_allclose(each[i], alone[i], rtol=2e-5, atol=1e-8)


# Of the whole update.


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def params(mesh):
    return jax.device_put(tiny_params(), make_param_shardings(mesh, TINY))


def pack_one_per_micro_batch(members, mode):
    """Pack each trajectory into a row and a micro-batch of its own, with padding all around."""
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=32)
    each = [packed_batch([member], shape, mode, counted=members).batch for member in members]
    batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *each)
    ids = batch.segment_ids * np.arange(1, len(members) + 1)[:, None, None]
    return dataclasses.replace(batch, segment_ids=ids), len(members)


@pytest.mark.minutes
@pytest.mark.parametrize("choice", WHOLE[1:3], ids=" ".join)
def test_packing_order_padding_micro_batches_and_balance_change_no_gradient(choice, mesh, params):
    members, mode = sequences(), mode_of(choice[0])
    gradient = whole_gradient(mesh, *choice)
    shape = BatchShape(num_micro=8, micro_rows=2, row_tokens=32)  # one, so that it compiles once
    wanted, measured = gradient(params, *pack_one_per_micro_batch(members, mode))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(wanted))
    for order in (range(8), [5, 2, 7, 0, 6, 3, 1, 4]):
        for num_shards in (1, 2):
            packed = packed_batch([members[i] for i in order], shape, mode, num_shards=num_shards)
            assert packed.num_micro < 8
            got, metrics = gradient(params, packed.batch, packed.num_micro)
            assert relative_distance(got, wanted) < 1e-5, (order, num_shards)
            for name, metric in measured.items():
                wanted_value = pytest.approx(float(metric.value), rel=1e-4, abs=1e-6)
                assert float(metrics[name].value) == wanted_value
    # And each trajectory does have an influence.
    without_last = packed_batch(members[:7], shape, mode)
    got, _ = gradient(params, without_last.batch, without_last.num_micro)
    assert relative_distance(got, wanted) > 1e-2


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    num_shards=st.sampled_from([1, 2, 4, 8]),
    per_shard=st.integers(1, 3),
)
def test_rows_are_balanced_over_devices(sizes, num_shards, per_shard):
    rows, micro_rows = [[(i, 0)] for i in range(len(sizes))], num_shards * per_shard
    items = [SequenceSize(length=size, prompt=i) for i, size in enumerate(sizes)]
    got, loads = balance_rows(rows, items, micro_rows, num_shards)
    assert sorted(i for row in got for i, _ in row) == list(range(len(sizes)))
    assert len(got) == -(-len(rows) // micro_rows) * micro_rows
    # Row r of a micro-batch is on device r // per_shard.
    held = [0] * num_shards
    for index, row in enumerate(got):
        held[index % micro_rows // per_shard] += sum(sizes[i] for i, _ in row)
    assert held == loads
    # No part is heavier than the fair share by more than one row's tokens.
    assert max(loads) <= sum(sizes) / num_shards + max(sizes)
    dealt = [0] * num_shards  # as rows lie without balancing, the longest first
    for index, size in enumerate(sorted(sizes, reverse=True)):
        dealt[index % micro_rows // per_shard] += size
    assert max(loads) <= max(dealt)


# Advantages: by group ids alone, and only by differences within a group.


@st.composite
def groups(draw):
    """Trajectories of up to four groups in any order, some of them failures."""
    numbers = [draw(st.integers(0, 3)) for _ in range(SLOTS)]
    rewards = [draw(st.integers(-4, 4)) / 4 for _ in range(SLOTS)]
    return [
        dataclasses.replace(
            make_trajectory(reward=reward, task_number=number, sample_index=i),
            is_correct=draw(st.booleans()),
        )
        if draw(st.integers(0, 9))
        else make_failure(task_number=number, sample_index=i)
        for i, (number, reward) in enumerate(zip(numbers, rewards, strict=True))
    ]


# What an estimator of subsets gives depends on the order in the batch, as the paper has it.
BY_ORDER = ("pass_at_k_full_sampling", "pass_at_k_bootstrap")
GROUP_RELATIVE = [
    (name, baseline)
    for name in ESTIMATORS
    for baseline in (False, True)
    if name == "reinforce_plus_plus" or not baseline
]


@pytest.mark.parametrize(("name", "baseline"), GROUP_RELATIVE)
@settings(max_examples=15, deadline=None)
@given(batch=groups(), shifts=st.lists(st.integers(-8, 8), min_size=4, max_size=4))
def test_shifting_the_rewards_of_a_group_changes_no_advantage(name, baseline, batch, shifts):
    if name == "reinforce_plus_plus" and not baseline:
        shifts = shifts[:1] * 4  # relative to the batch: all groups alike
    estimate = estimator(name, baseline)
    shifted = [dataclasses.replace(t, reward=t.reward + shifts[int(t.task_id[1:])]) for t in batch]
    np.testing.assert_allclose(estimate(shifted, 0), estimate(batch, 0), atol=1e-4)


@pytest.mark.parametrize(("name", "baseline"), GROUP_RELATIVE)
@settings(max_examples=15, deadline=None)
@given(batch=groups(), order=st.permutations(range(SLOTS)))
def test_advantages_depend_on_groups_and_not_on_the_order(name, baseline, batch, order):
    estimate = estimator(name, baseline)
    wanted = estimate(batch, 3)
    if name not in BY_ORDER:
        mixed = [batch[i] for i in order]
        np.testing.assert_allclose(estimate(mixed, 3), wanted, atol=2e-6)
    assert not wanted[[not t.is_scored for t in batch]].any()
    # What another group does is none of a group's business, where nothing is normalized over all.
    if name not in ("reinforce_plus_plus", "pass_at_k_entropy_guided"):
        others = np.array([t.task_id != "t0" for t in batch])
        failed = {"outcome": Outcome.ENVIRONMENT_ERROR}
        lost = [
            t if is_other else dataclasses.replace(t, **failed)
            for t, is_other in zip(batch, others, strict=True)
        ]
        np.testing.assert_allclose(estimate(lost, 3)[others], wanted[others], atol=1e-6)
        assert not estimate(lost, 3)[~others].any()


# What is off costs nothing.

ON_THE_HOST = {
    "filters": {
        **{"filter.name": "varied", "filter.tasks_per_batch": 8, "filter.skip_solved": True},
        "shaping.overlong_buffer": 64,
    },
    "shaping": {
        **{"shaping.boundary_aware": True, "eval.every_steps": 1, "filter.resample_attempts": 1},
        **{"shaping.entropy_reward": True, "shaping.bootstrap_tasks": 4},
    },
    "advantages": {
        "advantage.name": "reinforce_plus_plus",
        "advantage.reinforce_plus_plus.baseline": True,
    },
    "KL in the reward": {"kl.coef": 0.1, "kl.apply_to": "reward", "kl.estimator": "k1"},
    "settings of terms that are off": {
        **{"loss.correction.cap": 3.0, "loss.correction.mode": "mask"},
        **{"kl.estimator": "k1", "kl.adaptive.target": 0.5},
    },
}


def update_text(changes, fields=()):
    """Return the lowered update of a method whose batch has these optional fields."""
    config = configured(changes)
    config.model.path = config.tasks.train.source = config.tasks.eval.source = "x"
    config.search.local.corpus = "x"
    validate(config)
    method = method_of(config)
    shape = jax.ShapeDtypeStruct((2, 2, 16), jnp.float32)
    ids, mask = (jax.ShapeDtypeStruct(shape.shape, kind) for kind in (jnp.int32, jnp.bool_))
    batch = Batch(
        token_ids=ids, segment_ids=ids, positions=ids, loss_mask=mask,
        token_weights=shape, advantages=shape, rollout_logprobs=shape,
        **dict.fromkeys(fields, shape),
    )  # fmt: skip
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    step = GradientStep(
        Model(TINY, mesh, XLA, num_tokens=NUM_TOKENS, remat="none"),
        make_policy_loss(method),
        temperature=method.temperature,
        entropy_gradient=method.loss.entropy_coef != 0,
    )
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny_params())
    sums = jax.eval_shape(step.init_sums.function, params, batch)
    program = jax.jit(step.loop.program.function, static_argnums=5)
    return program.lower(params, sums, batch, jnp.int32(0), jnp.int32(1), 4).as_text()


@pytest.fixture(scope="module")
def plain_text():
    return update_text({})


def test_by_default_a_batch_has_no_optional_field():
    groups = grouped(make_trajectory(task_number=i, length=9) for i in range(16))
    groups = replace_fields(groups, advantage=[1.0] * 16)
    method = method_of(default_config())
    shape = BatchShape(num_micro=4, micro_rows=4, row_tokens=16)
    packed = make_minibatch(groups, shape, method, controllers=Controllers())
    names = {
        *("token_ids", "segment_ids", "positions", "loss_mask", "token_weights"),
        *("advantages", "rollout_logprobs"),
    }
    fields = {field.name for field in dataclasses.fields(Batch)}
    present = {name for name in fields if getattr(packed.batch, name) is not None}
    assert present == names | {"token_arrays"}
    assert packed.batch.token_arrays == {}
    assert len(jax.tree.leaves(packed.batch)) == len(names)


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_what_works_on_the_host_does_not_change_the_update(name, plain_text):
    assert update_text(ON_THE_HOST[name]) == plain_text


@pytest.mark.parametrize("loss", LOSSES)
def test_terms_that_are_off_read_nothing(loss, logprobs_of):
    """Not even to multiply it by 0: what only they read may hold anything, at any token."""
    batch = flat(packed_batch(sequences(), TIGHT, mode_of(loss)).batch)
    logprobs = scatter(batch, logprobs_of)
    token_loss = make_policy_loss(method_of(configured(LOSSES[loss])))
    values = jax.jit(lambda *arguments: token_loss(*arguments)[0])
    wanted = np.asarray(values(logprobs, np.ones_like(logprobs), batch))
    assert np.isfinite(wanted).all()
    nothing = np.full_like(logprobs, np.nan)
    names = ("rollout_logprobs", "ref_logprobs", "kl_weights")
    lost = dataclasses.replace(batch, **dict.fromkeys(names, nothing))
    if loss != "gspo":
        lost = dataclasses.replace(lost, segment_ids=np.zeros_like(batch.segment_ids))
    np.testing.assert_array_equal(values(logprobs, nothing, lost), wanted)


def test_a_coefficient_that_moves_is_not_part_of_the_program(plain_text):
    """It enters as an array, whoever moves it and wherever it stands."""
    fields = ("ref_logprobs", "kl_weights")
    texts = {
        update_text({"kl.coef": coef, "kl.controller": name}, fields)
        for coef, name in ((0.1, "adaptive"), (0.7, "log"), (0.1, "budget"))
    }
    assert len(texts) == 1
    assert texts != {plain_text}
