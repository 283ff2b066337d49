"""Training step by step from Python: equal to `train`, interchangeable with it, and its pieces."""

import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import api
from jaxrl.objectives.aggregation import AGGREGATIONS
from jaxrl.objectives.losses import PolicyLoss
from jaxrl.runtime.checkpoint import list_steps
from jaxrl.training.controllers import Controllers
from jaxrl.training.gradients import AccumulatedGradients
from jaxrl.training.minibatches import make_minibatches
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import GradientStep, put_batch
from jaxrl.types import flatten_groups
from jaxrl.utils.callables import NamedFunction
from tests.runs import (
    base_config,
    evaluation,
    free_port,
    lasting,
    trajectories,
    warm_start,
    without_usage,
)

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "one_size", "no_pictures"),
]

SETTINGS = {
    "num_steps": 3,
    "kl.coef": 0.05,
    "kl.controller": "adaptive",
    "kl.apply_to": "reward",
    "kl.estimator": "k1",
    "eval.suites": ("sampled",),
    "eval.every_steps": 2,
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 100,
    "optimizer.num_minibatches": 2,
    "optimizer.num_epochs": 2,
    "log.trajectories": -1,
}


def with_changes(config, changes):
    config.update_from_flattened_dict(changes)
    return config


def step_through(trainer):
    groups = trainer.rollout(trainer.next_tasks())
    trainer.update(trainer.compute_advantages(groups))
    trainer.finish_step()


def check_same_run(workdir, expected):
    assert lasting(workdir) == lasting(expected)
    weights = [next((folder / "export").glob("*.safetensors")) for folder in (workdir, expected)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    for step in (1, 2, 3):
        assert [*map(without_usage, trajectories(workdir, step))] == [
            *map(without_usage, trajectories(expected, step))
        ]
    for name in ("train_2.json", "train_3.json"):
        assert evaluation(workdir, name) == evaluation(expected, name)


@pytest.fixture(scope="module")
def config(tiny_world):
    return with_changes(base_config(tiny_world), SETTINGS)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory, quick_compilation, one_size, no_pictures):
    """A run of `train`."""
    return api.train(config, tmp_path_factory.mktemp("runs") / "trained").workdir


@pytest.fixture(scope="module")
def trainer(tiny_world, tmp_path_factory, quick_compilation, one_size, no_pictures):
    """A trainer with one update per step, shared by tests that take few steps."""
    changes = {"num_steps": 100, "kl.coef": 0.01, "optimizer.epsilon": 1e-3}
    config = with_changes(base_config(tiny_world), changes)
    with api.Trainer(config, tmp_path_factory.mktemp("runs") / "shared") as trainer:
        yield trainer


def test_single_calls_repeat_train_bit_for_bit(config, trained, tmp_path):
    with api.Trainer(config, tmp_path) as trainer:
        while not trainer.is_done:
            step_through(trainer)
        trainer.export(tmp_path)
    check_same_run(tmp_path, trained)


def test_checkpoints_of_both_ways_are_interchangeable(config, trained, tmp_path):
    # Stop between the update and the end of its step, and finish with `train`.
    first = tmp_path / "first"
    with api.Trainer(config, first) as trainer:
        step_through(trainer)
        trainer.update(trainer.compute_advantages(trainer.collect()))
    assert list_steps(first / "checkpoints") == [1, 2]
    api.train(config, first)
    check_same_run(first, trained)
    # Begin with `train`, and finish step by step. A rollout without an update changes nothing.
    second = tmp_path / "second"
    api.train(with_changes(config.copy_and_resolve_references(), {"num_steps": 1}), second)
    with api.Trainer(config, second) as trainer:
        assert trainer.num_steps_done == 1
        trainer.rollout(trainer.next_tasks())
    with api.Trainer(config, second) as trainer:
        while not trainer.is_done:
            trainer.step()
        trainer.export(second)
    assert [r["critic/rewards/mean"] for r in lasting(second)[-2:]] == [
        r["critic/rewards/mean"] for r in lasting(trained)[-2:]
    ]


