"""Models that read images against `transformers`: tower, logits, gradients; what is refused."""

import dataclasses
import json
import math
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from jaxrl.extras.vision.processor import Image
from jaxrl.extras.vision.qwen2_vl import Qwen2VLConfig
from jaxrl.extras.vision.qwen3_vl import Qwen3VLConfig
from jaxrl.extras.vision.qwen_vision import attend_windows
from jaxrl.extras.vision.qwen_vl import QwenVLConfig
from jaxrl.extras.vision.tower import attend_segments
from jaxrl.models.attention.reference import MASK_VALUE, XLA
from jaxrl.models.hf_weights import load_hf, locate_hf_tensors, save_hf
from jaxrl.models.layers import LayerScan
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.registry import read_architecture, resolve_architecture
from tests.helpers import fuse_tensors, tiny_params
from tests.vision import FOLDERS, NAMES, golden, logits_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

FOLDER = FOLDERS / "qwen2_5_vl"


@pytest.mark.parametrize("name", NAMES)
def test_the_tower_sees_what_the_reference_sees(name):
    config, params, wanted, images = golden(name)
    order = [2, 0, 1]  # beside others, and behind padding, as alone
    collated = config.tower.collate([images[i] for i in order])
    padding = [(0, 24), (0, 0)]
    rows = (np.pad(x, padding)[None] for x in (collated.patches, collated.coords))
    seen = jax.jit(config.tower.encode, static_argnums=3)(params["vision"], *rows, LayerScan())
    found = {i: seen[0][units] for i, units in zip(order, collated.units, strict=True)}
    features = jnp.concatenate([found[i] for i in range(3)])
    np.testing.assert_allclose(features, wanted["features"], atol=1e-4, rtol=0)


def test_positions_by_hand():
    """3 tokens, an image of 2 x 2 units, 2 tokens: the numbers of the source's figure."""
    config = golden()[0]
    image = Image(
        patches=np.zeros((16, config.tower.num_values_per_patch), np.float32), grid=(1, 4, 4)
    )
    ids = np.array([1, 2, 3, *[config.tower.token_id] * 4, 4, 5])
    found = config.tower.compute_positions(ids, [image]).T
    assert found.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 3, 4, 4, 5, 6],
        [0, 1, 2, 3, 4, 3, 4, 5, 6],
    ]
    again = config.tower.compute_positions(ids[3:], [image], start=3).T
    assert (again == found[:, 3:]).all()
    assert config.tower.compute_positions(ids[:3], []).T.tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("name", NAMES)
def test_positions_are_those_of_the_reference(name):
    config, _, wanted, images = golden(name)
    found = config.tower.compute_positions(wanted["token_ids"][0], images).T
    np.testing.assert_array_equal(found, wanted["positions"][:, 0])


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_reference_and_an_image_matters(name):
    config, params, wanted, images = golden(name)
    ids = wanted["token_ids"][0]
    blank = [dataclasses.replace(each, patches=np.zeros_like(each.patches)) for each in images]
    rows = {"rows": [ids] * 2, "images_of_rows": [images, blank]}
    real, nothing = jax.jit(partial(logits_of, config, **rows))(params)
    is_text = ~np.isin(np.arange(config.vocab_size), [config.tower.token_id, config.tower.video_id])
    expected = wanted["logits"][0][:, is_text]
    np.testing.assert_allclose(real[:, is_text], expected, atol=2e-4, rtol=0)
    assert (real[:, ~is_text] == MASK_VALUE).all()
    assert abs(real - nothing)[-1].max() > 0.1
    np.testing.assert_array_equal(real[:4], nothing[:4])  # before the first image


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_reference(name):
    config, params, wanted, images = golden(name)
    ids = wanted["token_ids"][0]
    at = np.flatnonzero(ids[1:] != config.tower.token_id) + 1

    def loss(params):
        logits = logits_of(config, params, [ids], [images], layer_scan=LayerScan(remat="names"))[0]
        return -jax.nn.log_softmax(logits)[at - 1, ids[at]].mean()

    found = flatten_dict(jax.jit(jax.grad(loss))(params), sep="/")
    difference = total = 0.0
    for tensor, place in locate_hf_tensors(config).items():
        leaf = found[place.param][place.index]
        gradient, expected = leaf.T if place.is_transposed else leaf, wanted[f"gradient/{tensor}"]
        difference += ((gradient - expected) ** 2).sum()
        total += (expected**2).sum()
        assert abs(expected).max() > 0, tensor
        relative = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
        assert relative < 2e-3, tensor  # of each tensor, however small its gradient is
    assert (difference / total) ** 0.5 < 1e-4


