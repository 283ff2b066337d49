"""The vision models against `transformers` on torch, both run here, on random shapes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxrl.envs.images import Picture
from jaxrl.extras.vision.processor import HFImageProcessor, Image
from jaxrl.extras.vision.qwen2_vl import Qwen2Vision, Qwen2VLConfig
from jaxrl.extras.vision.qwen3_5 import Qwen35Vision
from jaxrl.extras.vision.qwen3_vl import Qwen3Vision, Qwen3VLConfig
from jaxrl.extras.vision.qwen_vision import QwenVision
from jaxrl.extras.vision.qwen_vl import QwenVLConfig
from jaxrl.models.hf_weights import load_hf, locate_hf_tensors, save_hf
from jaxrl.models.layers import LayerScan
from jaxrl.models.registry import read_architecture, resolve_architecture
from tests.extras.delta_net import models
from tests.extras.hybrid_moe.models import random_experts
from tests.helpers import relative_distance, split_fused
from tests.images import drawn, encoded, save_processor
from tests.vision import logits_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("quick_compilation")]
torch.set_num_threads(1)  # the models are too small to share

IMAGE, VIDEO, START = 1, 2, 3


def random_decoder(rng):
    """Sizes of a small decoder with whatever the families allow."""
    num_kv_heads = int(rng.integers(1, 3))
    num_heads = num_kv_heads * int(rng.integers(1, 3))
    half = int(rng.integers(3, 9))
    cuts = np.sort(rng.choice(np.arange(1, half), 2, replace=False))
    return {
        "vocab_size": int(rng.integers(50, 200)),
        "width": num_heads * 2 * half,
        "mlp_width": int(rng.integers(8, 60)),
        "num_layers": int(rng.integers(1, 4)),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 2 * half,
        "rope_theta": float(rng.choice([1e4, 1e6])),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5])),
        "tie_embeddings": bool(rng.integers(2)),
        "max_positions": 4096,
        "mrope_section": tuple(int(x) for x in np.diff([0, *cuts, half])),
    }


def random_tower(rng, out_width):
    """Sizes of a small tower with whatever the families allow."""
    heads = int(rng.integers(1, 5))
    return {
        "width": 4 * heads * int(rng.integers(1, 5)),
        "mlp_width": int(rng.integers(5, 40)),
        "num_layers": int(rng.integers(1, 5)),
        "num_heads": heads,
        "out_width": out_width,
        "channels": int(rng.integers(1, 4)),
        "patch": int(rng.integers(1, 4)),
        "temporal_patch": int(rng.integers(1, 3)),
        "merge": int(rng.integers(1, 4)),
        "rope_theta": 10_000.0,
        "token_id": IMAGE,
        "video_id": VIDEO,
    }


def qwen2(seed):
    """A small Qwen2-VL."""
    rng = np.random.default_rng(seed)
    decoder = random_decoder(rng)
    tower = random_tower(rng, decoder["width"])
    tower["mlp_width"] = tower["width"] * int(rng.integers(1, 5))
    kind = {"qkv_bias": True, "output_bias": False, "qk_norm": False}
    return Qwen2VLConfig(**decoder, **kind, tower=Qwen2Vision(**tower))


def qwen2_5(seed):
    """A small Qwen2.5-VL."""
    rng = np.random.default_rng(seed)
    decoder = random_decoder(rng)
    tower = random_tower(rng, decoder["width"])
    full = np.flatnonzero(rng.integers(0, 2, tower["num_layers"]))
    window = tower["merge"] * int(rng.integers(1, 4))
    vision = QwenVision(**tower, window=window, full_layers=tuple(map(int, full)))
    kind = {"qkv_bias": True, "output_bias": False, "qk_norm": False}
    return QwenVLConfig(**decoder, **kind, tower=vision)


def qwen3(seed):
    """A small Qwen3-VL, of a width that is not that of its heads."""
    rng = np.random.default_rng(seed)
    decoder = random_decoder(rng)
    decoder["width"] += 2 * int(rng.integers(0, 3))
    tower = random_tower(rng, decoder["width"])
    most = min(tower["num_layers"], decoder["num_layers"])
    deep = rng.choice(tower["num_layers"], rng.integers(1, most + 1), replace=False)
    vision = Qwen3Vision(
        **tower, side=int(rng.integers(1, 9)), deepstack_layers=tuple(sorted(map(int, deep)))
    )
    has_bias = bool(rng.integers(2))
    kind = {"qkv_bias": has_bias, "output_bias": has_bias, "qk_norm": True}
    return Qwen3VLConfig(**decoder, **kind, tower=vision)


def qwen3_5(seed):
    """A small Qwen3.5, part of whose heads is rotated."""
    rng = np.random.default_rng(seed)
    decoder = random_decoder(rng)
    parts = int(rng.integers(1, 5))
    num_key_heads = int(rng.integers(1, 3))
    num_layers = decoder["num_layers"] + 1
    attention = rng.choice(num_layers, rng.integers(1, num_layers), replace=False)
    tower = random_tower(rng, decoder["width"])
    return resolve_architecture({"model_type": "qwen3_5"}, "", "config.json")(
        **decoder
        | {
            "num_layers": num_layers,
            "head_dim": parts * decoder["head_dim"],
            "rotary_fraction": 1 / parts,
        },
        **{"qkv_bias": False, "output_bias": False, "qk_norm": True, "has_tower": True},
        attention_layers=tuple(sorted(map(int, attention))),
        num_key_heads=num_key_heads,
        num_value_heads=num_key_heads * int(rng.integers(1, 3)),
        key_dim=int(rng.integers(8, 17)),
        value_dim=int(rng.integers(8, 17)),
        conv_width=int(rng.integers(2, 5)),
        tower=Qwen35Vision(**tower, side=int(rng.integers(1, 9))),
    )


def qwen3_5_moe(seed):
    """A small Qwen3.5 with experts in every layer."""
    dense = qwen3_5(seed)
    experts = random_experts(np.random.default_rng(seed), dense.num_layers)
    return resolve_architecture({"model_type": "qwen3_5_moe"}, "", "config.json")(
        **vars(dense) | experts | {"mlp_width": experts["shared_width"]}
    )


FAMILIES = {
    "Qwen2VL": qwen2,
    "Qwen2_5_VL": qwen2_5,
    "Qwen3VL": qwen3,
    "Qwen3_5": qwen3_5,
    "Qwen3_5Moe": qwen3_5_moe,
}
"""By the name that transformers gives their classes."""


def reference_class(family):
    return getattr(transformers, f"{family}ForConditionalGeneration")


def load_reference(family, folder):
    """Load an export into the class of transformers, in float32."""
    model = reference_class(family).from_pretrained(folder, dtype=torch.float32).eval()
    if family.endswith("Moe"):
        model.set_experts_implementation("eager")  # one expert after another
    return model


def random_params(config, seed):
    """Weights at which every parameter matters; those of a hybrid are like published ones."""
    params = random_weights(config, seed)
    if config.recurrent_module:
        hybrid = models.random_params(config, seed)
        params = {name: hybrid[name] if name != "vision" else params[name] for name in params}
    return params


def random_weights(config, seed):
    """Weights at which every parameter matters: no zero biases, no norm scales of one."""
    rng = np.random.default_rng(seed)

    def leaf(path, like):
        name = path[-1].key
        if name == "scale":
            return rng.uniform(0.5, 1.5, like.shape).astype(np.float32)
        fan_in = like.shape[-2] if name == "kernel" else 1
        scale = {"bias": 0.5, "kernel": fan_in**-0.5, "filter": 0.3}.get(name, 1.0)
        return rng.normal(0.0, scale, like.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, config.make_abstract_params())


def random_images(config, rng, count):
    """Images of all shapes, and a sequence of ids with them."""
    tower, images = config.tower, []
    ids = [*rng.integers(4, config.vocab_size, 3)]
    for _ in range(count):
        h, w = (int(x) * tower.merge for x in rng.integers(1, 6, 2))
        patches = rng.standard_normal((h * w, tower.num_values_per_patch), np.float32)
        images.append(Image(patches=patches, grid=(1, h, w)))
        run = [IMAGE] * tower.count_tokens(images[-1])
        ids += [START, *run, *rng.integers(4, config.vocab_size, 1 + rng.integers(3))]
    return images, np.array(ids)


def make_inputs(ids, images):
    """Return the inputs of the reference."""
    token_ids = torch.tensor(ids[None])
    return {
        "input_ids": token_ids,
        "pixel_values": torch.tensor(np.concatenate([image.patches for image in images])),
        "image_grid_thw": torch.tensor([image.grid for image in images]),
        "mm_token_type_ids": (token_ids == IMAGE).int(),
    }


def is_text(config):
    """Return a mask of the ids that are not masked out."""
    return ~np.isin(np.arange(config.vocab_size), [IMAGE, VIDEO])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_our_export(tmp_path, family, seed):
    config, rng = FAMILIES[family](seed), np.random.default_rng(seed)
    params = jax.tree.map(jnp.asarray, random_params(config, seed))
    save_hf(params, config, tmp_path / "hf")
    assert read_architecture(tmp_path / "hf") == config
    model = load_reference(family, tmp_path / "hf")
    images, ids = random_images(config, rng, int(rng.integers(1, 4)))
    inputs = make_inputs(ids, images)
    patches, grids = inputs["pixel_values"], inputs["image_grid_thw"]
    with torch.no_grad():
        found = model.model.get_image_features(patches, grids)
        depths = [found.pooler_output, *getattr(found, "deepstack_features", ())]
        features = torch.cat([torch.cat(list(of_images)) for of_images in depths], dim=1)
        kinds = inputs["mm_token_type_ids"]
        positions, _ = model.model.get_rope_index(inputs["input_ids"], kinds, image_grid_thw=grids)
        logits = model(**inputs).logits[0]
    np.testing.assert_array_equal(config.tower.compute_positions(ids, images).T, positions[:, 0])
    collated = config.tower.collate(images)
    see = partial(config.tower.encode, layer_scan=LayerScan(scan=False))
    rows = collated.patches[None], collated.coords[None]
    params = load_hf(tmp_path / "hf")
    seen = jax.jit(see)(params["vision"], *rows)[0][np.concatenate(collated.units)]
    np.testing.assert_allclose(seen, features.numpy(), atol=1e-4, rtol=0)
    run = jax.jit(partial(logits_of, config, rows=[ids], images_of_rows=[images]))
    ours, theirs = (x[:, is_text(config)] for x in (run(params)[0], logits.numpy()))
    np.testing.assert_allclose(
        jax.nn.log_softmax(ours), jax.nn.log_softmax(theirs), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_has_the_gradients_of_transformers(tmp_path, family, seed):
    config, rng = FAMILIES[family](seed), np.random.default_rng(seed)
    params = jax.tree.map(jnp.asarray, random_params(config, seed))
    save_hf(params, config, tmp_path / "hf")
    model = load_reference(family, tmp_path / "hf")
    images, ids = random_images(config, rng, 2)
    at = np.flatnonzero(ids[1:] != IMAGE) + 1
    allowed = model(**make_inputs(ids, images)).logits[0]
    allowed = allowed.masked_fill(torch.tensor(~is_text(config)), torch.finfo().min / 2)
    (-allowed.log_softmax(dim=-1)[at - 1, ids[at]].mean()).backward()
    theirs = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    theirs = split_fused(theirs, config)

    def loss(params):
        logits = logits_of(config, params, [ids], [images])[0]
        return -jax.nn.log_softmax(logits)[at - 1, ids[at]].mean()

    leaves = flatten_dict(jax.jit(jax.grad(loss))(params), sep="/")
    prefixes = {prefix: theirs for theirs, prefix in config.get_hf_prefix_map().items()}
    ours = {}
    for name, location in locate_hf_tensors(config).items():
        gradient = np.asarray(leaves[location.param][location.index])
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        name = prefixes.get(prefix, "") + name.removeprefix(prefix)
        ours[name] = gradient.T if location.is_transposed else gradient
    assert ours.keys() == theirs.keys()
    assert relative_distance(ours, theirs) < 1e-4


@pytest.mark.parametrize("size", [(5, 7), (90, 33), (64, 64)])
def test_pixel_values_are_those_of_the_processor_of_transformers(tmp_path, size):
    folder = save_processor(tmp_path, min_pixels=256, max_pixels=2048)
    image = drawn(*size)
    theirs = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")(
        image, return_tensors="np"
    )
    ours = HFImageProcessor(folder)(Picture(data=encoded(image)))
    assert ours.grid == tuple(theirs["image_grid_thw"][0])
    np.testing.assert_array_equal(ours.patches, theirs["pixel_values"])


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_that_transformers_wrote_comes_back_bit_for_bit(tmp_path, family):
    config = FAMILIES[family](3)
    fields = getattr(transformers, f"{family}Config").from_dict(config.to_hf_config())
    model = reference_class(family)(fields).bfloat16()
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    assert read_architecture(tmp_path / "source") == config
    params = load_hf(tmp_path / "source")
    save_hf(params, config, tmp_path / "export", source=tmp_path / "source")
    again = reference_class(family).from_pretrained(tmp_path / "export", dtype=torch.bfloat16)
    for (name, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