@pytest.mark.parametrize("changes", [{"rollout.async_level": 1, "loss.correction.level": "token"}])
def test_steps_with_prefetched_groups_repeat_train(tiny_world, tmp_path, changes):
    config = with_changes(
        base_config(tiny_world), {"num_steps": 3, "log.trajectories": -1, **changes}
    )
    expected = api.train(config, tmp_path / "train").workdir
    with api.Trainer(config, tmp_path / "steps") as trainer:
        records = [trainer.step() for _ in range(3)]
        assert trainer.is_done
    rewards = [record["critic/rewards/mean"] for record in lasting(expected)[1:]]
    assert [record["critic/rewards/mean"] for record in records] == rewards
    assert lasting(tmp_path / "steps") == lasting(expected)


def test_a_finished_run_continues_as_if_it_had_not_ended(config, trained, tmp_path):
    shorter = with_changes(config.copy_and_resolve_references(), {"num_steps": 2})
    with api.Trainer(shorter, tmp_path) as trainer:
        step_through(trainer)
        step_through(trainer)
        assert trainer.is_done
    with api.Trainer(shorter, tmp_path) as trainer:  # only looks
        trainer.generate("who is the mentor of Soren Dumont?")
    with api.Trainer(config, tmp_path) as trainer:
        step_through(trainer)
        trainer.export(tmp_path)
    check_same_run(tmp_path, trained)


