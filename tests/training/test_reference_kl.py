"""Divergences against all logits, and the way back from packed rows to trajectories."""

import numpy as np
import pytest

from jaxrl.training.reference_kl import make_kl_fn
from jaxrl.types import flatten_groups, replace_fields
from tests.episodes import grouped, make_failure, make_trajectory, strayed
from tests.helpers import method_with
from tests.training.policies import MESH, SHAPE, dense, policies, score, trajectories

pytestmark = pytest.mark.usefixtures("quick_compilation")

ESTIMATES = {
    "k1": lambda old, ref: old - ref,
    "k3": lambda old, ref: np.clip(np.exp(ref - old) - (ref - old) - 1, -10, 10),
}


@pytest.mark.parametrize(("estimator", "mask_observations"), [("k1", True), ("k3", False)])
def test_divergences_are_those_of_all_logits(estimator, mask_observations):
    # Six rows: the seven trajectories that did not fail take two rounds.
    changes = {"kl.estimator": estimator, "loss.mask_observations": mask_observations}
    method = method_with(**{"kl.coef": 0.1}, **changes)
    measure = make_kl_fn(score(), MESH, SHAPE, method)
    measured = measure(grouped(trajectories()), *policies())
    assert [group.task_id for group in measured] == ["t0", "t1", "t2", "t3"]
    actual = [t.divergence for t in flatten_groups(measured)]
    assert actual[5] is None
    for index, (trajectory, divergence) in enumerate(zip(trajectories(), actual, strict=True)):
        if divergence is None:
            continue
        old, ref = dense()[0][index], dense()[1][index]
        mask = trajectory.loss_mask
        if not mask_observations:
            mask = np.arange(len(mask)) >= trajectory.prompt_length
        np.testing.assert_allclose(divergence.old_logprobs, old * mask, atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(divergence.ref_logprobs, ref * mask, atol=2e-5, rtol=1e-5)
        expected = np.where(mask, ESTIMATES[estimator](old, ref), 0)
        np.testing.assert_allclose(divergence.per_token, expected, atol=2e-4, rtol=1e-4)
        assert divergence.total == pytest.approx(expected.sum(), rel=1e-3)
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
