"""A user's architecture: a run samples, trains and exports it."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import debug_tiny
from jaxrl.extras.plan import memory
from jaxrl.logs.display import Display
from jaxrl.models.attention.reference import XLA
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.models.policy import Model
from jaxrl.models.registry import read_architecture
from jaxrl.run import run
from tests.extending.my_architecture import Pocket
from tests.helpers import build, compilations, resolved, settings_of
from tests.toys import Player, one_device_mesh, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")

POCKET = Pocket(vocab_size=960, width=32, num_layers=2, num_heads=4, head_dim=8, max_positions=256)
NAME = "tests.extending.my_architecture.Pocket"


def random_params():
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, jnp.float32)  # noqa: E731
    return jax.tree.map(draw, POCKET.make_abstract_params())


def test_compiled_programs_are_not_shared():
    """Its code may be edited and loaded again between two runs of a process."""
    assert Model(POCKET, one_device_mesh(), XLA, num_tokens=960).program_key is None
    for _ in range(2):
        engine = Player(POCKET, toy_tokenizer(), ("a",), num_rows=1).engine
        with compilations() as compiled:
            engine.set_weights(random_params())
        assert compiled


@pytest.fixture
def folder(tiny_world, tmp_path):
    """Folder of the world's tokenizer and a model of the user's architecture."""
    save_hf(random_params(), POCKET, tmp_path / "model")
    for file in (tiny_world / "model").iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, tmp_path / "model")
    return tmp_path / "model"


def test_a_run_trains_and_exports_it(tiny_world, folder, tmp_path):
    config = debug_tiny.get_config(str(tiny_world))
    config.model.path = str(folder)
    config.model.architecture = NAME  # the only line that names it
    config.model.remat = "none"  # compiles faster
    config.optimizer.skip_signal_free = False
    config.stages = ("sft", "train")
    config.sft.num_steps, config.num_steps, config.eval.suites = 2, 1, ()
    assert memory.make_plan(resolved(config), POCKET, memory.detect_target()).fits

    workdir = tmp_path / "run"
    workdir.mkdir()
    run(settings_of(config), workdir, build(config), Display())
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert records[1]["sft/loss"] < records[0]["sft/loss"]
    assert records[-1]["rollout_corr/logprob_diff_max"] < 1e-3  # sampler and trainer agree
    assert np.isfinite(records[-1]["actor/grad_norm"])

    assert read_architecture(workdir / "export", NAME) == POCKET
    before, after = (load_hf(path, architecture=NAME) for path in (folder, workdir / "export"))
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    assert all((old != new).any() for old, new in pairs)  # each has a gradient


def test_the_model_type_alone_is_unknown(folder):
    with pytest.raises(ValueError, match=r"model_type 'pocket' .* config\.model\.architecture"):
        read_architecture(folder)
