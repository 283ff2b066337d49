"""Adapters on Qwen3.5's delta nets: names, sums with the weights, files, and an int8 base."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl.extras.lora.adapter import Adapter, find_targets, get_hf_module_name
from jaxrl.extras.lora.files import (
    check_adapter,
    load_adapter,
    load_base,
    save_adapter,
    save_merged,
)
from jaxrl.models.attention.reference import XLA
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.models.params import merge_params
from jaxrl.models.policy import Model
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import UpdateStep, init_state
from tests.extras.delta_net.models import TINY_HYBRID, random_params
from tests.extras.lora.adapters import logits_of, plain_logits
from tests.helpers import NUM_TOKENS, pack_all, policy_loss, random_sequences
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

MESH = one_device_mesh()
PARAMS = random_params(TINY_HYBRID, seed=0)
TOKEN_IDS = jnp.asarray(np.random.default_rng(1).integers(0, NUM_TOKENS, (2, 70)))


def make_adapter(*names, **settings):
    """Return an adapter that changes the model a lot, and its parameters."""
    targets = find_targets(TINY_HYBRID, names)
    adapter = Adapter(model=TINY_HYBRID, rank=3, alpha=6.0, targets=targets, **settings)
    rng = np.random.default_rng(2)
    params = {
        path: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32)
        for path, leaf in flatten_dict(adapter.make_param_specs()[0].make_abstract_params()).items()
    }
    return adapter, unflatten_dict(params)


def merge_by_hand(adapter, params, base):
    """Return the base with `W + 2 A B` in place of each target's weights."""
    flat, added = flatten_dict(base, sep="/"), flatten_dict(params, sep="/")
    for target in adapter.targets:
        change = np.einsum("nir,nro->nio", added[f"{target}/kernel_a"], added[f"{target}/kernel_b"])
        flat[f"{target}/kernel"] = flat[f"{target}/kernel"] + 2 * change
    return unflatten_dict(flat, sep="/")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    save_hf(jax.tree.map(jnp.asarray, PARAMS), TINY_HYBRID, folder)
    return folder


def test_all_linear_targets_are_those_of_peft():
    """`test_live_lora.py` compares them with PEFT's."""
    names = [
        get_hf_module_name(TINY_HYBRID, layer) for layer in make_adapter("all-linear")[0].targets
    ]
    delta = ("in_proj_qkv", "in_proj_a", "in_proj_b", "in_proj_z", "out_proj")
    assert {name.removeprefix("model.layers.{}.") for name in names} == {
        *(f"linear_attn.{name}" for name in delta),
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    }
    assert find_targets(TINY_HYBRID, ["in_proj_a", "delta/o"]) == (
        "blocks/delta/decay", "blocks/delta/o",
    )  # fmt: skip
    with pytest.raises(ValueError, match="'conv1d'"):  # not a linear layer
        find_targets(TINY_HYBRID, ["conv1d"])


@pytest.mark.parametrize("names", [["all-linear"], ["in_proj_a"]])
def test_an_adapter_computes_the_sum_of_the_weights(names):
    adapter, params = make_adapter(*names)
    logits = logits_of(adapter, merge_params(PARAMS, params), TOKEN_IDS)
    wanted = plain_logits(TINY_HYBRID, merge_by_hand(adapter, params, PARAMS), TOKEN_IDS)
    np.testing.assert_allclose(logits, wanted, atol=2e-4)
    assert np.abs(wanted - plain_logits(TINY_HYBRID, PARAMS, TOKEN_IDS)).max() > 0.1


def test_files_of_an_adapter(source, tmp_path):
    adapter, params = make_adapter("in_proj_qkv", "in_proj_a", "out_proj", "q_proj", "down_proj")
    save_adapter(params, adapter, tmp_path / "adapter", source=source)
    check_adapter(tmp_path / "adapter", adapter)
    loaded = load_adapter(tmp_path / "adapter", adapter, MESH)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    names = ["down_proj", "in_proj_a", "in_proj_qkv", "out_proj", "q_proj"]
    assert config["target_modules"] == names

    save_merged(params, adapter, tmp_path / "merged", source=source)
    wanted = merge_by_hand(adapter, params, PARAMS)
    jax.tree.map(
        lambda got, leaf: np.testing.assert_allclose(got, leaf, atol=1e-6),
        load_hf(tmp_path / "merged"),
        wanted,
    )
    untouched = load_hf(tmp_path / "merged")["blocks"]["delta"]["decay"]
    for name in ("bias", "log_rate"):
        np.testing.assert_array_equal(untouched[name], PARAMS["blocks"]["delta"]["decay"][name])


@pytest.mark.parametrize("is_merged", [False, True])
def test_an_int8_base_computes_its_rounded_weights(source, is_merged):
    adapter, params = make_adapter("all-linear", base_dtype="int8", is_merged=is_merged)
    base = load_base(source, MESH, adapter)
    flat = flatten_dict(base, sep="/")
    rounded = {}
    for name, leaf in flatten_dict(PARAMS, sep="/").items():
        rounded[name] = np.asarray(flat[name])
        if (scale := flat.get(f"{name}_scale")) is not None:
            assert rounded[name].dtype == np.int8
            rounded[name] = rounded[name] * np.asarray(scale)[:, None]
            assert (np.abs(rounded[name] - leaf) <= 0.51 * np.asarray(scale)[:, None]).all()
        else:
            np.testing.assert_array_equal(rounded[name], leaf)
    assert {name for name in flat if "delta" in name and name.endswith("_scale")} == {
        f"blocks/delta/{name}/kernel_scale" for name in ("qkv", "decay", "beta", "gate", "o")
    }
    wanted = plain_logits(
        TINY_HYBRID,
        merge_by_hand(adapter, params, unflatten_dict(rounded, sep="/")),
        TOKEN_IDS,
    )
    policy = merge_params(base, params)
    weights = (adapter.prepare_decoding_weights if is_merged else adapter.prepare_training_weights)(
        policy, jnp.float32
    )
    np.testing.assert_allclose(plain_logits(TINY_HYBRID, weights, TOKEN_IDS), wanted, atol=5e-4)


def test_an_update_changes_only_the_adapter(source):
    adapter, params = make_adapter("all-linear", base_dtype="int8")
    model = Model(adapter, MESH, XLA, num_tokens=NUM_TOKENS)
    model.base = load_base(source, MESH, adapter)
    before = jax.tree.map(np.array, model.base)
    packed = pack_all(
        random_sequences([9, 70, 31, 64]), BatchShape(num_micro=1, micro_rows=2, row_tokens=120)
    )
    optimizer = optax.adam(1e-3)
    step = UpdateStep(model, policy_loss(), optimizer)
    state = init_state(jax.tree.map(jnp.array, params), MESH, model.trained, optimizer)
    state, _ = step(state, packed.batch, packed)
    for path, leaf in flatten_dict(state.params, sep="/").items():
        change = np.abs(np.asarray(leaf) - flatten_dict(params, sep="/")[path])
        assert (change > 0).mean() > 0.99, path  # Adam's first step changes each by the rate
        np.testing.assert_allclose(change.max(), 1e-3, rtol=0.02)
    jax.tree.map(np.testing.assert_array_equal, model.base, before)
