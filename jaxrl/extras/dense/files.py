"""On-disk index of a corpus's vectors, with resumable builds and memory-mapped reads.

An index folder contains

    vectors.bin     [N, D] vectors, in the order of the corpus
    lines.npy       [N] records: byte offset and CRC-32 of each document's corpus line
    manifest.json   build settings, and the number of vectors written so far

The folder name contains a hash of the build settings and the corpus, and ends in `.building` until
the index is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxrl.envs.search.base import Progress
from jaxrl.envs.search.corpus import (
    CorpusDocuments,
    build_index_once,
    check_corpus,
    check_corpus_unchanged,
    compute_corpus_digest,
    compute_line_checksum,
    read_corpus,
)
from jaxrl.utils.files import open_atomic
from jaxrl.utils.json_io import read_object
from jaxrl.utils.paths import suggest_path

FILE_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""NumPy dtype of `vectors.bin`, by value of `search.dense.file_dtype`."""

CHUNK_ROWS = 8_192
"""Vectors per chunk. A build that is killed loses at most one chunk."""

_VERSION = 4  # part of the folder name; increment it when the format changes
_VECTORS, _LINES, _MANIFEST = "vectors.bin", "lines.npy", "manifest.json"
_LINE_DTYPE = np.dtype([("offset", np.int64), ("check", np.uint32)])

ReadRows = Callable[[int, int], np.ndarray]
"""Function from corpus positions start and stop to their vectors, float [stop - start, D]."""


@dataclass(frozen=True, kw_only=True)
class IndexSpec:
    """Build settings of an index, which determine its folder name.

    Attributes:
        corpus: JSONL file of documents.
        index_dir: Parent folder of all indexes.
        settings: Other settings that determine the vectors, including file digests.
        width: Embedding dimension.
        dtype: Dtype of the vectors on disk, a key of `FILE_DTYPES`.
    """

    corpus: Path
    index_dir: Path
    settings: Mapping[str, Any]
    width: int
    dtype: str

    @property
    def folder(self) -> Path:
        """Path of the index folder."""
        corpus = compute_corpus_digest(self.corpus, self.index_dir)
        inputs = [_VERSION, dict(self.settings), self.width, self.dtype, corpus]
        key = json.dumps(inputs, sort_keys=True)
        return self.index_dir / f"dense-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


class VectorFiles(NamedTuple):
    """Dense index opened from disk: memory-mapped vectors and their documents."""

    folder: Path
    vectors: np.ndarray
    documents: CorpusDocuments


def open_index(
    spec: IndexSpec, make_reader: Callable[[CorpusDocuments], ReadRows], progress: Progress
) -> VectorFiles:
    """Open an index, building it or resuming an interrupted build if necessary.

    One process builds; other processes that open the same index wait.

    Args:
        spec: Build settings of the index.
        make_reader: Function that returns a `ReadRows` for documents, called only to build.
        progress: Callback that receives the number of vectors written so far.

    Raises:
        FileNotFoundError: The corpus is missing.
        OSError: The index folder cannot be written.
        ValueError: The corpus is malformed, or the index is damaged.
    """
    check_corpus(spec.corpus, section="search.dense")
    folder = spec.folder
    build_index_once(
        folder,
        lambda: _build_index(spec, folder, make_reader, progress),
        lock=spec.index_dir / f".{folder.name}.lock",
    )
    try:
        lines = np.load(folder / _LINES, mmap_mode="r")
        shape = (len(lines), spec.width)
        vectors = np.memmap(folder / _VECTORS, FILE_DTYPES[spec.dtype], "r", shape=shape)
    except (OSError, ValueError) as error:  # a file is missing or too short
        raise ValueError(
            f"the index {folder} is damaged; delete this folder to rebuild it. ({error})"
        ) from error
    return VectorFiles(folder, vectors, _open_corpus_documents(spec, lines))


def _open_corpus_documents(spec: IndexSpec, lines: Any) -> CorpusDocuments:
    return CorpusDocuments(spec.corpus, lines["offset"], lines["check"])


