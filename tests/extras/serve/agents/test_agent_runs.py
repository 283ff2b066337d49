"""Runs with agents: complete groups, weight versions of tokens, restarts."""

import shutil
from collections import Counter

import pytest

from jaxrl import run
from jaxrl.data.stream import Stream
from jaxrl.logs.display import Display
from tests.extras.serve.agents.played import TO_PLAY, read_notes
from tests.helpers import build, settings_of
from tests.runs import killed, records, run_settings, saved_progress, trajectories

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")

SETTINGS = {
    "stages": ("train",),
    "num_steps": 4,
    "rollout.tasks_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_turns": 4,
    "filter.unfinished_tasks": 1,
    "loss.correction.level": "token",
    "eval.suites": (),
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 100,
    "reward.weights": {"reward": 1.0},
    "env.name": "agents",
    "env.agents.function": f"{TO_PLAY}:learns",
}


def play(config, workdir):
    """Run in this process; return the logged lines and the components."""
    workdir.mkdir(exist_ok=True, parents=True)
    parts, display, lines = build(config), Display(), []
    display.log = lines.append
    run.run(settings_of(config), workdir, parts, display)
    return lines, parts


def in_flight(parts, workdir, order):
    """Return the tasks in flight at the newest checkpoint."""
    progress, _ = saved_progress(parts, workdir)
    return [order[index] for index in progress.in_flight_tasks]


def sampled_turns(trajectory):
    """Return prompt and sampled ids of each completion of a trajectory of one context."""
    ids, mask = trajectory["token_ids"], trajectory["loss_mask"]
    edges = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]] + [len(mask)]
    return [[ids[:a], ids[a:b]] for a, b in zip(edges[::2], edges[1::2], strict=True)]


def assert_trained_as_noted(steps, folder):
    """The trained tokens equal the tokens that the agents received."""
    notes = read_notes(folder)
    for trained in steps.values():
        for trajectory in trained:
            assert sampled_turns(trajectory) in notes[trajectory["task_id"]]


def test_no_step_waits_for_the_slowest_and_a_restart_replays_what_was_in_flight(
    tiny_world, tmp_path
):
    (folder := tmp_path / "notes").mkdir()
    settings = {"folder": str(folder)}
    config = run_settings(tiny_world, **SETTINGS, **{"env.agents.settings": settings})
    order = [task.id for task in Stream(build(config).tasks, seed=config.seed).get_items(0, 10)]
    with config.unlocked():
        config.env.agents.settings = settings | {"slow": [order[0], order[5]]}
    workdir = tmp_path / "run"
    _, parts = play(config, workdir)
    steps = {step: trajectories(workdir, step) for step in range(1, 5)}
    # Two complete groups a step, each task of the stream once, the first one late.
    for trained in steps.values():
        assert sorted(Counter(t["task_id"] for t in trained).values()) == [2, 2]
    task_ids = [t["task_id"] for trained in steps.values() for t in trained]
    assert sorted(set(task_ids)) == sorted(set(order[:9]) - set(in_flight(parts, workdir, order)))
    assert order[0] not in {t["task_id"] for t in steps[1]}
    versions = {
        t["task_id"]: {version for version in t["policy_versions"] if version >= 0}
        for trained in steps.values()
        for t in trained
    }
    assert min(versions[order[0]]) == 0
    assert len(set.union(*versions.values())) > 1
    step_of = {t["task_id"]: step for step, trained in steps.items() for t in trained}
    assert all(max(of_task) < step_of[task] for task, of_task in versions.items())
    assert any(
        len(of_task) > 1 or max(of_task) < step_of[task] - 1 for task, of_task in versions.items()
    )
    assert_trained_as_noted(steps, folder)
    assert [record["step"] for record in records(workdir)] == [0, 1, 2, 3, 4]

    # Killed after the first step, the run plays again what was in flight, and logs it.
    resumed = killed(workdir, tmp_path / "resumed", after=1)
    assert in_flight(parts, resumed, order) == order[:1]
    shutil.rmtree(folder)
    folder.mkdir()
    lines, _ = play(config, resumed)
    [line] = [line for line in lines if "in flight" in line]
    assert "1 task" in line
    steps = {step: trajectories(resumed, step) for step in range(2, 5)}
    counts = Counter(t["task_id"] for trained in steps.values() for t in trained)
    assert set(counts.values()) == {2}
    assert counts[order[0]] == 2
    assert_trained_as_noted(steps, folder)
