"""Text embedding models and their pooling settings.

sentence-transformers writes the pooling and normalization of a model to `modules.json`, the
prefixes of queries and passages to `config_sentence_transformers.json`, and the maximum length to
`sentence_bert_config.json`. The run's config overrides these files. For values that neither
specifies, the defaults of the model family apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.extras.dense.bert import BertConfig
from jaxrl.models.architecture import Architecture
from jaxrl.models.attention.reference import XLA
from jaxrl.models.hf_weights import (
    StoredTensor,
    check_shape,
    load_tensors,
    locate_hf_tensors,
    make_missing_tensor_error,
    open_tensors,
)
from jaxrl.models.layers import LayerScan
from jaxrl.models.registry import read_architecture, read_hf_config, suggest_model
from jaxrl.types import Params
from jaxrl.utils.json_io import parse_json, read_object

POOLINGS = ("mean", "first", "last")
"""Methods of pooling hidden states: mean over tokens, first token, last token."""

QWEN_QUERY_PREFIX = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
)
"""Default query prefix of Qwen3-Embedding."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingModel:
    """Text embedding model: architecture, pooling and prefixes.

    Attributes:
        model: Architecture that computes the hidden states.
        pooling: One of `POOLINGS`.
        normalize: True to scale vectors to norm 1.
        query_prefix: Text prepended to each query.
        passage_prefix: Text prepended to each passage.
        max_tokens: Length to which texts are truncated, in tokens, including special tokens.
    """

    model: BertConfig | Architecture
    pooling: str
    normalize: bool
    query_prefix: str
    passage_prefix: str
    max_tokens: int

    @property
    def width(self) -> int:
        """Embedding dimension."""
        return self.model.width

    def embed(
        self, params: Params, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B D"]:
        """Compute float32 embeddings of texts.

        Args:
            params: Parameters in the compute dtype.
            token_ids: Token ids, one padded text per row.
            lengths: Number of tokens of each text, at least 1.
        """
        T = token_ids.shape[1]
        padding_mask = jnp.arange(T) < lengths[:, None]
        if isinstance(self.model, BertConfig):
            hidden = self.model.compute_hidden_states(params, token_ids, padding_mask)
        else:
            positions = jnp.broadcast_to(jnp.arange(T), token_ids.shape)
            attend = XLA.make_attend(padding_mask.astype(jnp.int32), positions)
            hidden = self.model.compute_hidden_states(
                params, token_ids, positions, attend, LayerScan()
            )
        hidden = hidden.astype(jnp.float32)
        if self.pooling == "mean":
            total = jnp.where(padding_mask[:, :, None], hidden, 0.0).sum(axis=1)
            pooled = total / lengths[:, None]
        elif self.pooling == "first":
            pooled = hidden[:, 0]
        else:
            pooled = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        if not self.normalize:
            return pooled
        return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)


@partial(jax.jit, static_argnames=("model", "mesh"))
def encode_rows(
    params: Params, token_ids: jax.Array, lengths: jax.Array, *, model: EmbeddingModel, mesh: Mesh
) -> jax.Array:
    """Compute `EmbeddingModel.embed` for rows sharded over a one-axis mesh.

    Weights are replicated. Float32 matmuls use full precision on every platform.
    """
    split = P(*mesh.axis_names)
    encode = jax.shard_map(
        model.embed, mesh=mesh, in_specs=(P(), split, split), out_specs=split, check_vma=False
    )
    with jax.default_matmul_precision("highest"):
        return encode(params, token_ids, lengths)


