"""Adapters against PEFT's numbers and hand-worked numbers, and rejected adapters."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from jaxrl.extras.lora.adapter import Adapter, find_targets, merge_layer, quantize_kernel
from jaxrl.extras.lora.files import (
    check_adapter,
    load_adapter,
    load_base,
    save_adapter,
    save_merged,
)
from jaxrl.models.attention.reference import XLA
from jaxrl.models.decoder import linear
from jaxrl.models.hf_weights import load_hf, open_tensors
from jaxrl.models.params import merge_params
from jaxrl.models.policy import Model
from jaxrl.models.registry import read_architecture
from jaxrl.types import Batch
from tests.extras.lora.adapters import GOLDEN, MESH, logits_of, plain_logits
from tests.helpers import TINY, relative_distance

SETTINGS = {
    "lora_all_linear": {"rank": 4, "alpha": 8.0, "names": ["all-linear"]},
    "lora_rank_stabilised": {
        "rank": 3,
        "alpha": 6.0,
        "names": ["q_proj", "attention/v"],
        "use_rslora": True,
    },
}
SOURCES = {"lora_all_linear": "qwen3_untied", "lora_rank_stabilised": "qwen2_tied"}

pytestmark = pytest.mark.usefixtures("quick_compilation")


def adapter_of(name, **changes):
    """The adapter of a golden folder."""
    settings = {**SETTINGS[name], **changes}
    model = read_architecture(GOLDEN / SOURCES[name])
    return Adapter(model=model, targets=find_targets(model, settings.pop("names")), **settings)


def loaded(name, **changes):
    """The adapter of a golden folder, its parameters and those of its base."""
    adapter = adapter_of(name, **changes)
    check_adapter(GOLDEN / name, adapter)
    params = load_adapter(GOLDEN / name, adapter, MESH)
    return adapter, params, load_base(GOLDEN / SOURCES[name], MESH, adapter)


@pytest.mark.parametrize(
    ("name", "scan"), [("lora_all_linear", False), ("lora_rank_stabilised", True)]
)
def test_logits_and_gradients_are_those_of_peft(name, scan):
    adapter, params, base = loaded(name)
    golden = np.load(GOLDEN / name / "golden.npz")
    token_ids, weights = jnp.asarray(golden["token_ids"]), golden["weights"]

    def summed(params):
        logits = logits_of(adapter, merge_params(base, params), token_ids, scan=scan)
        table = jax.nn.log_softmax(logits)[:, :-1]
        logprobs = jnp.take_along_axis(table, token_ids[:, 1:, None], -1)[..., 0]
        return (logprobs * weights[:, 1:]).sum(), logits

    gradients, logits = jax.jit(jax.grad(summed, has_aux=True))(params)
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    for param, gradient in flatten_dict(gradients, sep="/").items():
        layer, _, matrix = param.rpartition("/")
        for number, layer_gradient in enumerate(gradient):
            module = adapter.model.get_hf_names()[f"{layer}/kernel"].format(number)
            name_there = module.replace("weight", f"lora_{matrix[-1].upper()}.weight")
            expected = golden[f"base_model.model.{name_there}"].T
            assert relative_distance(layer_gradient, expected) < 1e-4, (param, number)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_merged_export_and_the_adapter_itself_are_read_again(name, tmp_path):
    adapter, params, _ = loaded(name)
    source = GOLDEN / SOURCES[name]
    save_merged(params, adapter, tmp_path / "merged", source=source)
    save_adapter(params, adapter, tmp_path / "adapter", source=source)
    golden = np.load(GOLDEN / name / "golden.npz")
    token_ids = jnp.asarray(golden["token_ids"])
    model = adapter.model
    logits = plain_logits(model, load_hf(tmp_path / "merged"), token_ids)
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    # What has no adapter is as it was, bit for bit.
    before, after = open_tensors(source), open_tensors(tmp_path / "merged")
    same = {n for n in before if np.array_equal(before[n].data[:], after[n].data[:])}
    assert len(before) - len(same) == len(adapter.targets) * model.num_layers
    check_adapter(tmp_path / "adapter", adapter)
    again = load_adapter(tmp_path / "adapter", adapter, MESH)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "adapter", GOLDEN / name)
    )
    assert ours["base_model_name_or_path"] == str(source)
    same = ("r", "lora_alpha", "use_rslora", "peft_type", "task_type", "bias", "use_dora")
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    expected = {name.rpartition(".")[2] for name in theirs["target_modules"]}
    assert ours["target_modules"] == sorted(expected)


def test_a_layer_by_hand():
    layer = {
        "kernel": jnp.array([[1.0, 0.0], [0.0, 2.0]]),
        "kernel_a": jnp.array([[1.0], [1.0]]),
        "kernel_b": jnp.array([[0.5, -1.0]]),
        "bias": jnp.array([10.0, 20.0]),
    }
    # x W = [3, 8], x A = 7, (x A) B = [3.5, -7].
    np.testing.assert_array_equal(linear(layer, jnp.array([[3.0, 4.0]])), [[16.5, 21.0]])
    np.testing.assert_array_equal(merge_layer(layer), [[1.5, -1.0], [0.5, 1.0]])


def test_int8_by_hand():
    kernel = np.array([[1.27, 0.0, -2.54], [-0.634, 0.0, 1.0]], np.float32)
    values, scale = quantize_kernel(kernel)
    np.testing.assert_array_equal(values, [[127, 0, -127], [-63, 0, 50]])
    np.testing.assert_allclose(scale, [0.01, 1.0, 0.02], rtol=1e-6)
    layer = {"kernel": jnp.asarray(values), "kernel_scale": jnp.asarray(scale)}
    x = jnp.array([[1.0, 2.0]])
    np.testing.assert_allclose(linear(layer, x), [[0.01, 0.0, -0.54]], rtol=1e-4)


def test_an_int8_base_is_near_the_model_and_rounds_by_at_most_half_a_step():
    name = "lora_all_linear"
    adapter, params, base = loaded(name, base_dtype="int8")
    original = load_hf(GOLDEN / SOURCES[name])
    found, expected = flatten_dict(base), flatten_dict(original)
    for path, weights in expected.items():
        if (*path[:-1], "kernel_scale") in found:
            assert found[path].dtype == jnp.int8
            scale = np.asarray(found[*path[:-1], "kernel_scale"])[:, None]
            step = np.abs(np.asarray(found[path]) * scale - np.asarray(weights)) / scale
            assert 0.4 < step.max() < 0.501
        else:
            np.testing.assert_array_equal(found[path], weights)
    assert len(found) - len(expected) == 7  # a scale for each linear layer
    golden = np.load(GOLDEN / name / "golden.npz")
    logits = logits_of(adapter, merge_params(base, params), jnp.asarray(golden["token_ids"]))
    assert 1e-4 < relative_distance(logits, golden["logits"]) < 0.03


def test_a_new_adapter_changes_nothing_and_is_one_of_its_seed():
    adapter, _, base = loaded("lora_all_linear")
    first, same, other = (adapter.load_initial_params(MESH, seed) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, same)
    a, b = (first["blocks"]["mlp"]["down"][name] for name in ("kernel_a", "kernel_b"))
    assert (a.shape, b.shape) == ((2, 72, 4), (2, 4, 40))
    assert not b.any()
    assert 0.9 / 72**0.5 < jnp.abs(a).max() < 1 / 72**0.5
    assert jnp.abs(a - other["blocks"]["mlp"]["down"]["kernel_a"]).max() > 0.01
    token_ids = jnp.arange(12)[None]
    plain = plain_logits(adapter.model, load_hf(GOLDEN / "qwen3_untied"), token_ids)
    np.testing.assert_array_equal(logits_of(adapter, merge_params(base, first), token_ids), plain)


def test_targets_by_our_names_and_by_theirs():
    find = lambda *names: find_targets(TINY, names)  # noqa: E731
    assert find("q") == find("attention/q") == find("q_proj") == ("blocks/attention/q",)
    assert find("self_attn.q_proj", "down") == ("blocks/attention/q", "blocks/mlp/down")
    assert len(find("all-linear")) == 7
    for name in ("", "proj", "ttention/q", "lm_head", "norm"):
        with pytest.raises(ValueError, match=r"targets has .* expected all-linear, .* q_proj"):
            find(name)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GOLDEN / "lora_all_linear", tmp_path / "adapter"))


def change(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 8}, r"r is 4, but config\.model\.lora\.rank is 8"),
        ({"names": ["q"]}, r"has 'model\.layers\.0\.mlp\.down_proj'.*'qwen3_untied'.*targets"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_adapter(GOLDEN / "lora_all_linear", adapter_of("lora_all_linear", **changes))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("qwen2_tied", r"lora_A.* requires \[4, 48\].*'qwen3_untied'"),
        ("qwen3_biased_bf16", r"lacks 'model\.layers\.2\..*for the model 'qwen3_untied'"),  # deeper
    ],
)
def test_an_adapter_of_another_base_is_refused(base, message):
    model = read_architecture(GOLDEN / base)
    adapter = Adapter(model=model, rank=4, alpha=8.0, targets=find_targets(model, ["all-linear"]))
    with pytest.raises(ValueError, match=message):
        check_adapter(GOLDEN / "lora_all_linear", adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; expected 'LORA'"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', so .* weights that PEFT has ch"),
    ],
)
def test_what_is_not_computed_here_is_refused(fields, message, folder):
    change(folder, **fields)
    with pytest.raises(ValueError, match=message):
        check_adapter(folder, adapter_of("lora_all_linear"))


def test_a_tensor_that_nothing_reads_is_refused(folder):
    file = folder / "adapter_model.safetensors"
    module = "base_model.model.model.layers.0.mlp.up_proj"
    save_file({**load_file(file), f"{module}.lora_diag": np.ones(4, np.float32)}, file)
    with pytest.raises(ValueError, match=r"safetensors has '.*up_proj\.lora_diag', which is not"):
        check_adapter(folder, adapter_of("lora_all_linear"))


@pytest.mark.parametrize(
    ("source", "mlp_names"),
    [
        # The tower has modules of the same name, mlp.up_proj.
        (
            "qwen2_5_vl",
            ["model.language_model.layers.0.mlp.", "model.language_model.layers.1.mlp."],
        ),
        # The experts have modules of the same name, up_proj.
        ("qwen3_moe_mixed", ["mlp."]),
    ],
)
def test_an_adapter_names_no_layer_that_it_does_not_have(source, mlp_names, tmp_path):
    """PEFT selects each module whose name ends with one of `target_modules`."""
    model = read_architecture(GOLDEN / source)
    adapter = Adapter(model=model, rank=2, alpha=4.0, targets=find_targets(model, ["all-linear"]))
    params = adapter.load_initial_params(MESH, seed=0)
    save_adapter(params, adapter, tmp_path, source=GOLDEN / source)
    check_adapter(tmp_path, adapter)
    named = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    of_mlp = {f"{name}{part}_proj" for name in mlp_names for part in ("gate", "up", "down")}
    assert {*named} == {*of_mlp, "q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_damaged_or_missing_adapter_is_named(folder):
    adapter = adapter_of("lora_all_linear")
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(
        ValueError, match=r"adapter_config\.json contains a list; expected a JSON object"
    ):
        check_adapter(folder, adapter)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model\.safetensors"):
        check_adapter(folder, adapter)


def test_the_sampler_reads_merged_weights_as_separate_ones():
    token_ids = jnp.arange(9)[None]
    logits = []
    for is_merged in (False, True):
        adapter, params, base = loaded("lora_all_linear", base_dtype="int8", is_merged=is_merged)
        weights = adapter.prepare_decoding_weights(merge_params(base, params), jnp.float32)
        assert ("kernel_a" in weights["blocks"]["mlp"]["up"]) != is_merged
        logits.append(plain_logits(adapter.model, weights, token_ids))
    np.testing.assert_allclose(*logits, atol=1e-4)


def test_in_bfloat16_only_what_is_trained_stays_float32():
    adapter, params, base = loaded("lora_all_linear", base_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(base)} == {jnp.dtype("bfloat16")}
    weights = adapter.prepare_training_weights(merge_params(base, params), jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    # s in B before it is rounded
    expected = (params["blocks"]["mlp"]["up"]["kernel_b"] * 2).astype(jnp.bfloat16)
    np.testing.assert_array_equal(weights["blocks"]["mlp"]["up"]["kernel_b"], expected)


def test_the_base_gets_no_gradient():
    """Updates do not compute the base's gradient, a third of their arithmetic."""
    adapter, params, base = loaded("lora_all_linear")
    ids = jnp.arange(32)[None]
    ones = jnp.ones(ids.shape, jnp.float32)
    batch = Batch(
        token_ids=ids,
        segment_ids=jnp.ones_like(ids),
        positions=ids,
        loss_mask=ids > 4,
        token_weights=ones,
        advantages=ones,
        rollout_logprobs=ones,
    )

    def flops(policy, params, base):
        settings = {"num_tokens": 288, "logits_chunk_tokens": 8, "remat": "none"}
        model = Model(policy, MESH, XLA, scan_layers=False, **settings)
        loss = lambda params: model.compute_token_logprobs(  # noqa: E731
            merge_params(base, params), batch, temperature=1.0
        )[0].sum()
        return jax.jit(jax.grad(loss)).lower(params).compile().cost_analysis()["flops"]

    whole = flops(adapter.model, base, {})
    of_adapter = flops(adapter, params, base)
    assert of_adapter < 0.85 * whole
