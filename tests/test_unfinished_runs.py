"""Runs whose steps leave some groups to the next one: bit for bit, and through a restart."""

from collections import Counter

import pytest

from jaxrl import run
from jaxrl.data.stream import Stream
from jaxrl.logs.display import Display
from tests.helpers import build, settings_of
from tests.runs import killed, lasting, run_settings, saved_progress, trajectories, without_usage

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")

SETTINGS = {
    "stages": ("train",),
    "num_steps": 4,
    "rollout.tasks_per_step": 2,
    "rollout.group_size": 2,
    "rollout.chunk_tokens": 4,
    "filter.unfinished_tasks": 2,
    "loss.correction.level": "token",
    "eval.suites": ("sampled",),
    "eval.max_tasks": 2,
    "eval.every_steps": 2,
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 100,
}


def play(config, workdir):
    workdir.mkdir(exist_ok=True)
    parts, display, said = build(config), Display(), []
    display.log = said.append
    run.run(settings_of(config), workdir, parts, display)
    return said, parts


def trained(workdir, steps):
    return [t for step in steps for t in trajectories(workdir, step)]


def test_groups_go_on_in_the_next_step_and_a_run_repeats(tiny_world, tmp_path):
    config = run_settings(tiny_world, **SETTINGS)
    _, parts = play(config, tmp_path / "one")
    play(config, tmp_path / "other")
    assert lasting(tmp_path / "one") == lasting(tmp_path / "other")
    both = [trained(tmp_path / name, range(1, 5)) for name in ("one", "other")]
    assert [*map(without_usage, both[0])] == [*map(without_usage, both[1])]

    # Two whole groups a step, each task once; some tokens are of weights before the newest.
    order = [t.id for t in Stream(parts.tasks, seed=config.seed).take(0, 10)]
    counts = Counter(t["task_id"] for t in both[0])
    assert set(counts.values()) == {2}
    progress, _ = saved_progress(parts, tmp_path / "one")
    assert sorted(counts) == sorted(set(order) - {order[at] for at in progress.in_flight_tasks})
    ages, mixed = set(), 0
    for step in range(1, 5):
        for t in trajectories(tmp_path / "one", step):
            versions = {version for version in t["policy_versions"] if version >= 0}
            ages |= {step - 1 - version for version in versions}
            mixed += len(versions) > 1
    assert min(ages) == 0 < max(ages)
    assert mixed

    again = killed(tmp_path / "one", tmp_path / "again", after=2)
    progress, _ = saved_progress(parts, again)
    assert len(progress.in_flight_tasks) == 2
    said, _ = play(config, again)
    assert any("2 tasks were in flight" in line for line in said)
    later = trained(again, (3, 4))
    assert set(Counter(t["task_id"] for t in later).values()) == {2}
    left = {order[at] for at in progress.in_flight_tasks}
    assert left <= {t["task_id"] for t in later}
