"""Writes the adapters of `tests/extras/lora/test_lora.py`; run with torch and peft installed.

    python tests/golden/make_lora.py

Each is a folder as PEFT writes it, of one of the models beside it, and `golden.npz`: input ids
`[B, T]`, weights of their tokens `[B, T]`, the logits `[B, T, V]` and by the name of each tensor
the gradient of the weighted sum of log-probabilities of all tokens but the first, all in float32.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
ADAPTERS = {
    "lora_all_linear": ("qwen3_untied", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "lora_rank_stabilised": (
        "qwen2_tied",
        {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    ),
}


def adapted(source: Path, settings: dict[str, Any]) -> Any:
    """A model with an adapter that changes it: PEFT's new ones do not."""
    model = AutoModelForCausalLM.from_pretrained(
        source, attn_implementation="eager", dtype="float32"
    )
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.3)
    return model.eval()


def reference(model: Any, token_ids: torch.Tensor, weights: torch.Tensor) -> dict[str, np.ndarray]:
    """What PEFT and torch compute."""
    logits = model(token_ids).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, token_ids[:, 1:, None])[..., 0]
    (logprobs * weights[:, 1:]).sum().backward()
    gradients = {
        name.replace(".default", ""): weight.grad.numpy()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    return {
        "token_ids": token_ids.numpy().astype(np.int32),
        "weights": weights.numpy(),
        "logits": logits.detach().numpy(),
        **gradients,
    }


def main() -> None:
    """Replaces every adapter's folder beside this file."""
    for seed, (name, (source, settings)) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = adapted(HERE / source, settings)
        model.peft_config["default"].base_model_name_or_path = source
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        token_ids = torch.randint(0, model.config.vocab_size, (2, 14))
        weights = torch.randn(2, 14)
        np.savez(folder / "golden.npz", **reference(model, token_ids, weights))


if __name__ == "__main__":
    main()
