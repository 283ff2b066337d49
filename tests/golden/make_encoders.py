"""Writes the reference encoders of `tests/extras/dense/test_encoders.py`; run with torch installed.

    python tests/golden/make_encoders.py

Each is a folder in Hugging Face format with a small random `transformers` model and a tokenizer, as
E5, BGE and Qwen3-Embedding are published, and `golden.npz`: the vectors `[N, D]` of `texts.json`,
which `transformers` tokenizes, computes and this script pools as the models' authors say.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_golden import randomize
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, BertConfig, PreTrainedTokenizerFast, Qwen3Config

TEXTS = {
    "queries": ["who built the bridge at avington", "Bridge?", "a " * 80, "der Müller"],
    "passages": [
        "The bridge at Avington was built by Ada Kerr in 1871.",
        "bread",
        "A mill stands beside the river; its miller was Tom Hale. " * 6,
    ],
}
BERT = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "type_vocab_size": 2}
MODELS: dict[str, Any] = {
    "encoder_e5": BertConfig(
        **BERT, hidden_size=32, intermediate_size=48, max_position_embeddings=64
    ),
    "encoder_bge": BertConfig(
        **BERT, hidden_size=24, intermediate_size=64, max_position_embeddings=40
    ),
    "encoder_qwen3": Qwen3Config(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ),
}
POOLINGS = {"encoder_e5": "mean", "encoder_bge": "first", "encoder_qwen3": "last"}
PREFIXES = {
    "encoder_e5": ("query: ", "passage: "),
    "encoder_bge": ("", ""),
    "encoder_qwen3": ("Instruct: Find it\nQuery:", ""),
}


def word_pieces() -> PreTrainedTokenizerFast:
    """Letters, and a few words, as BERT's tokenizer has them."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789?.;:"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{one}" for one in letters[:36])]
    words += ["the", "bridge", "at", "mill", "##er", "query", "passage", "was", "##ing", "by"]
    tokenizer = Tokenizer(
        models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, sep_token="[SEP]", **special)


def bytes_and_end() -> PreTrainedTokenizerFast:
    """Bytes, and <|endoftext|> behind every text, as Qwen3-Embedding's tokenizer has it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: i for i, one in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", len(letters))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")


def write_sentence_transformers(name: str, folder: Path, max_tokens: int) -> None:
    """The files by which a folder says how it pools; BGE's is left without."""

    def write(file: str, content: Any) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    if name == "encoder_bge":
        return
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    write(
        "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds)
        ],
    )
    modes = {"mean": "mean_tokens", "last": "lasttoken"}
    on = {f"pooling_mode_{mode}": kind == POOLINGS[name] for kind, mode in modes.items()}
    write("1_Pooling/config.json", {**on, "pooling_mode_cls_token": False, "include_prompt": True})
    write("sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    if name == "encoder_qwen3":
        prompts = {"query": PREFIXES[name][0], "document": ""}
        write("config_sentence_transformers.json", {"prompts": prompts})


def vectors(model: Any, tokenizer: Any, texts: list[str], pooling: str, limit: int) -> np.ndarray:
    """Of texts one by one, as the models' cards have it."""
    found = []
    for text in texts:
        tokens = tokenizer([text], truncation=True, max_length=limit, return_tensors="pt")
        with torch.no_grad():
            hidden = model(tokens["input_ids"], attention_mask=tokens["attention_mask"])[0][0]
        pooled = {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1]}[pooling]
        found.append(torch.nn.functional.normalize(pooled, dim=0).numpy())
    return np.stack(found)


def without_model_prefix(file: Path) -> None:
    """Names tensors as Qwen3-Embedding does, which was saved without its output layer."""
    tensors = {name.removeprefix("model."): t for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def main() -> None:
    """Replaces every encoder's folder beside this file."""
    for seed, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        folder = Path(__file__).parent / name
        shutil.rmtree(folder, ignore_errors=True)
        model = AutoModel.from_config(config, attn_implementation="eager").float().eval()
        randomize(model)
        model.save_pretrained(folder)
        (bytes_and_end() if name == "encoder_qwen3" else word_pieces()).save_pretrained(folder)
        limit = min(config.max_position_embeddings, 48)
        write_sentence_transformers(name, folder, limit)
        without_model_prefix(folder / "model.safetensors")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        golden = {
            kind: vectors(model, tokenizer, [prefix + t for t in texts], POOLINGS[name], limit)
            for prefix, (kind, texts) in zip(PREFIXES[name], TEXTS.items(), strict=True)
        }
        np.savez(folder / "golden.npz", **golden)
    texts = json.dumps(TEXTS, indent=2, ensure_ascii=False) + "\n"
    (Path(__file__).parent / "encoder_texts.json").write_text(texts, encoding="utf-8")


if __name__ == "__main__":
    main()
