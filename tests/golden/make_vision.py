"""Writes the reference model of `tests/models/test_vision.py`; run with torch installed.

    python tests/golden/make_vision.py

A folder in Hugging Face format with a small random `transformers` model, and `golden.npz`, all
computed by `transformers` in float32: patches `[P, C]` of images with `grids` `[n, 3]`, ids
`[1, T]` of a sequence with them, the tower's `features`, rotary `positions` `[3, 1, T]`, `logits`
`[1, T, V]`, and as `gradient/<tensor>` the gradient of the mean negative log-probability of all
tokens that stand for no image.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from make_golden import randomize
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

IMAGE, VIDEO, START, END = 90, 91, 92, 93
GRIDS = [(1, 4, 6), (1, 10, 8), (1, 2, 2)]  # windows of 4 x 4 patches, whole and cut

CONFIG = Qwen2_5_VLConfig(
    text_config={
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 1, 1],
        },
        "bos_token_id": None,
        "eos_token_id": None,
    },
    vision_config={
        "depth": 4,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 2,
        "window_size": 8,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1, 3],
    },
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
    tie_word_embeddings=False,
)


def token_ids() -> list[int]:
    """Text around the images and between them."""
    ids = [1, 2, 3]
    for index, (_, h, w) in enumerate(GRIDS):
        ids += [START, *[IMAGE] * (h * w // 4), END, 10 + index]
    return [*ids, 20, 21, 22]


def main() -> None:
    """Replaces the folder beside this file."""
    torch.manual_seed(0)
    folder = Path(__file__).parent / "qwen2_5_vl"
    shutil.rmtree(folder, ignore_errors=True)
    model = Qwen2_5_VLForConditionalGeneration(CONFIG).float().eval()
    randomize(model)
    with torch.no_grad():  # a patch has few values, and more than two axes
        model.model.visual.patch_embed.proj.weight.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    grids = torch.tensor(GRIDS)
    patches = torch.randn(int(grids.prod(dim=1).sum()), 3 * 2 * 2 * 2)
    ids = torch.tensor([token_ids()])
    kinds = (ids == IMAGE).int()
    features = model.model.get_image_features(patches, grids).pooler_output
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
    saved_names = {
        name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        for name, _ in model.named_parameters()
    }
    np.savez(
        folder / "golden.npz",
        patches=patches.numpy(),
        grids=grids.numpy().astype(np.int32),
        token_ids=ids.numpy().astype(np.int32),
        features=torch.cat(list(features)).detach().numpy(),
        positions=positions.numpy().astype(np.int32),
        logits=logits.detach().numpy(),
        **{
            f"gradient/{saved_names[name]}": weight.grad.numpy()
            for name, weight in model.named_parameters()
        },
    )


if __name__ == "__main__":
    main()
