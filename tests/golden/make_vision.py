"""Writes the reference models of `tests/extras/vision/test_qwen_vision.py`; run with torch.

    python tests/golden/make_vision.py

Each is a folder in Hugging Face format with a small random `transformers` model, and `golden.npz`,
all computed by `transformers` in float32: patches `[P, C]` of images with `grids` `[n, 3]`, ids
`[1, T]` of a sequence with them, the tower's `features`, behind them those for the first layers of
the decoder, rotary `positions` `[3, 1, T]`, `logits` `[1, T, V]`, and as `gradient/<tensor>` the
gradient of the mean negative log-probability of all tokens that stand for no image.

Names behind the command make these models only.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from make_golden import randomize
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
)

IMAGE, VIDEO, START, END = 90, 91, 92, 93
GRIDS = [(1, 4, 6), (1, 10, 8), (1, 2, 2)]  # windows of 4 x 4 patches, whole and cut

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 32,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MODELS = {
    "qwen2_vl": Qwen2VLConfig(
        text_config={
            **TEXT,
            "num_hidden_layers": 2,
            "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 2,
        },
        **TOKENS,
        tie_word_embeddings=True,
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={
            **TEXT,
            "num_hidden_layers": 2,
            "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            **TOWER,
            "depth": 4,
            "window_size": 8,
            "fullatt_block_indexes": [1, 3],
        },
        **TOKENS,
        tie_word_embeddings=False,
    ),
    # Two of three layers of the decoder look behind two of four of the tower.
    "qwen3_vl": Qwen3VLConfig(
        text_config={
            **TEXT,
            "num_hidden_layers": 3,
            "head_dim": 16,  # not hidden_size / num_attention_heads
            "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        vision_config={
            **TOWER,
            "depth": 4,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
        **TOKENS,
        tie_word_embeddings=True,
    ),
    "qwen3_5_vl": Qwen3_5Config(
        text_config={
            **TEXT,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": {
                **ROPE,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={**TOWER, "depth": 2, "num_position_embeddings": 16},
        **TOKENS,
        tie_word_embeddings=False,
    ),
}


def token_ids() -> list[int]:
    """Text around the images and between them."""
    ids = [1, 2, 3]
    for index, (_, h, w) in enumerate(GRIDS):
        ids += [START, *[IMAGE] * (h * w // 4), END, 10 + index]
    return [*ids, 20, 21, 22]


def make(name: str) -> None:
    """Replaces the folder of that name beside this file."""
    torch.manual_seed(0)
    folder = Path(__file__).parent / name
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForImageTextToText.from_config(MODELS[name]).float().eval()
    randomize(model)
    with torch.no_grad():  # a patch has few values, and more than two axes
        model.model.visual.patch_embed.proj.weight.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    grids = torch.tensor(GRIDS)
    patches = torch.randn(int(grids.prod(dim=1).sum()), 3 * 2 * 2 * 2)
    ids = torch.tensor([token_ids()])
    kinds = (ids == IMAGE).int()
    seen = model.model.get_image_features(patches, grids)
    depths = [seen.pooler_output, *getattr(seen, "deepstack_features", ())]
    features = torch.cat([torch.cat(list(of_images)) for of_images in depths], dim=1)
    positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=grids)
    logits = model(
        input_ids=ids, pixel_values=patches, image_grid_thw=grids, mm_token_type_ids=kinds
    ).logits
    # As here: what stands for images and videos is never written.
    allowed = logits.clone()
    allowed[..., [IMAGE, VIDEO]] = torch.finfo(torch.float32).min / 2
    wanted = torch.arange(ids.shape[1])[1:][ids[0, 1:] != IMAGE]
    logprobs = allowed.log_softmax(dim=-1)[0, wanted - 1, ids[0, wanted]]
    (-logprobs.mean()).backward()
    saved_names = {tensor: tensor for tensor, _ in model.named_parameters()}
    if name in ("qwen2_vl", "qwen2_5_vl"):  # whose files have other names
        for tensor in saved_names:
            shorter = tensor.replace("model.language_model.", "model.")
            saved_names[tensor] = shorter.replace("model.visual.", "visual.")
    np.savez(
        folder / "golden.npz",
        patches=patches.numpy(),
        grids=grids.numpy().astype(np.int32),
        token_ids=ids.numpy().astype(np.int32),
        features=features.detach().numpy(),
        positions=positions.numpy().astype(np.int32),
        logits=logits.detach().numpy(),
        **{
            f"gradient/{saved_names[tensor]}": weight.grad.numpy()
            for tensor, weight in model.named_parameters()
        },
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        make(name)
