"""Writes the reference models of `tests/models/test_parity.py`; run with torch installed.

    python tests/golden/make_golden.py

Each is a folder in Hugging Face format with a small random `transformers` model, and
`golden.npz`: input ids `[B, T]`, the embeddings and the first layer's output `[B, T, D]`, and the
logits `[B, T, V]`, all computed by `transformers` in float32.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

SHARED = {"num_hidden_layers": 2, "hidden_act": "silu", "max_position_embeddings": 4096}

MODELS = {
    "qwen2_tied": Qwen2Config(
        **SHARED,
        vocab_size=256,
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ),
    "qwen3_untied": Qwen3Config(
        **SHARED,
        vocab_size=288,
        hidden_size=40,
        intermediate_size=72,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,  # not hidden_size / num_attention_heads
        rope_parameters={"rope_type": "default", "rope_theta": 5e6},
        tie_word_embeddings=False,
    ),
    "qwen3_biased_bf16": Qwen3Config(
        **{**SHARED, "num_hidden_layers": 3},
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        attention_bias=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        dtype="bfloat16",
    ),
    "qwen2_old_spelling": Qwen2Config(
        **SHARED,
        vocab_size=320,  # of which a tokenizer would know 300
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=False,
    ),
}


def randomize(model: torch.nn.Module) -> None:
    """Weights at which every parameter matters: no zero biases, no norm scales of one."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.5)
            elif weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)


def reference(model: Any, token_ids: torch.Tensor) -> dict[str, np.ndarray]:
    """What `transformers` computes for `token_ids`, in float32."""
    with torch.no_grad():
        out = model.float().eval()(token_ids, output_hidden_states=True)
    return {
        "token_ids": token_ids.numpy().astype(np.int32),
        "embeddings": out.hidden_states[0].numpy(),
        "first_layer": out.hidden_states[1].numpy(),
        "logits": out.logits.numpy(),
    }


def spell_as_before_transformers_5(file: Path) -> None:
    """Rewrites a `config.json` with the names of transformers 4."""
    fields = json.loads(file.read_text(encoding="utf-8"))
    fields["rope_theta"] = fields.pop("rope_parameters")["rope_theta"]
    fields["torch_dtype"] = fields.pop("dtype")
    fields.pop("layer_types", None)
    fields["sliding_window"] = 4096  # as published: set, and switched off by use_sliding_window
    fields["transformers_version"] = "4.51.0"
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Replaces every model's folder beside this file."""
    for seed, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        folder = Path(__file__).parent / name
        shutil.rmtree(folder, ignore_errors=True)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        randomize(model)
        model.save_pretrained(folder)
        if name == "qwen2_old_spelling":
            spell_as_before_transformers_5(folder / "config.json")
        token_ids = torch.randint(0, config.vocab_size, (2, 20))
        np.savez(folder / "golden.npz", **reference(model, token_ids))


if __name__ == "__main__":
    main()
