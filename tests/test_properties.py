"""What must not change an update, for every loss, KL form and correction; and what must not cost.

`test_update.py` compares a few variants with plain arithmetic; here, all of them with themselves.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

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
from jaxrl.runtime.sharding import make_mesh, param_shardings
from jaxrl.training.controllers import Controllers
from jaxrl.training.method import old_logprobs_are_current
from jaxrl.training.minibatches import make_minibatches
from jaxrl.training.packing import BatchShape, Item, balance_rows
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import GradientStep, put_batch
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
from tests.episodes import grouped, make_failure, make_trajectory, strayed
from tests.helpers import (
    NUM_TOKENS,
    TINY,
    method_of,
    pack_all,
    random_sequences,
    relative_distance,
    scatter,
    tiny_params,
    with_devices,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "one_size")

ROOT = Path(__file__).parents[1]


def kl_weights_of(one):
    rng = np.random.default_rng(one.token_ids)
    return rng.choice([0.1, 0.2, 0.4], len(one.token_ids)).astype(np.float32)


def packed_batch(members, shape, mode, *, is_weighed=True, **changes):
    """These sequences with all that a method may want to know of their tokens."""
    packed = pack_all(members, shape, aggregation=mode, **changes)
    if not is_weighed:
        return packed
    weights = scatter(packed.batch, [kl_weights_of(one) for one in members])
    return dataclasses.replace(packed, batch=dataclasses.replace(packed.batch, kl_weights=weights))


# Of the loss alone: every combination.


@pytest.fixture(scope="module")
def logprobs_of():
    """What the current policy would say of each sequence, near what the old one said."""
    rng = np.random.default_rng(6)
    return [
        one.old_logprobs + 0.3 * rng.standard_normal(len(one.token_ids)).astype(np.float32)
        for one in sequences()
    ]


WILD = (np.nan, np.inf, -np.inf, 3e38, -1e30)
FIELDS = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "kl_weights")
TIGHT = BatchShape(num_micro=1, micro_rows=8, row_tokens=32)


# Every pair of choices; all the rest of them take minutes.
PAIRS = [
    (loss, kl, list(CORRECTIONS)[(row + column) % len(CORRECTIONS)])
    for row, loss in enumerate(LOSSES)
    for column, kl in enumerate(KL_TERMS)
]


@pytest.mark.parametrize("choice", PAIRS, ids=", ".join)
def test_masked_tokens_have_no_gradient_and_no_say(choice, logprobs_of):
    check_masked_tokens(*choice, logprobs_of)


@pytest.mark.slow(instead="test_properties.py::test_masked_tokens_have_no_gradient_and_no_say")
@pytest.mark.parametrize("choice", [x for x in EVERY if x not in PAIRS], ids=", ".join)
def test_masked_tokens_have_no_say_in_any_other_combination(choice, logprobs_of):
    check_masked_tokens(*choice, logprobs_of)


def check_masked_tokens(loss, kl, correction, logprobs_of):
    """Whatever stands at masked tokens and on padding: not a bit of any gradient changes."""
    is_weighed = kl == "weighed k3"
    batch = flat(packed_batch(sequences(), TIGHT, mode_of(loss), is_weighed=is_weighed).batch)
    mask = batch.loss_mask
    logprobs = scatter(batch, logprobs_of)
    entropies = np.ones_like(logprobs)
    gradient = loss_gradient(loss_of(loss, kl, correction))
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


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_neighbours_in_a_row_have_no_say(loss, correction, logprobs_of):
    """A trajectory's gradient is the same alone, packed tightly, and in any order."""
    members = sequences()
    gradient = loss_gradient(loss_of(loss, "weighed k3", correction))
    found = []
    for order in (range(8), [5, 2, 7, 0, 6, 3, 1, 4], range(7, -1, -1)):
        batch = flat(packed_batch([members[i] for i in order], TIGHT, mode_of(loss)).batch)
        logprobs = scatter(batch, [logprobs_of[i] for i in order])
        got, _ = gradient(logprobs, np.ones_like(logprobs), batch)
        each = {i: np.asarray(got)[batch.segment_ids == n + 1] for n, i in enumerate(order)}
        found.append([each[i] for i in range(8)])
    alone = []
    for index in range(8):
        batch = flat(packed_batch([members[index]], TIGHT, mode_of(loss)).batch)
        whole = flat(packed_batch(members, TIGHT, mode_of(loss)).batch)
        weights = np.zeros_like(batch.token_weights)
        weights[batch.segment_ids == 1] = whole.token_weights[whole.segment_ids == index + 1]
        batch = dataclasses.replace(batch, token_weights=weights)
        logprobs = scatter(batch, [logprobs_of[index]])
        got, _ = gradient(logprobs, np.ones_like(logprobs), batch)
        alone.append(np.asarray(got)[batch.segment_ids == 1])
    for index in range(8):
        for one in found:
            np.testing.assert_allclose(one[index], alone[index], rtol=2e-5, atol=1e-8)


