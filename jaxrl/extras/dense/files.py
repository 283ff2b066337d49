"""The vectors of a corpus in files: built once, resumed where a build was killed, memory-mapped.

A folder of the index holds

    vectors.bin     [N, D] values, row by row, in the order of the corpus
    offsets.npy     int64 [N], where each document's line begins in the corpus
    checks.npy      uint32 [N], CRC-32 of that line
    chunks.jsonl    a line for each chunk of vectors that is written: its number and SHA-256
    manifest.json   what the vectors were made of, and SHA-256 of the three files above

It is named after all that its vectors depend on. While it is built it has another name, so a folder
with that name is whole.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl.envs.search.base import Progress
from jaxrl.envs.search.corpus import (
    CorpusDocuments,
    check_corpus,
    check_unchanged,
    corpus_digest,
    file_digest,
    line_check,
    longest_known,
    make_once,
    read_corpus,
)
from jaxrl.utils.json_io import parse_json
from jaxrl.utils.paths import similar_path

FILE_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""Dtypes of `vectors.bin`, by `search.dense.file_dtype`."""

CHUNK_ROWS = 8_192
"""Vectors that are written at a time: what a killed build loses at most."""

_VERSION = 2  # part of every folder's name: raise it when what is stored changes
_VECTORS, _OFFSETS, _CHECKS, _CHUNKS, _MANIFEST = (
    "vectors.bin", "offsets.npy", "checks.npy", "chunks.jsonl", "manifest.json",
)  # fmt: skip
_LINE_FILES, _LINES = (_OFFSETS, _CHECKS), "lines"  # the manifest's key for digests of files

Rows = Callable[[int, int], np.ndarray]
"""Vectors of the documents from one place in the corpus to before another, float [n, D]."""


class Documents(CorpusDocuments):
    """Documents of a corpus, and their texts for the encoder."""

    def texts(self, start: int, stop: int) -> list[str]:
        """Texts of some documents for the encoder: title and text, as in `Document.contents`."""
        documents = (self[place] for place in range(start, stop))
        return [one.contents if one.title else one.text for one in documents]


def line_offsets(corpus: Path, progress: Progress) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of a corpus' documents in bytes, int64 [N], and `line_check` of each, uint32 [N].

    Checks all of them.

    Raises:
        FileNotFoundError, ValueError: as `read_corpus`.
    """
    offsets, checks, begin = [], [], 0
    documents = read_corpus(corpus)
    with open(corpus, "rb") as lines:
        for line in lines:
            if line.strip():
                next(documents)
                offsets.append(begin)
                checks.append(line_check(line))
                if len(offsets) % 10_000 == 0:
                    progress(0)
            begin += len(line)
    next(documents, None)  # which refuses a corpus without any
    return np.array(offsets, np.int64), np.array(checks, np.uint32)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Inputs that vectors are made of; a folder of the index is named after them.

    Attributes:
        corpus: a JSONL file.
        index_dir: where indexes live.
        settings: all that the vectors depend on beside the corpus, digests of files among it.
        width: values of a vector.
        dtype: of the file, out of `FILE_DTYPES`.
    """

    corpus: Path
    index_dir: Path
    settings: Mapping[str, Any]
    width: int
    dtype: str

    @property
    def digest(self) -> str:
        """SHA-256 of the corpus."""
        return corpus_digest(self.corpus, self.index_dir)

    @property
    def made_of(self) -> dict[str, Any]:
        """Content of `manifest.json` without the corpus."""
        return {
            **{"version": _VERSION, "width": self.width, "dtype": self.dtype},
            "settings": dict(self.settings),
        }

    @property
    def manifest(self) -> dict[str, Any]:
        """Content of `manifest.json` without digests of files."""
        size = self.corpus.stat().st_size
        return {**self.made_of, "corpus": {"digest": self.digest, "bytes": size}}

    @property
    def folder(self) -> Path:
        """The folder of these vectors."""
        key = json.dumps([self.made_of, self.digest], sort_keys=True)
        return self.index_dir / f"dense-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


@dataclass(frozen=True)
class VectorFiles:
    """An index that is built: its vectors, mapped from the file, and its documents."""

    folder: Path
    vectors: np.ndarray
    documents: Documents


