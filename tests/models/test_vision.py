"""Qwen2.5-VL against `transformers`: tower, positions, logits, gradients; what is refused."""

import dataclasses
import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from jaxrl.models.architecture import read_model
from jaxrl.models.attention.kernels import XLA
from jaxrl.models.attention.reference import LOWEST
from jaxrl.models.hf_weights import hf_places, load_hf, save_hf
from jaxrl.models.layers import Through
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.qwen_vl import QwenVLConfig
from jaxrl.models.vision import attend_windows, attend_within
from jaxrl.types import Image
from tests.vision import FOLDER, golden, logits_of


def test_the_tower_sees_what_the_reference_sees():
    config, params, wanted, images = golden()
    order = [2, 0, 1]  # beside others, and behind padding, as alone
    arranged = config.vision.arrange([images[i] for i in order])
    padding = [(0, 24), (0, 0)]
    rows = (np.pad(x, padding)[None] for x in (arranged.patches, arranged.places))
    seen = jax.jit(config.vision.embeddings, static_argnums=3)(params["vision"], *rows, Through())
    found = {i: seen[0][units] for i, units in zip(order, arranged.units, strict=True)}
    features = jnp.concatenate([found[i] for i in range(3)])
    np.testing.assert_allclose(features, wanted["features"], atol=1e-4, rtol=0)


def test_positions_by_hand():
    """3 tokens, an image of 2 x 2 units, 2 tokens: the numbers of the source's figure."""
    config = golden()[0]
    image = Image(patches=np.zeros((16, config.vision.patch_values), np.float32), grid=(1, 4, 4))
    ids = np.array([1, 2, 3, *[config.vision.image_id] * 4, 4, 5])
    found = config.vision.rotary_positions(ids, [image])
    assert found.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 3, 4, 4, 5, 6],
        [0, 1, 2, 3, 4, 3, 4, 5, 6],
    ]
    again = config.vision.rotary_positions(ids[3:], [image], start=3)
    assert (again == found[:, 3:]).all()
    assert config.vision.rotary_positions(ids[:3], []).tolist() == [[0, 1, 2]] * 3


def test_positions_are_those_of_the_reference():
    config, _, wanted, images = golden()
    found = config.vision.rotary_positions(wanted["token_ids"][0], images)
    np.testing.assert_array_equal(found, wanted["positions"][:, 0])


def test_logits_are_those_of_the_reference_and_an_image_matters():
    config, params, wanted, images = golden()
    ids = wanted["token_ids"][0]
    blank = [dataclasses.replace(one, patches=np.zeros_like(one.patches)) for one in images]
    rows = {"rows": [ids] * 3, "images_of_rows": [images, images, blank]}  # on three devices
    real, again, nothing = jax.jit(partial(logits_of, config, **rows))(params)
    is_text = ~np.isin(np.arange(config.vocab_size), [config.vision.image_id, config.video_id])
    expected = wanted["logits"][0][:, is_text]
    for logits in real, again:
        np.testing.assert_allclose(logits[:, is_text], expected, atol=2e-4, rtol=0)
        assert (logits[:, ~is_text] == LOWEST).all()
    assert abs(real - nothing)[-1].max() > 0.1
    np.testing.assert_array_equal(real[:4], nothing[:4])  # before the first image


def test_gradients_are_those_of_the_reference():
    config, params, wanted, images = golden()
    ids = wanted["token_ids"][0]
    at = np.flatnonzero(ids[1:] != config.vision.image_id) + 1

    def loss(params):
        logits = logits_of(config, params, [ids], [images], through=Through(remat="names"))[0]
        return -jax.nn.log_softmax(logits)[at - 1, ids[at]].mean()

    found = flatten_dict(jax.jit(jax.grad(loss))(params), sep="/")
    difference = total = 0.0
    for name, place in hf_places(config).items():
        leaf = found[place.param][place.index]
        gradient, expected = leaf.T if place.is_transposed else leaf, wanted[f"gradient/{name}"]
        difference += ((gradient - expected) ** 2).sum()
        total += (expected**2).sum()
        assert abs(expected).max() > 0, name
        relative = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
        assert relative < 2e-3, name  # of each tensor, however small its gradient is
    assert (difference / total) ** 0.5 < 1e-4


