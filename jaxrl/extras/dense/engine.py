"""Dense retrieval as a search engine: documents whose vectors fit that of the query best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.envs.search.base import DocumentSearch, Hit, Progress
from jaxrl.envs.search.corpus import corpus_digest, index_folder
from jaxrl.extras.dense.encoder import Encoder, folder_digest
from jaxrl.extras.dense.encoders import EmbeddingModel, read_embedding_model
from jaxrl.extras.dense.files import Documents, Rows, Source, open_built, read_prebuilt
from jaxrl.extras.dense.passages import Passages
from jaxrl.utils.text import writable

NUM_SAMPLED = 8
"""Documents that are encoded to see whether prebuilt vectors are of this encoder."""

LEAST_COSINE = 0.95
"""Cosine of a prebuilt vector and the encoder's own, in the middle of the sampled documents."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a `DenseSearch`; `jaxrl/config/schema.py` says more of each.

    Attributes:
        corpus: a JSONL file of documents.
        encoder: a folder in Hugging Face format: BERT (E5, BGE) or Qwen3-Embedding.
        index: where indexes live, by default a folder `index` beside the corpus.
        embeddings: vectors of the documents that were made elsewhere; "": the encoder makes them.
        topk: documents that an answer shows at most.
        dtype: of vectors on the devices: float32, bfloat16 or int8.
        file_dtype: of vectors in the file: float32 or bfloat16.
        devices: run, those of this process, or cpu.
        candidates: documents whose scores are computed again from the file.
        query_rows: queries that are searched for at once.
        pooling: mean, first or last; "": as the encoder's folder says.
        query_prefix: before a query; auto: as the folder says.
        passage_prefix: before a document; likewise.
        max_tokens: of a text, at most.
        encoder_dtype: of the encoder's weights and activations.
        batch_tokens: of documents that a device encodes at once.
        query_batch_tokens: of queries that a device encodes at once.
    """

    corpus: str
    encoder: str
    index: str = ""
    embeddings: str = ""
    topk: int = 3
    dtype: str = "float32"
    file_dtype: str = "float32"
    devices: str = "run"
    candidates: int = 100
    query_rows: int = 16
    pooling: str = ""
    query_prefix: str = "auto"
    passage_prefix: str = "auto"
    max_tokens: int = 512
    encoder_dtype: str = "float32"
    batch_tokens: int = 16_384
    query_batch_tokens: int = 256


def embedding_model(settings: Settings) -> EmbeddingModel:
    """Reads the encoder's folder, as the settings change it; reads no weights.

    Raises:
        FileNotFoundError, ValueError: as `read_embedding_model`.
    """
    return read_embedding_model(
        settings.encoder,
        pooling=settings.pooling,
        query_prefix=settings.query_prefix,
        passage_prefix=settings.passage_prefix,
        max_tokens=settings.max_tokens,
    )


class DenseSearch(DocumentSearch):
    """Exact search by inner product over the vectors of a corpus, on the devices of the run.

    The vectors are made on first use, in a folder of `index` named after corpus, encoder and what
    else they depend on, and mapped from there afterwards. A build that was killed goes on where it
    was; several processes may start at once, and one of them builds. Where a corpus has grown at
    its end, only what is new is encoded.

    A query finds the same documents whatever else is asked with it, and on any number of devices.
    """

    def __init__(self, *, progress: Progress = lambda _: None, **settings: Any) -> None:
        """Opens the index of a corpus, building it if need be; `settings` are those of `Settings`.

        Args:
            progress: is told how many documents have their vectors, where an index must be built.
            settings: those of `Settings`.

        Raises:
            FileNotFoundError: there is no such corpus, encoder or file of vectors.
            ImportError: the vectors are of FAISS, which is not installed.
            PermissionError, NotADirectoryError: the index may not be written.
            ValueError: there is no such setting, a file is malformed, or what belongs together does
                not fit.
        """
        names = [field.name for field in fields(Settings)]
        unknown = [name for name in settings if name not in names]
        missing = [name for name in ("corpus", "encoder") if name not in settings]
        if unknown or missing:
            problem = f"{unknown[0]!r} is none" if unknown else f"{missing[0]!r} is missing"
            raise ValueError(f"of the settings of dense search {problem}: {', '.join(names)}.")
        self._settings = own = Settings(**settings)
        if own.topk < 1:
            raise ValueError(f"topk is {own.topk}; a search must show at least 1 document.")
        self.topk = own.topk
        devices = jax.local_devices(backend="cpu" if own.devices == "cpu" else None)
        model = embedding_model(own)
        self._encoder = Encoder(model, own.encoder, devices, dtype=own.encoder_dtype)
        index_dir = index_folder(own.corpus, own.index)
        # All that the vectors depend on beside the corpus.
        if own.embeddings:
            file = Path(own.embeddings)
            read_prebuilt(file)  # which says what is wrong with it
            made_with: dict[str, Any] = {"embeddings": corpus_digest(file, index_dir)}
        else:
            made_with = asdict(model)
            del made_with["model"], made_with["query_prefix"]
            made_with["encoder"] = folder_digest(own.encoder)
            made_with["encoder_dtype"] = own.encoder_dtype
        source = Source(
            corpus=Path(own.corpus),
            index_dir=index_dir,
            settings=made_with,
            width=model.width,
            dtype=own.file_dtype,
        )
        built = open_built(source, self._rows, progress)
        self._documents = self.documents = built.documents
        self._passages = Passages(
            built.vectors,
            devices,
            dtype=own.dtype,
            candidates=own.candidates,
            query_rows=own.query_rows,
        )

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The documents with the largest inner products; of equal ones the first in the corpus."""
        if not queries:
            return []
        texts = [writable(query) for query in queries]
        vectors = self._encoder.queries(texts, batch_tokens=self._settings.query_batch_tokens)
        rankings = zip(*self._passages.search(vectors, topk), strict=True)
        return [
            [Hit(self._documents[int(i)], float(x)) for i, x in zip(places, scores, strict=True)]
            for places, scores in rankings
        ]

    def _rows(self, documents: Documents) -> Rows:
        """Function from places to vectors: encoded here, or of a file that fits the encoder."""
        if not self._settings.embeddings:
            return lambda start, stop: self._encode(documents.texts(start, stop))
        key, path = "config.search.dense.embeddings", self._settings.embeddings
        vectors = read_prebuilt(Path(path))
        if (len(vectors), vectors.width) != (len(documents), self._encoder.model.width):
            raise ValueError(
                f"{key} is {path!r}, {len(vectors)} vectors of {vectors.width} values; expected "
                f"{len(documents)}, one for each document of {self._settings.corpus}, of the "
                f"{self._encoder.model.width} values that the encoder's have."
            )
        places = np.unique(np.linspace(0, len(documents) - 1, NUM_SAMPLED).round().astype(int))
        theirs = np.concatenate([vectors(i, i + 1) for i in places.tolist()])
        ours = self._encode([documents.texts(i, i + 1)[0] for i in places.tolist()])
        norms = np.linalg.norm(theirs, axis=1) * np.linalg.norm(ours, axis=1)
        cosines = (theirs * ours).sum(axis=1) / np.maximum(norms, 1e-12)
        if not np.median(cosines) >= LEAST_COSINE:
            raise ValueError(
                f"{key} is {path!r}, whose vectors are not those that the encoder makes of these "
                f"documents: cosines of {', '.join(f'{x:.2f}' for x in cosines)} for documents "
                f"{', '.join(map(str, places))}. They have to be in the order of the corpus, and "
                "of the same encoder, pooling and passage_prefix."
            )
        return vectors

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        return self._encoder.passages(
            [writable(text) for text in texts], batch_tokens=self._settings.batch_tokens
        )
