"""On-disk index of a corpus's vectors, with resumable builds and memory-mapped reads.

An index folder contains

    vectors.bin     [N, D] vectors, in the order of the corpus
    lines.npy       [N] records: byte offset and CRC-32 of each document's corpus line
    manifest.json   build settings, SHA-256 of `lines.npy` and of each chunk of vectors

The folder name contains a hash of the build settings and the corpus, and ends in `.building` until
the index is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
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
    check_unchanged,
    compute_corpus_digest,
    compute_line_checksum,
    find_longest_prefix,
    hash_file,
    read_corpus,
)
from jaxrl.utils.files import open_atomic
from jaxrl.utils.json_io import read_object
from jaxrl.utils.paths import suggest_path

FILE_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""NumPy dtype of `vectors.bin`, by value of `search.dense.file_dtype`."""

CHUNK_ROWS = 8_192
"""Vectors per chunk. A chunk is written as a whole; a killed build loses at most one."""

_VERSION = 3  # part of the folder name; increment it when the format changes
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
    def inputs(self) -> dict[str, Any]:
        """Manifest entries that are independent of the corpus."""
        settings = {"settings": dict(self.settings)}
        return {"version": _VERSION, "width": self.width, "dtype": self.dtype, **settings}

    @property
    def folder(self) -> Path:
        """Path of the index folder."""
        key = json.dumps(
            [self.inputs, compute_corpus_digest(self.corpus, self.index_dir)], sort_keys=True
        )
        return self.index_dir / f"dense-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


