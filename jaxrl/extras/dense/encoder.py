"""Text encoder that tokenizes texts and encodes batches of similar length on devices."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.extras.dense.encoders import EmbeddingModel, encode_rows, load_encoder_params

MIN_WIDTH = 16
"""Smallest batch width, in tokens. Other widths are this number times a power of two."""

_FILES = (
    *("config*.json", "*.safetensors*", "tokenizer.json", "modules.json"),
    *("sentence_bert_config.json", "*/config.json"),
)


def compute_folder_digest(folder: str | Path) -> str:
    """Return the SHA-256 of the names and contents of an encoder's model and tokenizer files."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _FILES for file in Path(folder).glob(pattern)}):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        with open(file, "rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


class Encoder:
    """Text encoder. Thread-safe.

    The batch width of a text depends only on the text's length, so its vector is independent of
    other texts in the batch.
    """

    def __init__(
        self, model: EmbeddingModel, folder: str | Path, devices: Sequence[Any], *, dtype: str
    ) -> None:
        """Load the weights and the tokenizer.

        Args:
            model: Architecture and settings of the model in `folder`.
            folder: HF folder with weights and `tokenizer.json`.
            devices: Devices over which batches are sharded and weights replicated.
            dtype: Dtype of weights and activations, float32 or bfloat16.

        Raises:
            FileNotFoundError: The tokenizer or the weights are missing.
            ValueError: The tokenizer or the weights are damaged, or do not match the model.
        """
        self.model = model
        self._tokenizer = read_tokenizer(folder, model)
        self._mesh = Mesh(np.array(devices), ("rows",))
        self._params = load_encoder_params(model.model, folder, self._mesh, dtype)

    def encode_queries(self, texts: Sequence[str], *, batch_tokens: int) -> np.ndarray:
        """Encode queries to float32 vectors [N, D]."""
        return self._encode([f"{self.model.query_prefix}{text}" for text in texts], batch_tokens)

    def encode_passages(self, texts: Sequence[str], *, batch_tokens: int) -> np.ndarray:
        """Encode passages to float32 vectors [N, D]."""
        return self._encode([f"{self.model.passage_prefix}{text}" for text in texts], batch_tokens)

    def _encode(self, texts: Sequence[str], batch_tokens: int) -> np.ndarray:
        """Encode texts in batches of `batch_tokens` tokens per device, including padding."""
        encodings = self._tokenizer.encode_batch([*texts], add_special_tokens=True)
        # Some tokenizers return no tokens for a blank text.
        ids = [encoding.ids or [0] for encoding in encodings]
        # Use power-of-two widths, so that few programs are compiled.
        doublings = [max(-(-len(text) // MIN_WIDTH) - 1, 0).bit_length() for text in ids]
        widths = [min(MIN_WIDTH << exponent, self.model.max_tokens) for exponent in doublings]
        split, batches = NamedSharding(self._mesh, P("rows")), []
        for width in sorted(set(widths)):
            rows = max(batch_tokens // width, 1) * self._mesh.size
            members = [index for index, text_width in enumerate(widths) if text_width == width]
            for start in range(0, len(members), rows):
                batch = members[start : start + rows]
                token_ids, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
                for row, index in enumerate(batch):
                    lengths[row] = len(ids[index])
                    token_ids[row, : lengths[row]] = ids[index]
                arrays = jax.device_put((token_ids, lengths), split)
                encoded = encode_rows(self._params, *arrays, model=self.model, mesh=self._mesh)
                batches.append((batch, encoded))
        vectors = np.zeros((len(texts), self.model.width), np.float32)
        for batch, encoded in batches:  # wait for the devices last
            vectors[batch] = np.asarray(encoded)[: len(batch)]
        return vectors


def read_tokenizer(folder: str | Path, model: EmbeddingModel) -> tokenizers.Tokenizer:
    """Load the tokenizer in a folder, set to truncate to the model's `max_tokens`.

    Raises:
        FileNotFoundError: The folder has no `tokenizer.json`.
        ValueError: The tokenizer is damaged, or has ids outside the model's vocabulary.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} holds no tokenizer.json; expected a fast tokenizer. Save it there "
            "with transformers' `save_pretrained`."
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain exceptions
        raise ValueError(f"{file} is damaged: {error}") from error
    num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if num_ids > model.model.vocab_size:
        raise ValueError(
            f"{file} has {num_ids} ids, but the model has {model.model.vocab_size} (vocab_size in "
            "config.json); they belong to different models."
        )
    tokenizer.no_padding()
    tokenizer.enable_truncation(model.max_tokens)
    return tokenizer