def test_text_alone_is_as_by_the_decoder():
    config, params, wanted, _ = golden("qwen3_vl")
    ids = jnp.asarray(wanted["token_ids"][:, :3])
    names = {field.name for field in dataclasses.fields(QwenConfig)}
    text = QwenConfig(**{name: getattr(config, name) for name in names})
    positions = jnp.arange(3)[None]
    attend = XLA.make_attend(jnp.ones_like(ids), positions)
    of_text = {name: entry for name, entry in params.items() if name != "vision"}
    hidden, expected = (
        jax.jit(model.compute_hidden_states, static_argnums=(3, 4))(
            weights, ids, positions, attend, LayerScan()
        )
        for model, weights in ((config, params), (text, of_text))
    )
    np.testing.assert_array_equal(hidden, expected)


def test_windows_are_as_whole_attention_with_windows_for_numbers():
    rng = np.random.default_rng(0)
    q, k, v = jnp.asarray(rng.standard_normal((3, 2, 23, 2, 4)), jnp.float32)
    sizes = [4, 1, 3, 4, 4, 2, 5]  # the last are padding, longer than any window
    ids = np.repeat([0, 1, 2, 3, 4, 5, -1], sizes)
    ids = np.stack([ids, np.repeat([0, 1, 2, 3, 4, 5], [2, 4, 4, 4, 4, 5])])
    ids[1, 18:] = -1
    found = attend_windows(q, k, v, jnp.asarray(ids), block_size=4)
    wanted = attend_segments(q, k, v, jnp.asarray(ids))
    np.testing.assert_allclose(found[ids >= 0], wanted[ids >= 0], atol=1e-6)
    assert np.isfinite(found).all()


# Files.


def rename(name):
    if name.startswith("visual."):
        return "model." + name
    return name.replace("model.", "model.language_model.", 1)


def test_both_spellings_of_names_come_in_and_go_out_bit_for_bit(tmp_path):
    config, params, _, _ = golden()
    stored = load_file(FOLDER / "model.safetensors")
    (tmp_path / "new").mkdir()
    shutil.copyfile(FOLDER / "config.json", tmp_path / "new" / "config.json")
    (tmp_path / "new" / "preprocessor_config.json").write_text("{}")
    renamed = {rename(name): tensor for name, tensor in stored.items()}
    save_file(renamed, tmp_path / "new" / "model.safetensors")
    again = load_hf(tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, params, again)
    save_hf(params, config, tmp_path / "out", source=FOLDER)
    save_hf(params, config, tmp_path / "new_out", source=tmp_path / "new", max_shard_size=60_000)
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == stored.keys()
    jax.tree.map(np.testing.assert_array_equal, out, stored)
    files = (tmp_path / "new_out").glob("*.safetensors")
    out = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert "model.visual.blocks.3.attn.qkv.weight" in out
    assert out.keys() == renamed.keys()
    jax.tree.map(np.testing.assert_array_equal, out, renamed)
    assert (tmp_path / "new_out" / "preprocessor_config.json").is_file()
    save_hf(params, config, tmp_path / "fresh")
    assert read_architecture(tmp_path / "fresh") == config
    jax.tree.map(np.testing.assert_array_equal, params, load_hf(tmp_path / "fresh"))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2_vl", "visual.merger.ln_q.bias"),
        ("qwen3_vl", "model.visual.deepstack_merger_list.1.linear_fc2.bias"),
        ("qwen3_5_vl", "model.visual.pos_embed.weight"),
    ],
)
def test_names_come_in_and_go_out_bit_for_bit(tmp_path, name, tensor):
    config, params, _, _ = golden(name)
    stored = load_file(FOLDERS / name / "model.safetensors")
    assert tensor in stored
    save_hf(params, config, tmp_path / "out", source=FOLDERS / name)
    save_hf(params, config, tmp_path / "fresh")
    assert read_architecture(tmp_path / "fresh") == config
    for folder in tmp_path / "out", tmp_path / "fresh":
        out = load_file(folder / "model.safetensors")
        assert out.keys() == stored.keys()
        jax.tree.map(np.testing.assert_array_equal, out, stored)


