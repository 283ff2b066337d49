"""A user's own architecture: its passes agree, and a run trains it, exports it and reads it."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import debug_tiny
from jaxrl.extras.plan import memory
from jaxrl.logs.display import Display
from jaxrl.models import kv_cache
from jaxrl.models.attention.reference import XLA
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.models.policy import Model
from jaxrl.models.registry import read_architecture
from jaxrl.run import run
from jaxrl.training.packing import BatchShape
from tests.extending.my_architecture import Pocket
from tests.helpers import (
    build,
    compilations,
    full_pass,
    gradient_of,
    pack_all,
    policy_loss,
    random_sequences,
    read_tokens,
    resolved,
    settings_of,
)
from tests.toys import Player, one_device_mesh, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")

POCKET = Pocket(vocab_size=960, width=32, num_layers=2, num_heads=4, head_dim=8, max_positions=256)
NAME = "tests.extending.my_architecture.Pocket"


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, jnp.float32)  # noqa: E731
    return jax.tree.map(draw, POCKET.abstract_params())


def test_cached_decoding_is_the_full_pass():
    params, (B, T, first) = random_params(), (2, 12, 7)
    token_ids = jnp.asarray(np.random.default_rng(1).integers(0, 960, (B, T)))
    places = jnp.broadcast_to(jnp.arange(T), (B, T))
    wanted = full_pass(POCKET, params, token_ids, places, jnp.ones_like(places))

    weights, zeros = POCKET.weights_for_decoding(params, jnp.float32), jnp.zeros(B, jnp.int32)
    cache = kv_cache.allocate(POCKET, B * 3, 4, jnp.float32)
    tables = jnp.arange(B * 3).reshape(B, 3)
    for start, end in [(0, 4), (4, first), *((at, at + 1) for at in range(first, T))]:
        counts, chunk = zeros + end - start, token_ids[:, start:end]
        hidden, cache = read_tokens(POCKET, weights, cache, tables, zeros + start, counts, chunk)
        np.testing.assert_allclose(hidden, wanted[:, start:end], atol=1e-5)


def test_its_programs_are_not_shared():
    """Its code may be edited and loaded again between two runs of a process."""
    assert Model(POCKET, one_device_mesh(), XLA, num_tokens=960).program_key is None
    for _ in range(2):
        engine = Player(POCKET, toy_tokenizer(), ("a",), num_rows=1).engine
        with compilations() as compiled:
            engine.set_weights(random_params())
        assert compiled


def test_every_parameter_has_a_finite_gradient():
    model = Model(POCKET, one_device_mesh(), XLA, num_tokens=950)
    sequences = [replace(s, old_logprobs=None) for s in random_sequences([9, 14, 12])]
    packed = pack_all(sequences, BatchShape(num_micro=1, micro_rows=2, row_tokens=32))
    gradient = gradient_of(model, policy_loss())
    found, _ = gradient(random_params(), packed.batch, packed.num_micro)
    for leaf in jax.tree.leaves(found):
        assert np.isfinite(leaf).all()
        assert np.asarray(leaf).any()


@pytest.fixture
def folder(tiny_world, tmp_path):
    """The world's tokenizer beside a model that it did not come with."""
    save_hf(random_params(), POCKET, tmp_path / "model")
    for file in (tiny_world / "model").iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, tmp_path / "model")
    return tmp_path / "model"


def test_a_run_trains_and_exports_it(tiny_world, folder, tmp_path):
    config = debug_tiny.get_config(str(tiny_world))
    config.model.path = str(folder)
    config.model.architecture = NAME  # the one line
    config.sft.num_steps, config.num_steps, config.eval.max_tasks = 2, 1, 2
    assert memory.make_plan(resolved(config), POCKET, memory.detect_target()).fits

    workdir = tmp_path / "run"
    workdir.mkdir()
    run(settings_of(config), workdir, build(config), Display())
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert records[1]["sft/loss"] < records[0]["sft/loss"]
    assert records[-1]["stage"] == "evaluate"
    gaps = [r["rollout_corr/logprob_diff_max"] for r in records if r.get("actor/grad_norm")]
    assert all(gap < 1e-3 for gap in gaps)  # sampler and trainer agree

    assert read_architecture(workdir / "export", NAME) == POCKET
    before, after = (load_hf(path, architecture=NAME) for path in (folder, workdir / "export"))
    assert all(
        (one != other).any()
        for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    )


def test_without_the_line_the_model_type_is_unknown(folder):
    with pytest.raises(ValueError, match=r"model_type 'pocket' .* config\.model\.architecture"):
        read_architecture(folder)
