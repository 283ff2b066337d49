"""Texts to vectors: tokens, batches of few shapes, and the devices that encode them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.extras.dense.encoders import EmbeddingModel, encode_rows, load_encoder
from jaxrl.utils.json_io import read_object

SHORTEST = 16
"""Tokens of the narrowest batch; each wider one has twice as many."""

_FILES = (
    *("config*.json", "*.safetensors*", "tokenizer.json", "modules.json"),
    *("sentence_bert_config.json", "*/config.json"),
)


def folder_digest(folder: str | Path) -> str:
    """SHA-256 of what an encoder's folder holds of its model and tokenizer, names included."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _FILES for file in Path(folder).glob(pattern)}):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        with open(file, "rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


class Encoder:
    """Makes vectors of texts; safe to be called from several threads, which share its weights.

    A text is encoded by a program whose shape depends on its own length alone: with how many others
    it came, and which, changes nothing.
    """

    def __init__(
        self, model: EmbeddingModel, folder: str | Path, devices: Sequence[Any], *, dtype: str
    ) -> None:
        """Loads weights and tokenizer.

        Args:
            model: what the folder holds.
            folder: in Hugging Face format, with `tokenizer.json`.
            devices: of this process; texts are split over them, each has all weights.
            dtype: of weights and activations, float32 or bfloat16.

        Raises:
            FileNotFoundError: the tokenizer or the weights are missing.
            ValueError: they are damaged, or not those of the model.
        """
        self.model = model
        self._tokenizer = read_tokenizer(folder, model)
        self._mesh = Mesh(np.array(devices), ("rows",))
        self._params = load_encoder(model.model, folder, self._mesh, dtype)

    def queries(self, texts: Sequence[str], *, batch_tokens: int) -> np.ndarray:
        """Vectors of queries, float32 [N, D]; see `_encode`."""
        return self._encode([f"{self.model.query_prefix}{text}" for text in texts], batch_tokens)

    def passages(self, texts: Sequence[str], *, batch_tokens: int) -> np.ndarray:
        """Vectors of passages, float32 [N, D]; see `_encode`."""
        return self._encode([f"{self.model.passage_prefix}{text}" for text in texts], batch_tokens)

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts, with what the tokenizer adds, cut at the model's limit."""
        ids = [one.ids for one in self._tokenizer.encode_batch([*texts], add_special_tokens=True)]
        # A tokenizer that adds nothing makes none of a blank text.
        return [one or [0] for one in ids]

    def _encode(self, texts: Sequence[str], batch_tokens: int) -> np.ndarray:
        """Vectors of texts, in their order; `batch_tokens` of a device's part, padding included."""
        ids = self.token_ids(texts)
        # Few widths, each twice the one before: each is a program.
        doublings = [max(-(-len(one) // SHORTEST) - 1, 0).bit_length() for one in ids]
        widths = [min(SHORTEST << power, self.model.max_tokens) for power in doublings]
        split, pending = NamedSharding(self._mesh, P("rows")), []
        for width in sorted(set(widths)):
            rows = max(batch_tokens // width, 1) * self._mesh.size
            own = [index for index, one in enumerate(widths) if one == width]
            for start in range(0, len(own), rows):
                block = own[start : start + rows]
                token_ids, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
                for row, index in enumerate(block):
                    lengths[row] = len(ids[index])
                    token_ids[row, : lengths[row]] = ids[index]
                arrays = jax.device_put((token_ids, lengths), split)
                encoded = encode_rows(self._params, *arrays, model=self.model, mesh=self._mesh)
                pending.append((block, encoded))
        vectors = np.zeros((len(texts), self.model.width), np.float32)
        for block, encoded in pending:  # all are under way by now
            vectors[block] = np.asarray(encoded)[: len(block)]
        return vectors


def read_tokenizer(folder: str | Path, model: EmbeddingModel) -> tokenizers.Tokenizer:
    """The tokenizer of a folder, which cuts texts at the model's limit.

    Raises:
        FileNotFoundError: there is no `tokenizer.json`.
        ValueError: it cannot be read, or makes ids that the model does not have.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} holds no tokenizer.json; expected a fast tokenizer's file. Save it "
            "there with transformers' `save_pretrained`."
        )
    try:
        spec = read_object(file)
        tokenizer = tokenizers.Tokenizer.from_str(
            json.dumps(spec | {"truncation": None, "padding": None})
        )
    except Exception as error:  # whatever tokenizers makes of a damaged file
        raise ValueError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if num_ids > model.model.vocab_size:
        raise ValueError(
            f"{file} knows {num_ids} ids, the model {model.model.vocab_size} (vocab_size in "
            "config.json); they belong to two models."
        )
    tokenizer.enable_truncation(model.max_tokens)
    return tokenizer