def test_qwen3_5_exports_a_layer_that_it_does_not_use(tmp_path):
    config, params, _, _ = golden("qwen3_5_vl")
    stored = load_file(FOLDERS / "qwen3_5_vl" / "model.safetensors")
    stored["mtp.fc.weight"] = np.ones((2, 3), np.float16)
    source = shutil.copytree(FOLDERS / "qwen3_5_vl", tmp_path / "source")
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    save_hf(jax.tree.map(lambda leaf: leaf + 1, params), config, tmp_path / "out", source=source)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert exported["mtp.fc.weight"].dtype == np.float16
    for name in ("model.visual.pos_embed.weight", "model.language_model.norm.weight"):
        np.testing.assert_array_equal(exported[name], stored[name] + 1)


def test_equal_experts_compute_what_the_dense_model_does(tmp_path):
    """Qwen3.5 with experts that all are the MLP of the dense model, stored as transformers does."""
    dense, params, wanted, images = golden("qwen3_5_vl")
    sizes = dict(expert_width=dense.mlp_width, num_experts=3, top_k=2, shared_width=8, mlp_width=8)
    config = resolve_architecture({"model_type": "qwen3_5_moe"}, "", "config.json")(
        **vars(dense) | sizes, renormalize=True, expert_layers=tuple(range(dense.num_layers))
    )
    experts = jax.tree.map(jnp.asarray, tiny_params(config)["blocks"])
    blocks = experts | params["blocks"]
    for name, layer in blocks.pop("mlp").items():
        blocks["moe"][name]["kernel"] = jnp.repeat(layer["kernel"][:, None], 3, axis=1)
    blocks["shared_expert"]["down"]["kernel"] *= 0
    save_hf(params | {"blocks": blocks}, config, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    save_file(fuse_tensors(load_file(file), config), file, metadata={"format": "pt"})
    assert "model.language_model.layers.1.mlp.experts.down_proj" in load_file(file)
    assert read_architecture(tmp_path / "hf") == config
    rows = {"rows": [wanted["token_ids"][0]], "images_of_rows": [images]}
    found = jax.jit(partial(logits_of, config, **rows))(load_hf(tmp_path / "hf"))[0]
    is_text = ~np.isin(np.arange(config.vocab_size), [config.tower.token_id, config.tower.video_id])
    np.testing.assert_allclose(
        found[:, is_text], wanted["logits"][0][:, is_text], atol=2e-4, rtol=0
    )


def fields_of(**changes):
    return json.loads((FOLDER / "config.json").read_text()) | changes


def test_config_of_qwen2_5_as_published():
    """The decoder's fields beside `vision_config`, and rotary settings of the kind `mrope`."""
    new = fields_of()
    text = new.pop("text_config")
    rope = text.pop("rope_parameters")
    published = {
        **text,
        **new,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "max_window_layers": 70,
        "sliding_window": 32768,
        "layer_types": None,
    }
    vision = {**published["vision_config"], "in_chans": 3, "spatial_patch_size": 2}
    del vision["rope_parameters"]
    assert QwenVLConfig.from_dict({**published, "vision_config": vision}) == golden()[0]


def test_config_of_qwen2_vl_as_published():
    """The fields of Qwen2-VL-2B-Instruct, and its number of parameters."""
    fields = {
        "model_type": "qwen2_vl", "vocab_size": 151936, "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rms_norm_eps": 1e-6,
        "sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": True,
        "vision_config": {
            "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
            "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2,
            "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
    }  # fmt: skip
    model = Qwen2VLConfig.from_dict(fields)
    assert (model.tower.token_id, model.tower.video_id) == (151655, 151656)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(model.make_abstract_params())]
    assert sum(sizes) == 2_208_985_600


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vision": {"mlp_ratio": 0}}, "'mlp_ratio' is 0"),
        ({"vision": {"hidden_size": 40}}, "'hidden_size' of 'vision_config' is 40; expected"),
        ({"vision": {"hidden_act": "gelu"}}, "'vision_config': hidden_act 'gelu'"),
        ({"vision": {"depth": 2**31 - 1}}, "'depth' is 2147483647; expected at most"),
        ({"vision": {"rope_parameters": {"rope_theta": None}}}, "'rope_theta' is None"),
        ({"vision": {"rope_parameters": {"rope_theta": -1e4}}}, "'rope_theta' is -10000.0"),
    ],
)
def test_configs_of_qwen2_that_are_refused(changes, why):
    fields = json.loads((FOLDERS / "qwen2_vl" / "config.json").read_text())
    assert_refused(Qwen2VLConfig, fields, changes, why)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "qwen3_vl_moe"}, "model_type 'qwen3_vl_moe' .* expected 'qwen3_vl'"),
        ({"vision": {"num_position_embeddings": 24}}, r"embeddings 24 \(not a square\)"),
        ({"vision": {"deepstack_visual_indexes": [0, 4]}}, r"\[0, 4\] with 4 layers"),
        ({"text_config": "qwen3"}, "is not a qwen3_vl configuration"),
        ({"rope": {"mrope_section": [12, 2, 2]}}, r"\[12, 2, 2\]; expected three integers"),
        ({"rope": {"mrope_section": 4}}, "'mrope_section' is 4; expected three integers"),
        ({"rope": {"mrope_section": ["2", "1", "1"]}}, "expected three integers"),
        ({"rope": {"mrope_section": [10, -1, -1]}}, "expected three integers"),
    ],
)
def test_configs_of_qwen3_that_are_refused(changes, why):
    fields = json.loads((FOLDERS / "qwen3_vl" / "config.json").read_text())
    assert_refused(Qwen3VLConfig, fields, changes, why)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vision_config": None}, "lacks the field 'vision_config'"),
        ({"image_token_id": "x"}, "'image_token_id'"),
        ({"vision": {"out_hidden_size": 40}}, "'out_hidden_size' .* is 40; expected .* 32"),
        ({"vision": {"window_size": 2}}, "window_size 2"),
        ({"vision": {"tokens_per_second": 0}}, "'tokens_per_second' is 0"),
        ({"rope": {"rope_type": "linear", "factor": 2.0}}, "RoPE scaling 'linear' with images"),
    ],
)
def test_configs_that_are_refused(changes, why):
    assert_refused(QwenVLConfig, fields_of(), changes, why)


