"""Convert a GGUF file to a model folder in Hugging Face format, which jaxrl can train.

    pip install gguf
    python -m examples.convert_gguf --file=SmolLM2-135M-Instruct.Q4_1.gguf --out=models/smollm2

SmolLM2, Qwen2.5 and Qwen3 are supported. Weights are dequantized to float32, so the folder has
four bytes per weight. transformers converts other models: load with `gguf_file=`, then save.
"""

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre

from jaxrl.models.architecture import Architecture
from jaxrl.models.hf_weights import locate_hf_tensors, open_hf, write_json, write_tensors
from jaxrl.models.registry import resolve_architecture
from jaxrl.utils.files import atomic_folder

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre.ByteLevel(add_prefix_space=False, use_regex=False)
PRE_TOKENIZERS = {
    "smollm": (None, pre.Sequence([pre.Digits(True), pre.ByteLevel(add_prefix_space=False)])),
    "qwen2": (normalizers.NFC(), pre.Sequence([pre.Split(Regex(WORDS), "isolated"), BYTES])),
}
"""Normalizer and pre-tokenizer by value of `tokenizer.ggml.pre`."""


def dequantize(tensor: Any, step: int = 1) -> np.ndarray:
    """Dequantize every `step`-th row of a tensor to float32."""
    return gguf.quants.dequantize(np.ascontiguousarray(tensor.data[::step]), tensor.tensor_type)


def merge_tied(tensors: dict[str, Any]) -> bool:
    """Return True for tied embeddings; drop the coarser copy if both layers are in `tensors`.

    Two matrices count as tied if they differ only by quantization, a few percent of the norm.
    Separately trained matrices differ by more.
    """
    embedding, output = tensors["token_embd.weight"], tensors.get("output.weight")
    if output is None:
        return True
    first, second = dequantize(embedding, step=37), dequantize(output, step=37)
    if np.square(first - second).sum() > 0.2 * np.square(second).sum():
        return False
    finer = max(embedding, tensors.pop("output.weight"), key=lambda tensor: tensor.n_bytes)
    tensors["token_embd.weight"] = finer
    return True


def convert_config(metadata: dict[str, Any], tensors: dict[str, Any]) -> Architecture:
    """Build the architecture from the metadata; remove a tied output layer from `tensors`."""
    family = metadata["general.architecture"]
    if family not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"general.architecture is {family!r}; expected llama, qwen2 or qwen3.")
    prefix, rows = f"{family}.", int(tensors["token_embd.weight"].shape[1])
    settings = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    head_dim = settings["embedding_length"] // settings["attention.head_count"]
    head_dim = settings.setdefault("attention.key_length", head_dim)
    repeated = {"vocab_size": rows}
    repeated |= dict.fromkeys(("attention.value_length", "rope.dimension_count"), head_dim)
    for key in settings.keys() - FIELDS.keys():
        if settings[key] not in (0, repeated.get(key)):  # it may affect the outputs
            raise ValueError(f"{prefix}{key} is {settings[key]!r:.80}, which is not supported.")
    fields = {name: settings[key] for key, name in FIELDS.items()}
    # The shortest decimal of the file's float32: 1e-05, not 9.999999747378752e-06.
    fields["rms_norm_eps"] = float(str(np.float32(fields["rms_norm_eps"])))
    fields |= {"model_type": family, "vocab_size": rows, "tie_word_embeddings": merge_tied(tensors)}
    return resolve_architecture(fields, "", "metadata").from_dict(fields, source="metadata")


def convert_tokenizer(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the tokenizer and the fields of `tokenizer_config.json`."""
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    if (kind := values.get("pre")) not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre is {kind!r}; expected {', '.join(PRE_TOKENIZERS)}.")
    tokens, types = values["tokens"], values["token_type"]
    vocab = {token: id for id, token in enumerate(tokens) if types[id] != gguf.TokenType.UNUSED}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(m.split(" ")) for m in values["merges"]]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]
    tokenizer.decoder = decoders.ByteLevel()
    for token, type in zip(tokens, types, strict=True):
        if type in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED):
            special = type == gguf.TokenType.CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    template = metadata["tokenizer.chat_template"]
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    for key, field in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        if f"{key}_token_id" in values:
            fields[f"{field}_token"] = tokens[values[f"{key}_token_id"]]
    return tokenizer, fields


def convert(file: Path, out: Path) -> None:
    """Convert a GGUF file to the model folder `out`, atomically."""
    reader = gguf.GGUFReader(file)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    family, model = metadata["general.architecture"], convert_config(metadata, tensors)
    tokenizer, tokenizer_config = convert_tokenizer(metadata)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], model.num_layers)
    sources = {
        name: names.get_name(name, (".weight", ".bias")) for name in locate_hf_tensors(model)
    }
    if wrong := sorted(tensors.keys() ^ {*sources.values()}):
        raise ValueError(f"tensor {wrong[0]!r} is unexpected or missing; use another file.")
    heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}

    def read(name: str) -> np.ndarray:
        values, kind = dequantize(tensors[sources[name]]), name.split(".")[-2]
        if family == "llama" and kind in heads:
            # RoPE rotates rows 2i and 2i + 1 of a head in llama.cpp, rows i and i + H/2 here.
            pairs = values.reshape(heads[kind], -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        return values

    with atomic_folder(out, marker="config.json") as folder:
        write_json(folder / "config.json", model.to_hf_config() | {"torch_dtype": "float32"})
        write_json(folder / "tokenizer_config.json", tokenizer_config)
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        sizes = {name: 4 * int(tensors[source].n_elements) for name, source in sources.items()}
        write_tensors(folder, sizes, read, max_shard_size=2 * 10**9)
        open_hf(folder)  # checks the shape of each tensor


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--file", type=Path, required=True, help="GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    convert(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
