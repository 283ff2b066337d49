"""The command on a run of two steps: its own numbers, another objective, and what is refused."""

import json
import math
import re
import shutil
import sys
import types

import jax
import numpy as np
import pytest

from jaxrl.components import assemble, settings_of
from jaxrl.config import to_json
from jaxrl.extras.compare import __main__ as command
from jaxrl.extras.compare import opening
from jaxrl.logs.display import Display
from jaxrl.opening import read_config
from jaxrl.run import run
from jaxrl.runtime.checkpoint import restore_params
from tests.runs import base_config, records, warm_start

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]

LR = 3e-3


@pytest.fixture(scope="module")
def workdir(tiny_world, cache_folder, quick_compilation, tmp_path_factory):
    """A run with a reference, whose first step has the checkpoint of the step before the second."""
    config = base_config(tiny_world, warm_start(tiny_world, cache_folder))
    changes = {"log.trajectories": -1, "checkpoint.every_steps": 1, "optimizer.lr": LR}
    config.update_from_flattened_dict({**changes, "kl.coef": 0.02})
    workdir = tmp_path_factory.mktemp("compare") / "run"
    workdir.mkdir()
    (workdir / "config.json").write_text(to_json(config))
    run(settings_of(config), workdir, assemble(config), Display())
    return workdir


def compared(workdir, *arguments, step=2):
    """What the command writes as JSON."""
    out = workdir.parent / "out.json"
    command.main([str(workdir), f"--step={step}", f"--out={out}", *arguments])
    return json.loads(out.read_text())


def refused(workdir, *arguments, step=2):
    with pytest.raises(SystemExit) as ended:
        command.main([str(workdir), f"--step={step}", *arguments])
    assert "\n" not in ended.value.code
    return ended.value.code


def test_the_runs_own_objective_is_that_of_the_step(workdir, capsys):
    before = sorted(workdir.rglob("*"))
    found = compared(workdir)
    assert sorted(workdir.rglob("*")) == before
    assert (found["checkpoint"], found["updates"], found["changed"]) == (1, 0, {})
    assert found["notes"] == ["both objectives are the run's own: no key was changed by --with"]
    step = records(workdir)[2]
    assert step["step"] == 2
    assert step["actor/grad_norm"] > 0.01
    norms, own = found["gradients"]["norm"], found["objectives"]["run"]
    assert norms[0] == pytest.approx(step["actor/grad_norm"], rel=1e-5)
    metrics = [name for name in own if name.startswith("actor/")]
    assert {"actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/pg_clipfrac"} <= {*metrics}
    for name in metrics:
        assert own[name] == pytest.approx(step[name], rel=1e-5, abs=1e-7), name
    assert own["loss"] == pytest.approx(step["actor/pg_loss"] + 0.02 * step["actor/kl_loss"])
    assert found["gradients"]["cosine"] == pytest.approx(1.0, abs=1e-6)
    squares = [row["norm"][0] ** 2 for row in found["gradients"]["layers"].values()]
    assert math.sqrt(sum(squares)) == pytest.approx(norms[0], rel=1e-6)
    assert found["objectives"]["with"] == own
    shown = capsys.readouterr().out
    assert "16 trajectories of 4 groups, weights of checkpoint 1" in shown
    assert "no update yet: every ratio is 1" in shown


def test_another_objective_stands_beside_it(workdir, tmp_path, capsys):
    file = tmp_path / "other.yaml"
    file.write_text("loss: {aggregation: seq-mean-token-mean}\nadvantage.name: rloo\n")
    negated = "--with.loss.name=tests.extras.compare.losses.negated"
    found = compared(workdir, f"--values={file}", negated, "--with.advantage.name=grpo")
    assert found["changed"].keys() == {"loss.aggregation", "loss.name"}
    one, other = (found["objectives"][name] for name in ("run", "with"))
    assert one["advantages/std"] == other["advantages/std"] > 0
    assert one["weights/max"] < other["weights/max"]
    assert "actor/negated" in other
    assert "actor/pg_clipfrac_lower" not in other
    told = capsys.readouterr().out
    assert "loss.name: 'clip' in the run, 'tests.extras.compare.losses.negated' with" in told
    assert -1 < found["gradients"]["cosine"] < 0  # the KL terms are alike
    assert found["gradients"]["opposite_share"] > 0.5


def test_a_loss_of_ones_own_is_found_in_the_working_folder(workdir, tmp_path, monkeypatch):
    (tmp_path / "my_loss_of_tests.py").write_text(
        "import jax.numpy as jnp\nfrom jaxrl.objectives.losses import PolicyLoss\n\n\n"
        "def nothing(logprobs, loss_mask):\n    return PolicyLoss(jnp.zeros_like(logprobs), {})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    found = compared(workdir, "--with.loss.name=my_loss_of_tests.nothing", "--with.kl.coef=0")
    assert (found["gradients"]["norm"][1], found["gradients"]["cosine"]) == (0, None)
    assert found["objectives"]["with"]["coefficients/nonzero_share"] == 0


def test_a_batch_that_later_weights_would_see(workdir):
    """Of the first step there is no checkpoint from before."""
    found = compared(workdir, "--with.loss.aggregation=seq-mean-token-sum", step=1)
    assert found["checkpoint"] == 1
    [note] = found["notes"]
    assert note.startswith("the batch of step 1 was sampled after step 0; checkpoint 1 has been")
    with_half = compared(workdir, "--checkpoint=2", step=1)
    assert with_half["checkpoint"] == 2


def test_updates_are_those_of_the_run(workdir):
    display = Display()
    case = opening.open_case(workdir, 2, keys={}, has_updates=True)
    own = case.objectives[0]
    prepared = own.prepare(
        case.groups, case.params, case.ref_params, step=1, stage_step=1, is_moved=True
    )
    params, rates = command._updated(case, prepared, 1, display)
    assert rates == [pytest.approx(LR)]
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    _, wanted = restore_params(workdir / "checkpoints", target, 2)
    _, before = restore_params(workdir / "checkpoints", target, 1)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), wanted, before)
    assert max(jax.tree.leaves(moved)) > LR / 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=LR / 20), params, wanted)