def test_text_alone_is_as_by_the_decoder():
    config, params, wanted, _ = golden()
    ids = jnp.asarray(wanted["token_ids"][:, :3])
    names = {field.name for field in dataclasses.fields(QwenConfig)}
    text = QwenConfig(**{name: getattr(config, name) for name in names})
    positions = jnp.arange(3)[None]
    attend = XLA.within(jnp.ones_like(ids), positions)
    of_text = {name: entry for name, entry in params.items() if name != "vision"}
    found, wanted = (
        jax.jit(one.hidden_states, static_argnums=(3, 4))(tree, ids, positions, attend, Through())
        for one, tree in ((config, params), (text, of_text))
    )
    np.testing.assert_array_equal(found, wanted)


def test_windows_are_as_whole_attention_with_windows_for_numbers():
    rng = np.random.default_rng(0)
    q, k, v = jnp.asarray(rng.standard_normal((3, 2, 23, 2, 4)), jnp.float32)
    sizes = [4, 1, 3, 4, 4, 2, 5]  # the last are padding, longer than any window
    ids = np.repeat([0, 1, 2, 3, 4, 5, -1], sizes)
    ids = np.stack([ids, np.repeat([0, 1, 2, 3, 4, 5], [2, 4, 4, 4, 4, 5])])
    ids[1, 18:] = -1
    found = attend_windows(q, k, v, jnp.asarray(ids), most=4)
    wanted = attend_within(q, k, v, jnp.asarray(ids))
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
    assert read_model(tmp_path / "fresh") == config
    jax.tree.map(np.testing.assert_array_equal, params, load_hf(tmp_path / "fresh"))


def fields_of(**changes):
    return json.loads((FOLDER / "config.json").read_text()) | changes


def test_config_as_published():
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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "qwen2_vl"}, "model_type 'qwen2_vl'"),
        ({"vision_config": None}, "lacks the field 'vision_config'"),
        ({"image_token_id": "x"}, "'image_token_id'"),
        ({"vision": {"hidden_act": "quick_gelu"}}, "hidden_act 'quick_gelu' in 'vision_config'"),
        ({"vision": {"depth": 0}}, "'depth' is 0"),
        ({"vision": {"out_hidden_size": 40}}, "'out_hidden_size' .* is 40; expected .* 32"),
        ({"vision": {"window_size": 2}}, "window_size 2"),
        ({"rope": {"rope_type": "linear", "factor": 2.0}}, "RoPE scaling 'linear' with images"),
        ({"sections": [4, 4, 4]}, r"'mrope_section' is \[4, 4, 4\]; .* half of a head, 4"),
    ],
)
def test_configs_that_are_refused(changes, why):
    fields = fields_of()
    fields["vision_config"] |= changes.pop("vision", {})
    fields["text_config"]["rope_parameters"] |= changes.pop("rope", {})
    if "sections" in changes:
        fields["text_config"]["rope_parameters"]["mrope_section"] = changes.pop("sections")
    with pytest.raises(ValueError, match=why) as error:
        QwenVLConfig.from_dict(fields | changes, source="here/config.json")
    assert "here/config.json" in str(error.value)


def image(grid, width=24):
    return Image(patches=np.zeros((np.prod(grid), width), np.float32), grid=grid)


@pytest.mark.parametrize(
    ("num_ids", "images", "why"),
    [
        (5, [image((1, 4, 4))], "has 5 image tokens .* expected 4 for its 1 images with grids"),
        (4, [], "has 4 image tokens .id 90.; expected 0 for its 0 images"),
        (4, [image((1, 3, 4))], r"grid of \(1, 3, 4\) patches; expected .* multiples of 2"),
        (4, [image((2, 4, 4))], "one moment in time"),
        (4, [image((1, 4, 4), width=7)], r"patches \[16, 7\]; expected \[16, 24\]"),
    ],
)
def test_images_that_do_not_fit_their_tokens(num_ids, images, why):
    config = golden()[0]
    ids = np.array([1, *[config.vision.image_id] * num_ids, 2])
    with pytest.raises(ValueError, match=why):
        config.vision.rotary_positions(ids, images)


def test_an_image_in_two_places_is_refused():
    config = golden()[0]
    ids = np.array([90, 90, 1, 90, 90])
    with pytest.raises(ValueError, match=r"not side by side; expected runs of \[4\]"):
        config.vision.rotary_positions(ids, [image((1, 4, 4))])


def test_equal_images_are_told_from_others():
    one = image((1, 4, 4))
    assert one.digest == image((1, 4, 4)).digest
    assert one.digest != image((1, 2, 8)).digest
    other = one.patches.copy()
    other[3, 3] = 1e-3
    assert one.digest != dataclasses.replace(one, patches=other).digest