def open_built(
    source: Source, make_rows: Callable[[Documents], Rows], progress: Progress
) -> VectorFiles:
    """Opens the files of an index, building them or resuming where they are not whole.

    One process builds; others that ask for the same wait for it.

    Args:
        source: what it is made of.
        make_rows: called where something has to be built; gives the vectors of documents.
        progress: told how many vectors are there.

    Raises:
        FileNotFoundError: there is no such corpus.
        PermissionError: the index may not be written.
        NotADirectoryError: the index folder is a file.
        ValueError: the corpus is malformed, or the index is damaged.
    """
    check_corpus(source.corpus, source.index_dir, section="search.dense")
    folder = source.folder
    make_once(
        folder,
        lambda: _build(source, folder, make_rows, progress),
        lock=source.index_dir / f".{folder.name}.lock",
        corpus=source.corpus,
        section="search.dense",
    )
    damaged = f"delete the folder {folder}, and the next start builds it anew."
    try:
        _check_lines(source, folder)
        documents = _documents(source, folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"the index is damaged; {damaged} ({error})") from error
    return VectorFiles(folder, _vectors(source, folder, len(documents)), documents)


def _check_lines(source: Source, folder: Path) -> None:
    """Refuses an index whose files of lines and chunks are not those that were written.

    An index of before there were digests gets them, once its lines are those of the corpus.

    Raises:
        OSError, ValueError: says which file is another.
    """
    manifest = _read_json(folder / _MANIFEST)
    digests = manifest.pop(_LINES, None) if isinstance(manifest, dict) else None
    if manifest != source.manifest:
        raise ValueError(f"{_MANIFEST} is not the file that was written")
    if digests is None:
        lines = line_offsets(source.corpus, lambda _: None)
        for name, expected in zip(_LINE_FILES, lines, strict=True):
            if not np.array_equal(np.load(folder / name), expected):
                raise ValueError(f"{name} is not the file that was written")
    else:
        _check_digests(folder, digests)
    if digests is None or _CHUNKS not in digests:
        with contextlib.suppress(OSError):  # of others: the next start compares again
            _write_manifest(source, folder)


def _check_digests(folder: Path, digests: object) -> None:
    """Refuses files that are not those of a manifest.

    Raises:
        OSError, ValueError: says which is another.
    """
    if not isinstance(digests, dict) or not set(digests) <= {*_LINE_FILES, _CHUNKS}:
        raise ValueError(f"{_MANIFEST} is not the file that was written")
    for name in (*_LINE_FILES, *digests):
        if digests.get(name) != file_digest(folder / name):
            raise ValueError(f"{name} is not the file that was written")


def _write_manifest(source: Source, folder: Path) -> None:
    """Writes the manifest in one piece, after all files that it vouches for."""
    names = [name for name in (*_LINE_FILES, _CHUNKS) if (folder / name).is_file()]
    digests = {name: file_digest(folder / name) for name in names}
    unfinished = folder / f".{_MANIFEST}.{os.getpid()}"
    with open(unfinished, "w", encoding="utf-8") as out:
        out.write(json.dumps({**source.manifest, _LINES: digests}, indent=1) + "\n")
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(folder / _MANIFEST)


