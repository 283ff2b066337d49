"""Training step by step from Python: equal to `train`, interchangeable with it, and its pieces."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl import api
from jaxrl.envs.base import Outcome
from jaxrl.objectives.aggregation import AGGREGATIONS
from jaxrl.objectives.losses import PolicyLoss
from jaxrl.runtime.checkpoint import list_steps
from jaxrl.training.controllers import Controllers
from jaxrl.training.gradients import AccumulatedGradients
from jaxrl.training.minibatches import make_minibatch
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import GradientStep, shard_batch
from jaxrl.types import Group, flatten_groups
from jaxrl.utils.callables import NamedFunction
from tests.helpers import no_file_beyond, with_devices
from tests.runs import (
    assert_same_weights,
    base_config,
    evaluation,
    free_port,
    lasting,
    trajectories,
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
    changes |= {"checkpoint.every_steps": 100}
    changes |= {"optimizer.beta1": 0.0, "optimizer.beta2": 0.0}  # steps need no earlier gradients
    config = with_changes(base_config(tiny_world), changes)
    with api.Trainer(config, tmp_path_factory.mktemp("runs") / "shared") as trainer:
        yield trainer


def test_single_calls_repeat_train_bit_for_bit(config, trained, tmp_path):
    with api.Trainer(config, tmp_path) as trainer:
        while not trainer.is_done:
            groups = trainer.rollout(trainer.next_tasks())
            trainer.compute_advantages(groups)  # as when a notebook's cell runs twice
            trainer.update(trainer.compute_advantages(groups))
            trainer.finish_step()
        trainer.export(tmp_path)
    check_same_run(tmp_path, trained)


def test_a_run_killed_between_two_calls_repeats_train(config, trained, tmp_path):
    """A kill leaves the folder as it is then, also while a checkpoint is written."""
    workdirs = []

    def copy_workdir():
        workdirs.append(tmp_path / f"killed_{len(workdirs)}")
        with contextlib.suppress(shutil.Error):  # temporary files of a checkpoint may vanish
            shutil.copytree(tmp_path / "run", workdirs[-1])

    with api.Trainer(config, tmp_path / "run") as trainer:
        step_through(trainer)
        copy_workdir()
        groups = trainer.rollout(trainer.next_tasks())
        trainer.update(trainer.compute_advantages(groups))
        copy_workdir()
        trainer.finish_step()
        copy_workdir()
    for workdir in workdirs:
        with api.Trainer(config, workdir) as trainer:
            while not trainer.is_done:
                step_through(trainer)
            trainer.export(workdir)
        check_same_run(workdir, trained)


def test_a_step_that_a_full_disk_ends_is_repeated(config, trained, tmp_path, monkeypatch):
    trainer = api.Trainer(config, tmp_path)
    step_through(trainer)
    trainer.update(trainer.compute_advantages(trainer.rollout(trainer.next_tasks())))
    with monkeypatch.context() as patch:
        patch.setattr(trainer._learner.run_state.metrics_log, "_path", Path("/dev/full"))
        with pytest.raises(OSError, match="No space left"):
            trainer.finish_step()
    with pytest.raises(ValueError, match="halfway"):
        trainer.save()
    trainer.close()
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


def test_usage_counts_once_however_often_a_step_is_saved(config, warm_model, tmp_path):
    """With a model that searches."""
    config = with_changes(
        config.copy_and_resolve_references(), {"model.path": warm_model, "eval.suites": ()}
    )
    with api.Trainer(config, tmp_path) as trainer:
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


@pytest.mark.parametrize(
    "num_processes",
    [
        pytest.param(
            1,
            marks=pytest.mark.slow(
                instead="runtime/test_sharding.py::test_four_devices_compute_what_one_does"
            ),
        ),
        2,
    ],
)
def test_jobs_and_meshes_repeat_train(tiny_world, tmp_path, quick_compilation, num_processes):
    """One process with eight devices, and two processes with one device each."""
    settings = {
        **{"num_steps": 2, "stages": ("train",), "eval.suites": (), "eval.max_tasks": 4},
        **{"rollout.max_num_seqs": 8, "kl.coef": 0.01, "optimizer.num_minibatches": 2},
        "env.name": "tests.runs.Chance",  # so that advantages differ from 0
    }
    environment = os.environ | quick_compilation
    if num_processes == 1:
        settings |= {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
        environment |= with_devices(8)
    for module in ("jaxrl.launch", "examples.grpo_loop"):
        command = [sys.executable, "-m", "tests.one_size", module]
        command += [f"--config=configs/debug_tiny.py:{tiny_world}"]
        command += [f"--config.{name}={value}" for name, value in settings.items()]
        command += [f"--workdir={tmp_path / module}"]
        if num_processes > 1:
            command += [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
        processes = [
            subprocess.Popen(
                [*command, *([f"--process_id={index}"] if num_processes > 1 else [])],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(num_processes)
        ]
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * num_processes, outputs
    loop, run = tmp_path / "examples.grpo_loop", tmp_path / "jaxrl.launch"
    assert lasting(loop) == lasting(run)
    assert lasting(run)[-1]["actor/pg_loss"] != 0
    assert_same_weights(loop / "export", run / "export")


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


def compute_plain_logprobs(weights, config, token_ids, num_tokens):
    """Return the log-probability of each token after the first, by Qwen3's equations."""

    def normalize(x, name):
        scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x * scale * weights[f"{name}.weight"]

    def project(x, name):
        return x @ weights[f"{name}.weight"].T

    def rotate(x):
        half = config["head_dim"] // 2
        angles = jnp.arange(len(x))[:, None] * config["rope_theta"] ** -(jnp.arange(half) / half)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    hidden = weights["model.embed_tokens.weight"][token_ids]
    is_visible = jnp.tri(len(token_ids), dtype=bool)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        x = normalize(hidden, f"{layer}.input_layernorm")
        q, k, v = (
            project(x, f"{layer}.self_attn.{name}_proj").reshape(len(x), -1, config["head_dim"])
            for name in "qkv"
        )
        q = rotate(normalize(q, f"{layer}.self_attn.q_norm"))
        k = rotate(normalize(k, f"{layer}.self_attn.k_norm"))
        k, v = (x.repeat(q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / config["head_dim"] ** 0.5
        attended = jax.nn.softmax(jnp.where(is_visible, scores, -jnp.inf)) @ v.swapaxes(0, 1)
        attended = attended.swapaxes(0, 1).reshape(len(x), -1)
        hidden += project(attended, f"{layer}.self_attn.o_proj")
        x = normalize(hidden, f"{layer}.post_attention_layernorm")
        gate, up = (project(x, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        hidden += project(jax.nn.silu(gate) * up, f"{layer}.mlp.down_proj")
    logits = normalize(hidden, "model.norm") @ weights["model.embed_tokens.weight"].T
    table = jax.nn.log_softmax(logits[:-1, :num_tokens])
    return jnp.take_along_axis(table, token_ids[1:, None], axis=1)[:, 0]


@pytest.mark.parametrize("num_calls", [1, 3])
def test_an_update_is_that_of_a_plain_model(trainer, tiny_world, tmp_path, num_calls):
    """Log-probabilities, gradient of loss and KL term, clipping and optimizer."""
    groups = trainer.rollout(trainer.next_tasks(3))
    trajectories = flatten_groups(groups)
    rng = np.random.default_rng(0)
    advantages = [rng.normal(size=len(t.token_ids)).astype(np.float32) for t in trajectories]
    groups = api.set_advantages(groups, advantages)
    model = json.loads((tiny_world / "model" / "config.json").read_text())
    first = load_file(tiny_world / "model" / "model.safetensors")
    before = load_file(trainer.export(tmp_path / "before") / "model.safetensors")

    # Rows of equal length: a causal model ignores what follows.
    rows = [t.token_ids for t in trajectories], advantages, [t.loss_mask for t in trajectories]
    length = max(map(len, advantages))
    token_ids, values, mask = (
        np.array([np.pad(x, (0, length - len(x))) for x in array]) for array in rows
    )

    @jax.jit
    def score(weights):
        return jax.vmap(
            lambda row: compute_plain_logprobs(weights, model, row, trainer.tokenizer.num_tokens)
        )(token_ids)

    def compute_loss(weights):
        logprobs = score(weights)
        diff = score(first) - logprobs
        losses = -values[:, 1:] * logprobs + 0.01 * (jnp.exp(diff) - diff - 1)
        return jnp.where(mask[:, 1:], losses, 0.0).sum() / mask.sum()

    for got, expected, t in zip(
        trainer.compute_logprobs(groups), score(before), trajectories, strict=True
    ):
        expected = np.where(t.loss_mask[1:], expected[: len(got) - 1], 0.0)
        np.testing.assert_allclose(got[1:], expected, atol=2e-5)

    if num_calls == 1:
        metrics = trainer.update(groups, loss=weighted_logprobs)
    else:
        for group in groups:
            trainer.accumulate_gradients([group], loss=weighted_logprobs)
        metrics = trainer.apply_gradients()
    gradients = jax.grad(compute_loss)(before)
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(gradients)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    after = load_file(trainer.export(tmp_path / "after") / "model.safetensors")
    lr = trainer._config.optimizer.lr
    for name, gradient in gradients.items():
        clipped = gradient / max(norm, 1.0)
        expected = -lr * clipped / (np.abs(clipped) + 1e-3)
        np.testing.assert_allclose(after[name] - before[name], expected, atol=0.01 * lr)
    trainer.finish_step()


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
    monkeypatch.setattr(learner, "_custom_losses", {})  # those of the other method
    groups = trainer.rollout(trainer.next_tasks(6))
    count, shape = len(flatten_groups(groups)), learner.stage.shape
    values = np.random.default_rng(0).normal(size=count)
    groups = api.set_advantages(groups, values.tolist())

    # All groups in one batch of a larger shape.
    assert count > shape.num_sequences
    method, _ = learner._select_loss(weighted_logprobs)
    packed = make_minibatch(
        groups, replace(shape, num_micro=2 * shape.num_micro), method, controllers=Controllers()
    )
    gradient = GradientStep(model, make_policy_loss(method), temperature=method.temperature)
    batch = shard_batch(model.mesh, packed.batch)
    expected = jax.device_get(gradient(learner.state.params, batch, packed).gradients)

    # The same groups in two calls, the second of which has two pieces.
    learner._discard_step_data()
    for part in (groups[:1], groups[1:]):
        trainer.accumulate_gradients(part, loss=weighted_logprobs)
    got = jax.device_get(learner._accumulated.sums.gradients)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 + 1e-5 * np.abs(b).max())
    learner._discard_step_data()


def test_weights_that_depend_on_other_lengths_are_not_accumulated():
    """By the longest trajectory: weights change by more than a factor when groups are added."""
    sums = SimpleNamespace(metrics={})
    first, second = (
        AccumulatedGradients(sums=sums, counts=np.array(counts)) for counts in ([1, 2], [9, 3])
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
    with pytest.raises(ValueError, match="is in use by process"):
        api.Trainer(trainer._config.config, trainer._workdir)
    with pytest.raises(ValueError, match="takes everything; expected arrays among logprobs"):
        trainer.update(groups, loss=lambda everything: everything)
    with pytest.raises(ValueError, match="1 advantages for 4"):
        api.set_advantages(groups, [1.0])
    with pytest.raises(ValueError, match="finite number"):
        api.set_advantages(groups, [float("nan")] * 4)
    with pytest.raises(ValueError, match="PolicyLoss"):
        trainer.update(api.set_advantages(groups, [1.0] * 4), loss=lambda logprobs: logprobs)
    with pytest.raises(ValueError, match="expected a function"):
        trainer.update(api.set_advantages(groups, [1.0] * 4), loss="weighted_logprobs")
    with pytest.raises(ValueError, match="expected a question"):
        trainer.generate(" ")
    with pytest.raises(ValueError, match="temperature=nan"):
        trainer.generate("who is the mentor of Soren Dumont?", temperature=float("nan"))
    assert trainer.num_steps_done == num_done


def test_a_checkpoint_that_a_full_disk_ends_does_not_count_as_saved(trainer):
    step_through(trainer)
    with no_file_beyond(20_000), pytest.raises(ValueError, match="Error writing"):
        trainer.save()
    with contextlib.suppress(ValueError):  # Orbax repeats the error once
        trainer.save()
    trainer.save()
    assert trainer.num_steps_done in list_steps(trainer._workdir / "checkpoints")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": float("nan")}, "not finite"),
        ({"custom_advantages": np.ones(3, np.float32)}, r"shapes .*\[3\]"),
        ({"loss_mask": np.ones(3, bool)}, r"shapes \[3\]"),
        ({"token_ids": np.full(3, 10**6)}, "from 1000000 to 1000000"),
    ],
)
def test_changed_trajectories_are_refused(trainer, changes, message):
    if "token_ids" in changes:
        names = ("loss_mask", "rollout_logprobs", "rollout_entropies", "policy_versions")
        changes = changes | dict.fromkeys(names, np.ones(3))
    [group] = api.set_advantages(trainer.rollout(trainer.next_tasks(1)), [1.0, 0.0, 0.0, 0.0])
    changed = Group(
        trajectories=(replace(group.trajectories[0], **changes), *group.trajectories[1:])
    )
    for use in (trainer.update, trainer.accumulate_gradients, trainer.compute_logprobs):
        with pytest.raises(ValueError, match=message):
            use([changed])


def test_accumulated_environment_errors_make_a_step_without_an_update(trainer):
    groups = trainer.rollout(trainer.next_tasks(1))
    failed = [
        Group(
            trajectories=tuple(
                replace(t, outcome=Outcome.ENVIRONMENT_ERROR) for t in group.trajectories
            )
        )
        for group in groups
    ]
    before = trainer.num_steps_done, int(trainer._learner.state.num_updates)
    trainer.accumulate_gradients(failed)
    with pytest.raises(ValueError, match="call apply_gradients first"):
        trainer.update(api.set_advantages(groups, [1.0] * 4))
    trainer.apply_gradients()
    trainer.finish_step()
    after = trainer.num_steps_done, int(trainer._learner.state.num_updates)
    assert after == (before[0] + 1, before[1])
