"""Where values of single tokens come to stand in mini-batches, and the KL weights of tokens."""

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
    make_minibatches,
    make_trajectory_filter,
    shard_minibatches,
    with_loss_mask,
)
from jaxrl.types import Divergence, replace_fields
from jaxrl.utils.callables import NamedFunction, UserCodeError
from tests import helpers
from tests.episodes import grouped, in_turns, make_failure, make_trajectory, wavering
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


IN_LOSS = {
    "kl.coef": 0.1, "kl.controller": "budget", "kl.low_factor": 0.5, "optimizer.num_minibatches": 2,
}  # fmt: skip
# Groups of t0 and t1 are in two buckets; of the others nothing is known.
CONTROLLERS = Controllers(
    buckets=DifficultyBuckets({"t0": "easy", "t1": "medium"}),
    kl=KLBudget({"easy": 1.0, "medium": 3.0, "hard": 0.5}),
)


def random_windows():
    """Which tokens are high says, as a pattern, which tokens they are."""
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
    """The four groups with all that is measured and computed of them."""
    return replace_fields(
        grouped(trajectories()),
        advantage=advantages,
        divergence=divergences(),
        windows=random_windows(),
    )


@pytest.mark.parametrize("num_shards", [1, 2])
def test_values_of_tokens_stand_beside_their_tokens(num_shards):
    halves = make_minibatches(
        groups(), SHAPE, method_with(**IN_LOSS), controllers=CONTROLLERS, num_shards=num_shards
    )
    wanted = {
        "old_logprobs": tagged(1),
        "ref_logprobs": tagged(2),
        "kl_weights": weights_by_hand(),
    }
    for half, packed in zip(halves, ([0, 1, 2, 3], [4, 6, 7]), strict=True):
        for place, index in enumerate(packed):
            ids = gather(half.batch, half.batch.token_ids, place)
            np.testing.assert_array_equal(ids, trajectories()[index].token_ids)
            for name, values in wanted.items():
                got = gather(half.batch, getattr(half.batch, name), place)
                np.testing.assert_array_equal(got, values[index], err_msg=name)
        for name in wanted:
            assert not getattr(half.batch, name)[half.batch.segment_ids == 0].any()
        assert half.num_loss_tokens == sum(int(trajectories()[i].loss_mask.sum()) for i in packed)


def test_the_tokens_of_a_turn_carry_its_advantage():
    # The first adds up to nothing and is trained on all the same; the second has no signal.
    lengths = [[1, 2, 1], [3], [2, 2], [1]]
    advantages = [(0.5, 0.0, -0.5), (0.0,), (1.0, -2.0), (3.0,)]
    made = [in_turns([], 0.0, lengths=n, task=i) for i, n in enumerate(lengths)]
    of_turns = replace_fields(grouped(made), turn_advantages=advantages, advantage=[0.0] * 4)
    method = method_with(**{"rollout.group_size": 1})
    (packed,) = make_minibatches(of_turns, SHAPE, method, controllers=Controllers())
    for place, index in enumerate([0, 2, 3]):
        got = gather(packed.batch, packed.batch.advantages, place)
        wanted = np.repeat(advantages[index], lengths[index])
        np.testing.assert_array_equal(got[made[index].loss_mask], wanted)
        assert not got[~made[index].loss_mask].any()
    assert packed.batch.segment_ids.max() == 3


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", lambda counts: [1 / sum(counts)] * len(counts)),
        ("seq-mean-token-sum", lambda counts: [1 / len(counts)] * len(counts)),
        ("seq-mean-token-mean", lambda counts: [1 / len(counts) / count for count in counts]),
        ("seq-mean-token-sum-norm", lambda counts: [1 / len(counts) / 20] * len(counts)),
    ],
)
def test_what_has_no_signal_still_counts_in_the_weights(aggregation, expected):
    method = method_with(
        **{"loss.aggregation": aggregation, "rollout.max_response_tokens": 20},
        **{"optimizer.num_minibatches": 1},
    )
    (batch,) = make_minibatches(
        groups([1.0, 0.0, 0.0, 2.0, -1.0, 5.0, 3.0, 0.0]), SHAPE, method, controllers=Controllers()
    )
    made = trajectories()
    scored = [index for index, t in enumerate(made) if t.is_scored]
    wanted = dict(zip(scored, expected([made[i].num_sampled for i in scored]), strict=True))
    assert len(scored) == 7
    for place, index in enumerate([0, 3, 4, 6]):
        got = gather(batch.batch, batch.batch.token_weights, place)
        np.testing.assert_allclose(got, wanted[index] * made[index].loss_mask, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, []),
        ({"optimizer.num_epochs": 2}, []),  # scored on the device, not here
        (IN_LOSS, ["old_logprobs", "ref_logprobs", "kl_weights"]),
        ({"kl.coef": 0.1, "kl.controller": "log"}, ["ref_logprobs", "kl_weights"]),
        ({"kl.coef": 0.1, "kl.apply_to": "reward"}, []),
        ({"kl.coef": 0.1, "kl.low_factor": 0.5}, ["kl_weights"]),
    ],
    ids=str,
)
def test_only_what_is_read_is_in_the_batch(changes, fields):
    method = method_with(**changes)
    controllers = Controllers.init(method)
    for packed in make_minibatches(groups(), SHAPE, method, controllers=controllers):
        optional = ("old_logprobs", "ref_logprobs", "kl_weights")
        assert [name for name in optional if getattr(packed.batch, name) is not None] == fields