def test_half_an_update_is_not_saved(config, trained, tmp_path, monkeypatch):
    """The update fails in the third of its four optimizer steps."""
    trainer = api.Trainer(config, tmp_path)
    step_through(trainer)
    update = trainer._learner.stage.update
    apply_gradients, calls = update.apply_gradients, iter(range(4))

    def fail(*arguments):
        if next(calls) == 2:
            raise RuntimeError("device lost")
        return apply_gradients(*arguments)

    groups = trainer.compute_advantages(trainer.rollout(trainer.next_tasks()))
    with monkeypatch.context() as patch:
        patch.setattr(update, "apply_gradients", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            trainer.update(groups)
    with pytest.raises(ValueError, match="halfway"):
        trainer.save()
    trainer.close()
    assert list_steps(tmp_path / "checkpoints") == [1]
    with api.Trainer(config, tmp_path) as trainer:
        while not trainer.is_done:
            step_through(trainer)
        trainer.export(tmp_path)
    check_same_run(tmp_path, trained)


def test_divergences_are_measured_in_every_accumulating_call(config, tmp_path):
    with api.Trainer(config, tmp_path) as trainer:
        groups = trainer.rollout(trainer.next_tasks())
        for part in (groups[:1], groups[1:]):
            count = len(flatten_groups(part))
            trainer.accumulate_gradients(api.set_advantages(part, [1.0] * count))
        metrics = trainer.apply_gradients()
        assert metrics["kl"] == pytest.approx(0, abs=1e-6)
        with pytest.raises(ValueError, match="accumulate_gradients first"):
            trainer.apply_gradients()


def test_usage_counts_once_however_often_a_step_is_saved(config, tiny_world, tmp_path):
    """With a model that searches."""
    path = warm_start(tiny_world, tmp_path)
    config = with_changes(
        config.copy_and_resolve_references(), {"model.path": path, "eval.suites": ()}
    )
    with api.Trainer(config, tmp_path / "run") as trainer:
        groups = trainer.rollout(trainer.next_tasks())
        trainer.update(trainer.compute_advantages(groups))
        first = trainer.finish_step()["perf/ledger/total/attempts/search"]
        groups = trainer.rollout(trainer.next_tasks())
        num_searches = sum(r.attempts for t in flatten_groups(groups) for r in t.call_records)
        for _ in range(2):
            trainer.save()
        trainer.update(trainer.compute_advantages(groups))
        record = trainer.finish_step()
        assert num_searches > 0
        assert record["perf/ledger/total/attempts/search"] == first + num_searches


def test_two_processes_repeat_train_in_two_processes(tiny_world, tmp_path, quick_compilation):
    settings = ["--config.num_steps=2", "--config.stages=('train',)", "--config.eval.suites=()"]
    settings += ["--config.eval.max_tasks=4", "--config.rollout.max_num_seqs=8"]
    for module in ("jaxrl.launch", "examples.grpo_loop"):
        job = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
        command = [sys.executable, "-m", module, f"--config=configs/debug_tiny.py:{tiny_world}"]
        command += [f"--workdir={tmp_path / module}", *settings, *job]
        processes = [
            subprocess.Popen(
                [*command, f"--process_id={index}"],
                env=os.environ | quick_compilation,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(2)
        ]
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
    assert lasting(tmp_path / "examples.grpo_loop") == lasting(tmp_path / "jaxrl.launch")


def test_logprobs_are_those_of_the_sampler(trainer):
    groups = trainer.rollout(list(trainer.tasks)[:3], group_size=3)
    assert [len(group.trajectories) for group in groups] == [3, 3, 3]
    for trajectory, logprobs in zip(
        flatten_groups(groups), trainer.compute_logprobs(groups), strict=True
    ):
        np.testing.assert_allclose(logprobs, trajectory.rollout_logprobs, atol=1e-4)
        assert not logprobs[~trajectory.loss_mask].any()


def test_a_scorer_and_the_reference_are_the_initial_policy(trainer, tiny_world):
    groups = trainer.rollout(trainer.next_tasks(2))
    scorer = trainer.load_scorer(tiny_world / "model")
    expected = trainer.compute_logprobs(groups, use_reference=True)
    for got, reference in zip(scorer.compute_logprobs(groups), expected, strict=True):
        np.testing.assert_array_equal(got, reference)


def test_a_custom_loss_has_the_value_computed_by_hand(trainer):
    def weighted(logprobs, advantages, loss_mask):
        values = jnp.where(loss_mask, -advantages * logprobs, 0.0)
        return PolicyLoss(values, {"weight": jnp.where(loss_mask, advantages, 0.0)})

    groups = trainer.rollout(trainer.next_tasks())
    advantages = [np.linspace(-1, 2, len(t.token_ids)) for t in flatten_groups(groups)]
    groups = api.set_advantages(groups, advantages)
    logprobs = trainer.compute_logprobs(groups)
    masks = [t.loss_mask for t in flatten_groups(groups)]
    weights = np.concatenate([a[mask] for a, mask in zip(advantages, masks, strict=True)])
    sampled = np.concatenate([x[mask] for x, mask in zip(logprobs, masks, strict=True)])
    metrics = trainer.update(groups, loss=weighted)
    assert metrics["loss"] == pytest.approx(-(weights * sampled).mean(), rel=1e-4)
    assert metrics["actor/weight"] == pytest.approx(weights.mean(), rel=1e-4)
    trainer.finish_step()


def weighted_logprobs(logprobs, advantages, loss_mask):
    """A loss that is linear in the advantages."""
    return PolicyLoss(jnp.where(loss_mask, -advantages * logprobs, 0.0), {})


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_accumulated_gradients_are_those_of_one_large_minibatch(trainer, monkeypatch, aggregation):
    learner, model = trainer._learner, trainer._prepared.components.model
    settings = {"max_response_tokens": 40} if aggregation.endswith("norm") else {}
    function = NamedFunction(
        key="loss.aggregation",
        name=aggregation,
        function=AGGREGATIONS[aggregation],
        settings=settings,
    )
    method = learner.method
    monkeypatch.setattr(
        learner,
        "method",
        replace(
            method,
            loss=replace(method.loss, aggregation=function),
            kl=replace(method.kl, coef=0.0),
        ),
    )
    groups = trainer.rollout(trainer.next_tasks(6))
    count, shape = len(flatten_groups(groups)), learner.stage.shape
    values = np.random.default_rng(0).normal(size=count)
    groups = api.set_advantages(groups, values.tolist())

    # All groups in one batch of a larger shape.
    assert count > shape.num_sequences
    method, _ = learner._select_loss(weighted_logprobs)
    [packed] = make_minibatches(
        groups, replace(shape, num_micro=2 * shape.num_micro), method, controllers=Controllers()
    )
    gradient = GradientStep(model, make_policy_loss(method), temperature=method.temperature)
    batch = put_batch(model.mesh, packed.batch)
    expected = jax.device_get(gradient(learner.state.params, batch, packed).gradients)

    # The same groups in two calls, the second of which has two pieces.
    learner._begin_step()
    for part in (groups[:1], groups[1:]):
        trainer.accumulate_gradients(part, loss=weighted_logprobs)
    got = jax.device_get(learner._accumulated.sums.gradients)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 + 1e-5 * np.abs(b).max())
    learner._begin_step()


def test_weights_that_depend_on_other_lengths_are_not_accumulated():
    """By the longest trajectory: weights change by more than a factor when groups are added."""
    first, second = (
        AccumulatedGradients(sums=None, counts=np.array(counts)) for counts in ([1, 2], [9, 3])
    )
    with pytest.raises(ValueError, match="cannot be accumulated"):
        first.combine(second, lambda counts: 1.0 / (counts + counts.max()))


def test_generation_is_limited_and_repeats(trainer):
    short = trainer.generate("who is the mentor of Soren Dumont?", max_tokens=5)
    assert short.num_sampled <= 5
    assert short.is_scored
    assert short.reward == 0
    steps = trainer.token_steps(short)
    assert [step.token_id for step in steps] == short.token_ids[short.loss_mask].tolist()
    chat = [{"role": "user", "content": "who is the mentor of Soren Dumont?"}]
    greedy = [trainer.generate(chat, temperature=0.0) for _ in range(2)]
    assert greedy[0].token_ids.tolist() == greedy[1].token_ids.tolist()
    sampled = [tuple(trainer.generate(chat).token_ids.tolist()) for _ in range(4)]
    assert len(set(sampled)) > 1


def test_the_next_update_finishes_the_last_step(trainer):
    first = trainer.num_steps_done
    for _ in range(2):
        groups = trainer.rollout(trainer.next_tasks(1))
        trainer.update(api.set_advantages(groups, [1.0, 0.0, 0.0, -1.0]))
    trainer.finish_step()
    written = lasting(trainer._workdir)
    assert [record["step"] for record in written][-2:] == [first + 1, first + 2]


def test_wrong_calls_are_refused_and_change_nothing(trainer):
    num_done = trainer.num_steps_done
    groups = trainer.rollout(trainer.next_tasks(1))
    with pytest.raises(ValueError, match="no advantage"):
        trainer.update(groups)
    with pytest.raises(ValueError, match="at least one group"):
        trainer.update([])
    with pytest.raises(ValueError, match="accumulate_gradients first"):
        trainer.apply_gradients()
    with pytest.raises(ValueError, match="no update to finish"):
        trainer.finish_step()
    with pytest.raises(ValueError, match="sampled groups already"):
        trainer.collect()
    with pytest.raises(ValueError, match="already; call compute_advantages once"):
        trainer.compute_advantages(trainer.compute_advantages(groups))
    with pytest.raises(ValueError, match="at least one task"):
        trainer.rollout([])
    with pytest.raises(ValueError, match="'nonsense'; expected some of sampled"):
        trainer.evaluate(("nonsense",))
    with pytest.raises(ValueError, match="another Trainer of this process"):
        api.Trainer(trainer._config.config, trainer._workdir)
    with pytest.raises(ValueError, match="takes everything; expected arrays among logprobs"):
        trainer.update(groups, loss=lambda everything: everything)
    with pytest.raises(ValueError, match="1 advantages for 4"):
        api.set_advantages(groups, [1.0])
    with pytest.raises(ValueError, match="finite number"):
        api.set_advantages(groups, [float("nan")] * 4)
    with pytest.raises(ValueError, match="PolicyLoss"):
        trainer.update(api.set_advantages(groups, [1.0] * 4), loss=lambda logprobs: logprobs)
    assert trainer.num_steps_done == num_done