def test_after_updates_tokens_are_clipped(workdir, capsys):
    found = compared(workdir, "--with.loss.name=cispo", "--with.loss.clip_high=9", "--updates=3")
    one = found["objectives"]["run"]
    assert found["learning_rates"] == [pytest.approx(LR)] * 3
    assert one["actor/pg_clipfrac"] > 0.01
    assert abs(one["actor/ppo_kl"]) > 1e-4
    assert found["gradients"]["cosine"] < 0.999
    assert one["coefficients/nonzero_share"] > 0.9  # a token that is clipped has a KL term
    assert (
        "after 3 updates by the run's objective, learning rate 0.003; old"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "step", "told"),
    [
        ([], 9, "--step=9: .* holds no trajectories of this step; it holds steps 1, 2"),
        (["--checkpoint=7"], 2, "--checkpoint=7: .* no such checkpoint; it holds 1, 2"),
        (["--updates=-1"], 2, "--updates=-1; expected 0 or more"),
        (["--with.rollout.group_size=8"], 2, "config.rollout.group_size is 8, and the run has 4"),
        (["--with.reward.correct=f1"], 2, "config.reward.correct is 'f1', .* advantage.*, loss"),
        (["--with.loss.nme=clip"], 2, "there is no key config.loss.nme"),
        (["--with.loss.name=gae"], 2, "config.loss.name is 'gae'; expected one of clip"),
        (["--with.optimizer.num_minibatches=3"], 2, "expected a divisor of rollout.tasks_per_step"),
        (["--with.kl.place=reward"], 2, "config.kl.estimator is 'k3'; expected 'k1' with kl.pl"),
        (["--config.loss.name=cispo"], 2, "settings are --with.key=value"),
        (["--values=none.yaml"], 2, "--values=.*none.yaml' is not a file"),
    ],
)
def test_what_is_refused(workdir, arguments, step, told):
    assert re.search(told, refused(workdir, *arguments, step=step))


def other_run(workdir, folder, **changes):
    """The run as if another configuration had made it."""
    shutil.copytree(workdir, folder)
    config = read_config(workdir)
    config.update_from_flattened_dict(changes)
    (folder / "config.json").write_text(to_json(config))
    return folder


def test_a_reference_that_nobody_kept_is_missed(workdir, tmp_path):
    run = other_run(workdir, tmp_path / "run", **{"kl.coef": 0.0})
    told = refused(run, "--with.kl.coef=0.1")
    assert "config.kl.coef=0.1 needs the policy as it was at the start of the stage" in told
    found = compared(run, "--with.kl.coef=0.1", "--with.kl.anchor=old")
    # To the policy itself the divergence is 0, and so is its gradient.
    assert found["objectives"]["with"]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert found["gradients"]["cosine"] == pytest.approx(1.0, abs=1e-4)


def test_a_term_in_the_reward_is_charged_once(workdir, tmp_path):
    """By the other objective; recorded rewards that hold it stay as they are."""
    in_reward = {"kl.place": "reward", "kl.estimator": "k1", "kl.coef": 0.5}
    arguments = [f"--with.{key}={value}" for key, value in in_reward.items()]
    found = compared(workdir, *arguments)
    one, other = (found["objectives"][name] for name in ("run", "with"))
    assert "actor/kl_loss" not in other
    assert abs(one["advantages/std"] - other["advantages/std"]) > 1e-3
    run = other_run(workdir, tmp_path / "run", **in_reward)
    assert compared(run)["objectives"]["with"]["advantages/std"] == one["advantages/std"]
    told = refused(run, "--with.kl.coef=0.1")
    assert "its recorded rewards hold its KL term (kl.place='reward')" in told


def test_what_records_do_not_hold_is_refused(workdir, monkeypatch):
    reading = types.SimpleNamespace(tower=object()), None
    monkeypatch.setattr(opening, "model_and_tokenizer", lambda *_, **__: reading)
    assert "is a model that reads images (SimpleNamespace)" in refused(workdir)
    config = read_config(workdir)
    config.model.replay = True
    monkeypatch.setattr(
        opening, "model_and_tokenizer", lambda *_, **__: (types.SimpleNamespace(tower=None), None)
    )
    with pytest.raises(ValueError, match=r"config.model.replay is True"):
        opening._make_model(config, print)


def test_a_run_without_checkpoints(workdir, tmp_path):
    run = other_run(workdir, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    assert "has no checkpoint of this step or before; it holds none" in refused(run)
    assert refused(tmp_path).startswith(f"error: {tmp_path} is no run: it holds no config.json")