# Of the whole update.


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def params(mesh):
    return jax.device_put(tiny_params(), param_shardings(mesh, TINY))


def one_a_micro_batch(members, mode):
    """Each trajectory in a row and a micro-batch of its own, and padding all around."""
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=32)
    each = [packed_batch([one], shape, mode, counted=members).batch for one in members]
    batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *each)
    ids = batch.segment_ids * np.arange(1, len(members) + 1)[:, None, None]
    return dataclasses.replace(batch, segment_ids=ids), len(members)


@pytest.mark.minutes
@pytest.mark.parametrize(
    "choice",
    [*WHOLE[:4], pytest.param(WHOLE[4], marks=pytest.mark.slow(instead="::[WHOLE[:4]]"))],
    ids=" ".join,
)
def test_packing_order_padding_micro_batches_and_balance_change_no_gradient(choice, mesh, params):
    members, mode = sequences(), mode_of(choice[0])
    gradient = whole_gradient(mesh, *choice)
    shape = BatchShape(num_micro=8, micro_rows=2, row_tokens=32)  # one, so that it compiles once
    wanted, measured = gradient(params, *one_a_micro_batch(members, mode))
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
    # And each trajectory does have a say.
    other = packed_batch(members[:7], shape, mode)
    got, _ = gradient(params, other.batch, other.num_micro)
    assert relative_distance(got, wanted) > 1e-2


ON_MESH = BatchShape(num_micro=3, micro_rows=8, row_tokens=44)
SIZES_ON_MESH = [13, 44, 24, 24, 7, 40, 31, 5, 18] * 2


def measure_on_mesh():
    """How an update differs on eight virtual devices, and what each of them gets."""
    members = random_sequences(SIZES_ON_MESH)
    choice = ("gspo", "weighed k3", "sequence truncate")
    found, mode = [], mode_of(choice[0])
    for sizes, num_shards in (((1, 1, 1, 1), 1), ((1, 2, 2, 2), 2)):
        axes = dict(zip(("data", "fsdp", "context", "tensor"), sizes, strict=True))
        mesh = make_mesh(**axes, devices=jax.devices()[: math.prod(sizes)])
        params = jax.device_put(tiny_params(), param_shardings(mesh, TINY))
        packed = packed_batch(members, ON_MESH, mode, num_shards=num_shards)
        batch = put_batch(mesh, packed.batch)
        gradient = whole_gradient(mesh, *choice)
        found.append(jax.device_get(gradient(params, batch, packed.num_micro)[0]))
    shards = batch.segment_ids.addressable_shards
    # Devices along `tensor` hold the same tokens, those along `context` pieces of the same rows.
    tokens = {str(shard.index): int((np.asarray(shard.data) > 0).sum()) for shard in shards}
    return {
        "distance": float(relative_distance(*reversed(found))),
        "rows": [shard.data.shape[1:] for shard in shards],
        "tokens": np.reshape(list(tokens.values()), (2, -1)).sum(axis=1).tolist(),
        "imbalance": packed.imbalance,
        "as_packed": tokens_by_device(packed_batch(members, ON_MESH, mode).batch, 2),
    }


def tokens_by_device(batch, num_devices):
    """How many tokens each of these devices gets of every micro-batch's rows, in all."""
    per_row = (batch.segment_ids > 0).sum(axis=2)
    return per_row.reshape(len(per_row), num_devices, -1).sum(axis=(0, 2)).tolist()