class VectorFiles(NamedTuple):
    """Open index: memory-mapped vectors and their documents."""

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
        PermissionError, NotADirectoryError: The index folder is not writable.
        ValueError: The corpus is malformed, or the index is damaged.
    """
    check_corpus(spec.corpus, spec.index_dir, section="search.dense")
    folder = spec.folder
    build_index_once(
        folder,
        lambda: _build_index(spec, folder, make_reader, progress),
        lock=spec.index_dir / f".{folder.name}.lock",
        corpus=spec.corpus,
        section="search.dense",
    )
    try:
        return _open_verified(spec, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the index {folder} is damaged; delete this folder to rebuild it. ({error})"
        ) from error


def _open_verified(spec: IndexSpec, folder: Path) -> VectorFiles:
    """Open a complete index, verifying the digests of its files.

    Raises:
        OSError, ValueError, KeyError, TypeError: A file is missing or damaged.
    """
    manifest = read_object(folder / _MANIFEST)
    lines = _read_lines(folder, manifest)
    dtype, shape = FILE_DTYPES[spec.dtype], (len(lines), spec.width)
    vectors = np.memmap(folder / _VECTORS, dtype, "r", shape=shape)
    num_intact = _count_intact_chunks(vectors, manifest["chunks"])
    if num_intact < -(-len(lines) // CHUNK_ROWS):
        first = num_intact * CHUNK_ROWS
        raise ValueError(f"{_VECTORS} was changed: digests differ from vector {first} on")
    return VectorFiles(folder, vectors, _make_documents(spec, lines))


def _read_lines(folder: Path, manifest: Mapping[str, Any]) -> np.ndarray:
    if manifest["lines"] != hash_file(folder / _LINES):
        raise ValueError(f"{_LINES} does not match its digest")
    return np.load(folder / _LINES, mmap_mode="r")


def _make_documents(spec: IndexSpec, lines: Any) -> CorpusDocuments:
    return CorpusDocuments(spec.corpus, lines["offset"], lines["check"])


def _count_intact_chunks(vectors: np.ndarray, digests: list[str]) -> int:
    """Count the leading chunks with matching digests."""
    starts = range(0, len(digests) * CHUNK_ROWS, CHUNK_ROWS)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        actual = pool.map(lambda start: _hash_rows(vectors[start : start + CHUNK_ROWS]), starts)
        pairs = enumerate(zip(actual, digests, strict=True))
        return next((number for number, (a, b) in pairs if a != b), len(digests))


def _hash_rows(rows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).view(np.uint8).data).hexdigest()


def _build_index(
    spec: IndexSpec,
    folder: Path,
    make_reader: Callable[[CorpusDocuments], ReadRows],
    progress: Progress,
) -> None:
    """Build an index in a temporary folder, then rename that to `folder`."""
    # Resume an unfinished build if `lines.npy` is intact; otherwise, start over.
    build_folder = folder.with_name(f"{folder.name}.building")
    digest = compute_corpus_digest(spec.corpus, spec.index_dir)
    try:
        manifest = read_object(build_folder / _MANIFEST)
        lines = _read_lines(build_folder, manifest)
    except (OSError, ValueError, KeyError):
        shutil.rmtree(build_folder, ignore_errors=True)
        build_folder.mkdir(parents=True)
        lines = np.fromiter(_scan_lines(spec.corpus, progress), _LINE_DTYPE)
        np.save(build_folder / _LINES, lines)
        corpus = {"digest": digest, "bytes": spec.corpus.stat().st_size}
        manifest = {**spec.inputs, "corpus": corpus, "chunks": []}
        manifest["lines"] = hash_file(build_folder / _LINES)
        _write_manifest(build_folder, manifest)
    # Keep intact chunks. Copy vectors from the index of a shorter version of the corpus.
    shape, dtype = (len(lines), spec.width), FILE_DTYPES[spec.dtype]
    _preallocate(build_folder, shape[0] * shape[1] * dtype.itemsize)
    vectors = np.memmap(build_folder / _VECTORS, dtype, "r+", shape=shape)
    chunks = manifest["chunks"]
    del chunks[_count_intact_chunks(vectors, chunks) :]
    earlier_vectors, rows = _find_earlier_vectors(spec), make_reader(_make_documents(spec, lines))
    for start in range(len(chunks) * CHUNK_ROWS, len(lines), CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, len(lines))
        copy_stop = min(max(start, len(earlier_vectors)), stop)
        vectors[start:copy_stop] = earlier_vectors[start:copy_stop]
        if copy_stop < stop:
            new = rows(copy_stop, stop)
            if not np.isfinite(new.astype(np.float32)).all():
                raise ValueError(
                    f"vectors of documents {copy_stop} to {stop} have values that are not finite."
                )
            vectors[copy_stop:stop] = new.astype(dtype)
        vectors.flush()
        chunks.append(_hash_rows(vectors[start:stop]))
        _write_manifest(build_folder, manifest)
        progress(stop)
    check_unchanged(spec.corpus, spec.index_dir, digest)
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


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
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


def _find_earlier_vectors(spec: IndexSpec) -> np.ndarray:
    """Return the vectors of the longest indexed prefix of this corpus; empty if none exists."""
    folders: dict[str, tuple[Path, int]] = {}
    for file in spec.index_dir.glob(f"dense-*/{_MANIFEST}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = read_object(file)
            is_complete = file.parent.suffix != ".building"
            if is_complete and spec.inputs.items() <= manifest.items():
                corpus = manifest["corpus"]
                folders[corpus["digest"]] = file.parent, int(corpus["bytes"])
    sizes = {digest: size for digest, (_, size) in folders.items()}
    digest = find_longest_prefix(spec.corpus, sizes)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged
        return _open_verified(spec, folders[digest][0]).vectors
    return np.empty((0, spec.width), FILE_DTYPES[spec.dtype])


class PrebuiltVectors(NamedTuple):
    """Precomputed vectors from a file, in the order of the corpus."""

    shape: tuple[int, int]
    rows: ReadRows


def read_prebuilt(path: Path) -> PrebuiltVectors:
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
    return PrebuiltVectors(
        vectors.shape, lambda start, stop: vectors[start:stop].astype(np.float32)
    )


def _read_faiss(path: Path) -> PrebuiltVectors:
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
    return PrebuiltVectors(shape, lambda start, stop: index.reconstruct_n(start, stop - start))
