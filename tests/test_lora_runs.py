"""Whole runs that train an adapter: what moves, what stays, what is saved, written and read."""

import contextlib
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

from jaxrl import launch
from jaxrl.builders.fingerprints import compute_fingerprints
from jaxrl.builders.resolved import resolve_names
from jaxrl.extras.lora.files import load_adapter, load_base
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf, open_tensors
from jaxrl.models.params import merge_params
from jaxrl.run import run
from jaxrl.runtime.resume import write_config
from tests.helpers import build, relative_distance, settings_of
from tests.runs import assert_same_weights, killed, lasting, records, run_settings

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]

NUM_SFT, NUM_TRAIN = 16, 4
settings = partial(
    run_settings,
    **{
        "sft.num_steps": NUM_SFT,
        "num_steps": NUM_TRAIN,
        "checkpoint.every_steps": 2,
        "checkpoint.keep": 100,
        "eval.suites": (),
        "eval.final_suites": ("sampled",),
        "eval.max_tasks": 2,
        "log.trajectories": 2,
        "kl.coef": 0.01,
        "loss.entropy_coef": 0.01,  # a gradient whatever is sampled
        "model.lora.rank": 4,
        "model.lora.alpha": 16.0,
        "model.lora.targets": ("q_proj", "o", "mlp/up", "down_proj"),
    },
)
NUM_TARGETS = 4


def play(config, workdir, **arguments):
    workdir.mkdir(exist_ok=True)
    parts = build(config)
    write_config(workdir, config)
    contents = compute_fingerprints(resolve_names(config))
    run(settings_of(config), workdir, parts, Display(), contents=contents, **arguments)
    return parts


@pytest.fixture(scope="module")
def base(tiny_world, tmp_path_factory, quick_compilation, no_pictures):
    """A run of all stages, and what it worked with."""
    workdir = tmp_path_factory.mktemp("lora") / "base"
    model = shutil.copytree(tiny_world / "model", workdir.parent / "model")
    config = settings(tiny_world, **{"model.path": str(model)})
    before = config.copy_and_resolve_references()
    before.stages = ("sft", "train")
    # Parts of the stages that train: an evaluation gives the weights up.
    parts = play(before, workdir)
    play(config, workdir)
    return workdir, config, parts


def test_a_run_learns_and_the_base_stays_bit_for_bit(base):
    workdir, config, parts = base
    lines = records(workdir)
    assert lines[NUM_SFT - 1]["sft/loss"] < 0.8 * lines[0]["sft/loss"]
    trained = [line for line in lines if "actor/grad_norm" in line]
    assert len(trained) == NUM_TRAIN
    assert any(line["actor/grad_norm"] > 0 for line in trained)
    assert all(line["rollout_corr/logprob_diff_max"] < 1e-4 for line in trained)
    original = load_hf(config.model.path)
    jax.tree.map(np.testing.assert_array_equal, parts.model.base, original)
    before, after = open_tensors(Path(config.model.path)), open_tensors(workdir / "export")
    same = [n for n in before if np.array_equal(before[n].data[:], after[n].data[:])]
    assert len(before) - len(same) == NUM_TARGETS * parts.model.architecture.num_layers


def test_checkpoints_hold_the_adapter_alone(base):
    workdir, _, parts = base
    sizes = {
        name: sum(
            file.stat().st_size
            for file in (workdir / f"checkpoints/{NUM_SFT + 2}/{name}").rglob("*")
            if file.is_file()
        )
        for name in ("params", "optimizer", "ref_params")
    }
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(parts.model.base))
    shapes = jax.tree.leaves(parts.model.trained.abstract_params())
    own = sum(4 * leaf.size for leaf in shapes)
    assert sizes["params"] < own + 30_000 < whole
    assert sizes["optimizer"] < 2 * own + 60_000
    assert sizes["ref_params"] < own + 30_000


def test_a_killed_run_goes_on_bit_for_bit(base, tmp_path):
    workdir, config, _ = base
    again = killed(workdir, tmp_path / "again", after=NUM_SFT + 2)
    shutil.rmtree(again / "adapter")
    play(config, again)
    assert lasting(again) == lasting(workdir)
    assert_same_weights(again / "export", workdir / "export")
    file = "adapter/adapter_model.safetensors"
    assert (again / file).read_bytes() == (workdir / file).read_bytes()


