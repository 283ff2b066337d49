"""Models that make one vector of a text: which they are, how they pool, and their pass.

A folder of sentence-transformers says in `modules.json` how hidden states are pooled and whether
the vector is normalised, in `config_sentence_transformers.json` what stands before a query and a
passage, and in `sentence_bert_config.json` how many tokens are read. Where a file is missing, what
the family is known to do counts, and the configuration before all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    DTYPES,
    StoredTensor,
    check_shape,
    hf_places,
    lacking_tensor,
    load_stored,
    open_tensors,
)
from jaxrl.models.layers import Through
from jaxrl.models.registry import read_fields, read_model, suggest_model
from jaxrl.types import Params
from jaxrl.utils.json_io import parse_json, read_object

POOLINGS = ("mean", "first", "last")
"""Poolings of hidden states: their mean, that of the first token, that of the last one."""

WEB_SEARCH = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
)
"""Text before a query of Qwen3-Embedding unless its folder says something else."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingModel:
    """A model, and how its hidden states become a vector.

    Attributes:
        model: computes the hidden states.
        pooling: out of `POOLINGS`.
        normalize: whether a vector is divided by its length.
        query_prefix: stands before a query; None where nobody says.
        passage_prefix: stands before a passage; likewise.
        max_tokens: of a text, special tokens included; the rest is cut off.
    """

    model: BertConfig | Architecture
    pooling: str
    normalize: bool
    query_prefix: str | None
    passage_prefix: str | None
    max_tokens: int

    @property
    def width(self) -> int:
        """Values of a vector."""
        return self.model.width

    def vectors(
        self, params: Params, token_ids: Int[Array, "B T"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B D"]:
        """Float32 vectors of texts.

        Args:
            params: of the model, in the dtype that it computes in.
            token_ids: of the texts, one a row, from its beginning on.
            lengths: tokens of each text, at least 1; what follows is padding.
        """
        T = token_ids.shape[1]
        is_there = jnp.arange(T) < lengths[:, None]
        if isinstance(self.model, BertConfig):
            hidden = self.model.hidden_states(params, token_ids, is_there)
        else:
            positions = jnp.broadcast_to(jnp.arange(T), token_ids.shape)
            attend = XLA.within(is_there.astype(jnp.int32), positions)
            hidden = self.model.hidden_states(params, token_ids, positions, attend, Through())
        hidden = hidden.astype(jnp.float32)
        if self.pooling == "mean":
            summed = jnp.where(is_there[:, :, None], hidden, 0.0).sum(axis=1)
            pooled = summed / lengths[:, None]
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
    """`EmbeddingModel.vectors` of rows that are split over the devices of a mesh of one axis.

    Every device has all weights and encodes its own rows; they exchange nothing. Float32 is
    multiplied as float32, also where a device would round it.
    """
    each = P(*mesh.axis_names)
    with jax.default_matmul_precision("highest"):
        return jax.shard_map(
            model.vectors,
            mesh=mesh,
            in_specs=(P(), each, each),
            out_specs=each,
            check_vma=False,
        )(params, token_ids, lengths)


def read_encoder(path: str | Path) -> BertConfig | Architecture:
    """The model of an HF folder, from its `config.json` alone.

    Args:
        path: the folder.

    Raises:
        FileNotFoundError: there is no such folder, or no `config.json` in it.
        ValueError: it is of no kind that makes vectors here.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        problem = "holds no config.json" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(
            f"config.search.dense.encoder is {str(path)!r}, which {problem}; expected a local "
            f"folder in Hugging Face format.{suggest_model(path)}"
        )
    fields, source = read_fields(folder)
    if fields.get("model_type") == "bert":
        return BertConfig.from_dict(fields, source=source)
    if fields.get("model_type") in ("qwen2", "qwen3"):
        return read_model(folder)
    raise ValueError(
        f"{source}: model_type {fields.get('model_type')!r} makes no vectors here; expected 'bert' "
        "(E5, BGE), 'qwen3' or 'qwen2'."
    )


def read_embedding_model(
    path: str | Path,
    *,
    pooling: str = "",
    query_prefix: str = "auto",
    passage_prefix: str = "auto",
    max_tokens: int = 512,
) -> EmbeddingModel:
    """Reads an HF folder, without its weights.

    Args:
        path: a folder with `config.json`, of a BERT or of an architecture of ours.
        pooling: out of `POOLINGS`; "": as the folder says, else as its family does.
        query_prefix: before a query; "auto": as the folder says, else as its family does.
        passage_prefix: before a passage; likewise.
        max_tokens: of a text, at most; the model may read fewer.

    Raises:
        FileNotFoundError: there is no such folder, or no `config.json` in it.
        ValueError: it asks for something that is not computed here, or does not say what has to
            be known.
    """
    folder = Path(path)
    model = read_encoder(folder)
    is_bert = isinstance(model, BertConfig)
    embedding = EmbeddingModel(
        model=model,
        pooling="" if is_bert else "last",
        normalize=True,
        query_prefix=None if is_bert else WEB_SEARCH,
        passage_prefix=None if is_bert else "",
        max_tokens=min(max_tokens, model.max_positions),
    )
    embedding = _as_sentence_transformers(embedding, folder)
    embedding = replace(
        embedding,
        pooling=pooling or embedding.pooling,
        query_prefix=embedding.query_prefix if query_prefix == "auto" else query_prefix,
        passage_prefix=embedding.passage_prefix if passage_prefix == "auto" else passage_prefix,
    )
    if not embedding.pooling:
        raise ValueError(
            f"{str(path)!r} does not say how it pools (modules.json); set "
            "config.search.dense.pooling to 'mean' (E5) or 'first' (BGE)."
        )
    for name in ("query_prefix", "passage_prefix"):
        if getattr(embedding, name) is None:
            example = "query: " if name == "query_prefix" else "passage: "
            raise ValueError(
                f"{str(path)!r} does not say what stands before a text; set "
                f"config.search.dense.{name} to {example!r} (E5) or to what the model's authors "
                "name, '' for nothing."
            )
    return embedding


def _as_sentence_transformers(model: EmbeddingModel, folder: Path) -> EmbeddingModel:
    """Applies the files of sentence-transformers in the folder to the model."""
    settings = _read_fields(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts")
    if isinstance(prompts, dict) and any(prompts.values()):
        if not all(isinstance(text, str) for text in prompts.values()):
            raise ValueError(
                f"{folder / 'config_sentence_transformers.json'}: 'prompts' is {prompts!r:.80}; "
                "expected a text for each."
            )
        # Where all are empty nobody has set them; what the family needs is known better.
        passage = prompts.get("document", prompts.get("passage"))
        model = replace(
            model,
            query_prefix=prompts.get("query", model.query_prefix),
            passage_prefix=model.passage_prefix if passage is None else passage,
        )
    limit = _read_fields(folder / "sentence_bert_config.json").get("max_seq_length")
    if type(limit) is int and limit > 0:
        model = replace(model, max_tokens=min(model.max_tokens, limit))
    file = folder / "modules.json"
    if not file.is_file():
        return model
    modules = parse_json(file.read_bytes(), str(file))
    try:
        kinds = {str(one["type"]).rpartition(".")[2]: str(one.get("path", "")) for one in modules}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged: expected a list of objects with 'type' and "
            f"'path' ({type(error).__name__}: {error})."
        ) from error
    unknown = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise ValueError(
            f"{file} names the module {sorted(unknown)[0]}, which is not "
            "computed here; expected Transformer, Pooling and Normalize."
        )
    if "Pooling" in kinds:
        file = folder / kinds["Pooling"] / "config.json"
        if not file.is_file():
            raise ValueError(f"{file}, which modules.json names, is not there.")
        fields = read_object(file)
        modes = [name for name, on in fields.items() if "pooling_mode_" in name and on is True]
        if isinstance(fields.get("pooling_mode"), str):
            modes.append(fields["pooling_mode"])
        is_known = len(modes) == 1 and modes[0] in _POOLING_MODES
        if not is_known or fields.get("include_prompt") is False:
            raise ValueError(
                f"{file} asks for the pooling {modes}; expected one of mean, cls and lasttoken "
                "over all tokens, the prompt's too."
            )
        model = replace(model, pooling=_POOLING_MODES[modes[0]])
    is_dot = settings.get("similarity_fn_name") == "dot"
    return replace(model, normalize="Normalize" in kinds or not is_dot)


_POOLING_MODES = {
    **{"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"},
    **{"pooling_mode_lasttoken": "last", "mean": "mean", "cls": "first", "lasttoken": "last"},
}


def _read_fields(file: Path) -> dict[str, Any]:
    """The object of a JSON file; an empty one where there is no such file."""
    return read_object(file) if file.is_file() else {}


def load_encoder(
    model: BertConfig | Architecture, path: str | Path, mesh: Mesh, dtype: DTypeLike
) -> Params:
    """Loads the parameters that hidden states need, whole on every device of a mesh.

    Args:
        model: of the folder.
        path: an HF folder. Its tensors may be named as the bare model has them, or with its name
            before; tensors of output layers and poolers are left out.
        mesh: of the devices.
        dtype: of the parameters.

    Raises:
        FileNotFoundError, ValueError: as `hf_weights.load_hf`.
    """
    names = needed_params(model)
    stored: dict[str, StoredTensor] = {}
    for name, tensor in open_tensors(Path(path)).items():
        stored[name] = tensor
        for other in (f"model.{name}", name.removeprefix("bert.")):
            stored.setdefault(other, tensor)
    for name, place in hf_places(model).items():
        if place.param in names:
            if name not in stored:
                raise lacking_tensor(Path(path), name, place, stored)
            check_shape(stored[name], place)
            if stored[name].dtype not in DTYPES:
                raise ValueError(
                    f"{stored[name].file}: tensor {name!r} is stored as {stored[name].dtype}; "
                    f"expected one of {', '.join(DTYPES)}."
                )
    layouts = dict.fromkeys(names, NamedSharding(mesh, P()))
    return load_stored(model, stored, layouts, dtype=dtype)


def needed_params(model: BertConfig | Architecture) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the parameters that hidden states need, by their paths."""
    leaves = flatten_dict(model.abstract_params(), sep="/")
    return {name: leaf.shape for name, leaf in leaves.items() if not name.startswith("lm_head/")}


def encoder_bytes(
    model: BertConfig | Architecture, dtype: str, batch_tokens: int
) -> tuple[int, int]:
    """Bytes of one device: the weights, and about what the widest layer of a batch holds."""
    weights = sum(math.prod(shape) for shape in needed_params(model).values())
    inner = model.mlp_width if isinstance(model, BertConfig) else 4 * model.width
    itemsize = jnp.dtype(dtype).itemsize
    return itemsize * weights, itemsize * batch_tokens * (2 * inner + 8 * model.width)
