"""Writes the reference models of `tests/models/test_parity.py`; run with torch installed.

    python tests/golden/make_golden.py

Each is a folder in Hugging Face format with a small random `transformers` model, and
`golden.npz`: input ids `[B, T]`, the embeddings and the first layer's output `[B, T, D]`, and the
logits `[B, T, V]`, all computed by `transformers` in float32. Those with experts have the gradients
of a loss too: `gradient/` and the name of a parameter of `transformers`. `rope_scaling.json` has
frequencies of scaled rotary embeddings and the factor of their cosines and sines.

Names behind the command make these models only.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SMALL = {
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "vocab_size": 112,
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "head_dim": 8,
}

HYBRID = {
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-4,  # less rounding where a delta net's output is almost 0
    "shared_expert_intermediate_size": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope": {"partial_rotary_factor": 0.5},
}
HYBRID_KINDS = Qwen3_5TextConfig, Qwen3_5MoeTextConfig, Qwen3NextConfig
MOE_KINDS = Qwen3MoeConfig, Qwen3_5MoeTextConfig, Qwen3NextConfig


def small(kind: Any, *, rope_theta: float = 1e6, rope: Any = None, **changes: Any) -> Any:
    """Return a configuration of `kind` with changes to `SMALL`."""
    rope_parameters = {"rope_type": "default", "rope_theta": rope_theta, **(rope or {})}
    return kind(**{**SMALL, **changes}, rope_parameters=rope_parameters)


MODELS = {
    "qwen2_tied": small(
        Qwen2Config,
        vocab_size=256,
        hidden_size=48,
        intermediate_size=80,
        tie_word_embeddings=True,
    ),
    "qwen3_untied": small(
        Qwen3Config,
        vocab_size=288,
        hidden_size=40,
        intermediate_size=72,
        num_attention_heads=6,
        head_dim=16,  # not hidden_size / num_attention_heads
        rope_theta=5e6,
    ),
    "qwen3_biased_bf16": small(
        Qwen3Config,
        num_hidden_layers=3,
        vocab_size=256,
        intermediate_size=64,
        num_key_value_heads=4,
        head_dim=8,
        attention_bias=True,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        dtype="bfloat16",
    ),
    "qwen2_old_spelling": small(
        Qwen2Config,
        vocab_size=320,  # of which a tokenizer would know 300
        intermediate_size=64,
        num_key_value_heads=1,
        rope_theta=50_000.0,
    ),
    # Pretrained on 8 tokens, so that the 20 of the test are far.
    "qwen3_yarn": small(
        Qwen3Config,
        max_position_embeddings=32,
        head_dim=16,
        rope_theta=1000.0,
        rope={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 2.0,
            "beta_slow": 0.25,
        },
        tie_word_embeddings=True,
    ),
    "qwen2_yarn_old_spelling": small(
        Qwen2Config,
        max_position_embeddings=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_theta=100.0,
        rope={
            "rope_type": "yarn",
            "factor": 3.0,
            "beta_fast": 4.0,
            "mscale": 1.5,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    ),
    "qwen3_moe": small(
        Qwen3MoeConfig,
        **EXPERTS | {"norm_topk_prob": False},
        num_experts=6,
        num_experts_per_tok=3,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3_moe_mixed": small(
        Qwen3MoeConfig,
        **EXPERTS,
        num_hidden_layers=5,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    ),
    "qwen3_moe_sparse_step": small(
        Qwen3MoeConfig,
        **EXPERTS,
        num_hidden_layers=3,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
    ),
    "llama_tied": small(
        LlamaConfig,
        hidden_size=36,
        intermediate_size=56,
        num_attention_heads=6,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    ),
    # Waves of 6 to 400 tokens: some are unchanged, some divided, some between.
    "llama3_biased": small(
        LlamaConfig,
        max_position_embeddings=128,
        num_key_value_heads=4,
        head_dim=12,
        attention_bias=True,
        rope_theta=100.0,
        rope={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral_old_spelling": small(MistralConfig, head_dim=16, sliding_window=None),
    "qwen3_5": small(
        Qwen3_5TextConfig,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        vocab_size=112,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope={"partial_rotary_factor": 0.25},
    ),
    "qwen3_5_moe": small(
        Qwen3_5MoeTextConfig,
        **EXPERTS | HYBRID,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "qwen3_next": small(
        Qwen3NextConfig,
        **EXPERTS | HYBRID | {"norm_topk_prob": False},
        num_experts=5,
        num_experts_per_tok=3,
        mlp_only_layers=[1],
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    ),
}

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 2.5},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0},  # which does nothing alone
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
]
"""Settings of `rope_scaling`, each computed with two bases and sizes of heads."""

BALANCE_COEF = 0.1
"""Of the load-balance loss in the gradients; what is published is too little to show."""


def randomize(model: torch.nn.Module) -> None:
    """Draw weights at which every parameter matters: no zero biases, no norm scales of one."""
    # Most norms of the decoder add one to their scale.
    adds_one = isinstance(model.config, (*HYBRID_KINDS, Qwen3_5Config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.5)
            elif name.endswith("A_log"):
                weight.uniform_(-2.0, 2.5)
            elif weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
                if adds_one and "linear_attn" not in name and "visual" not in name:
                    weight.sub_(1.0)
            else:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)


def reference(model: Any, token_ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Return what `transformers` computes for `token_ids`, in float32."""
    with torch.no_grad():
        out = model.float().eval()(token_ids, output_hidden_states=True)
    return {
        "token_ids": token_ids.numpy().astype(np.int32),
        "embeddings": out.compute_hidden_states[0].numpy(),
        "first_layer": out.compute_hidden_states[1].numpy(),
        "logits": out.logits.numpy(),
    }