def refused(workdir, monkeypatch, **changes):
    """What the command says to going on in a workdir with some keys changed."""
    argv = ["launch", "--config=configs/debug_tiny.py", f"--workdir={workdir}"]
    argv += [f"--values={workdir / 'config.json'}"]
    argv += [f"--config.{key}={value}" for key, value in changes.items()]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr("jaxrl.run.run", lambda *_: pytest.fail("the run was begun"))
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        launch.main(launch.parse_flags(argv))
    return ended.value.code


@contextlib.contextmanager
def one_weight_changed(model):
    """The folder of a model, for a while with other weights."""
    file = Path(model) / "model.safetensors"
    before = file.read_bytes()
    changed = bytearray(before)
    changed[-3] ^= 64
    file.write_bytes(changed)
    try:
        yield
    finally:
        file.write_bytes(before)


def test_another_base_or_adapter_is_refused_when_a_run_goes_on(base, tmp_path, monkeypatch):
    workdir, config, _ = base
    told = (
        f"error: {workdir} is at step {NUM_SFT + NUM_TRAIN} of a run with other settings: "
        "config.model.{}. Set them back to resume, or set --workdir to another folder to start "
        "over; --accept_changes continues with them and records the change."
    )
    path, copy = config.model.path, str(tmp_path / "model")
    with one_weight_changed(path):
        shutil.copytree(path, copy)
        got = refused(workdir, monkeypatch)
        assert got == told.format("path/model.safetensors (content): changed")
    got = refused(workdir, monkeypatch, **{"model.path": copy})
    assert got == told.format(f"path: {path!r} -> {copy!r}")
    for key, before, now in (
        ("rank", 4, 8),
        ("alpha", 16.0, 4.0),
        ("rslora", False, True),
        ("targets", ["q_proj", "o", "mlp/up", "down_proj"], ["all-linear"]),
        ("base_dtype", "float32", "int8"),
    ):
        given = tuple(now) if isinstance(now, list) else now
        got = refused(workdir, monkeypatch, **{f"model.lora.{key}": given})
        assert got == told.format(f"lora.{key}: {before!r} -> {now!r}")


def test_the_adapter_and_the_export_are_one_model(base):
    """PEFT's folder on the base, and the merged folder, score what the run has scored."""
    workdir, config, parts = base
    adapter, mesh = parts.model.architecture, parts.mesh
    fields = json.loads((workdir / "adapter" / "adapter_config.json").read_text())
    assert fields["r"] == 4
    assert fields["target_modules"] == ["down_proj", "o_proj", "q_proj", "up_proj"]
    policy = merge_params(
        load_base(config.model.path, mesh, adapter),
        load_adapter(workdir / "adapter", adapter, mesh),
    )
    merged = adapter._merge(policy, np.float32)
    assert relative_distance(merged, load_hf(workdir / "export")) < 1e-6


@pytest.mark.slow(
    instead="extras/lora/test_lora.py"
    "::test_an_int8_base_is_near_the_model_and_rounds_by_at_most_half_a_step"
)
@pytest.mark.parametrize(("base_dtype", "sampler"), [("int8", "separate"), ("bfloat16", "merged")])
def test_a_run_goes_on_from_an_adapter_beside_a_smaller_base(base, tmp_path, base_dtype, sampler):
    workdir, config, _ = base
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(
        {
            "stages": ("train",),
            "num_steps": 1,
            "model.lora.path": str(workdir / "adapter"),
            "model.lora.base_dtype": base_dtype,
            "model.lora.sampler": sampler,
        }
    )
    parts = play(config, tmp_path / "run")
    kernel = parts.model.base["blocks"]["attention"]["k"]["kernel"]
    assert kernel.dtype == base_dtype
    [record] = (line for line in records(tmp_path / "run") if "actor/grad_norm" in line)
    assert record["rollout_corr/logprob_diff_max"] < 1e-4
    # It began where the other ended: one step at this rate does not move far from there.
    old, new = (
        load_adapter(folder / "adapter", parts.model.architecture, parts.mesh)
        for folder in (workdir, tmp_path / "run")
    )
    assert 0 < relative_distance(new, old) < 0.2
