"""Signs of a step: actions, the checkpoint to return to, and valid results of a watch."""

import pytest

from jaxrl.training.watch import (
    SIGN_COOLDOWN_STEPS,
    CollapseError,
    CollapseSign,
    WatchState,
    check_step,
    rollback_target,
)
from jaxrl.utils.callables import UserCodeError
from tests.helpers import method_with


def judge(record, state, *, limit=0.5):
    step = state.get("step", 0) + 1
    signs = (
        [CollapseSign(name="bad", text="it is bad", since=step - 1)]
        if record["bad"] > limit
        else []
    )
    return {"step": step}, signs


def broken(record):
    return {}, ["bad"]


def failing(record):
    raise KeyError("bad")


def watching(name, **settings):
    return method_with(**{"watch.name": f"{__name__}.{name}", "watch.settings": settings})


def test_a_sign_is_acted_on_when_it_is_new():
    method, watched, acted_on = watching("judge"), WatchState(), []
    bad = {3, 4, 5, 14, 16, 26}
    for step in range(1, 30):
        watched, metrics = check_step(method, watched, {"bad": float(step in bad)}, (), step)
        assert metrics.get("sentinel/bad", 0.0) == (step in bad)
        acted_on += [step] * len(watched.acting)
    # 14 comes 9 steps after 5, 26 comes 10 after 16.
    assert SIGN_COOLDOWN_STEPS == 10
    assert acted_on == [3, 26]
    assert watched.state == {"step": 29}


def test_another_function_starts_without_state():
    watched = WatchState(name="sentinel", state={"best": 0.3}, seen={"bad": 1}, lr_scale=0.5)
    after, _ = check_step(watching("judge"), watched, {"bad": 0.0}, (), 2)
    assert (after.name, after.state, after.seen) == (f"{__name__}.judge", {"step": 1}, {})
    assert after.lr_scale == 0.5


def record_step(record, step):
    return {"record": sorted(record), "step": step}, []


def test_it_gets_the_step_and_no_metric_in_which_processes_differ():
    record = {"a": 1.0, "timing_s/step": 2.0, "perf/max_memory_gib": 3.0}
    watched, _ = check_step(watching("record_step"), WatchState(), record, (), 7)
    assert watched.state == {"record": ["a", "actor/lr_scale"], "step": 7}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broken", "it returned ({}, ['bad']); expected a dict and a list of CollapseSign"),
        ("failing", "KeyError: 'bad'"),
    ],
)
def test_a_function_that_fails_is_named(name, text):
    with pytest.raises(UserCodeError) as error:
        check_step(watching(name), WatchState(), {}, (), 1)
    assert f"config.watch.name names 'tests.training.test_watch.{name}'" in str(error.value)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("since", "steps", "target"),
    [(7, [2, 5, 8], 5), (8, [2, 5, 8], 8), (1, [2, 5, 8], 2)],
)
def test_the_newest_sound_checkpoint_is_the_rollback_target(since, steps, target):
    watch = method_with(**{"watch.name": "sentinel"}).watch
    sign = {"name": "bad", "text": "it is bad.", "since": since}
    assert rollback_target(sign, watch, WatchState(num_roll_backs=2), steps) == target


@pytest.mark.parametrize(("num_roll_backs", "steps"), [(3, [1]), (0, [])])
def test_a_run_without_a_rollback_target_ends(num_roll_backs, steps):
    watch = method_with(**{"watch.name": "sentinel"}).watch
    sign = {"name": "bad", "text": "it is bad.", "since": 1}
    with pytest.raises(CollapseError, match=r"bad: it is bad\. .*config\.watch\.max_roll_backs"):
        rollback_target(sign, watch, WatchState(num_roll_backs=num_roll_backs), steps)
