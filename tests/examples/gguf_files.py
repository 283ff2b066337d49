"""GGUF files of small models, written with the package gguf from a Hugging Face folder."""

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import load_file
from tokenizers import models, normalizers, pre_tokenizers, trainers

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = ["The bridge at Avington was designed by Ada Kerr in 1871, it's said.\n\n  Né à Łódź."] * 3
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}


def make_tokenizer(pre):
    """Return a tokenizer that cuts texts as llama.cpp's `pre` says.

    Special tokens have the first ids of smollm's vocabulary, and the last of qwen2's.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if pre == "smollm":
        pieces = [pre_tokenizers.Digits(individual_digits=True)]
        pieces += [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        pieces = [pre_tokenizers.Split(tokenizers.Regex(GPT4), "isolated")]
        pieces += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL if pre == "smollm" else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def permuted(weight, heads):
    """Return the rows in llama.cpp's order: rows i and i + H/2 of a head are neighbors."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensors_of(folder):
    """Return the folder's tensors with llama.cpp's names and order of rows."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stem, _, end = name.rpartition(".")
        layer, rest = "", stem
        if stem.startswith("model.layers."):
            _, _, number, rest = stem.split(".", 3)
            layer = f"blk.{number}."
        if config["model_type"] == "llama" and rest == "self_attn.q_proj":
            weight = permuted(weight, config["num_attention_heads"])
        if config["model_type"] == "llama" and rest == "self_attn.k_proj":
            weight = permuted(weight, config["num_key_value_heads"])
        tensors[f"{layer}{NAMES[rest]}.{end}"] = weight
    return tensors


def write_gguf(path, folder, kind="F32", *, pre="qwen2", tensors=None, kinds=None, **changes):
    """Write the folder's model: norms and biases as F32, matrices as `kind`.

    Args:
        path: File to write.
        folder: Model folder in Hugging Face format.
        kind: Quantization of the matrices.
        pre: Value of `tokenizer.ggml.pre`. An unknown one gets qwen2's vocabulary.
        tensors: Tensors in place of the folder's, by llama.cpp's names.
        kinds: Quantizations of single tensors.
        changes: Metadata to set, with `__` for a dot; None leaves the key out.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    family = changes.pop("general__architecture", config["model_type"])
    writer = gguf.GGUFWriter(path, family)
    tokenizer = make_tokenizer(pre)
    vocabulary = {id: token for token, id in tokenizer.get_vocab().items()}
    added = tokenizer.get_added_tokens_decoder()
    tokens = [vocabulary[id] for id in range(len(vocabulary))]
    types = [1 if id not in added else 3 if added[id].special else 4 for id in range(len(tokens))]
    for id in range(len(tokens), config["vocab_size"]):  # rows without a token
        tokens.append(f"[PAD{id}]")
        types.append(5)
    spec = json.loads(tokenizer.to_str())
    values = {
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.key_length": config["head_dim"],
        f"{family}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{family}.rope.freq_base": config["rope_theta"],
        f"{family}.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "tokenizer.chat_template": TEMPLATE,
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    for name, value in values.items():
        if isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    for name, weight in (tensors_of(Path(folder)) if tensors is None else tensors).items():
        stored = (kinds or {}).get(name, kind if weight.ndim > 1 else "F32")
        stored = gguf.GGMLQuantizationType[stored]
        data = np.ascontiguousarray(gguf.quants.quantize(weight, stored))
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