def _vectors(source: Source, folder: Path, count: int) -> np.ndarray:
    """The vectors of an index, mapped from its file.

    Raises:
        OSError: the file cannot be read.
        ValueError: they are not as many, or not those that were written.
    """
    damaged = f"delete the folder {folder}, and the next start builds it anew."
    dtype, shape = FILE_DTYPES[source.dtype], (count, source.width)
    expected = count * source.width * dtype.itemsize
    size = (folder / _VECTORS).stat().st_size
    if size != expected:
        raise ValueError(
            f"{folder / _VECTORS} has {size} bytes; expected {expected}, {shape[0]} vectors of "
            f"{shape[1]} values: it is damaged; {damaged}"
        )
    vectors = np.memmap(folder / _VECTORS, dtype, "r", shape=shape)
    whole = _whole_chunks(folder, vectors)
    missing = [number for number in range(-(-len(vectors) // CHUNK_ROWS)) if number not in whole]
    if missing:
        raise ValueError(
            f"{folder / _VECTORS}: vectors from {missing[0] * CHUNK_ROWS} on are not those that "
            f"were written: it is damaged; {damaged}"
        )
    return vectors


def _documents(source: Source, folder: Path) -> Documents:
    """The documents of an index; a line of the corpus that is another by then is a failure.

    Raises:
        OSError, ValueError: its files cannot be read.
    """
    offsets, checks = (np.load(folder / name, mmap_mode="r") for name in _LINE_FILES)
    if offsets.ndim != 1 or offsets.shape != checks.shape:
        raise ValueError(f"{offsets.shape} offsets and {checks.shape} checks")
    return Documents(source.corpus, offsets, checks)


def _build(
    source: Source, folder: Path, make_rows: Callable[[Documents], Rows], progress: Progress
) -> None:
    """Builds an index in a folder beside, then renames it."""
    building = folder.with_name(f"{folder.name}.building")
    manifest, digest = _read_json(building / _MANIFEST), source.digest
    wanted = {**source.manifest, _LINES: 0}  # but for digests, which are those of the files there
    is_same = isinstance(manifest, dict) and {**manifest, _LINES: 0} == wanted
    has_lines = all((building / name).is_file() for name in _LINE_FILES)
    if not (is_same and has_lines):
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        offsets, checks = line_offsets(source.corpus, progress)
        np.save(building / _OFFSETS, offsets)
        np.save(building / _CHECKS, checks)
        _write_manifest(source, building)
    documents = _documents(source, building)
    shape, dtype = (len(documents), source.width), FILE_DTYPES[source.dtype]
    _reserve(building, shape, dtype)
    vectors = np.memmap(building / _VECTORS, dtype, "r+", shape=shape)
    done = _whole_chunks(building, vectors)
    rows = _with_earlier(source, make_rows(documents))
    with open(building / _CHUNKS, "ab") as log:
        for number in range(-(-len(documents) // CHUNK_ROWS)):
            start, stop = number * CHUNK_ROWS, min((number + 1) * CHUNK_ROWS, len(documents))
            if number not in done:
                block, wide = rows(start, stop), (stop - start, source.width)
                if block.shape != wide or not np.isfinite(block.astype(np.float32)).all():
                    what = f"an array of {block.shape}"
                    if block.shape == wide:  # a search could not rank them
                        what = "no finite numbers"
                    raise ValueError(
                        f"the vectors of documents {start} to {stop} are {what}; expected finite "
                        f"numbers, {wide}."
                    )
                vectors[start:stop] = block.astype(vectors.dtype)
                vectors.flush()
                line = {"chunk": number, "sha256": _digest(vectors[start:stop])}
                # A line that a kill has cut ends before this one.
                log.write(b"\n" + json.dumps(line).encode() + b"\n")
                log.flush()
                os.fsync(log.fileno())
            progress(stop)
    del vectors
    _write_manifest(source, building)  # now with its chunks
    check_unchanged(source.corpus, source.index_dir, digest)
    building.rename(folder)


def _reserve(building: Path, shape: tuple[int, int], dtype: np.dtype) -> None:
    """Allocates the file of all vectors, so that a lack of room shows before the work."""
    size = shape[0] * shape[1] * dtype.itemsize
    with open(building / _VECTORS, "ab") as file:
        try:
            if os.fstat(file.fileno()).st_size < size:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = shutil.disk_usage(building).free / 2**20
            raise OSError(
                error.errno,
                f"the vectors of {shape[0]:,} documents take {size / 2**20:,.0f} MiB, and "
                f"{building.parent} has {free:,.0f} MiB free; free some space, name another folder "
                "by config.search.dense.index, or set config.search.dense.file_dtype to 'bfloat16'",
            ) from error


def _whole_chunks(folder: Path, vectors: np.ndarray) -> set[int]:
    """Numbers of the chunks whose vectors are those that were written."""
    chunks: dict[int, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / _CHUNKS).read_bytes().split(b"\n"):
            # A kill may have cut it.
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                fields = parse_json(line, _CHUNKS)
                chunks[int(fields["chunk"])] = str(fields["sha256"])

    def is_whole(number: int) -> bool:
        start = number * CHUNK_ROWS
        return _digest(vectors[start : start + CHUNK_ROWS]) == chunks[number]

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return {n for n, whole in zip(chunks, pool.map(is_whole, chunks), strict=True) if whole}


def _digest(rows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).view(np.uint8).data).hexdigest()


def _with_earlier(source: Source, rows: Rows) -> Rows:
    """Reuses the vectors of an earlier index, where the corpus has grown at its end since."""
    folders: dict[str, tuple[int, Path, object]] = {}
    for manifest in source.index_dir.glob(f"dense-*/{_MANIFEST}"):
        match _read_json(manifest):
            case {"corpus": {"digest": str() as digest, "bytes": int() as size}, **fields}:
                digests = fields.pop(_LINES, None)  # which an early one lacks
                if fields == source.made_of and manifest.parent.suffix != ".building":
                    folders[digest] = size, manifest.parent, digests
    whole = source.corpus.stat().st_size
    sizes = {digest: size for digest, (size, *_) in folders.items() if size < whole}
    digest, _ = longest_known(source.corpus, sizes)
    if not digest:
        return rows
    try:
        _, folder, digests = folders[digest]
        if digests is not None:
            _check_digests(folder, digests)
        earlier = _vectors(source, folder, len(_documents(source, folder)))
    except (OSError, ValueError):  # damaged: it helps nobody
        return rows

    def joined(start: int, stop: int) -> np.ndarray:
        known = earlier[start : min(stop, len(earlier))]
        if len(known) == stop - start:
            return known
        new = rows(max(start, len(earlier)), stop)
        return np.concatenate([known, new.astype(known.dtype)])

    return joined


class Prebuilt(abc.ABC):
    """Vectors that were made elsewhere, in the order of the corpus; called, it gives some rows."""

    width: int

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of vectors."""

    @abc.abstractmethod
    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Float32 [stop - start, D]."""


def read_prebuilt(path: Path) -> Prebuilt:
    """Vectors of an `.npy` file of floats [N, D], or of a FAISS flat index.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: it is a FAISS index, and faiss is not installed.
        ValueError: the file holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"config.search.dense.embeddings is {str(path)!r}; there is no such file."
            f"{similar_path(path)}"
        )
    return _OfNumpy(path) if path.suffix == ".npy" else _OfFaiss(path)


class _OfNumpy(Prebuilt):
    def __init__(self, path: Path) -> None:
        try:
            self._vectors = np.load(path, mmap_mode="r")
        except ValueError as error:
            raise ValueError(f"{path} is no .npy file of numbers: {error}") from error
        if self._vectors.ndim != 2 or self._vectors.dtype.kind != "f":
            raise ValueError(
                f"{path} holds {self._vectors.dtype} {self._vectors.shape}; expected floats [N, D]."
            )
        self.width = self._vectors.shape[1]

    def __len__(self) -> int:
        return len(self._vectors)

    def __call__(self, start: int, stop: int) -> np.ndarray:
        return np.asarray(self._vectors[start:stop]).astype(np.float32)


class _OfFaiss(Prebuilt):
    def __init__(self, path: Path) -> None:
        try:
            import faiss
        except ImportError as error:
            raise ImportError(
                f"{path} is no .npy file, and a FAISS index needs faiss; pip install "
                "'jaxrl[faiss]', or save the vectors as .npy."
            ) from error
        try:
            # Older ones read all of it into memory.
            index = faiss.read_index(str(path), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
        except RuntimeError as error:
            raise ValueError(f"{path} is neither .npy nor a FAISS index: {error}") from error
        is_product = index.metric_type == faiss.METRIC_INNER_PRODUCT
        if not (isinstance(index, faiss.IndexFlat) and is_product):
            raise ValueError(
                f"{path} is a FAISS {type(index).__name__}; expected an IndexFlatIP, which holds "
                "the vectors as they are."
            )
        self._index, self.width = index, int(index.d)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def __call__(self, start: int, stop: int) -> np.ndarray:
        return self._index.reconstruct_n(start, stop - start)


def _read_json(file: Path) -> Any:
    try:
        return parse_json(file.read_bytes(), str(file))
    except (OSError, ValueError):
        return None
