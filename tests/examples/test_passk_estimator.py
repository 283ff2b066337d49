import dataclasses

import numpy as np
import pytest

from examples.passk_estimator import compute_advantages
from jaxrl.types import flatten_groups
from tests.episodes import grouped, make_failure, make_trajectory
from tests.helpers import estimator
from tests.objectives.test_pass_at_k import by_all_subsets


@pytest.mark.parametrize("k", [1, 3, 4])
def test_token_advantages_agree_with_all_subsets(k):
    sizes = [(size, c) for size in (2, 5, 8) for c in range(size + 1)]
    groups = [np.arange(size) < c for size, c in sizes]
    ids = np.repeat(np.arange(len(sizes)), [size for size, _ in sizes])
    expected = [by_all_subsets(g, k) if len(g) >= k else np.zeros(len(g)) for g in groups]
    # The reward is that of the second token; a third one is no part of the response.
    rewards = np.stack([np.zeros(len(ids)), np.concatenate(groups), np.ones(len(ids))], axis=1)
    mask = np.tile([True, True, False], (len(ids), 1))
    got = compute_advantages(rewards, mask, ids, k=k)
    by_token = np.concatenate(expected)[:, None] * mask
    np.testing.assert_allclose(got, by_token, rtol=2e-5, atol=1e-6)


def test_as_the_estimator_of_a_run_it_agrees_with_the_built_in_one():
    members = [
        dataclasses.replace(make_trajectory(task_number=n, sample_index=i), is_correct=i < c)
        for n, (size, c) in enumerate([(6, 1), (6, 2), (6, 6), (2, 1)])
        for i in range(size)
    ]
    groups = grouped([*members, make_failure(task_number=1, sample_index=6)])
    custom = {"advantage.name": "examples.passk_estimator.estimate"}
    built_in = {"advantage.name": "pass_at_k", "advantage.pass_at_k.k": 3}
    got, expected = (
        [t.advantage for t in flatten_groups(estimator(**changes)(groups, 0, 0))]
        for changes in (custom | {"advantage.settings": {"k": 3}}, built_in)
    )
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)
    assert sum(a != 0 for a in got) == 12