def test_a_mini_batch_without_anything_keeps_its_fields():
    # The same program must run on it.
    method = method_with(**IN_LOSS)
    lost = grouped(
        make_failure(task_number=index // 2, length=length) for index, length in enumerate(LENGTHS)
    )
    half, _ = make_minibatches(
        replace_fields(lost, advantage=[0.0] * 8), SHAPE, method, controllers=CONTROLLERS
    )
    assert (half.num_micro, half.num_tokens, half.num_loss_tokens) == (0, 0, 0)
    for name in ("old_logprobs", "ref_logprobs", "kl_weights"):
        value = getattr(half.batch, name)
        assert value.shape == (3, 2, 32)
        assert not value.any()


def test_what_a_filter_of_trajectories_says_is_checked():
    def method(function):
        chosen = NamedFunction(
            key="filter.trajectories", name="my.f", function=function, settings={}
        )
        plain = method_with()
        return dataclasses.replace(
            plain, filter=dataclasses.replace(plain.filter, trajectory_filter=chosen)
        ).filter

    made = [make_trajectory(sample_index=i) for i in range(4)]
    assert compute_trajectory_filter_metrics(made, method(lambda one: one.sample_index > 0)) == {
        "filter/trained_share": 0.75
    }
    for wrong, told in ((lambda one: None, "None"), (lambda one: "no", "'no'")):
        with pytest.raises(UserCodeError, match=f"it returned {told}; expected True or False"):
            make_trajectory_filter(method(wrong))(made[0])


def test_observations_are_trained_on_where_asked_for():
    one = trajectories()[2]
    assert with_loss_mask(one, method_with().loss) is one
    got = with_loss_mask(one, method_with(**{"loss.mask_observations": False}).loss)
    np.testing.assert_array_equal(got.loss_mask, np.arange(32) >= 2)
    assert one.loss_mask.sum() < got.loss_mask.sum() == 30


# Weights of the KL term.


weighed = partial(method_with, **{"kl.coef": 0.01})


def four(is_high, *, task_number=0, right=False, excess=0.6):
    """A trajectory of four tokens, and which of them are high."""
    return dataclasses.replace(
        make_trajectory(task_number=task_number, length=4),
        is_correct=right,
        windows=dataclasses.replace(
            wavering(0, length=4, excess=excess), is_high=np.array(is_high, bool)
        ),
    )


def test_kl_weights_by_hand():
    method = weighed(**{"kl.low_factor": 0.5, "kl.controller": "budget"})
    batch = [four([0, 1, 1, 0]), four([1, 0, 0, 0], task_number=1)]
    controllers = Controllers(
        threshold=EntropyThreshold(1.0),
        buckets=DifficultyBuckets({"t0": "easy", "t1": "medium"}),
        kl=KLBudget({"easy": 1.0, "medium": 3.0, "hard": 7.0}),
    )
    got = compute_token_kl_weights(batch, controllers, method.kl)
    np.testing.assert_allclose(got[0], [0.01, 0.005, 0.005, 0.01])
    np.testing.assert_allclose(got[1], [0.015, 0.03, 0.03, 0.03])
    assert got[0].dtype == np.float32
    # As a mean over these four tokens, the term of the first is 0.002.
    assert np.mean(got[0] * [0.2, 0.1, 0.3, 0.4]) == pytest.approx(0.002)


def test_a_second_chance_for_wrong_answers_to_easy_tasks():
    method = weighed(**{"kl.second_chance": True})
    controllers = Controllers(
        threshold=EntropyThreshold(1.0),
        buckets=DifficultyBuckets({"t0": "easy", "t1": "medium"}),
    )
    high = [1, 1, 1, 1]
    batch = [four(high), four(high, right=True), four(high, task_number=1), four(high, excess=0.4)]
    got = compute_token_kl_weights(batch, controllers, method.kl)
    scales = [0.67, 1, 1, 1]
    np.testing.assert_allclose(got, np.outer(scales, np.full(4, 0.01)), rtol=1e-6)


# On the device.


def test_logprobs_are_added_where_they_are_missing():
    method = method_with(**{"optimizer.num_epochs": 2, "kl.coef": 0.1, "kl.low_factor": 0.5})
    made = make_minibatches(groups(), SHAPE, method, controllers=Controllers())
    [packed] = made
    assert packed.batch.kl_weights is not None
    [got] = shard_minibatches(made, MESH, score(), *policies(), method)
    for place, index in enumerate([0, 1, 2, 3, 4, 6, 7]):
        for values, wanted in zip((got.old_logprobs, got.ref_logprobs), dense(), strict=True):
            own, mask = (gather(packed.batch, x, place) for x in (values, packed.batch.loss_mask))
            np.testing.assert_allclose(own, wanted[index] * mask, atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(got.kl_weights, packed.batch.kl_weights)

    # What is there stays, and what is not needed stays away.
    [plain] = shard_minibatches(made, MESH, score(), policies()[0], None, method_with())
    assert plain.old_logprobs is plain.ref_logprobs is None
    known = np.ones((3, 2, 32), np.float32)
    batch = dataclasses.replace(packed.batch, old_logprobs=known, ref_logprobs=known)
    scored = dataclasses.replace(packed, batch=batch)
    [kept] = shard_minibatches([scored], MESH, score(), *policies(), method)
    np.testing.assert_array_equal(kept.old_logprobs, known)
    np.testing.assert_array_equal(kept.ref_logprobs, known)
