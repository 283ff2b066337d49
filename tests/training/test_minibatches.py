"""Where values of single tokens come to stand in mini-batches, and how they are measured."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jaxrl.config_checks import has_kl_loss
from jaxrl.models.policy import Model
from jaxrl.runtime.sharding import make_mesh, param_shardings
from jaxrl.training.minibatches import (
    Divergence,
    add_logprobs,
    as_trained,
    make_measure,
    make_minibatches,
    takes_own_logprobs,
    unpack,
)
from jaxrl.training.packing import BatchShape, pack
from jaxrl.training.update import make_score_step, put_batch
from tests import helpers
from tests.episodes import make_failure, make_trajectory
from tests.helpers import NUM_TOKENS, TINY, dense_logprobs, gather, scatter, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = BatchShape(num_micro=3, micro_rows=2, row_tokens=32)
MESH = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
LENGTHS = [9, 14, 32, 20, 5, 17, 11, 30]


settings = partial(
    helpers.settings,
    **{
        "rollout.tasks_per_step": 4,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": 30,
    },
)


def trajectories():
    """Four groups of two; the second member of the third is an environment error."""
    made = []
    for index, length in enumerate(LENGTHS):
        make = make_failure if index == 5 else make_trajectory
        one = make(group_id=index // 2, sample_index=index % 2, length=length)
        # An observation in the middle, so that masks have gaps.
        mask = one.loss_mask & (np.arange(length) % 9 != 6)
        logprobs = np.where(mask, one.rollout_logprobs, 0).astype(np.float32)
        made.append(dataclasses.replace(one, loss_mask=mask, rollout_logprobs=logprobs))
    return made


def tagged(kind):
    """Values that say to which trajectory and which of its tokens they belong."""
    return [
        kind * 10_000 + index * 100 + np.arange(length, dtype=np.float32)
        for index, length in enumerate(LENGTHS)
    ]


def divergences():
    made = [
        Divergence(old_logprobs=old, ref_logprobs=ref, per_token=0 * old, num_tokens=1)
        for old, ref in zip(tagged(1), tagged(2), strict=True)
    ]
    return [*made[:5], None, *made[6:]]


IN_LOSS = {"kl.coef": 0.1, "kl.controller": "budget", "optimizer.num_minibatches": 2}


@pytest.mark.parametrize("num_shards", [1, 2])
def test_values_of_tokens_stand_beside_their_tokens(num_shards):
    halves = make_minibatches(
        trajectories(),
        np.ones(8, np.float32),
        SHAPE,
        settings(**IN_LOSS),
        kl_weights=tagged(3),
        divergences=divergences(),
        num_shards=num_shards,
    )
    wanted = {"old_logprobs": tagged(1), "ref_logprobs": tagged(2), "kl_weights": tagged(3)}
    for half, members in zip(halves, ([0, 1, 2, 3], [4, 6, 7]), strict=True):
        for place, index in enumerate(members):
            ids = gather(half.batch, half.batch.token_ids, place)
            np.testing.assert_array_equal(ids, trajectories()[index].token_ids)
            for name, values in wanted.items():
                got = gather(half.batch, getattr(half.batch, name), place)
                np.testing.assert_array_equal(got, values[index], err_msg=name)
        for name in wanted:
            assert not getattr(half.batch, name)[half.batch.segment_ids == 0].any()
        assert half.num_counted == sum(int(trajectories()[i].loss_mask.sum()) for i in members)


def test_what_has_no_signal_takes_its_values_along():
    # Without a KL term in the loss, trajectories 1, 2 and 7 need not be trained on.
    advantages = np.array([1, 0, 0, 2, -1, 5, 3, 0], np.float32)
    config = settings(**{"kl.coef": 0.1, "kl.place": "reward", "optimizer.num_epochs": 2})
    (batch,) = make_minibatches(
        trajectories(), advantages, SHAPE, config, divergences=divergences()
    )
    for place, index in enumerate([0, 3, 4, 6]):
        got = gather(batch.batch, batch.batch.old_logprobs, place)
        np.testing.assert_array_equal(got, tagged(1)[index])
    assert batch.batch.ref_logprobs is None  # the penalty is in the reward
    assert batch.batch.segment_ids.max() == 4
    assert batch.num_counted == sum(int(t.loss_mask.sum()) for t in trajectories() if t.is_scored)


@pytest.mark.parametrize(
    ("changes", "given_fields", "fields"),
    [
        ({}, [], []),
        ({"optimizer.num_epochs": 2}, [], []),  # scored on the device, not here
        (IN_LOSS, ["divergences"], ["old_logprobs", "ref_logprobs"]),
        ({"kl.coef": 0.1, "kl.controller": "log"}, ["divergences"], ["ref_logprobs"]),
        ({"kl.coef": 0.1, "kl.place": "reward"}, ["divergences"], []),
        ({"kl.coef": 0.1, "kl.low_factor": 0.5}, ["kl_weights"], ["kl_weights"]),
    ],
    ids=str,
)
def test_only_what_is_read_is_in_the_batch(changes, given_fields, fields):
    extra = {"divergences": divergences(), "kl_weights": tagged(3)}
    extra = {name: values for name, values in extra.items() if name in given_fields}
    advantages = np.ones(8, np.float32)
    for packed in make_minibatches(trajectories(), advantages, SHAPE, settings(**changes), **extra):
        optional = ("old_logprobs", "ref_logprobs", "kl_weights")
        assert [name for name in optional if getattr(packed.batch, name) is not None] == fields


def test_a_mini_batch_without_anything_keeps_its_fields():
    # The same program must run on it.
    config = settings(**IN_LOSS)
    lost = [make_failure(group_id=t.group_id, length=len(t.token_ids)) for t in trajectories()]
    half, _ = make_minibatches(
        lost,
        np.zeros(8, np.float32),
        SHAPE,
        config,
        kl_weights=tagged(3),
        divergences=[None] * 8,
    )
    assert (half.num_micro, half.num_tokens, half.num_counted) == (0, 0, 0)
    for name in ("old_logprobs", "ref_logprobs", "kl_weights"):
        value = getattr(half.batch, name)
        assert value.shape == (3, 2, 32)
        assert not value.any()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"kl.coef": 0.1, "kl.anchor": "old"}, True),
        ({"optimizer.num_minibatches": 2}, False),
        ({"optimizer.num_epochs": 2}, False),
        ({"filter.name": "varied"}, True),
        ({"filter.name": "varied", "filter.carry_over": True}, False),
    ],
    ids=str,
)
def test_who_takes_its_own_logprobs_for_the_old(changes, expected):
    assert takes_own_logprobs(settings(**changes)) == expected


def test_a_kl_term_is_in_the_loss_or_not():
    assert not has_kl_loss(settings())
    assert has_kl_loss(settings(**{"kl.coef": 0.1}))
    assert not has_kl_loss(settings(**{"kl.coef": 0.1, "kl.place": "reward"}))


def test_observations_are_trained_on_where_asked_for():
    one = trajectories()[2]
    assert as_trained(one, settings()) is one
    got = as_trained(one, settings(**{"loss.mask_observations": False}))
    np.testing.assert_array_equal(got.loss_mask, np.arange(32) >= 2)
    assert one.loss_mask.sum() < got.loss_mask.sum() == 30


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=8),
    num_shards=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**31),
)
def test_unpacking_is_the_inverse_of_packing(lengths, num_shards, seed):
    rng = np.random.default_rng(seed)
    made = [make_trajectory(group_id=i, length=length) for i, length in enumerate(lengths)]
    values = [rng.standard_normal(length).astype(np.float32) for length in lengths]
    shape = BatchShape(num_micro=2, micro_rows=4, row_tokens=32)
    packed = pack(
        made,
        np.ones(len(made), np.float32),
        shape,
        aggregation="token-mean",
        num_shards=num_shards,
        token_fields={"kl_weights": values},
    )
    np.testing.assert_array_equal(packed.batch.kl_weights, scatter(packed.batch, values))
    got = unpack(packed, packed.batch.kl_weights, lengths)
    for one, wanted in zip(got, values, strict=True):
        np.testing.assert_array_equal(one, wanted)


# On the device.


@pytest.fixture(scope="module")
def policies():
    """The policy and its reference."""
    return [jax.device_put(tiny_params(seed=seed), param_shardings(MESH, TINY)) for seed in (0, 2)]


@pytest.fixture(scope="module")
def score():
    model = Model(TINY, MESH, num_tokens=NUM_TOKENS, remat=False)
    return make_score_step(model, temperature=1.0)


@pytest.fixture(scope="module")
def dense(policies):
    """Log-probabilities of every trajectory under both policies, from all its logits."""
    longest = max(LENGTHS)
    compute = jax.jit(lambda params, ids: dense_logprobs(params, TINY, ids)[0])
    found = []
    for params in policies:
        rows = [np.pad(t.token_ids, (0, longest - len(t.token_ids))) for t in trajectories()]
        found.append([np.asarray(compute(params, row)) for row in rows])
    return [[row[:length] for row, length in zip(rows, LENGTHS, strict=True)] for rows in found]


ESTIMATES = {
    "k1": lambda old, ref: old - ref,
    "k3": lambda old, ref: np.clip(np.exp(ref - old) - (ref - old) - 1, -10, 10),
}


@pytest.mark.parametrize("estimator", ESTIMATES)
@pytest.mark.parametrize("mask_observations", [True, False])
def test_divergences_are_those_of_all_logits(estimator, mask_observations, score, policies, dense):
    # Six rows: the seven trajectories that did not fail take two rounds.
    config = settings(
        **{
            "kl.coef": 0.1,
            "kl.estimator": estimator,
            "loss.mask_observations": mask_observations,
        }
    )
    got = make_measure(score, MESH, SHAPE, config)(trajectories(), *policies)
    assert got[5] is None
    for index, (trajectory, found) in enumerate(zip(trajectories(), got, strict=True)):
        if found is None:
            continue
        old, ref = dense[0][index], dense[1][index]
        np.testing.assert_allclose(found.old_logprobs, old, atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(found.ref_logprobs, ref, atol=2e-5, rtol=1e-5)
        mask = trajectory.loss_mask
        if not mask_observations:
            mask = np.arange(len(mask)) >= trajectory.prompt_length
        wanted = np.where(mask, ESTIMATES[estimator](old, ref), 0)
        np.testing.assert_allclose(found.per_token, wanted, atol=2e-4, rtol=1e-4)
        assert found.total == pytest.approx(wanted.sum(), rel=1e-3)
        assert abs(found.total) > 0.1


def test_only_failures_have_no_divergence(score, policies):
    lost = [make_failure(group_id=0), make_failure(group_id=0)]
    config = settings(**{"kl.coef": 0.1})
    assert make_measure(score, MESH, SHAPE, config)(lost, *policies) == [None, None]


def test_logprobs_are_added_where_they_are_missing(score, policies, dense):
    config = settings(**{"optimizer.num_epochs": 2, "kl.coef": 0.1})
    (packed,) = make_minibatches(
        trajectories(), np.ones(8, np.float32), SHAPE, config, kl_weights=tagged(3)
    )
    batch = put_batch(MESH, packed.batch)
    got = add_logprobs(batch, packed, score, *policies, needs_old=True)
    for place, index in enumerate([0, 1, 2, 3, 4, 6, 7]):
        for values, wanted in zip((got.old_logprobs, got.ref_logprobs), dense, strict=True):
            own = gather(packed.batch, values, place)
            np.testing.assert_allclose(own, wanted[index], atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(got.kl_weights, packed.batch.kl_weights)

    # What is there stays, and what is not needed stays away.
    assert add_logprobs(batch, packed, score, policies[0], None, needs_old=False) == batch
    known = np.ones((3, 2, 32), np.float32)
    scored = dataclasses.replace(batch, old_logprobs=known, ref_logprobs=known)
    kept = add_logprobs(scored, packed, score, *policies, needs_old=True)
    assert kept.old_logprobs is known
    assert kept.ref_logprobs is known
