import dataclasses
import types
from functools import partial

import jax
import numpy as np
import pytest

from configs import debug_tiny
from jaxrl.builders.method import compute_batch_shape
from jaxrl.logs.display import Display
from jaxrl.runtime.preemption import Interrupted
from jaxrl.sampling.interfaces import EngineCounts
from jaxrl.train import update_gate
from jaxrl.training.collector import Collector
from jaxrl.training.controllers import Controllers
from jaxrl.training.estimators import AdvantageEstimator
from jaxrl.training.failures import FailureCounter
from jaxrl.training.minibatches import divide_into_minibatches, make_minibatch
from jaxrl.training.run_state import Progress, RunState
from jaxrl.training.usage import UsageStats
from jaxrl.types import Group
from tests.episodes import ANSWER, SEARCH, NumberedTasks, grouped, make_failure, make_trajectory
from tests.helpers import method_of, method_with, resolved, settings, settings_of


def minibatches(trajectories, **changes):
    config = debug_tiny.get_config()
    config.update_from_flattened_dict(
        {"rollout.tasks_per_step": 2, "rollout.group_size": 3, "optimizer.micro_rows": 2, **changes}
    )
    shape, method = compute_batch_shape(resolved(config), "train"), method_of(config)
    groups = AdvantageEstimator(method.advantage, method.seed)(grouped(trajectories), 0, 0)
    return [
        make_minibatch(part, shape, method, controllers=Controllers())
        for part in divide_into_minibatches(groups, method.optimizer.num_minibatches)
    ]


def test_environment_errors_leave_the_loss_of_the_others_unchanged():
    rewards = [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (1, 0.0)]
    others = [
        make_trajectory(task_number=task, reward=reward, sample_index=index)
        for index, (task, reward) in enumerate(rewards)
    ]
    failed = make_failure(task_number=0, length=9, sample_index=5)
    [got] = minibatches([*others[:2], failed, *others[2:]])
    [wanted] = minibatches(others)
    assert got.num_loss_tokens == wanted.num_loss_tokens == 5 * 4
    jax.tree.map(np.testing.assert_array_equal, got.batch, wanted.batch)


def test_groups_stay_whole_in_minibatches():
    rewards = [(0, 1.0), (0, 0.0), (0, 0.0), (1, 1.0), (1, 1.0), (1, 1.0)]
    trajectories = [
        make_trajectory(task_number=task, reward=reward, sample_index=index)
        for index, (task, reward) in enumerate(rewards)
    ]
    first, second = minibatches(trajectories, **{"optimizer.num_minibatches": 2})
    # All of group 1 is right: it has no signal and is left out, but still counts as sampled.
    assert (first.num_tokens, first.num_loss_tokens) == (3 * 6, 3 * 4)
    assert (second.num_tokens, second.num_micro, second.num_loss_tokens) == (0, 0, 3 * 4)


def test_an_evaluation_in_which_every_search_failed_leaves_the_gate_unchanged():
    method = method_with(**{"shaping.boundary_aware": True})
    run_state = types.SimpleNamespace(
        settings=settings_of(settings()),
        components=types.SimpleNamespace(method=method),
        progress=Progress(controllers=Controllers.init(method)),
    )
    update_gate(run_state, {"val-core/all/exact_match/greedy": 0.5})
    update_gate(run_state, {"timing_s/testing": 1.0})
    assert run_state.progress.controllers.gate.best == 0.5
    assert run_state.progress.controllers.gate.tolerance == 0


def test_the_cost_of_an_interrupted_collection_is_counted():
    """A first batch of 2 groups of 2, each with a search, is dropped; the second never ends."""
    searching = make_trajectory(reward=1.0, turns=(SEARCH, ANSWER))

    def rollout(draws, *_, **__):
        if draws[0].stream_index:
            raise Interrupted("a rollout was asked to stop")
        return [Group(trajectories=(searching, searching)) for _ in draws]

    changes = {"rollout.tasks_per_step": 2, "rollout.group_size": 2, "filter.name": "varied"}
    config, progress = settings(**changes, **{"ledger.prices": {"search": 0.5}}), Progress()
    parts = types.SimpleNamespace(
        method=method_of(config),
        rollout=rollout,
        engine=types.SimpleNamespace(counts=EngineCounts(), wait_s={}),
    )
    run_state = types.SimpleNamespace(
        settings=settings_of(config),
        components=parts,
        progress=progress,
        display=Display(),
        failures=FailureCounter(limit=0, log=print, num_batches=0),
        check_budget=lambda: None,
        should_stop=lambda: False,
        pending_usage=UsageStats(),
    )
    run_state.add_discarded_cost = partial(RunState.add_discarded_cost, run_state)
    collector = Collector(run_state=run_state, stream=NumberedTasks(), add_divergences=list)
    saved = dataclasses.replace(progress)
    with pytest.raises(Interrupted):
        collector.collect_groups(0)
    assert progress.ledger.usage.attempts == {"search": 4}
    assert progress.ledger.usage.cost == 4 * 0.5
    # They are drawn again and count then; `save_progress` writes a progress that differs.
    assert progress.ledger.num_calls == {}
    assert progress != saved
