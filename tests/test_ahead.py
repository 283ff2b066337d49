"""Rollouts one step ahead of updates, and groups that are left to the next step."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from jaxrl import run
from jaxrl.data import serialization
from jaxrl.data.stream import Stream
from jaxrl.logs.display import Display
from jaxrl.runtime.checkpoint import list_steps
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.training.collect import draw_tasks
from jaxrl.training.settings import STAGES
from jaxrl.types import flatten_groups
from tests.helpers import build, settings_of
from tests.runs import (
    SIZES,
    assert_same_weights,
    killed,
    lasting,
    made_for,
    records,
    run_settings,
    saved_progress,
    trajectories,
    without_usage,
)

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]

NUM_SFT, NUM_TRAIN = 16, 4
LAST = NUM_SFT + NUM_TRAIN
SETTINGS = {
    **SIZES,
    "stages": ("sft", "train"),
    "sft.num_steps": NUM_SFT,
    "num_steps": NUM_TRAIN,
    "rollout.async_level": 1,
    "loss.correction.level": "token",
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 100,
    "eval.every_steps": 2,
    "eval.suites": ("sampled",),
    "log.trajectories": -1,
}
IN_FLIGHT = {
    "stages": ("train",),
    "rollout.async_level": 0,
    "rollout.tasks_per_step": 2,
    "rollout.group_size": 2,
    "rollout.chunk_tokens": 4,
    "filter.unfinished_tasks": 2,
    "eval.max_tasks": 2,
}


def settings(tiny_world, **changes):
    return run_settings(tiny_world, **{**SETTINGS, **changes})


def play(config, workdir, parts, should_stop=lambda: False):
    """Run in this process; return what was logged, and False if the run was stopped."""
    workdir.mkdir(exist_ok=True, parents=True)
    display, lines = Display(), []
    display.log = lines.append
    try:
        run.run(settings_of(config), workdir, parts, display, should_stop)
    except Interrupted:
        return lines, False
    return lines, True


@pytest.fixture(scope="module")
def parts(tiny_world, quick_compilation, one_size):
    return build(settings(tiny_world))


@pytest.fixture(scope="module")
def base(tiny_world, tmp_path_factory, parts, no_pictures):
    """The workdir of an undisturbed run."""
    workdir = tmp_path_factory.mktemp("runs") / "base"
    play(settings(tiny_world), workdir, parts)
    return workdir


def position(workdir, step):
    return json.loads((workdir / "checkpoints" / str(step) / "position" / "metadata").read_text())


def assert_same_run(workdir, base):
    assert lasting(workdir) == lasting(base)
    assert_same_weights(workdir / "export", base / "export")
    for step in range(NUM_SFT + 1, LAST + 1):
        got, wanted = trajectories(workdir, step), trajectories(base, step)
        assert [*map(without_usage, got)] == [*map(without_usage, wanted)]


def test_groups_are_sampled_by_the_weights_before_the_last_update(
    base, parts, tiny_world, tmp_path
):
    config = settings(tiny_world)
    for step in (1, 2):
        # The weights before the update of this step.
        workdir = killed(base, tmp_path / str(step), after=NUM_SFT + step - 1)
        before = config if step > 1 else settings(tiny_world, stages=("sft",))
        _, params = saved_progress(made_for(before, parts), workdir)
        saved = position(base, NUM_SFT + step)
        prefetched = serialization.deserialize_groups(saved["prefetched"]["groups"])
        parts.engine.set_weights(params)
        size = config.rollout.tasks_per_step
        draws, _ = draw_tasks(Stream(parts.tasks, seed=config.seed), saved["items_taken"], size)
        sampling = SamplingConfig(
            group_size=config.rollout.group_size,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            seeds=Seeds(seed=config.seed, stage=STAGES.index("train"), step=NUM_SFT + step),
            policy_version=step - 1,
        )
        wanted = parts.rollout(draws, sampling)
        parts.engine.clear()
        for got, expected in zip(flatten_groups(prefetched), flatten_groups(wanted), strict=True):
            np.testing.assert_array_equal(got.token_ids, expected.token_ids)
            np.testing.assert_array_equal(got.rollout_logprobs, expected.rollout_logprobs)
            assert {*got.policy_versions[got.loss_mask]} == {step - 1}
    assert position(base, LAST)["prefetched"] is None
    steps = [r for r in records(base) if r["stage"] == "train" and "actor/grad_norm" in r]
    assert [record["rollout/lag"] for record in steps] == [0, 1, 1, 1]
    gaps = [record["rollout_corr/logprob_diff_mean"] for record in steps]
    assert gaps[0] < 1e-5
    assert min(gaps[1:]) > 1e-3


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(1, marks=pytest.mark.slow(instead="::[2]")),
        2,
        pytest.param(3, marks=pytest.mark.slow(instead="::[2]")),
    ],
)
def test_a_killed_run_resumes_bit_for_bit(base, parts, tiny_world, tmp_path, step):
    workdir = killed(base, tmp_path / "run", after=NUM_SFT + step)
    play(settings(tiny_world), workdir, parts)
    assert_same_run(workdir, base)


@pytest.mark.slow(
    instead="test_controllers_in_runs.py"
    "::test_a_run_that_is_stopped_while_it_samples_resumes_with_its_states"
)
def test_a_stopped_run_resumes_bit_for_bit(base, parts, tiny_world, tmp_path):
    config = settings(tiny_world, **{"checkpoint.every_steps": 100})
    workdir = killed(base, tmp_path / "run", after=NUM_SFT)
    is_ahead = False

    def rollout(draws, sampling, **options):
        nonlocal is_ahead
        is_ahead = sampling.seeds.step == NUM_SFT + 2
        return parts.rollout(draws, sampling, **options)

    # Stopped while it samples ahead: the evaluation of step 2 is dropped, and the step is saved
    # with what is sampled ahead.
    sampling_ahead = dataclasses.replace(parts, rollout=rollout)
    assert not play(config, workdir, sampling_ahead, lambda: is_ahead)[1]
    newest = list_steps(workdir / "checkpoints")[-1]
    assert newest == NUM_SFT + 2
    assert position(workdir, newest)["record"]
    assert position(workdir, newest)["prefetched"]
    # Then right after that evaluation: nothing is sampled before the run ends.
    count = NUM_SFT + 1 + 2
    file = workdir / "metrics.jsonl"
    assert not play(config, workdir, parts, lambda: file.read_bytes().count(b"\n") == count)[1]
    assert len(records(workdir)) == count
    assert not position(workdir, newest)["record"]
    assert play(config, workdir, parts)[1]
    assert_same_run(workdir, base)


def test_groups_in_flight_end_in_the_next_step_and_a_run_repeats(tiny_world, tmp_path):
    config = settings(tiny_world, **IN_FLIGHT)
    parts, workdir = build(config), tmp_path / "run"
    play(config, workdir, parts)
    play(config, tmp_path / "repeated", parts)
    assert lasting(workdir) == lasting(tmp_path / "repeated")
    steps = range(1, 5)
    trained, repeated = (
        [without_usage(t) for step in steps for t in trajectories(folder, step)]
        for folder in (workdir, tmp_path / "repeated")
    )
    assert trained == repeated

    # Two whole groups a step, each task once; some tokens are of weights before the newest.
    order = [t.id for t in Stream(parts.tasks, seed=config.seed).get_items(0, 10)]
    counts = Counter(t["task_id"] for t in trained)
    assert set(counts.values()) == {2}
    progress, _ = saved_progress(parts, workdir)
    in_flight = {order[index] for index in progress.in_flight_tasks}
    assert sorted(counts) == sorted(set(order) - in_flight)
    versions = [
        (step, {version for version in t["policy_versions"] if version >= 0})
        for step in steps
        for t in trajectories(workdir, step)
    ]
    ages = {step - 1 - version for step, of_trajectory in versions for version in of_trajectory}
    assert min(ages) == 0 < max(ages)
    assert any(len(of_trajectory) > 1 for _, of_trajectory in versions)

    # A killed run samples again what was in flight.
    resumed = killed(workdir, tmp_path / "resumed", after=2)
    progress, _ = saved_progress(parts, resumed)
    assert len(progress.in_flight_tasks) == 2
    lines, _ = play(config, resumed, parts)
    assert any("2 tasks were in flight" in line for line in lines)
    later = Counter(t["task_id"] for step in (3, 4) for t in trajectories(resumed, step))
    assert set(later.values()) == {2}
    assert {order[index] for index in progress.in_flight_tasks} <= later.keys()
