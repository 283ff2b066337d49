"""Hybrids with experts: agreement with torch, packing, adapters, files and refusals."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from jaxrl.extras import hybrid_moe
from jaxrl.extras.lora.adapter import Adapter, find_targets, get_hf_module_name
from jaxrl.models.attention.reference import XLA
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.models.params import split_params
from jaxrl.models.policy import Model
from jaxrl.models.registry import TOWERS, read_architecture
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import UpdateStep, init_state
from tests.extras.delta_net.models import random_params
from tests.extras.experts.golden import check_golden
from tests.extras.hybrid_moe.models import TINY_NEXT, TINY_QWEN3_5
from tests.helpers import (
    NUM_TOKENS,
    fuse_tensors,
    pack_all,
    policy_loss,
    random_sequences,
)
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.minutes
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_logits_losses_and_gradients_are_those_of_torch(name):
    folder = GOLDEN / name
    config = read_architecture(folder)
    assert type(config).from_dict(config.to_hf_config()) == config
    check_golden(config, load_hf(folder), dict(np.load(folder / "golden.npz")))


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_checkpoint_beside_a_vision_tower_keeps_its_format(tmp_path, monkeypatch, is_fused):
    monkeypatch.setitem(TOWERS, "qwen3_5_moe", "jaxrl.extras.deleted:add_tower")
    params = jax.tree.map(jnp.asarray, random_params(TINY_QWEN3_5, seed=0))
    text, whole = tmp_path / "text", tmp_path / "whole"
    save_hf(params, TINY_QWEN3_5, text)
    assert read_architecture(text) == TINY_QWEN3_5
    tensors = load_file(text / "model.safetensors")
    if is_fused:
        tensors = fuse_tensors(tensors, TINY_QWEN3_5)
    tensors = {n.replace("model.", "model.language_model.", 1): x for n, x in tensors.items()}
    tensors["mtp.layers.0.mlp.experts.0.up_proj.weight"] = np.ones((2, 3), np.float32)
    whole.mkdir()
    fields = json.loads((text / "config.json").read_text())
    config = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": fields | {"mlp_only_layers": [1], "norm_topk_prob": False},  # ignored
        "vision_config": {"depth": 2},
        "tie_word_embeddings": False,
    }
    (whole / "config.json").write_text(json.dumps(config))
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})

    loaded = load_hf(whole)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    trained = jax.tree.map(lambda leaf: 2 * leaf, loaded)
    save_hf(trained, read_architecture(whole), tmp_path / "export", source=whole)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        factor = 1 if name.startswith("mtp.") else 2
        np.testing.assert_array_equal(exported[name], factor * tensor)


@pytest.mark.parametrize(
    ("config", "delta"),
    [
        (TINY_QWEN3_5, ("in_proj_qkv", "in_proj_a", "in_proj_b", "in_proj_z", "out_proj")),
        (TINY_NEXT, ("in_proj_qkvz", "in_proj_ba", "out_proj")),
    ],
)
def test_all_linear_targets(config, delta):
    targets = find_targets(config, ["all-linear"])
    projections = [f"{name}_proj" for name in ("gate", "up", "down")]
    dense = {f"mlp.{name}" for name in projections} if config is TINY_NEXT else set()
    names = {get_hf_module_name(config, t).removeprefix("model.layers.{}.") for t in targets}
    assert names == dense | {
        *(f"linear_attn.{name}" for name in delta),
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.shared_expert.{name}" for name in projections),
        "mlp.shared_expert_gate",
    }


@pytest.mark.minutes
def test_an_adapter_on_all_linear_layers_trains():
    config, mesh = TINY_NEXT, one_device_mesh()
    targets = find_targets(config, ["all-linear"])
    adapter = Adapter(model=config, rank=3, alpha=6.0, targets=targets)
    model = Model(adapter, mesh, XLA, num_tokens=NUM_TOKENS)
    noise = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * noise.standard_normal(leaf.shape), jnp.float32),
        model.trained.make_abstract_params(),
    )
    model.base = split_params(
        jax.tree.map(jnp.asarray, random_params(config, seed=0)), model.trained
    )[1]
    shape = BatchShape(num_micro=1, micro_rows=1, row_tokens=70)
    packed, optimizer = pack_all(random_sequences([9, 31, 17]), shape), optax.adam(1e-3)
    step = UpdateStep(model, policy_loss(), optimizer)
    state = init_state(jax.tree.map(jnp.array, params), mesh, model.trained, optimizer)
    state, _ = step(state, packed.batch, packed)
    for path, leaf in flatten_dict(state.params, sep="/").items():
        change = np.abs(np.asarray(leaf) - flatten_dict(params, sep="/")[path])
        assert (change > 0).mean() > 0.9, path


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (TINY_QWEN3_5, {"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        (TINY_QWEN3_5, {"model_type": "qwen3_5_moe"}, "'text_config'"),
        (TINY_QWEN3_5, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        (TINY_QWEN3_5, {"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9"),
        (TINY_NEXT, {"model_type": "qwen3_5_moe_text"}, "expected 'qwen3_next'"),
        (TINY_NEXT, {"mlp_only_layers": [*range(5)]}, "leave no layer with experts"),
        (TINY_NEXT, {"linear_num_value_heads": 3}, "'linear_num_value_heads' 3"),
    ],
)
def test_unsupported_configurations_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        type(config).from_dict({**config.to_hf_config(), **changes})
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("part", ["delta_net", "experts"])
def test_a_missing_part_is_named(tmp_path, monkeypatch, part):
    (tmp_path / "config.json").write_text(json.dumps(TINY_NEXT.to_hf_config()))
    monkeypatch.setitem(sys.modules, f"jaxrl.extras.{part}", None)
    for name in [name for name in sys.modules if name.startswith(f"jaxrl.extras.{part}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "jaxrl.extras.hybrid_moe.qwen3_next")
    monkeypatch.delattr(hybrid_moe, "qwen3_next")
    with pytest.raises(ValueError, match=rf"missing folder jaxrl/extras/{part}; restore"):
        read_architecture(tmp_path)
