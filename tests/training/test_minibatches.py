"""Values of single tokens in mini-batches, and the KL weights of tokens."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from jaxrl.training.controllers import (
    Controllers,
    DifficultyBuckets,
    EntropyThreshold,
    KLBudget,
)
from jaxrl.training.minibatches import (
    compute_token_kl_weights,
    compute_trajectory_filter_metrics,
    divide_into_minibatches,
    make_minibatch,
    make_trajectory_filter,
    shard_minibatch,
    with_loss_mask,
)
from jaxrl.types import Divergence, replace_fields
from jaxrl.utils.callables import NamedFunction, UserCodeError
from tests import helpers
from tests.episodes import grouped, make_failure, make_trajectory, wavering
from tests.helpers import gather
from tests.training.policies import LENGTHS, MESH, SHAPE, dense, policies, score, trajectories

pytestmark = pytest.mark.usefixtures("quick_compilation")

method_with = partial(
    helpers.method_with,
    **{
        "rollout.tasks_per_step": 4,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": 30,
    },
)


def tagged(kind):
    """Return values that identify their trajectory and token."""
    return [
        kind * 10_000 + index * 100 + np.arange(length, dtype=np.float32)
        for index, length in enumerate(LENGTHS)
    ]


def divergences():
    measured = [
        Divergence(old_logprobs=old, ref_logprobs=ref, per_token=0 * old, num_tokens=1)
        for old, ref in zip(tagged(1), tagged(2), strict=True)
    ]
    return [*measured[:5], None, *measured[6:]]


IN_LOSS = {
    "kl.coef": 0.1, "kl.controller": "budget", "kl.low_factor": 0.5, "optimizer.num_minibatches": 2,
}  # fmt: skip
# Groups of t0 and t1 are in two buckets; of the others nothing is known.
CONTROLLERS = Controllers(
    buckets=DifficultyBuckets({"t0": "easy", "t1": "medium"}),
    kl=KLBudget({"easy": 1.0, "medium": 3.0, "hard": 0.5}),
)


def random_windows():
    """Return windows whose pattern of high tokens identifies the tokens."""
    rng = np.random.default_rng(0)
    return [
        dataclasses.replace(wavering(0, length=length), is_high=rng.random(length) < 0.5)
        for length in LENGTHS
    ]


def weights_by_hand():
    scales = [1.0, 1.0, 3.0, 3.0, 0.5, 0.5, 0.5, 0.5]
    pairs = zip(scales, random_windows(), strict=True)
    return [np.float32(0.1 * scale * np.where(w.is_high, 0.5, 1.0)) for scale, w in pairs]


def groups(advantages=(1,) * 8):
    """Return the four groups with divergences, windows and advantages."""
    return replace_fields(
        grouped(trajectories()),
        advantage=advantages,
        divergence=divergences(),
        windows=random_windows(),
    )


def test_values_of_tokens_stand_beside_their_tokens():
    halves = [
        make_minibatch(part, SHAPE, method_with(**IN_LOSS), controllers=CONTROLLERS, num_shards=2)
        for part in divide_into_minibatches(groups(), 2)
    ]
    expected = {
        "old_logprobs": tagged(1),
        "ref_logprobs": tagged(2),
        "kl_weights": weights_by_hand(),
    }
    for half, packed in zip(halves, ([0, 1, 2, 3], [4, 6, 7]), strict=True):
        for position, index in enumerate(packed):
            ids = gather(half.batch, half.batch.token_ids, position)
            np.testing.assert_array_equal(ids, trajectories()[index].token_ids)
            for name, values in expected.items():
                actual = gather(half.batch, getattr(half.batch, name), position)
                np.testing.assert_array_equal(actual, values[index], err_msg=name)
        for name in expected:
            assert not getattr(half.batch, name)[half.batch.segment_ids == 0].any()
        assert half.num_loss_tokens == sum(int(trajectories()[i].loss_mask.sum()) for i in packed)


def test_an_empty_minibatch_keeps_its_fields():
    # The same program must run on it.
    method = method_with(**IN_LOSS)
    lost = grouped(
        make_failure(task_number=index // 2, length=length) for index, length in enumerate(LENGTHS)
    )
    lost = replace_fields(lost, advantage=[0.0] * 8)
    half = make_minibatch(lost, SHAPE, method, controllers=CONTROLLERS)
    assert (half.num_micro, half.num_tokens, half.num_loss_tokens) == (0, 0, 0)
    for name in ("old_logprobs", "ref_logprobs", "kl_weights"):
        value = getattr(half.batch, name)
        assert value.shape == (3, 2, 32)
        assert not value.any()


def test_the_result_of_a_trajectory_filter_is_checked():
    def filter_with(function):
        name = {"key": "filter.trajectories", "name": "my.f"}
        named = NamedFunction(**name, function=function, settings={})
        return dataclasses.replace(method_with().filter, trajectory_filter=named)

    members = [make_trajectory(sample_index=i) for i in range(4)]
    settings = filter_with(lambda trajectory: trajectory.sample_index > 0)
    metrics = compute_trajectory_filter_metrics(members, settings)
    assert metrics == {"filter/trained_share": 0.75}
    with pytest.raises(UserCodeError, match="it returned None; expected True or False"):
        make_trajectory_filter(filter_with(lambda trajectory: None))(members[0])


def test_observations_are_trained_on_where_asked_for():
    masked = trajectories()[2]
    assert with_loss_mask(masked, method_with().loss) is masked
    actual = with_loss_mask(masked, method_with(**{"loss.mask_observations": False}).loss)
    np.testing.assert_array_equal(actual.loss_mask, np.arange(32) >= 2)
    assert masked.loss_mask.sum() < actual.loss_mask.sum() == 30


def test_a_second_chance_for_wrong_answers_to_easy_tasks():
    method = method_with(**{"kl.coef": 0.01, "kl.second_chance": True})
    controllers = Controllers(
        threshold=EntropyThreshold(1.0),
        buckets=DifficultyBuckets({"t0": "easy", "t1": "medium"}),
    )
    batch = [
        dataclasses.replace(
            make_trajectory(task_number=task, length=4),
            is_correct=right,
            windows=wavering(4, length=4, excess=excess),
        )
        for task, right, excess in (
            (0, False, 0.6),
            (0, True, 0.6),
            (1, False, 0.6),
            (0, False, 0.4),
        )
    ]
    actual = compute_token_kl_weights(batch, controllers, method.kl)
    np.testing.assert_allclose(actual, np.outer([0.67, 1, 1, 1], np.full(4, 0.01)), rtol=1e-6)


def test_logprobs_are_added_where_they_are_missing():
    method = method_with(**{"optimizer.num_epochs": 2, "kl.coef": 0.1, "kl.low_factor": 0.5})
    packed = make_minibatch(groups(), SHAPE, method, controllers=Controllers())
    assert packed.batch.kl_weights is not None
    actual = shard_minibatch(packed, MESH, score(), *policies(), method)
    for position, index in enumerate([0, 1, 2, 3, 4, 6, 7]):
        for values, expected in zip(
            (actual.old_logprobs, actual.ref_logprobs), dense(), strict=True
        ):
            scores, mask = (
                gather(packed.batch, x, position) for x in (values, packed.batch.loss_mask)
            )
            np.testing.assert_allclose(scores, expected[index] * mask, atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(actual.kl_weights, packed.batch.kl_weights)

    # With the sampler's log-probabilities, only the reference scores.
    of_sampler = dataclasses.replace(
        method, loss=dataclasses.replace(method.loss, old_logprobs="sampler")
    )
    actual = shard_minibatch(packed, MESH, score(), *policies(), of_sampler)
    assert actual.old_logprobs is None
    assert actual.ref_logprobs is not None

    # What is there stays, and what is not needed stays away.
    plain = shard_minibatch(packed, MESH, score(), policies()[0], None, method_with())
    assert plain.old_logprobs is plain.ref_logprobs is None
    known = np.ones((3, 2, 32), np.float32)
    batch = dataclasses.replace(packed.batch, old_logprobs=known, ref_logprobs=known)
    scored = dataclasses.replace(packed, batch=batch)
    unchanged = shard_minibatch(scored, MESH, score(), *policies(), method)
    np.testing.assert_array_equal(unchanged.old_logprobs, known)
    np.testing.assert_array_equal(unchanged.ref_logprobs, known)