def _build_index(
    spec: IndexSpec,
    folder: Path,
    make_reader: Callable[[CorpusDocuments], ReadRows],
    progress: Progress,
) -> None:
    """Build an index in a temporary folder, and rename the folder when the index is complete."""
    # Resume an unfinished build, unless it was killed before the manifest was written.
    build_folder = folder.with_name(f"{folder.name}.building")
    digest = compute_corpus_digest(spec.corpus, spec.index_dir)
    if not (build_folder / _MANIFEST).is_file():
        shutil.rmtree(build_folder, ignore_errors=True)
        build_folder.mkdir(parents=True)
        scanned = np.fromiter(_scan_lines(spec.corpus, progress), _LINE_DTYPE)
        np.save(build_folder / _LINES, scanned)
        _write_manifest(build_folder, spec, 0)
    lines = np.load(build_folder / _LINES, mmap_mode="r")
    shape, dtype = (len(lines), spec.width), FILE_DTYPES[spec.dtype]
    _preallocate(build_folder, shape[0] * shape[1] * dtype.itemsize)
    vectors = np.memmap(build_folder / _VECTORS, dtype, "r+", shape=shape)
    read_rows = make_reader(_open_corpus_documents(spec, lines))
    num_written = read_object(build_folder / _MANIFEST)["num_vectors"]
    for start in range(num_written, len(lines), CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, len(lines))
        new = read_rows(start, stop)
        if not np.isfinite(new.astype(np.float32)).all():
            raise ValueError(
                f"vectors of documents {start} to {stop} have values that are not finite."
            )
        vectors[start:stop] = new.astype(dtype)
        vectors.flush()
        _write_manifest(build_folder, spec, stop)
        progress(stop)
    check_corpus_unchanged(spec.corpus, spec.index_dir, digest)
    build_folder.rename(folder)


def _scan_lines(corpus: Path, progress: Progress) -> Iterator[tuple[int, int]]:
    """Validate the corpus; yield each document's byte offset and line checksum."""
    documents, offset = read_corpus(corpus), 0
    with open(corpus, "rb") as lines:
        for number, line in enumerate(lines):
            if line.strip():
                next(documents)
                yield offset, compute_line_checksum(line)
            offset += len(line)
            if number % 10_000 == 9_999:
                progress(0)
    next(documents, None)  # raises if the corpus has no documents


def _write_manifest(folder: Path, spec: IndexSpec, num_vectors: int) -> None:
    manifest: dict[str, Any] = {"settings": dict(spec.settings), "corpus": str(spec.corpus)}
    manifest |= {"width": spec.width, "dtype": spec.dtype, "num_vectors": num_vectors}
    with open_atomic(folder / _MANIFEST) as out:
        json.dump(manifest, out, indent=1)


def _preallocate(build_folder: Path, size: int) -> None:
    """Allocate `vectors.bin`, so that a full disk raises an error before the build."""
    with open(build_folder / _VECTORS, "ab") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{build_folder.parent} cannot hold {size / 2**20:,.0f} MiB of vectors "
                f"({error.strerror}); free some space, set config.search.dense.index to "
                "another folder, or set config.search.dense.file_dtype to 'bfloat16'",
            ) from error


class PrecomputedVectors(NamedTuple):
    """Precomputed vectors from a file, in the order of the corpus."""

    shape: tuple[int, int]
    rows: ReadRows


def open_precomputed_vectors(path: Path) -> PrecomputedVectors:
    """Open precomputed vectors: an `.npy` file of floats [N, D], or a FAISS flat index.

    Raises:
        FileNotFoundError: The file does not exist.
        ImportError: The file is a FAISS index, and faiss is not installed.
        ValueError: The file is in neither format.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"config.search.dense.embeddings is {str(path)!r}; there is no such file."
            f"{suggest_path(path)}"
        )
    if path.suffix != ".npy":
        return _read_faiss(path)
    try:
        vectors = np.load(path, mmap_mode="r")
    except ValueError as error:
        raise ValueError(f"{path} is not an .npy file of numbers: {error}") from error
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise ValueError(f"{path} holds {vectors.dtype} {vectors.shape}; expected floats [N, D].")
    return PrecomputedVectors(
        vectors.shape, lambda start, stop: vectors[start:stop].astype(np.float32)
    )


def _read_faiss(path: Path) -> PrecomputedVectors:
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            f"{path} is not an .npy file, and a FAISS index needs faiss; pip install "
            "'jaxrl[faiss]', or save the vectors as .npy."
        ) from error
    try:
        # Older versions of faiss lack this flag and read the complete file into memory.
        index = faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
    except RuntimeError as error:
        raise ValueError(f"{path} is neither .npy nor a FAISS index: {error}") from error
    is_inner_product = index.metric_type == faiss.METRIC_INNER_PRODUCT
    if not (isinstance(index, faiss.IndexFlat) and is_inner_product):
        raise ValueError(
            f"{path} is a FAISS {type(index).__name__}; expected an IndexFlatIP, which holds "
            "uncompressed vectors."
        )
    shape = int(index.ntotal), int(index.d)
    return PrecomputedVectors(shape, lambda start, stop: index.reconstruct_n(start, stop - start))