def gradients(model: Any, token_ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the gradient of the next-token loss and the routers' balance, and both losses."""
    mask = torch.ones_like(token_ids)
    mask[1, -6:] = 0  # padding
    labels = torch.where(mask.bool(), token_ids, -100)
    model.router_aux_loss_coef = BALANCE_COEF
    model.zero_grad()
    out = model(token_ids, attention_mask=mask, labels=labels, output_router_logits=True)
    out.loss.backward()
    by_name = {f"gradient/{name}": p.grad.numpy() for name, p in model.named_parameters()}
    losses = {"loss": out.loss.detach().numpy(), "balance_loss": out.aux_loss.detach().numpy()}
    return {**by_name, **losses, "mask": mask.numpy()}


def spell_as_before_transformers_5(file: Path) -> None:
    """Rewrite a `config.json` with the names of transformers 4."""
    fields = json.loads(file.read_text(encoding="utf-8"))
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if kind != "default":
        rope.pop("original_max_position_embeddings")  # those of the model
        fields["rope_scaling"] = {"type": kind, **rope}
    fields["torch_dtype"] = fields.pop("dtype")
    fields.pop("layer_types", None)
    if "use_sliding_window" in fields:
        fields["sliding_window"] = 4096  # as published: set, and switched off by that
    fields["transformers_version"] = "4.51.0"
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def scaled_frequencies() -> list[dict[str, Any]]:
    """Return frequencies and attention factors of `transformers` for `SCALINGS`."""
    computed = []
    for theta, head_dim in ((1e6, 128), (10_000.0, 64)):
        for scaling in SCALINGS:
            config = Qwen3Config(
                max_position_embeddings=40960,
                head_dim=head_dim,
                rope_parameters={"rope_theta": theta, **scaling},
            )
            frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
            computed.append(
                {
                    "rope_parameters": {"rope_theta": theta, **scaling},
                    "head_dim": head_dim,
                    "frequencies": [float(x) for x in frequencies.numpy()],
                    "attention_factor": factor,
                }
            )
    return computed


def main() -> None:
    """Replace the folders of the models beside this file."""
    text = json.dumps(scaled_frequencies(), indent=1) + "\n"
    (Path(__file__).parent / "rope_scaling.json").write_text(text, encoding="utf-8")
    for seed, (name, config) in enumerate(MODELS.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(seed)
        folder = Path(__file__).parent / name
        shutil.rmtree(folder, ignore_errors=True)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        if isinstance(config, MOE_KINDS):
            model.set_experts_implementation("eager")  # one expert after another
        randomize(model)
        model.save_pretrained(folder)
        if name.endswith("old_spelling"):
            spell_as_before_transformers_5(folder / "config.json")
        is_hybrid = isinstance(config, HYBRID_KINDS)  # 70 tokens are more than a chunk
        token_ids = torch.randint(0, config.vocab_size, (2, 70 if is_hybrid else 20))
        arrays = reference(model, token_ids)
        if isinstance(config, MOE_KINDS):
            arrays |= gradients(model, token_ids)
        save = np.savez_compressed if len(arrays) > 4 else np.savez
        save(folder / "golden.npz", **arrays)


if __name__ == "__main__":
    main()
