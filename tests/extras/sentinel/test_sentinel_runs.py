"""Reactions to signs in runs: a rollback changes the samples and halves the learning rate."""

import contextlib
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest

from jaxrl import run as runs
from jaxrl import train
from jaxrl.builders.validation import validate
from jaxrl.logs.display import Display
from jaxrl.run import run
from jaxrl.runtime import resume
from jaxrl.runtime.checkpoint import Checkpointer, CheckpointError, list_steps
from jaxrl.runtime.preemption import BestEvaluation
from jaxrl.training.run_state import Progress
from jaxrl.training.usage import UsageStats
from jaxrl.training.watch import CollapseError, CollapseSign
from tests.helpers import build, method_of, settings_of
from tests.runs import (
    assert_same_weights,
    base_config,
    records,
    trajectories,
    without_usage,
)

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]


def judge(record, state, *, step, since, always=False):
    """Detector that raises a sign at one step while the learning rate is the initial rate."""
    number = state.get("number", 0) + 1
    is_bad = number == step and (always or record["actor/lr_scale"] == 1.0)
    signs = [CollapseSign(name="bad", text="The test says so.", since=since)] if is_bad else []
    return {"number": number}, signs


def make(tiny_world, warm_model, **changes):
    config = base_config(tiny_world, warm_model)
    config.update_from_flattened_dict(
        {
            **{"num_steps": 6, "checkpoint.every_steps": 2, "checkpoint.keep": 5},
            **{"optimizer.lr": 1e-3, "loss.entropy_coef": 0.01},
            **{"log.trajectories": -1, "rollout.tasks_per_step": 2, **changes},
        }
    )
    validate(config)
    return config


def watching(tiny_world, warm_model, action, settings=(("step", 5), ("since", 3)), **changes):
    name = f"{__name__}.judge"
    watch = {"watch.name": name, "watch.settings": dict(settings), "watch.action": action}
    return make(tiny_world, warm_model, **watch, **changes)


PARTS = []


def build_once(config):
    """Return the engine and the update of the first run: a watch changes no program."""
    PARTS[:] = PARTS or [build(config)]
    stage = dataclasses.replace(PARTS[0].stages["train"], num_steps=config.num_steps)
    return dataclasses.replace(PARTS[0], method=method_of(config), stages={"train": stage})


def play(config, workdir):
    parts = build_once(config)
    workdir.mkdir(exist_ok=True)
    run(settings_of(config), workdir, parts, Display())
    return workdir


