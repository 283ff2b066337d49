"""Conversion of a GGUF file to a folder in Hugging Face's format.

The layout of the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensors have
llama.cpp's names here, and those of `Architecture.hf_names` in the folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from jaxrl.envs.text import printable
from jaxrl.extras.gguf.tokenizer import tokenizer_files
from jaxrl.models.architecture import Architecture
from jaxrl.models.hf_weights import hf_places, write_json, write_tensors
from jaxrl.models.reading import find_architecture
from jaxrl.models.rope_scaling import Llama3, default_frequencies

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `general.architecture` that are read; each is the `model_type` of the folder too."""

PERMUTED = ("llama",)
"""Families whose rows of q and k llama.cpp stores as it turns them: pair by pair."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensors of a layer, without `blk.N.` and the `.weight` or `.bias` behind them."""

EMBEDDING, OUTPUT, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"

REFUSED = (
    *("expert_count", "attention.scale", "logit_scale", "residual_scale", "embedding_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
"""Settings of a family's metadata that change what is computed, and that nothing here computes."""

STORAGE = (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16))
"""Dtypes that a folder may have in place of float32, where they hold each value exactly."""

MAX_VALUES = 2**22
"""Values in a list of the metadata; the largest vocabularies have a tenth as many merges."""

MAX_SHARD_SIZE = 2 * 10**9  # bytes that are on the host at a time


@dataclass(frozen=True, kw_only=True)
class Contents:
    """An open GGUF file.

    Attributes:
        path: for messages.
        metadata: values by key.
        tensors: of the package gguf, mapped from the disk, by llama.cpp's names.
        family: one of `FAMILIES`.
        model: what its sizes come to.
        sources: the tensor behind each HF name.
        files: of the tokenizer and of its special ids, by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]
    family: str
    model: Architecture
    sources: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors in float32, which a folder has at most."""
        return 4 * sum(int(tensor.n_elements) for tensor in self.sources.values())

    def values(self, name: str) -> np.ndarray:
        """An HF tensor in float32, dequantised, its rows in HF's order."""
        tensor = self.sources[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        heads = {"q_proj": self.model.num_heads, "k_proj": self.model.num_kv_heads}
        kind = name.split(".")[-2]
        if self.family in PERMUTED and kind in heads:
            # Rows 2i and 2i + 1 of a head are turned together there, rows i and i + H/2 here.
            pairs = values.reshape(heads[kind], -1, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        return np.ascontiguousarray(values, dtype=np.float32)


def read_model(path: Path) -> Contents:
    """A GGUF file, all checked that can be without reading the weights.

    Raises:
        ValueError: says in one line what is wrong with it, or not supported.
    """
    metadata, tensors = _open(path)
    family = metadata.get("general.architecture")
    if family not in FAMILIES:
        raise ValueError(
            f"{path}: general.architecture is {family!r:.80}; expected one of "
            f"{', '.join(FAMILIES)}. A folder in Hugging Face format may be of other models."
        )
    if (pieces := metadata.get("split.count", 1)) not in (0, 1):
        raise ValueError(
            f"{path} is one of {pieces!r:.80} pieces of a model; join them with "
            "`llama-gguf-split --merge`."
        )
    if EMBEDDING not in tensors:
        raise ValueError(f"{path} holds no tensor {EMBEDDING!r}, so it is no whole model.")
    for tensor in tensors.values():
        if not len(tensor.shape):
            raise ValueError(f"{path}: tensor {tensor.name!r} has no shape; expected 1 or 2 axes.")
        try:
            gguf.quants.dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{path}: tensor {tensor.name!r} is stored as {tensor.tensor_type.name}, which the "
                "package gguf cannot dequantise; take another quantisation of the model."
            ) from error
    is_tied = OUTPUT not in tensors or _are_one(tensors[EMBEDDING], tensors[OUTPUT])
    fields = _config_fields(path, metadata, tensors, family, is_tied)
    model = find_architecture(fields, "", str(path)).from_dict(fields, source=str(path))
    contents = Contents(
        path=path,
        metadata=metadata,
        tensors=tensors,
        family=family,
        model=model,
        sources=_hf_tensors(tensors, is_tied=is_tied),
        files=tokenizer_files(path, metadata),
    )
    places = hf_places(model)
    for name in sorted(places.keys() ^ contents.sources.keys()):
        verb = "lacks" if name in places else "holds"
        raise ValueError(
            f"{path} {verb} the tensor {name!r}, which the model of its metadata "
            f"{'has' if name in places else 'does not have'}."
        )
    for name, tensor in contents.sources.items():
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != places[name].shape:
            raise ValueError(
                f"{path}: tensor {tensor.name!r} has shape {list(shape)}; its metadata calls for "
                f"{list(places[name].shape)}."
            )
    return contents


class _Reader(gguf.GGUFReader):
    """The package's reader on plain arrays: slices of a memory map cost it three times as much."""

    @property
    def data(self) -> Any:
        """Bytes of the file, mapped from the disk."""
        return self._bytes

    @data.setter
    def data(self, mapped: Any) -> None:
        self._bytes = mapped.view(np.ndarray)

    # A damaged number of fields or values would be counted down to its end, outside of the file.

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        values = super()._get(offset, dtype, count, override_order)
        if len(values) < count:
            raise ValueError(f"{count} values at byte {offset} end behind it")
        return values

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:  # the type of its values, their number, values
            [length] = self._get(orig_offs + 4, np.uint64)
            if length > MAX_VALUES:
                raise ValueError(f"a list of {length} values; at most {MAX_VALUES} are read")
        return super()._get_field_parts(orig_offs, raw_type)


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors by name."""
    with path.open("rb") as file:
        begins = file.read(4)
    if begins != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it begins with {begins!r}; expected b'GGUF'.")
    try:
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # the package trusts the file: any error means that it is damaged
        text = printable(" ".join(str(error).split()))[:200].rstrip(".")
        kind = "has a quantisation that the package gguf does not know"
        if "is not a valid GGMLQuantizationType" not in text:
            kind = f"({path.stat().st_size} bytes) is cut off, damaged or of another version"
        raise ValueError(
            f"{path} {kind}: {type(error).__name__}: {text}; fetch it again, or another file of "
            "the model."
        ) from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _are_one(embedding: Any, output: Any) -> bool:
    """Return True if two tensors are roundings of one, as some files of tied models have them.

    Metadata does not say so. The rounding of the coarsest quantisation is some percent of a matrix;
    two matrices that were trained apart differ by more than their own size.
    """
    if embedding.data.shape[0] != output.data.shape[0]:
        return False
    rows = slice(None, None, max(1, embedding.data.shape[0] // 4096))
    first, second = (
        gguf.quants.dequantize(np.ascontiguousarray(tensor.data[rows]), tensor.tensor_type)
        for tensor in (embedding, output)
    )
    if first.shape != second.shape:
        return False
    return bool(np.square(first - second).sum() < 0.2 * np.square(second).sum())


def _config_fields(
    path: Path, metadata: dict[str, Any], tensors: dict[str, Any], family: str, is_tied: bool
) -> dict[str, Any]:
    """The `config.json` of the file's metadata, for `Architecture.from_dict` to check."""

    def number(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{family}.{name}", default)
        if type(value) not in (int, float) or value != value:
            raise ValueError(
                f"{path}: {family}.{name} is {value!r:.80}; expected a number, alike in all layers."
            )
        # The shortest decimal number of that float32: 1e-05, and not 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    for name in REFUSED:
        if metadata.get(f"{family}.{name}"):
            raise ValueError(
                f"{path}: {family}.{name} is {metadata[f'{family}.{name}']!r:.80}; no model with "
                "it is computed here."
            )
    max_positions = number("context_length")
    window = number("attention.sliding_window", 0)
    if 0 < window < max_positions:
        raise ValueError(f"{path}: a sliding window of {window} tokens is not supported.")
    width, num_heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", width // num_heads if num_heads else 0)
    for name in ("attention.value_length", "rope.dimension_count"):
        if number(name, head_dim) != head_dim:
            raise ValueError(
                f"{path}: {family}.{name} is {number(name)}, of heads of {head_dim} values; "
                "expected the same number."
            )
    fields = {
        "model_type": family,
        "vocab_size": int(tensors[EMBEDDING].shape[1]) if len(tensors[EMBEDDING].shape) > 1 else 0,
        "hidden_size": width,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10_000.0),  # llama.cpp's own default
        "tie_word_embeddings": is_tied,
    }
    if family != "qwen2":  # whose biases are always there
        fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
    scaling = _rope_scaling(path, metadata, family, max_positions)
    if FREQUENCIES in tensors:
        # Llama 3's scaling, of which a file holds the result alone: for each pair of a head what
        # its frequency is divided by. The largest is the factor; the others follow from settings
        # that all published models share.
        tensor, theta = tensors[FREQUENCIES], fields["rope_theta"]
        factors = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        llama3 = Llama3(
            factor=float(factors.max(initial=1.0)),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=8192.0,
        )
        expected = default_frequencies(head_dim, theta) / llama3.frequencies(head_dim, theta)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
            raise ValueError(
                f"{path}: the tensor {FREQUENCIES!r} is not that of Llama 3's RoPE scaling with "
                "low_freq_factor 1, high_freq_factor 4 and 8192 original positions."
            )
        scaling = {"rope_type": llama3.rope_type, **llama3.hf_fields()}
    return fields | ({"rope_scaling": scaling} if scaling else {})


def _rope_scaling(
    path: Path, metadata: dict[str, Any], family: str, max_positions: int
) -> dict[str, Any] | None:
    """The `rope_scaling` of `config.json` that the metadata comes to; None without any."""
    begins = f"{family}.rope.scaling."
    settings = {k.removeprefix(begins): v for k, v in metadata.items() if k.startswith(begins)}
    settings.pop("finetuned", None)
    kind = settings.pop("type", "none")
    if kind == "none":
        return None
    names = {"factor": "factor"}
    if kind == "yarn":
        names["original_context_length"] = "original_max_position_embeddings"
    unknown = sorted(settings.keys() - names.keys())
    if kind not in ("linear", "yarn") or unknown:
        raise ValueError(
            f"{path}: RoPE scaling {kind!r:.80}{f' with {unknown[0]}' if unknown else ''} is not "
            "supported; expected linear, or yarn with its factor and original_context_length."
        )
    return {"rope_type": kind, **{names[name]: value for name, value in settings.items()}}


def _hf_tensors(tensors: dict[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """Each tensor by its HF name; unknown ones keep theirs, and are refused by `read_model`."""
    named = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.removeprefix("blk.").partition(".")
        kind, _, end = rest.rpartition(".")
        if name == EMBEDDING:
            named["model.embed_tokens.weight"] = tensor
        elif name == "output_norm.weight":
            named["model.norm.weight"] = tensor
        elif name == OUTPUT:
            named["lm_head.weight"] = tensor
        elif name.startswith("blk.") and kind in LAYER_NAMES:
            named[f"model.layers.{layer}.{LAYER_NAMES[kind]}.{end}"] = tensor
        elif name != FREQUENCIES:  # which is in config.json
            named[name] = tensor
    if is_tied and OUTPUT in tensors:
        # Of two roundings of one matrix the finer is nearer to it.
        both = (named["model.embed_tokens.weight"], named.pop("lm_head.weight"))
        named["model.embed_tokens.weight"] = max(both, key=lambda tensor: tensor.n_bytes)
    return named


def write_model(contents: Contents, folder: Path) -> None:
    """Writes the folder: configuration, tokenizer, then weights.

    Weights are stored as what holds them exactly: a quantised one is a whole number times a scale
    (and an offset), for which bfloat16's 8 bits do not suffice, so that is float32. Files of floats
    are mostly bfloat16 in truth, and stay as small.
    """
    name = "float32"
    dtype: np.dtype = np.dtype(name)
    floats = {gguf.GGMLQuantizationType[kind] for kind in ("F32", "F16", "BF16")}
    if all(tensor.tensor_type in floats for tensor in contents.sources.values()):
        for kind, short in STORAGE:
            values = (contents.values(source) for source in contents.sources)
            with np.errstate(over="ignore"):  # float16 ends at 65504
                if all(np.array_equal(x.astype(short).astype(np.float32), x) for x in values):
                    name, dtype = kind, np.dtype(short)
                    break
    ids = contents.files["generation_config.json"]
    config = {**contents.model.hf_config(), "torch_dtype": name, **ids}
    write_json(folder / "config.json", config)
    for file, content in contents.files.items():
        text = json.dumps(content, ensure_ascii=False)  # of a vocabulary, half of its size
        (folder / file).write_text(text + "\n", encoding="utf-8")
    item, places = dtype.itemsize, hf_places(contents.model)
    write_tensors(
        folder,
        {name: int(contents.sources[name].n_elements) * item for name in places},
        lambda name: contents.values(name).astype(dtype),
        max_shard_size=MAX_SHARD_SIZE,
    )
