"""The training loops in examples/: each trains for two steps and does what it says."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import best_of_n, curriculum, custom_loss, distillation
from jaxrl.models.hf_weights import load_hf
from jaxrl.types import Group
from tests.episodes import make_failure, make_trajectory
from tests.runs import lasting

pytestmark = pytest.mark.usefixtures("quick_compilation", "one_size", "no_pictures")

SETTINGS = [
    *("--config.num_steps=2", "--config.stages=('train',)", "--config.eval.suites=()"),
    *("--config.optimizer.weight_decay=0.0", "--config.optimizer.epsilon=1e-3"),
    *("--config.rollout.max_response_tokens=40", "--config.rollout.max_total_tokens=112"),
    "--config.rollout.max_observation_tokens=24",
]


def train(example, world, warm_model, workdir, *more):
    """Run an example for two steps and return the folder of its weights."""
    options = [f"--config=configs/debug_tiny.py:{world}", f"--workdir={workdir}"]
    example.main([*options, *SETTINGS, f"--config.model.path={warm_model}", *more])
    assert lasting(workdir)[-1]["step"] == 2
    return workdir / "export"


def is_changed(folder, warm_model):
    return any(
        np.any(a != b)
        for a, b in zip(*(jax.tree.leaves(load_hf(f)) for f in (folder, warm_model)), strict=True)
    )


def test_leave_one_out_ignores_failed_trajectories():
    trajectories = [make_trajectory(reward=reward) for reward in (1.0, 0.0, 2.0)]
    group = Group(trajectories=(*trajectories, make_failure()))
    alone = Group(trajectories=(make_trajectory(reward=1.0),))
    assert custom_loss.compute_leave_one_out([group, alone]) == [0.0, -1.5, 1.5, 0.0, 0.0]


def test_custom_loss_is_the_gradient_of_expected_reward():
    # REINFORCE on one token: the gradient of the loss in the log-probability is -advantage.
    def loss(logprobs):
        mask = jnp.array([[True, True, False]])
        advantages = jnp.array([[2.0, -1.0, 5.0]])
        return custom_loss.reinforce(logprobs, advantages, mask).per_token.sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros((1, 3))), [[-2.0, 1.0, 0.0]])


def test_best_of_n_keeps_the_shortest_correct_answer():
    def group(*verdicts):
        trajectories = [
            replace(make_trajectory(length=length), is_correct=is_correct)
            for length, is_correct in verdicts
        ]
        return Group(trajectories=tuple(trajectories))

    solved, unsolved = group((9, True), (6, True), (4, False)), group((4, False), (8, False))
    (best,) = best_of_n.select_best([solved, unsolved])
    assert best.trajectories == (solved.trajectories[1],)


@pytest.mark.minutes
@pytest.mark.parametrize("example", [best_of_n, curriculum, custom_loss], ids=lambda m: m.__name__)
def test_loops_train_for_two_steps(example, tiny_world, warm_model, tmp_path):
    chance = "--config.env.name=tests.runs.Chance"  # some answers of each group are correct
    assert is_changed(train(example, tiny_world, warm_model, tmp_path, chance), warm_model)


@pytest.mark.minutes
def test_a_student_does_not_move_from_a_teacher_that_equals_it(
    tiny_world, warm_model, tmp_path, capsys
):
    folder = train(
        distillation, tiny_world, warm_model, tmp_path / "same", f"--teacher={warm_model}"
    )
    divergences = re.findall(r"reverse KL (\S+)", capsys.readouterr().out)
    assert [abs(float(divergence)) for divergence in divergences] == [0.0, 0.0]
    for ours, theirs in zip(
        *(jax.tree.leaves(load_hf(f)) for f in (folder, warm_model)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    teacher = Path(tiny_world) / "model"
    folder = train(distillation, tiny_world, warm_model, tmp_path / "other", f"--teacher={teacher}")
    divergences = re.findall(r"reverse KL (\S+)", capsys.readouterr().out)
    assert all(float(divergence) > 1 for divergence in divergences)
    assert is_changed(folder, warm_model)
