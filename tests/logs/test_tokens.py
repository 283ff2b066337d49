"""Logged token fields against all logits, and a run that is the same with and without them."""

import dataclasses

import numpy as np
import pytest

from jaxrl.logs.display import Display
from jaxrl.logs.tokens import make_token_logger
from jaxrl.run import run
from jaxrl.training.controllers import AdaptiveKL, Controllers
from jaxrl.training.method import needs_divergences
from jaxrl.training.packing import CompiledSizes
from jaxrl.training.reference_kl import make_kl_fn
from jaxrl.types import flatten_groups, replace_fields
from tests.episodes import grouped
from tests.helpers import build, method_with, settings_of
from tests.runs import assert_same_weights, base_config, lasting, trajectories
from tests.training import policies

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures")

NAMES = {"old_logprobs", "new_logprobs", "token_weights", "token_advantages"}


def log_step(count=-1, **changes):
    """Return the fields logged of a step that moved the policy to its reference, and its groups."""
    sizes = {"rollout.tasks_per_step": 4, "rollout.group_size": 2}
    method = method_with(**sizes, **changes)
    groups = grouped(policies.trajectories())
    groups = replace_fields(
        groups, advantage=[0.5 * i - 1 for i in range(len(flatten_groups(groups)))]
    )
    policy, other = policies.policies()
    begin = make_token_logger(count, policies.score(), policies.SHAPE, method)
    reference = other if method.has_reference else None
    controllers = Controllers()
    if needs_divergences(method.kl):
        controllers = Controllers(kl=AdaptiveKL(0.25))
        groups = make_kl_fn(policies.score(), policies.MESH, policies.SHAPE, method)(
            groups, policy, other
        )
    return begin(groups, controllers, policy, reference)(other), flatten_groups(groups)


def test_logged_log_probabilities_match_all_logits():
    notes, members = log_step(**{"kl.coef": 0.1})
    assert notes[5] == {}  # an environment error
    for index, (note, trajectory) in enumerate(zip(notes, members, strict=True)):
        if index == 5:
            continue
        assert note.keys() == NAMES | {"ref_logprobs", "kl_weights"}
        mask = trajectory.loss_mask
        assert {len(values) for values in note.values()} == {len(mask)}
        assert all((values[~mask] == 0).all() for values in note.values())
        old, ref = (policy[index] * mask for policy in policies.dense())
        np.testing.assert_allclose(note["old_logprobs"], old, atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(note["ref_logprobs"], ref, atol=2e-5, rtol=1e-5)
        np.testing.assert_array_equal(note["new_logprobs"], note["ref_logprobs"])
        np.testing.assert_array_equal(note["token_advantages"], (0.5 * index - 1) * mask)
        np.testing.assert_array_equal(note["kl_weights"], np.float32(0.1) * mask)


def test_logged_weights_are_those_of_the_mini_batch():
    # Of two mini-batches each has two groups; in the second one, one of its four failed.
    changes = {"loss.aggregation": "seq-mean-token-mean", "optimizer.num_minibatches": 2}
    notes, members = log_step(**changes)
    for index, (note, trajectory) in enumerate(zip(notes, members, strict=True)):
        if index != 5:
            assert note.keys() == NAMES
            share = 1 / (4 if index < 4 else 3) / trajectory.num_sampled
            wanted = np.float32(share) * trajectory.loss_mask
            np.testing.assert_allclose(note["token_weights"], wanted, rtol=1e-6)


def test_logging_adds_no_size_of_micro_batches(monkeypatch):
    shape = dataclasses.replace(policies.SHAPE, sizes=CompiledSizes())
    monkeypatch.setattr(policies, "SHAPE", shape)
    log_step()
    assert shape.sizes == CompiledSizes()


def test_logged_kl_weights_use_the_coefficient_of_the_step():
    moving = {"kl.coef": 0.1, "kl.controller": "adaptive"}
    notes, members = log_step(**moving)
    for index in (0, 7):
        np.testing.assert_array_equal(notes[index]["kl_weights"], 0.25 * members[index].loss_mask)
        measured = members[index].divergence
        np.testing.assert_allclose(notes[index]["old_logprobs"], measured.old_logprobs, atol=2e-5)
    notes, _ = log_step(**moving, **{"kl.apply_to": "reward"})
    assert notes[0].keys() == NAMES | {"ref_logprobs"}  # no term in the loss


def test_only_logged_trajectories_are_scored():
    notes, _ = log_step(count=3)
    assert [bool(note) for note in notes] == [True] * 3 + [False] * 5


@pytest.mark.minutes
@pytest.mark.usefixtures("one_size")
def test_a_run_is_the_same_with_and_without_logged_tokens(tiny_world, tmp_path):
    config = base_config(tiny_world)
    # Untrained, the model earns nothing but for the length of its responses.
    reward = {"tests.extending.my_reward.brevity": 1.0}
    config.update_from_flattened_dict(
        {"log.trajectories": 6, "kl.coef": 0.05, "reward.weights": reward}
    )
    components = build(config)
    for name in ("without", "with"):
        config.log.tokens = name == "with"
        (tmp_path / name).mkdir()
        run(settings_of(config), tmp_path / name, components, Display())
    assert lasting(tmp_path / "with") == lasting(tmp_path / "without")
    assert_same_weights(tmp_path / "with" / "export", tmp_path / "without" / "export")
    assert not trajectories(tmp_path / "without", 1)[0].keys() & NAMES
    for step in (1, 2):
        lines = trajectories(tmp_path / "with", step)
        assert len(lines) == 6
        for line in lines:
            mask = np.array(line["loss_mask"], bool)
            old, new, ref = (np.array(line[f"{x}_logprobs"]) for x in ("old", "new", "ref"))
            # The weights that sampled are those before the update.
            np.testing.assert_allclose(old, line["rollout_logprobs"], atol=2e-4)
            assert np.abs(new - old)[mask].max() > 1e-4
            assert (new[~mask] == 0).all()
            if step == 1:
                np.testing.assert_array_equal(ref, old)
            np.testing.assert_allclose(np.array(line["kl_weights"])[mask], 0.05)
            rounded = float(f"{line['advantage']:.6g}")
            assert (np.array(line["token_advantages"])[mask] == rounded).all()
