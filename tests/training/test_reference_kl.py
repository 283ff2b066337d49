"""Divergences against all logits, and the way back from packed rows to trajectories."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jaxrl.training.packing import BatchShape, pack
from jaxrl.training.reference_kl import make_kl_fn, unpack
from jaxrl.types import flatten_groups, replace_fields
from tests.episodes import grouped, make_failure, make_trajectory, strayed
from tests.helpers import method_with, scatter
from tests.training.policies import MESH, SHAPE, dense, policies, score, trajectories

pytestmark = pytest.mark.usefixtures("quick_compilation")


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=8),
    num_shards=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**31),
)
def test_unpacking_is_the_inverse_of_packing(lengths, num_shards, seed):
    rng = np.random.default_rng(seed)
    members = [make_trajectory(task_number=i, length=length) for i, length in enumerate(lengths)]
    values = [rng.standard_normal(length).astype(np.float32) for length in lengths]
    shape = BatchShape(num_micro=2, micro_rows=4, row_tokens=32)
    packed = pack(
        members,
        np.ones(len(members), np.float32),
        shape,
        num_shards=num_shards,
        token_fields={"kl_weights": values},
    )
    np.testing.assert_array_equal(packed.batch.kl_weights, scatter(packed.batch, values))
    got = unpack(packed, packed.batch.kl_weights, members)
    for unpacked, wanted in zip(got, values, strict=True):
        np.testing.assert_array_equal(unpacked, wanted)


ESTIMATES = {
    "k1": lambda old, ref: old - ref,
    "k3": lambda old, ref: np.clip(np.exp(ref - old) - (ref - old) - 1, -10, 10),
}


@pytest.mark.parametrize(("estimator", "mask_observations"), [("k1", True), ("k3", False)])
def test_divergences_are_those_of_all_logits(estimator, mask_observations):
    # Six rows: the seven trajectories that did not fail take two rounds.
    method = method_with(
        **{
            "kl.coef": 0.1,
            "kl.estimator": estimator,
            "loss.mask_observations": mask_observations,
        }
    )
    measure = make_kl_fn(score(), MESH, SHAPE, method)
    measured = measure(grouped(trajectories()), *policies())
    assert [group.task_id for group in measured] == ["t0", "t1", "t2", "t3"]
    got = [t.divergence for t in flatten_groups(measured)]
    assert got[5] is None
    for index, (trajectory, divergence) in enumerate(zip(trajectories(), got, strict=True)):
        if divergence is None:
            continue
        old, ref = dense()[0][index], dense()[1][index]
        mask = trajectory.loss_mask
        if not mask_observations:
            mask = np.arange(len(mask)) >= trajectory.prompt_length
        np.testing.assert_allclose(divergence.old_logprobs, old * mask, atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(divergence.ref_logprobs, ref * mask, atol=2e-5, rtol=1e-5)
        wanted = np.where(mask, ESTIMATES[estimator](old, ref), 0)
        np.testing.assert_allclose(divergence.per_token, wanted, atol=2e-4, rtol=1e-4)
        assert divergence.total == pytest.approx(wanted.sum(), rel=1e-3)
        assert abs(divergence.total) > 0.1


def test_divergences_measured_for_a_filter_are_not_measured_again():
    def fail(*_):
        raise AssertionError("scored again")

    groups = grouped([make_trajectory(), make_failure(sample_index=1)])
    known = replace_fields(groups, divergence=[strayed(0.5, 0.25), None])
    method = method_with(**{"kl.coef": 0.1})
    [group] = make_kl_fn(fail, MESH, SHAPE, method)(known, *policies())
    assert group.trajectories[0].divergence is known[0].trajectories[0].divergence
    assert group.trajectories[1].divergence is None