def read_encoder(path: str | Path) -> BertConfig | Architecture:
    """Read an encoder's architecture from the `config.json` of an HF folder.

    Raises:
        FileNotFoundError: The folder or its `config.json` is missing.
        ValueError: The model is not a supported encoder.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        problem = "holds no config.json" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(
            f"config.search.dense.encoder is {str(path)!r}, which {problem}; expected a local "
            f"folder in Hugging Face format.{suggest_model(path)}"
        )
    fields, source = read_hf_config(folder)
    model_type = fields.get("model_type")
    if model_type == "bert":
        return BertConfig.from_dict(fields, source=source)
    if model_type in ("qwen2", "qwen3"):
        return read_architecture(folder)
    raise ValueError(
        f"{source}: model_type {model_type!r} is not an encoder; expected 'bert' (E5, BGE), "
        "'qwen3' or 'qwen2'."
    )


def read_embedding_model(
    path: str | Path,
    *,
    pooling: str = "",
    query_prefix: str = "auto",
    passage_prefix: str = "auto",
    max_tokens: int = 512,
) -> EmbeddingModel:
    """Read the architecture and settings of the embedding model in an HF folder.

    Args:
        path: Folder with the `config.json` of a BERT or Qwen model.
        pooling: One of `POOLINGS`; "" for the value in the folder, or else the default of the model
            family.
        query_prefix: Text prepended to each query; "auto" for the value in the folder, or else the
            default of the model family.
        passage_prefix: Text prepended to each passage; "auto" as for `query_prefix`.
        max_tokens: Maximum number of tokens per text. The model's limit also applies.

    Raises:
        FileNotFoundError: The folder or its `config.json` is missing.
        ValueError: A setting in the folder is unsupported, or a setting has no value.
    """
    # Defaults of the family, overridden by the folder's files, then by the arguments.
    folder = Path(path)
    model = read_encoder(folder)
    settings: dict[str, Any] = {"pooling": "", "query_prefix": None, "passage_prefix": None}
    if not isinstance(model, BertConfig):
        settings = {"pooling": "last", "query_prefix": QWEN_QUERY_PREFIX, "passage_prefix": ""}
    try:
        settings |= _read_sentence_transformers(folder)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder}: a file of sentence-transformers is damaged: {type(error).__name__}: {error}"
        ) from error
    prefixes = {"query_prefix": query_prefix, "passage_prefix": passage_prefix}
    settings |= {name: text for name, text in prefixes.items() if text != "auto"}
    settings["pooling"] = pooling or settings["pooling"]
    examples = {
        "pooling": "'mean' (E5) or 'first' (BGE)",
        "query_prefix": "'query: ' (E5), or to the text in the model's documentation, or ''",
        "passage_prefix": "'passage: ' (E5), or to the text in the model's documentation, or ''",
    }
    for name, example in examples.items():
        if settings[name] is None or (name == "pooling" and not settings[name]):
            raise ValueError(
                f"{str(path)!r} does not specify a {name}; set config.search.dense.{name} to "
                f"{example}."
            )
    limit = settings.pop("max_tokens", max_tokens)
    return EmbeddingModel(
        model=model,
        normalize=settings.pop("normalize", True),
        max_tokens=min(max_tokens, limit, model.max_positions),
        **settings,
    )


_POOLING_MODES = {
    **{"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"},
    **{"pooling_mode_lasttoken": "last", "mean": "mean", "cls": "first", "lasttoken": "last"},
}


def _read_sentence_transformers(folder: Path) -> dict[str, Any]:
    """Read `EmbeddingModel` fields from a sentence-transformers folder.

    Raises:
        ValueError: A module or pooling mode is not supported.
    """
    result: dict[str, Any] = {}
    settings = _read_optional_json(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts") or {}
    if any(prompts.values()):  # all empty means not set
        passage = prompts.get("document", prompts.get("passage"))
        prefixes = {"query_prefix": prompts.get("query"), "passage_prefix": passage}
        result |= {name: text for name, text in prefixes.items() if text is not None}
    if limit := _read_optional_json(folder / "sentence_bert_config.json").get("max_seq_length"):
        result["max_tokens"] = limit
    file = folder / "modules.json"
    if not file.is_file():
        return result
    modules = parse_json(file.read_bytes(), str(file))
    module_types = {module["type"].rpartition(".")[2]: module.get("path", "") for module in modules}
    if unknown := module_types.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise ValueError(
            f"{file} has the module {min(unknown)}, which is not supported; expected Transformer, "
            "Pooling and Normalize."
        )
    if "Pooling" in module_types:
        file = folder / module_types["Pooling"] / "config.json"
        fields = read_object(file)
        modes = [
            name for name, is_on in fields.items() if "pooling_mode_" in name and is_on is True
        ]
        if "pooling_mode" in fields:
            modes.append(fields["pooling_mode"])
        is_known = len(modes) == 1 and modes[0] in _POOLING_MODES
        if not is_known or fields.get("include_prompt") is False:
            raise ValueError(
                f"{file} has the pooling {modes}; expected one of mean, cls and lasttoken over all "
                "tokens, including those of the prompt."
            )
        result["pooling"] = _POOLING_MODES[modes[0]]
    is_dot = settings.get("similarity_fn_name") == "dot"
    result["normalize"] = "Normalize" in module_types or not is_dot
    return result


def _read_optional_json(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def load_encoder_params(
    model: BertConfig | Architecture, path: str | Path, mesh: Mesh, dtype: DTypeLike
) -> Params:
    """Load an encoder's parameters, replicated over a mesh.

    Args:
        model: Architecture of the model in `path`.
        path: HF folder. Output layers and poolers are ignored. The model prefix of tensor names is
            optional.
        mesh: Mesh over which the parameters are replicated.
        dtype: Dtype of the loaded parameters.

    Raises:
        FileNotFoundError: The folder has no weights.
        ValueError: The weights are damaged or do not match the model.
    """
    names = get_required_param_shapes(model)
    stored: dict[str, StoredTensor] = {}
    for name, tensor in open_tensors(Path(path)).items():
        stored[name] = tensor
        for alias in (f"model.{name}", name.removeprefix("bert.")):
            stored.setdefault(alias, tensor)
    for name, location in locate_hf_tensors(model).items():
        if location.param in names:
            if name not in stored:
                raise make_missing_tensor_error(Path(path), name, location, stored)
            check_shape(stored[name], location)
    shardings = dict.fromkeys(names, NamedSharding(mesh, P()))
    return load_tensors(model, stored, shardings, dtype=dtype)


def get_required_param_shapes(model: BertConfig | Architecture) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes, by path, of the parameters needed to compute hidden states."""
    leaves = flatten_dict(model.make_abstract_params(), sep="/")
    return {name: leaf.shape for name, leaf in leaves.items() if not name.startswith("lm_head/")}


def estimate_encoder_bytes(
    model: BertConfig | Architecture, dtype: str, batch_tokens: int
) -> tuple[int, int]:
    """Estimate the size of an encoder's weights and largest activations on a device, in bytes."""
    weights = sum(math.prod(shape) for shape in get_required_param_shapes(model).values())
    inner_width = model.mlp_width if isinstance(model, BertConfig) else 4 * model.width
    itemsize = jnp.dtype(dtype).itemsize
    return itemsize * weights, itemsize * batch_tokens * (2 * inner_width + 8 * model.width)
