"""The vision models against `transformers` on torch, both run here, on random shapes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.vision.processor import Image
from jaxrl.extras.vision.qwen3_vl import Qwen3Vision, Qwen3VLConfig
from jaxrl.extras.vision.qwen_vl import QwenVLConfig
from jaxrl.extras.vision.vision import QwenVision
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.models.layers import LayerScan
from jaxrl.models.registry import read_architecture
from tests.vision import logits_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch
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
        "video_id": VIDEO,
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
    }


def qwen2_5(seed):
    """A small Qwen2.5-VL."""
    rng = np.random.default_rng(seed)
    decoder = random_decoder(rng)
    tower = random_tower(rng, decoder["width"])
    full = np.flatnonzero(rng.integers(0, 2, tower["num_layers"]))
    window = tower["merge"] * int(rng.integers(1, 4))
    vision = QwenVision(**tower, window=window, full_layers=tuple(map(int, full)))
    kind = {"qkv_bias": True, "output_bias": False, "qk_norm": False}
    return QwenVLConfig(**decoder, **kind, vision=vision)


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
    return Qwen3VLConfig(**decoder, **kind, vision=vision)


FAMILIES = {
    "Qwen2_5_VL": qwen2_5,
    "Qwen3VL": qwen3,
}
"""By the name that transformers gives their classes."""


def reference_class(family):
    return getattr(transformers, f"{family}ForConditionalGeneration")


def random_params(config, seed):
    """Weights at which every parameter matters: no zero biases, no norm scales of one."""
    rng = np.random.default_rng(seed)

    def leaf(path, like):
        name = path[-1].key
        if name == "scale":
            return rng.uniform(0.5, 1.5, like.shape).astype(np.float32)
        fan_in = like.shape[-2] if name == "kernel" else 1
        scale = {"bias": 0.5, "kernel": fan_in**-0.5, "filter": 0.3}.get(name, 1.0)
        return rng.normal(0.0, scale, like.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, config.abstract_params())


def random_images(config, rng, count):
    """Images of all shapes, and a sequence of ids with them."""
    vision, images = config.tower, []
    ids = [*rng.integers(4, config.vocab_size, 3)]
    for _ in range(count):
        h, w = (int(x) * vision.merge for x in rng.integers(1, 6, 2))
        patches = rng.standard_normal((h * w, vision.patch_values), np.float32)
        images.append(Image(patches=patches, grid=(1, h, w)))
        run = [IMAGE] * vision.num_tokens(images[-1])
        ids += [START, *run, *rng.integers(4, config.vocab_size, 1 + rng.integers(3))]
    return images, np.array(ids)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_our_export(tmp_path, family, seed):
    config, rng = FAMILIES[family](seed), np.random.default_rng(seed)
    params = jax.tree.map(jnp.asarray, random_params(config, seed))
    save_hf(params, config, tmp_path / "hf")
    assert read_architecture(tmp_path / "hf") == config
    model = reference_class(family).from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    images, ids = random_images(config, rng, int(rng.integers(1, 4)))
    patches = torch.tensor(np.concatenate([one.patches for one in images]))
    grids = torch.tensor([one.grid for one in images])
    token_ids = torch.tensor(ids[None])
    kinds = (token_ids == IMAGE).int()
    with torch.no_grad():
        found = model.model.get_image_features(patches, grids)
        depths = [found.pooler_output, *getattr(found, "deepstack_features", ())]
        features = torch.cat([torch.cat(list(of_images)) for of_images in depths], dim=1)
        logits = model(
            input_ids=token_ids,
            pixel_values=patches,
            image_grid_thw=grids,
            mm_token_type_ids=kinds,
        ).logits[0]
    collated = config.tower.collate(images)
    see = partial(config.tower.encode, layer_scan=LayerScan(scan=False))
    rows = collated.patches[None], collated.coords[None]
    params = load_hf(tmp_path / "hf")
    seen = jax.jit(see)(params["vision"], *rows)[0][np.concatenate(collated.units)]
    np.testing.assert_allclose(seen, features.numpy(), atol=1e-4, rtol=0)
    run = jax.jit(partial(logits_of, config, rows=[ids], images_of_rows=[images]))
    found = run(params)[0][:, 3:]
    np.testing.assert_allclose(found, logits[:, 3:].numpy(), atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_that_transformers_wrote_comes_back_bit_for_bit(tmp_path, family):
    config = FAMILIES[family](3)
    fields = getattr(transformers, f"{family}Config").from_dict(config.hf_config())
    model = reference_class(family)(fields).bfloat16()
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    assert read_architecture(tmp_path / "source") == config
    params = load_hf(tmp_path / "source")
    save_hf(params, config, tmp_path / "export", source=tmp_path / "source")
    again = reference_class(family).from_pretrained(tmp_path / "export", dtype=torch.bfloat16)
    for (name, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
