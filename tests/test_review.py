"""Corners of the methods: failures in groups, values that are not finite, older checkpoints."""

import dataclasses
import math
import types
from functools import partial

import numpy as np
import pytest
from jaxrl.objectives.controllers import KLBudget, SkipSet
from jaxrl.training.method import Controllers

from configs import dapo, dapo_small, search_r1_small
from jaxrl import config_checks as rules
from jaxrl.codecs import to_json
from jaxrl.data import Stream
from jaxrl.envs.base import Task
from jaxrl.objectives.entropy import EntropyThreshold
from jaxrl.train import Position, open_gate, skip_solved
from jaxrl.train import draw as draw_tasks
from jaxrl.training.collect import NotEnoughGroupsError, Tried, collect, shape
from jaxrl.types import Draw
from tests import helpers
from tests.episodes import make_failure, make_trajectory

settings = partial(helpers.settings, **{"rollout.tasks_per_step": 1, "rollout.group_size": 4})


def draw(position, count):
    places = range(position, position + count)
    return [Draw(task=Task(id=f"q{p}", question="?"), position=p) for p in places], position + count


def group(*right):
    """A group's members: right, wrong, or (None) an environment error."""
    return [
        make_failure(sample_index=i)
        if is_right is None
        else dataclasses.replace(make_trajectory(sample_index=i), is_correct=is_right)
        for i, is_right in enumerate(right)
    ]


def generator(*groups):
    """Samples the groups by the places of their tasks."""
    return lambda draws: [
        dataclasses.replace(member, group_id=index, task=one.task)
        for index, one in enumerate(draws)
        for member in groups[one.position]
    ]


@pytest.mark.parametrize(("size", "taken"), [(4, 2), (1, 1)])
def test_the_survivor_of_failures_is_no_group_of_one(size, taken):
    """Alone of four it has no advantage; where groups have one member, each is kept."""
    groups = [group(True, None, None, None)[:size], group(True, False, None, None)]
    config = settings(**{"filter.name": "varied", "rollout.group_size": size})
    got = collect(generator(*groups), draw, config, items_taken=0)
    assert got.items_taken == taken


def test_shares_of_no_group_are_not_zero():
    config = settings(**{"filter.name": "varied", "filter.carry_over": True})
    got = collect(generator(), draw, config, items_taken=5, carried=[group(True, False)])
    shares = {name: value for name, value in got.metrics.items() if name.endswith("_share")}
    assert len(shares) == 5
    assert all(math.isnan(value) for value in shares.values())
    assert got.items_taken == 5


def test_a_task_is_not_skipped_for_what_failures_left_of_its_group():
    config = settings(**{"filter.skip_solved": True, "filter.skip_entropy": 1.0})
    whole = dataclasses.replace(Tried.of(group(True, True, True, True)), task_id="whole")
    rest = dataclasses.replace(Tried.of(group(True, None, None, None)), task_id="rest")
    controllers = skip_solved(Controllers.init(config), [whole, rest], config)
    assert list(controllers.skipped.task_ids) == ["whole"]


def test_an_evaluation_in_which_every_search_failed_says_nothing_to_the_gate():
    config = settings(**{"shaping.boundary_aware": True})
    run = types.SimpleNamespace(config=config, position=Position())
    run.position.controllers = Controllers.init(config)
    open_gate(run, {"val-core/all/exact_match/greedy": 0.5})
    open_gate(run, {"timing_s/testing": 1.0})
    assert run.position.controllers.gate.best == 0.5
    assert run.position.controllers.gate.tolerance == 0


def test_a_checkpoint_from_before_there_were_controllers_is_read():
    config = settings(**{"shaping.boundary_aware": True})
    saved = Position(step=3, stage="train").to_json()
    del saved["controllers"], saved["carried"]
    read = Position.from_json(saved, config)
    assert (read.step, read.controllers) == (3, Controllers.init(config))


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 1), ({"rollout.group_size": 8}, 0), ({"filter.carry_over": False}, 0)],
)
def test_carried_groups_that_no_longer_fit_are_dropped(changes, count):
    config = settings(**{"filter.name": "varied", "filter.carry_over": True} | changes)
    saved = Position(carried=[group(True, False, True, False)]).to_json()
    assert saved["carried"][0][0] == to_json(group(True)[0])
    assert len(Position.from_json(saved, config).carried) == count


def test_values_that_are_not_finite_move_no_controller():
    budget = KLBudget.init().update({"easy": math.nan, "hard": 1.0})
    assert budget.multipliers == {"easy": 1.0, "medium": 1.0, "hard": pytest.approx(1.008)}
    good, bad = np.array([1.0, 2.0], np.float32), np.array([1.0, np.nan], np.float32)
    threshold = EntropyThreshold.init().update([good, bad], percentile=50.0)
    assert threshold.value == 1.5
    assert threshold.update([bad]) == threshold


def test_searching_is_not_overlong_by_the_limit_of_what_is_sampled():
    """64 tokens may be sampled, and two results of 72 come on top."""
    config = search_r1_small.get_config()
    config.shaping.overlong_buffer = 16
    assert rules.overlong_limit(config) == 192 - 32
    searched = make_trajectory(length=2 + 100)
    [got] = shape([searched], config, is_late=True)
    assert got.reward_parts["overlong"] == 0
    config.shaping.overlong_max_tokens = 176
    assert rules.overlong_limit(config) == 176
    assert rules.overlong_limit(dapo_small.get_config()) == 96
    assert rules.overlong_limit(dapo.get_config()) == 20480


@pytest.mark.parametrize(("num_solved", "count"), [(98, 16), (85, 64), (99, 7), (0, 5)])
def test_draws_go_on_while_anything_is_left(num_solved, count):
    """However many draws a batch needs, and however often the solved tasks come by meanwhile."""
    stream = Stream([Task(id=f"q{i}", question="?") for i in range(100)], seed=0)
    solved = SkipSet({f"q{i}": 0.0 for i in range(num_solved)})
    draws, position = draw_tasks(stream, 0, count, solved)
    assert len(draws) == count
    passed = [task.id for task in stream.take(0, position)]
    assert [one.task.id for one in draws] == [name for name in passed if name not in solved]
    assert [one.task.id for one in draws] == [passed[one.position] for one in draws]


def test_a_stream_without_anything_left_says_so():
    stream = Stream([Task(id=f"q{i}", question="?") for i in range(3)], seed=0)
    with pytest.raises(NotEnoughGroupsError, match="all 3 tasks are solved and skipped"):
        draw_tasks(stream, 5, 1, SkipSet({f"q{i}": 0.0 for i in range(3)}))
