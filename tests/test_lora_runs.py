"""Complete runs that train an adapter: what changes, and what is saved, exported and read."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

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
        "stages": ("sft", "train"),
        "checkpoint.every_steps": 2,
        "checkpoint.keep": 100,
        "eval.suites": (),
        "log.trajectories": 2,
        "kl.coef": 0.01,
        "loss.entropy_coef": 0.01,  # a gradient whatever is sampled
        "model.lora.rank": 4,
        "model.lora.alpha": 16.0,
        "model.lora.targets": ("q_proj", "o", "mlp/up", "down_proj"),
    },
)
NUM_TARGETS = 4


def play(config, workdir, parts):
    workdir.mkdir(exist_ok=True)
    write_config(workdir, config)
    contents = compute_fingerprints(resolve_names(config))
    run(settings_of(config), workdir, parts, Display(), contents=contents)


@pytest.fixture(scope="module")
def base(tiny_world, tmp_path_factory, quick_compilation, no_pictures, one_size):
    """Workdir, configuration and components of an undisturbed run."""
    workdir = tmp_path_factory.mktemp("lora") / "base"
    model = shutil.copytree(tiny_world / "model", workdir.parent / "model")
    config = settings(tiny_world, **{"model.path": str(model)})
    parts = build(config)
    play(config, workdir, parts)
    return workdir, config, parts


def test_a_run_learns_and_its_base_stays_bit_for_bit(base):
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
    model_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(parts.model.base))
    shapes = jax.tree.leaves(parts.model.trained.make_abstract_params())
    adapter_bytes = sum(4 * leaf.size for leaf in shapes)
    assert sizes["params"] < adapter_bytes + 30_000 < model_bytes
    assert sizes["optimizer"] < 2 * adapter_bytes + 60_000
    assert sizes["ref_params"] < adapter_bytes + 30_000


def test_a_killed_run_resumes_bit_for_bit(base, tmp_path):
    workdir, config, parts = base
    resumed = killed(workdir, tmp_path / "resumed", after=NUM_SFT + 2)
    shutil.rmtree(resumed / "adapter")
    play(config, resumed, parts)
    assert lasting(resumed) == lasting(workdir)
    assert_same_weights(resumed / "export", workdir / "export")
    file = "adapter/adapter_model.safetensors"
    assert (resumed / file).read_bytes() == (workdir / file).read_bytes()


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
    merged = adapter._merge_adapter(policy, np.float32)
    assert relative_distance(merged, load_hf(workdir / "export")) < 1e-6
