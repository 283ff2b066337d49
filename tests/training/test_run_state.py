"""Where a run stands, through JSON and under a changed configuration."""

import json
from functools import partial
from math import nan
from types import SimpleNamespace

import pytest

from jaxrl.data.serialization import serialize_trajectory
from jaxrl.training.collect import CollectedGroups
from jaxrl.training.packing import CompiledSizes
from jaxrl.training.run_state import Progress, RunState
from jaxrl.training.usage import UsageStats
from jaxrl.types import GroupStats, flatten_groups
from tests import helpers
from tests.episodes import grouped, make_trajectory

method_with = partial(helpers.method_with, **{"rollout.tasks_per_step": 1, "rollout.group_size": 4})


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 1), ({"rollout.group_size": 8}, 0), ({"filter.carry_over": False}, 0)],
    ids=str,
)
def test_leftover_groups_that_no_longer_fit_are_dropped(changes, count):
    method = method_with(**{"filter.name": "varied", "filter.carry_over": True} | changes)
    [group] = grouped(make_trajectory(sample_index=i) for i in range(4))
    saved = Progress(buffered_groups=[group]).to_json()
    assert saved["buffered_groups"][0][0] == serialize_trajectory(group.trajectories[0])
    read = Progress.from_json(saved, method).buffered_groups
    assert len(read) == count
    for trajectory, expected in zip(
        flatten_groups(read), group.trajectories if count else (), strict=True
    ):
        assert serialize_trajectory(trajectory) == serialize_trajectory(expected)


@pytest.mark.parametrize(
    ("changes", "is_restored"),
    [
        ({}, True),
        ({"rollout.tasks_per_step": 2}, False),
        ({"rollout.async_level": 0}, False),
    ],
    ids=str,
)
def test_prefetched_groups_are_restored_where_they_fit(changes, is_restored):
    method = method_with(**{"rollout.async_level": 1} | changes)
    [group, surplus] = grouped(
        make_trajectory(task_number=n // 4, sample_index=n) for n in range(8)
    )
    failed = GroupStats(task_id="q", num_correct=0, num_scored=0, mean_entropy=nan, error="down")
    pending = CollectedGroups(
        groups=[group],
        buffered_groups=[surplus],
        num_tasks_taken=5,
        sampled_stats=[GroupStats.from_group(group), failed],
        metrics={"filter/accuracy": nan, "rollout/sampled_tokens": 7},
        ledger=UsageStats(num_trajectories=8, num_calls={"search": 3}),
    )
    before = UsageStats(num_trajectories=2, num_calls={"search": 1})
    saved = json.dumps(Progress(prefetched=pending, ledger=before).to_json())
    progress = Progress.from_json(json.loads(saved), method)
    read = progress.prefetched
    assert (read is not None) == is_restored
    # Its usage counts, whether it is dropped now or with its stage.
    session = SimpleNamespace(progress=progress, components=SimpleNamespace(method=method))
    progress.stage = "train"
    assert RunState.begin_stage(session, "evaluate")
    assert (progress.prefetched, progress.ledger) == (None, before + pending.ledger)
    if read:
        assert json.dumps(read.to_json()) == json.dumps(pending.to_json())
        assert read.sampled_stats[0] == pending.sampled_stats[0]


def test_compiled_sizes_are_restored_and_belong_to_a_stage():
    method = method_with()
    in_use = CompiledSizes(((1, 96), (2, 64)), 0.25)
    saved = json.dumps(Progress(stage="sft", compiled_sizes=in_use).to_json())
    progress = Progress.from_json(json.loads(saved), method)
    assert progress.compiled_sizes == in_use
    session = SimpleNamespace(progress=progress, components=SimpleNamespace(method=method))
    assert RunState.begin_stage(session, "train")
    assert progress.compiled_sizes == CompiledSizes()


def test_records_after_a_checkpoint_are_newer():
    steps = [("sft", 24), *(("train", step) for step in range(24, 28)), ("evaluate", 27)]
    records = [{"stage": stage, "step": step} for stage, step in steps]

    def count_before(**fields):
        progress = Progress(**fields)
        return sum(not progress.is_older_than(record) for record in records)

    assert count_before() == 0
    # The evaluation before the first step is to come.
    assert count_before(stage="sft", step=24) == 1
    assert count_before(stage="train", step=26) == 4
    assert count_before(stage="train", step=26, record={}) == 3  # its own record is to come
    assert count_before(stage="train", step=27) == 5
    assert Progress(stage="train", step=1).is_older_than({"step": 1, "stage": "unknown"})