@pytest.fixture(scope="module")
def plain(tiny_world, warm_model, quick_compilation, tmp_path_factory):
    return play(make(tiny_world, warm_model), tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def apply_rollback(tiny_world, warm_model, quick_compilation, tmp_path_factory):
    config = watching(tiny_world, warm_model, "roll_back")
    return play(config, tmp_path_factory.mktemp("back") / "run")


def numbers(workdir, name="metrics.jsonl"):
    """Return the records by step, without timings and the watch's metrics."""
    lines = [json.loads(line) for line in (workdir / name).read_text().splitlines()]
    clocks = ("timing_s/", "perf/", "sentinel/", "actor/lr_scale")
    return {
        line["step"]: {key: value for key, value in line.items() if not key.startswith(clocks)}
        for line in lines
    }


def test_going_back_is_other_draws_of_the_same_tasks_at_half_the_rate(plain, apply_rollback):
    [line] = [json.loads(line) for line in (apply_rollback / "roll_backs.jsonl").open()]
    decision = {"number": 1, "sign": "bad", "from_step": 5, "to_step": 2, "lr_scale": 0.5}
    assert {name: line[name] for name in decision} == decision
    aside, before = apply_rollback / "rolled_back" / "1", numbers(plain)
    assert numbers(aside) == {step: before[step] for step in range(6)}
    assert [record["step"] for record in records(apply_rollback)] == list(range(7))
    assert {step: numbers(apply_rollback)[step] for step in (0, 1, 2)} == {
        step: before[step] for step in (0, 1, 2)
    }
    scales = [record.get("actor/lr_scale") for record in records(apply_rollback)]
    assert scales == [None, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    old, new, set_aside = (
        [without_usage(line) for line in trajectories(folder, 3)]
        for folder in (plain, apply_rollback, aside)
    )
    assert set_aside == old
    assert [line["question"] for line in old] == [line["question"] for line in new]
    assert all(a["token_ids"] != b["token_ids"] for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("moment", ["before it is carried out", "before the next checkpoint"])
def test_killed_on_the_way_it_repeats(moment, apply_rollback, tiny_world, warm_model, tmp_path):
    config = watching(tiny_world, warm_model, "roll_back")
    calls = []

    def kill(of, original):
        def patched(*arguments):
            calls.append(of)
            # The second opening; the first step after it.
            if (of, calls.count(of)) in {("open", 2), ("step", 7)}:
                raise KeyboardInterrupt
            return original(*arguments)

        return patched

    with pytest.MonkeyPatch.context() as patch:
        if moment == "before it is carried out":
            original = runs.discard_rolled_back_output
            patch.setattr(runs, "discard_rolled_back_output", kill("open", original))
        else:
            patch.setattr(train, "log_trajectories", kill("step", train.log_trajectories))
        with pytest.raises(KeyboardInterrupt):
            play(config, tmp_path / "run")
    workdir = play(config, tmp_path / "run")
    assert numbers(workdir) == numbers(apply_rollback)
    assert_same_weights(workdir / "export", apply_rollback / "export")
    for name in ("roll_backs.jsonl", "sentinel.jsonl"):
        assert (workdir / name).exists() == (apply_rollback / name).exists()
    aside = workdir / "rolled_back" / "1"
    assert numbers(aside) == numbers(apply_rollback / "rolled_back" / "1")
    assert (aside / "sentinel.jsonl").read_text().count("\n") == 1


def test_what_was_given_up_is_spent_all_the_same(plain, apply_rollback):
    name, size = "ledger/total/trajectories", 8  # two tasks of four samples
    spent, back = ([r[name] for r in records(folder)] for folder in (plain, apply_rollback))
    assert back[:3] == spent[:3]
    assert back[3:] == [spent[5] + size * n for n in range(1, 5)]


def copy_of(run, tmp_path, *, steps):
    """Return a run's folder with only these checkpoints."""
    workdir = tmp_path / "copy"
    shutil.copytree(run, workdir)
    for checkpoint in (workdir / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) not in steps:
            shutil.rmtree(checkpoint)
    return workdir


def damage(workdir, step):
    [file] = (workdir / "checkpoints" / str(step) / "position").glob("metadata")
    file.write_bytes(b" " + file.read_bytes()[1:])


def decided(workdir, to_step):
    line = {"number": 1, "sign": "bad", "from_step": 7, "to_step": to_step, "lr_scale": 0.5}
    resume.append_rollback(workdir, line | {"ledger": {}})


def carried_out(workdir):
    with contextlib.closing(Checkpointer(workdir / "checkpoints", keep=9)) as checkpointer:
        lines = runs.discard_rolled_back_output(workdir, checkpointer)
    return lines, list_steps(workdir / "checkpoints")


@pytest.mark.parametrize(("is_damaged", "to_step"), [(True, 4), (False, 3)])
def test_nothing_goes_before_there_is_something_to_go_back_to(is_damaged, to_step, plain, tmp_path):
    workdir = copy_of(plain, tmp_path, steps=(4, 6))
    decided(workdir, to_step)
    if is_damaged:
        damage(workdir, 4)
    with pytest.raises(CheckpointError, match=f"go back to step {to_step}, but .* has no complete"):
        carried_out(workdir)
    assert list_steps(workdir / "checkpoints") == [4, 6]


def test_a_return_is_not_undone_by_damage_after_it(apply_rollback, tmp_path):
    workdir = copy_of(apply_rollback, tmp_path, steps=(2, 4, 6))
    for step in (4, 6):
        damage(workdir, step)
    [line], steps = carried_out(workdir)
    assert (line["number"], line["lr_scale"], steps) == (1, 0.5, [2])


def test_decisions_go_with_the_checkpoints_of_their_run(apply_rollback, tmp_path):
    workdir = copy_of(apply_rollback, tmp_path, steps=())
    assert carried_out(workdir) == ([], [])
    assert not (workdir / "roll_backs.jsonl").exists()


class Values:
    """Checkpoint manager that only returns evaluation scores."""

    def __init__(self, values):
        self.read_scores = lambda: values


@pytest.mark.parametrize(
    ("values", "value", "step"),
    [({2: 0.5, 3: 0.4}, 0.5, 2), ({3: 0.4}, 0.4, 3), ({3: None}, None, 0)],
)
def test_the_best_is_a_checkpoint_that_is_left(values, value, step):
    progress = Progress(
        best=BestEvaluation(value=0.5, step=2, mark=0.5, num_stale=1), prefetched=object()
    )
    spent = UsageStats(num_trajectories=3)
    decision = {"number": 2, "lr_scale": 0.25, "ledger": spent.to_json()}
    runs.apply_rollback(progress, decision, Values(values))
    assert (progress.best.value, progress.best.step) == (value, step)
    assert (progress.prefetched, progress.ledger) == (None, spent)
    assert (progress.watched.lr_scale, progress.watched.num_roll_backs) == (0.25, 2)


def test_too_many_returns_end_the_run_and_save_it(tiny_world, warm_model, tmp_path):
    settings = (("step", 3), ("since", 2), ("always", True))
    config = watching(tiny_world, warm_model, "roll_back", settings, **{"watch.max_roll_backs": 2})
    with pytest.raises(CollapseError, match=r"rolled back 2 of 2 times.*max_roll_backs"):
        play(config, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "roll_backs.jsonl").open()]
    assert [line["lr_scale"] for line in lines] == [0.5, 0.25]
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


def test_a_run_that_is_stopped_goes_on(plain, tiny_world, warm_model, tmp_path):
    config = watching(tiny_world, warm_model, "stop")
    with pytest.raises(CollapseError, match=r"bad: The test says so."):
        play(config, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "5").is_dir()
    workdir = play(config, tmp_path / "run")
    # A watch changes no number.
    assert numbers(workdir) == numbers(plain)
    assert_same_weights(workdir / "export", plain / "export")
    [mark] = map(json.loads, (workdir / "sentinel.jsonl").read_text().splitlines())
    sign = {"sign": "bad", "text": "The test says so.", "since": 3, "action": "stop"}
    assert mark == {"step": 5, "stage": "train", **sign}


def test_a_lower_rate_changes_what_follows_alone(plain, tiny_world, warm_model, tmp_path):
    workdir = play(watching(tiny_world, warm_model, "lower_lr"), tmp_path / "run")
    slowed, usual = numbers(workdir), numbers(plain)
    assert {step: slowed[step] for step in range(6)} == {step: usual[step] for step in range(6)}
    assert records(workdir)[6]["actor/lr_scale"] == 0.5
    # Step 6 still samples and differentiates as before; its update is half as long.
    assert slowed[6]["actor/grad_norm"] == usual[6]["actor/grad_norm"]


def test_a_sampler_that_keeps_old_weights_is_named(
    tiny_world, warm_model, tmp_path, monkeypatch, capsys
):
    """From step 8 on, the sampler always gets the same weights."""
    config = make(
        tiny_world,
        warm_model,
        **{"watch.name": "sentinel", "num_steps": 12, "checkpoint.every_steps": 50},
        **{"advantage.grpo.normalize_std": False},
    )
    engine = build_once(config).engine
    set_weights = engine.set_weights
    copies: list[object] = []

    def set_old_weights(weights):
        if len(copies) < 8:
            copies.append(jax.tree.map(jnp.copy, weights))  # the update donates them
        set_weights(jax.tree.map(jnp.copy, copies[-1]))

    monkeypatch.setattr(engine, "set_weights", set_old_weights)
    workdir = play(config, tmp_path / "run")
    signs = [json.loads(line) for line in (workdir / "sentinel.jsonl").open()]
    assert min(sign["step"] for sign in signs) >= 8
    assert "sampler_differs" in {sign["sign"] for sign in signs}
    assert "warning: train " in capsys.readouterr().err
