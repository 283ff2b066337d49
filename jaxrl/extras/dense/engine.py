"""Search engine for dense retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.envs.search.base import DocumentSearch, Hit, Progress
from jaxrl.envs.search.corpus import CorpusDocuments, compute_corpus_digest, get_index_folder
from jaxrl.extras.dense.encoder import Encoder, compute_folder_digest
from jaxrl.extras.dense.encoders import read_embedding_model
from jaxrl.extras.dense.files import IndexSpec, ReadRows, open_index, open_precomputed_vectors
from jaxrl.extras.dense.passages import PassageIndex
from jaxrl.utils.text import replace_surrogates

NUM_SAMPLED = 8
"""Number of documents to encode as a check of precomputed vectors."""

MIN_COSINE = 0.95
"""Minimum median cosine similarity between precomputed and encoded vectors."""


class DenseSearch(DocumentSearch):
    """Search engine that ranks documents by the exact inner product of their vectors.

    The vectors are built on first use, in a subfolder of `index` named by a hash of the build
    settings and the corpus, and are memory-mapped from there. In multi-process runs, one process
    builds them. An interrupted build resumes.

    The result of a query depends neither on other queries in the batch nor on the number of
    devices.
    """

    def __init__(
        self,
        *,
        corpus: str,
        encoder: str,
        index: str = "",
        embeddings: str = "",
        topk: int = 3,
        dtype: str = "float32",
        file_dtype: str = "float32",
        devices: str = "run",
        candidates: int = 100,
        query_rows: int = 16,
        pooling: str = "",
        query_prefix: str = "auto",
        passage_prefix: str = "auto",
        max_tokens: int = 512,
        encoder_dtype: str = "float32",
        batch_tokens: int = 16_384,
        query_batch_tokens: int = 256,
        progress: Progress = lambda _: None,
    ) -> None:
        """Open the index of a corpus, building it if necessary.

        `progress` receives the number of vectors encoded so far. The other arguments are the
        settings of `search.dense`; see `keys.py`.

        Raises:
            FileNotFoundError: The corpus, encoder or file of precomputed vectors is missing.
            ImportError: The precomputed vectors are a FAISS index, and faiss is not installed.
            OSError: The index folder cannot be written.
            ValueError: A file is malformed, or corpus, encoder and vectors do not match.
        """
        self.topk = topk
        self._batch_tokens, self._query_batch_tokens = batch_tokens, query_batch_tokens
        model = read_embedding_model(
            encoder,
            pooling=pooling,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
            max_tokens=max_tokens,
        )
        search_devices = jax.local_devices(backend="cpu" if devices == "cpu" else None)
        self._encoder = Encoder(model, encoder, search_devices, dtype=encoder_dtype)
        # The folder name contains a hash of all settings and files that determine the vectors.
        index_dir = get_index_folder(corpus, index)
        settings: dict[str, Any]
        if embeddings:
            open_precomputed_vectors(
                Path(embeddings)
            )  # before the digest, so that errors name the config key
            settings = {"embeddings": compute_corpus_digest(Path(embeddings), index_dir)}
        else:
            settings = asdict(model)
            del settings["model"], settings["query_prefix"]
            settings |= {"encoder": compute_folder_digest(encoder), "encoder_dtype": encoder_dtype}
        spec = IndexSpec(
            corpus=Path(corpus),
            index_dir=index_dir,
            settings=settings,
            width=model.width,
            dtype=file_dtype,
        )

        def make_reader(documents: CorpusDocuments) -> ReadRows:
            encode = self._make_encoding_reader(documents)
            if not embeddings:
                return encode
            return self._make_precomputed_reader(documents, encode, embeddings)

        index_files = open_index(spec, make_reader, progress)
        self.documents = self._documents = index_files.documents
        self._passages = PassageIndex(
            index_files.vectors,
            search_devices,
            dtype=dtype,
            candidates=candidates,
            query_rows=query_rows,
        )

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return the `topk` documents with the largest inner products. Ties are in corpus order."""
        if not queries:
            return []
        texts = [replace_surrogates(query) for query in queries]
        vectors = self._encoder.encode_queries(texts, batch_tokens=self._query_batch_tokens)
        rankings = zip(*self._passages.search(vectors, topk), strict=True)
        return [
            [Hit(self._documents[int(i)], float(x)) for i, x in zip(positions, scores, strict=True)]
            for positions, scores in rankings
        ]

    def _make_encoding_reader(self, documents: CorpusDocuments) -> ReadRows:
        """Return a function that encodes the `contents` of a range of documents."""

        def encode_range(start: int, stop: int) -> np.ndarray:
            parts = [documents[position] for position in range(start, stop)]
            texts = [
                replace_surrogates(document.contents if document.title else document.text)
                for document in parts
            ]
            return self._encoder.encode_passages(texts, batch_tokens=self._batch_tokens)

        return encode_range

    def _make_precomputed_reader(
        self, documents: CorpusDocuments, encode: ReadRows, path: str
    ) -> ReadRows:
        """Check a sample of the precomputed vectors, and return a function that reads them.

        Raises:
            ValueError: The vectors do not match these documents and this encoder.
        """
        key, precomputed = "config.search.dense.embeddings", open_precomputed_vectors(Path(path))
        width = self._encoder.model.width
        if precomputed.shape != (len(documents), width):
            raise ValueError(
                f"{key} is {path!r} with vectors of shape {list(precomputed.shape)}; expected "
                f"{[len(documents), width]}, one per document with the encoder's width."
            )
        positions = np.unique(np.linspace(0, len(documents) - 1, NUM_SAMPLED).round().astype(int))
        prebuilt_vectors = np.concatenate([precomputed.rows(i, i + 1) for i in positions.tolist()])
        encoded_vectors = np.concatenate([encode(i, i + 1) for i in positions.tolist()])
        norms = np.linalg.norm(prebuilt_vectors, axis=1) * np.linalg.norm(encoded_vectors, axis=1)
        cosines = (prebuilt_vectors * encoded_vectors).sum(axis=1) / np.maximum(norms, 1e-12)
        if not np.median(cosines) >= MIN_COSINE:
            raise ValueError(
                f"{key} is {path!r}, whose vectors differ from the encoder's: cosines of "
                f"{', '.join(f'{x:.2f}' for x in cosines)} for documents "
                f"{', '.join(map(str, positions))}. Expected the order of the corpus, and the same "
                "encoder, pooling and passage_prefix."
            )
        return precomputed.rows
