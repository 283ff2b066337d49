"""A small recipe earns the mean reward that TRL earns; `benchmarks/recipe.py` has the recipe."""

import dataclasses
import json
import math
import statistics

import pytest

from benchmarks import recipe


def test_band_by_hand():
    # t(0.995, 2) = 9.925, the standard deviation is 1, and sqrt(1/2 + 1/3) = 0.9129.
    low, high = recipe.compute_band([1.0, 2.0, 3.0], num_runs=2)
    assert math.isclose(high - 2, 9.925 * 0.9129, rel_tol=1e-3)
    assert math.isclose(low + high, 4)


def test_trl_ran_the_same_recipe():
    golden = json.loads(recipe.GOLDEN.read_text())
    assert golden["recipe"] == dataclasses.asdict(recipe.WORK)
    # The band excludes a run that learns nothing, and one whose first steps are already good.
    assert all(run["by_window"][0] < 0.3 < 0.9 < run["by_window"][-1] for run in golden["runs"])


@pytest.mark.slow(instead="test_learning.py::test_a_policy_learns_what_demonstrations_do_not_show")
@pytest.mark.usefixtures("no_pictures", "one_size")
def test_mean_reward_lies_in_the_band_of_trl(tmp_path, cache_folder):
    recipe.write_world(tmp_path)
    runs = []
    for seed in range(3):
        config = recipe.get_config(tmp_path, seed)
        config.compilation_cache = str(cache_folder)
        rewards = recipe.run_jaxrl(config, tmp_path / f"run_{seed}")
        runs.append(recipe.summarize(seed, rewards))
    means = [run["mean_reward"] for run in runs]
    low, high = recipe.compute_band(recipe.read_trl_means(), len(means))
    assert low < statistics.fmean(means) < high, runs