def assert_refused(family, fields, changes, why):
    fields["vision_config"] |= changes.pop("vision", {})
    fields["text_config"]["rope_parameters"] |= changes.pop("rope", {})
    with pytest.raises(ValueError, match=why) as error:
        family.from_dict(fields | changes, source="here/config.json")
    assert "here/config.json" in str(error.value)


def image(grid, width=24):
    return Image(patches=np.zeros((np.prod(grid), width), np.float32), grid=grid)


@pytest.mark.parametrize(
    ("ids", "images", "why"),
    [
        ([90] * 5, [image((1, 4, 4))], "has 5 image tokens .* expected 4 for its 1 images"),
        ([90] * 4, [image((1, 3, 4))], r"grid of \(1, 3, 4\) patches; expected .* multiples of 2"),
        ([90] * 4, [image((1, 4, 4), width=7)], r"patches \[16, 7\]; expected \[16, 24\]"),
        (
            [90, 90, 1, 90, 90],
            [image((1, 4, 4))],
            r"not contiguous; expected runs of lengths \[4\]",
        ),
    ],
)
def test_images_that_do_not_fit_their_tokens(ids, images, why):
    with pytest.raises(ValueError, match=why):
        golden()[0].tower.compute_positions(np.array([1, *ids, 2]), images)


def test_equal_images_have_equal_digests_and_others_have_not():
    blank = image((1, 4, 4))
    assert blank.digest == image((1, 4, 4)).digest
    assert blank.digest != image((1, 2, 8)).digest
    patches = blank.patches.copy()
    patches[3, 3] = 1e-3
    assert blank.digest != dataclasses.replace(blank, patches=patches).digest
