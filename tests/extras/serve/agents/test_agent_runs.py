"""Runs whose episodes agents play: whole groups, older weights by token, restarts."""

import shutil
from collections import Counter

import pytest

from jaxrl import run
from jaxrl.data.stream import Stream
from jaxrl.logs.display import Display
from tests.extras.serve.agents.played import TO_PLAY, noted
from tests.helpers import build, settings_of
from tests.runs import killed, records, run_settings, saved_progress, trajectories

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")

SETTINGS = {
    "stages": ("train",),
    "num_steps": 5,
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
    """What a run in this process tells, and its parts."""
    workdir.mkdir(exist_ok=True, parents=True)
    parts, display, said = build(config), Display(), []
    display.log = said.append
    run.run(settings_of(config), workdir, parts, display)
    return said, parts


def under_way(parts, workdir, order):
    """Tasks that are under way where the newest checkpoint stands."""
    progress, _ = saved_progress(parts, workdir)
    return [order[place] for place in progress.in_flight_tasks]


def trained(workdir, steps):
    """Trajectories by step."""
    return {step: trajectories(workdir, step) for step in steps}


def as_seen(trajectory):
    """Prompt and sampled ids of each answer in a written trajectory of one context."""
    ids, mask = trajectory["token_ids"], trajectory["loss_mask"]
    edges = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]] + [len(mask)]
    return [[ids[:a], ids[a:b]] for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_no_step_waits_for_the_slowest_and_a_restart_plays_it_anew(tiny_world, tmp_path):
    (folder := tmp_path / "noted").mkdir()
    settings = {"folder": str(folder)}
    config = run_settings(tiny_world, **SETTINGS, **{"env.agents.settings": settings})
    order = [task.id for task in Stream(build(config).tasks, seed=config.seed).take(0, 12)]
    with config.unlocked():
        config.env.agents.settings = settings | {"slow": [order[0], order[5]]}
    workdir = tmp_path / "run"
    _, parts = play(config, workdir)
    steps = trained(workdir, range(1, 6))
    # Two whole groups a step, each task of the stream once, the first one later than its turn.
    for of_step in steps.values():
        assert sorted(Counter(t["task_id"] for t in of_step).values()) == [2, 2]
    taken = [t["task_id"] for of_step in steps.values() for t in of_step]
    assert sorted(set(taken)) == sorted(set(order[:11]) - set(under_way(parts, workdir, order)))
    assert order[0] not in {t["task_id"] for t in steps[1]}
    versions = {
        t["task_id"]: {v for v in t["policy_versions"] if v >= 0}
        for of_step in steps.values()
        for t in of_step
    }
    assert min(versions[order[0]]) == 0
    assert len(set.union(*versions.values())) > 1
    step_of = {t["task_id"]: step for step, of_step in steps.items() for t in of_step}
    assert all(max(of_one) < step_of[task] for task, of_one in versions.items())
    assert any(max(of_one) < step_of[task] - 1 for task, of_one in versions.items()) or any(
        len(of_one) > 1 for of_one in versions.values()
    )
    # What was trained is what the agents were answered, token by token.
    seen = noted(folder)
    for of_step in steps.values():
        for trajectory in of_step:
            assert as_seen(trajectory) in seen[trajectory["task_id"]]
    assert [record["step"] for record in records(workdir)] == [0, 1, 2, 3, 4, 5]

    # Killed after the first step, it plays what was under way anew, and says so.
    again = killed(workdir, tmp_path / "again", after=1)
    assert under_way(parts, again, order) == order[:1]
    shutil.rmtree(folder)
    folder.mkdir()
    said, _ = play(config, again)
    [told] = [line for line in said if "in flight" in line]
    assert "1 task" in told
    later = trained(again, range(2, 6))
    counts = Counter(t["task_id"] for of_step in later.values() for t in of_step)
    assert set(counts.values()) == {2}
    assert counts[order[0]] == 2
    seen = noted(folder)
    for of_step in later.values():
        for trajectory in of_step:
            assert as_seen(trajectory) in seen[trajectory["task_id"]]