@pytest.mark.slow(instead="test_properties.py::test_balancing_deals_all_rows_out_evenly")
def test_a_mesh_changes_no_gradient_and_its_devices_have_even_shares():
    settings = {
        "JAX_PLATFORMS": "cpu",
        **with_devices(8),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_properties"],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["distance"] < 1e-5
    assert measured["rows"] == [[4, 22]] * 8
    tokens = measured["tokens"]
    assert (len(tokens), sum(tokens)) == (2, sum(SIZES_ON_MESH))
    assert max(tokens) * 2 / sum(tokens) - 1 == pytest.approx(measured["imbalance"])
    assert max(tokens) < max(measured["as_packed"])


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    num_shards=st.sampled_from([1, 2, 4, 8]),
    per_shard=st.integers(1, 3),
)
def test_balancing_deals_all_rows_out_evenly(sizes, num_shards, per_shard):
    rows, micro_rows = [[(i, 0)] for i in range(len(sizes))], num_shards * per_shard
    items = [Item(length=size, prompt=i) for i, size in enumerate(sizes)]
    got, loads = balance_rows(rows, items, micro_rows, num_shards)
    assert sorted(i for row in got for i, _ in row) == list(range(len(sizes)))
    assert len(got) == -(-len(rows) // micro_rows) * micro_rows
    # Row r of a micro-batch is on device r // per_shard.
    held = [0] * num_shards
    for place, row in enumerate(got):
        held[place % micro_rows // per_shard] += sum(sizes[i] for i, _ in row)
    assert held == loads
    # No part is heavier than the fair share by more than one row's tokens.
    assert max(loads) <= sum(sizes) / num_shards + max(sizes)
    dealt = [0] * num_shards  # as rows lie without balancing, the longest first
    for place, size in enumerate(sorted(sizes, reverse=True)):
        dealt[place % micro_rows // per_shard] += size
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
@given(made=groups(), shifts=st.lists(st.integers(-8, 8), min_size=4, max_size=4))
def test_shifting_the_rewards_of_a_group_changes_no_advantage(name, baseline, made, shifts):
    if name == "reinforce_plus_plus" and not baseline:
        shifts = shifts[:1] * 4  # relative to the batch: all groups alike
    estimate = estimator(name, baseline)
    shifted = [dataclasses.replace(t, reward=t.reward + shifts[int(t.task_id[1:])]) for t in made]
    np.testing.assert_allclose(estimate(shifted, 0), estimate(made, 0), atol=1e-4)


@pytest.mark.parametrize(("name", "baseline"), GROUP_RELATIVE)
@settings(max_examples=15, deadline=None)
@given(made=groups(), order=st.permutations(range(SLOTS)))
def test_groups_are_those_of_a_task_wherever_they_stand(name, baseline, made, order):
    estimate = estimator(name, baseline)
    wanted = estimate(made, 3)
    if name not in BY_ORDER:
        mixed = [made[i] for i in order]
        np.testing.assert_allclose(estimate(mixed, 3), wanted, atol=2e-6)
    assert not wanted[[not t.is_scored for t in made]].any()
    # What another group does is none of a group's business, where nothing is normalized over all.
    if name not in ("reinforce_plus_plus", "pass_at_k_entropy_guided"):
        others = np.array([t.task_id != "t0" for t in made])
        failed = {"outcome": Outcome.ENVIRONMENT_ERROR}
        lost = [
            t if is_other else dataclasses.replace(t, **failed)
            for t, is_other in zip(made, others, strict=True)
        ]
        np.testing.assert_allclose(estimate(lost, 3)[others], wanted[others], atol=1e-6)
        assert not estimate(lost, 3)[~others].any()


# What is off costs nothing.

OFF_ON_THE_DEVICE = {  # each works on the host alone
    "filters": {"filter.name": "varied", "filter.tasks_per_batch": 8},
    "skipping": {"filter.skip_solved": True},
    "resampling": {"filter.resample_attempts": 2},
    "overlong": {"shaping.overlong_buffer": 64},
    "abstentions": {
        "shaping.boundary_aware": True, "eval.every_steps": 1, "filter.resample_attempts": 1,
    },
    "entropy reward": {"shaping.entropy_reward": True, "shaping.bootstrap_tasks": 4},
    "Dr. GRPO": {"advantage.grpo.normalize_std": False},
    "RLOO": {"advantage.name": "rloo"},
    "REINFORCE++": {
        "advantage.name": "reinforce_plus_plus",
        "advantage.reinforce_plus_plus.baseline": True,
    },
    "pass@k": {"advantage.name": "pass_at_k", "advantage.pass_at_k.k": 2},
    "KL in the reward": {"kl.coef": 0.1, "kl.apply_to": "reward", "kl.estimator": "k1"},
    "correction's settings": {"loss.correction.cap": 3.0, "loss.correction.mode": "mask"},
    "KL's settings": {"kl.estimator": "k1", "kl.adaptive.target": 0.5},
}  # fmt: skip
OPTIONAL = {
    "KL to ref": ({"kl.coef": 0.1}, {"ref_logprobs"}),
    "KL to old": ({"kl.coef": 0.1, "kl.anchor": "old"}, set()),
    "looser KL": ({"kl.coef": 0.1, "kl.low_factor": 0.5}, {"ref_logprobs", "kl_weights"}),
    "budgets": ({"kl.coef": 0.1, "kl.controller": "budget"}, {"ref_logprobs", "kl_weights"}),
    "token correction": ({"loss.correction.level": "token"}, set()),
    "sequence correction": ({"loss.correction.level": "sequence"}, set()),
    "epochs": ({"optimizer.num_epochs": 2}, {"old_logprobs"}),
    "carry-over": ({"filter.name": "varied", "filter.carry_over": True}, {"old_logprobs"}),
    "entropy bonus": ({"loss.entropy_coef": 0.1}, set()),
    "dual clip": ({"loss.clip.dual_clip": 3.0}, set()),
    "GSPO": (LOSSES["gspo"], set()),
    "observations": ({"loss.mask_observations": False}, set()),
}


def step_of(changes):
    """The batch that a method needs, and the update of it: its text and number of operations."""
    config = configured(changes)
    config.model.path = config.tasks.train.source = config.tasks.eval.source = "x"
    config.search.local.corpus = "x"
    validate(config)
    method = method_of(config)
    fields = needed_fields(method)
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
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny_params())
    sums = jax.eval_shape(step.init_sums.function, abstract, batch)
    program = jax.jit(step.add.program.function, static_argnums=5)
    traced = program.trace(abstract, sums, batch, jnp.int32(0), jnp.int32(1), 4)
    return fields, traced.lower().as_text(), str(traced.jaxpr).count(" = ")


def needed_fields(method):
    """The fields of a batch that are not there for every method, as the loop comes to fill them."""
    one = dataclasses.replace(make_trajectory(length=6), advantage=1.0)
    one = dataclasses.replace(one, divergence=strayed(0.1, 0.2, 0.3, 0.4))
    shape = BatchShape(num_micro=1, micro_rows=1, row_tokens=16)
    alone = dataclasses.replace(method, tasks_per_step=1)
    controllers = Controllers.init(alone)
    (packed,) = make_minibatches(grouped([one]), shape, alone, controllers=controllers)
    optional = ("old_logprobs", "ref_logprobs", "kl_weights")
    fields = {name for name in optional if getattr(packed.batch, name) is not None}
    is_own = old_logprobs_are_current(method.optimizer, method.filter)
    fields |= set() if is_own else {"old_logprobs"}
    is_in_loss = method.kl.apply_to == "loss" and method.has_reference
    return fields | ({"ref_logprobs"} if is_in_loss else set())


@pytest.fixture(scope="module")
def plain_step():
    return step_of({})


def test_by_default_a_batch_has_nothing_optional(plain_step):
    assert plain_step[0] == set()
    made = grouped(make_trajectory(task_number=i, length=9) for i in range(16))
    made = replace_fields(made, advantage=[1.0] * 16)
    method = method_of(default_config())
    shape = BatchShape(num_micro=4, micro_rows=4, row_tokens=16)
    (packed,) = make_minibatches(made, shape, method, controllers=Controllers())
    names = {
        *("token_ids", "segment_ids", "positions", "loss_mask", "token_weights"),
        *("advantages", "rollout_logprobs"),
    }
    fields = {field.name for field in dataclasses.fields(Batch)}
    there = {name for name in fields if getattr(packed.batch, name) is not None}
    assert there == names | {"token_arrays"}
    assert packed.batch.token_arrays == {}
    assert len(jax.tree.leaves(packed.batch)) == len(names)


@pytest.mark.parametrize("name", OFF_ON_THE_DEVICE)
def test_what_works_on_the_host_leaves_the_update_as_it_is(name, plain_step):
    fields, text, count = step_of(OFF_ON_THE_DEVICE[name])
    assert (fields, count) == (plain_step[0], plain_step[2])
    assert text == plain_step[1]


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


@pytest.mark.parametrize("name", OPTIONAL)
def test_what_is_on_adds_only_its_own(name, plain_step):
    changes, expected = OPTIONAL[name]
    fields, text, count = step_of(changes)
    assert fields == expected
    assert text != plain_step[1]
    # Old log-probabilities are read rather than repeated; another mask is one in place of one.
    if name not in ("epochs", "carry-over", "observations"):
        assert count > plain_step[2]


def test_a_coefficient_that_moves_is_no_part_of_the_program():
    """It enters as an array, whoever moves it and wherever it stands."""
    texts = {
        step_of({"kl.coef": 0.1, "kl.controller": name})[1]
        for name in ("adaptive", "log", "budget")
    }
    other = step_of({"kl.coef": 0.7, "kl.controller": "adaptive"})[1]
    assert texts == {other}


if __name__ == "__main__":
    print(json.dumps(measure_on_mesh()))
