"""JSONL corpora: reading documents, computing digests and building indexes once."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document
from jaxrl.utils.files import hash_file
from jaxrl.utils.json_io import read_object
from jaxrl.utils.jsonl import read_objects
from jaxrl.utils.paths import suggest_path


def read_corpus(path: Path) -> Iterator[Document]:
    r"""Stream the documents of a JSONL corpus, skipping blank lines.

    A line is `{"id", "title", "text"}`, or Search-R1's `{"id", "contents"}` with `contents` equal
    to `"title"\nbody`. Other keys are ignored.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: A line is malformed or repeats an id, a document is blank, or the corpus is
            empty.
    """
    seen: set[bytes] = set()
    for fields, location in read_objects(path):
        document = parse_document(fields, location)
        key = hashlib.blake2b(document.id.encode(), digest_size=8).digest()
        if key in seen:
            raise ValueError(
                f"{location}: the id {document.id!r} is already used by an earlier line; give "
                "every document a unique id."
            )
        seen.add(key)
        yield document
    if not seen:
        raise ValueError(f"the corpus {path} has no documents; expected one JSON object per line.")


def parse_document(fields: dict[str, Any], location: str) -> Document:
    """Convert the fields of a corpus line to a document.

    Raises:
        ValueError: The line is malformed or the document is blank. The message starts with
            `location`.
    """
    match fields:
        case {"id": str() | int() as key, "title": str() as title, "text": str() as text}:
            document = Document(str(key), " ".join(title.split()), text.strip())
        case {"id": str() | int() as key, "contents": str() as contents}:
            document = Document.from_contents(str(key), contents)
        case _:
            raise ValueError(
                f'{location}: expected "id", "title" and "text", or "id" and "contents", all of '
                f"them strings; got {json.dumps(fields, ensure_ascii=False)[:80]}"
            )
    if not (document.title or document.text):
        raise ValueError(
            f"{location}: the document {document.id!r} has neither title nor text; remove it."
        )
    return document


class CorpusDocuments:
    """Sequence of a corpus's documents, each read from the file on demand."""

    def __init__(
        self,
        corpus: Path,
        offsets: Sequence[int] | None = None,
        checksums: Sequence[int] | None = None,
    ) -> None:
        """Store the arguments. The file is opened on first use.

        Args:
            corpus: JSONL file, which must not change.
            offsets: Byte offset of each document's line; None to compute them on first use.
            checksums: Result of `compute_line_checksum` for each document's line; None to skip the
            check.
        """
        self._path, self._given_offsets, self._checksums = corpus, offsets, checksums

    @functools.cached_property
    def _offsets(self) -> Sequence[int]:
        return find_line_offsets(self._path) if self._given_offsets is None else self._given_offsets

    @functools.cached_property
    def _corpus_file(self) -> FileIO:
        return open(self._path, "rb", buffering=0)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int, /) -> Document:
        """Return a document. Thread-safe.

        Raises:
            ToolError: The line has changed since it was indexed.
        """
        begin = int(self._offsets[index])
        is_last = index + 1 == len(self._offsets)
        end = (
            os.fstat(self._corpus_file.fileno()).st_size
            if is_last
            else int(self._offsets[index + 1])
        )
        # Blank lines may follow the document's line.
        line = os.pread(self._corpus_file.fileno(), max(end - begin, 0), begin).partition(b"\n")[0]
        if self._checksums is not None and compute_line_checksum(line) != int(
            self._checksums[index]
        ):
            raise ToolError(
                f"{self._path}, byte {begin}: this line differs from the one that was indexed. The "
                "file has changed, or the index is damaged; start the run again, and if that does "
                "not help, delete the index (config.search.dense.index)"
            )
        return parse_document(json.loads(line.decode("utf-8-sig")), f"{self._path}, byte {begin}")


def compute_line_checksum(line: bytes) -> int:
    """Return the CRC-32 of a line without its newline."""
    return zlib.crc32(line.removesuffix(b"\n"))


def find_line_offsets(path: Path) -> Sequence[int]:
    """Return the byte offsets of a file's nonblank lines."""
    offsets, begin = array("Q"), 0
    with open(path, "rb") as lines:
        for line in lines:
            if line.strip():
                offsets.append(begin)
            begin += len(line)
    return offsets


def get_index_folder(corpus: str | Path, index: str | Path = "") -> Path:
    """Return the folder for a corpus's indexes: `index`, or a folder `index` next to the corpus."""
    return Path(index) if index else Path(corpus).parent / "index"


def check_corpus(corpus: Path, *, section: str) -> None:
    """Check that a corpus exists.

    Raises:
        FileNotFoundError: The corpus does not exist. The message names the config key in `section`.
    """
    if not corpus.is_file():
        raise FileNotFoundError(
            f"there is no corpus at {corpus}; expected a JSONL file with one document per line. "
            f"Set config.{section}.corpus to its path.{suggest_path(corpus)}"
        )


def build_index_once(folder: Path, build: Callable[[], None], *, lock: Path) -> None:
    """Build an index if it is missing. One process builds it, and the others wait.

    Args:
        folder: Folder of the index.
        build: Function that builds the index.
        lock: Lock file next to the folder. The operating system releases the lock when the process
            dies.

    Raises:
        OSError: The folder cannot be written.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not folder.is_dir():
            build()


def check_corpus_unchanged(corpus: Path, index_dir: Path, digest: str) -> None:
    """Check that a corpus did not change while it was indexed.

    Raises:
        ValueError: The SHA-256 of the corpus is no longer `digest`.
    """
    if compute_corpus_digest(corpus, index_dir) != digest:
        raise ValueError(
            f"{corpus} changed while it was indexed; run the same command again when no "
            "process is writing to it."
        )


_DIGEST_CACHE = "digests.json"

_MTIME_RESOLUTION_NS = 2 * 10**9  # some file systems round modification times to two seconds


def compute_corpus_digest(corpus: Path, index_dir: Path) -> str:
    """Return the SHA-256 of a corpus.

    The digest is cached in the index folder by the corpus's file name, size and modification time,
    so corpus and folder may be moved. The cache is not used for a corpus modified within the last
    two seconds, which may change again without a change of the modification time.
    """
    stat, now_ns = corpus.stat(), time.time_ns()
    key = f"{corpus.name} {stat.st_size} {stat.st_mtime_ns}"
    cache: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        cache = read_object(index_dir / _DIGEST_CACHE)
    is_stable = now_ns - stat.st_mtime_ns > _MTIME_RESOLUTION_NS
    if is_stable and isinstance(cache.get(key), str):
        return cache[key]
    digest = hash_file(corpus)
    if is_stable:
        with contextlib.suppress(OSError):  # the folder may be read-only, or the disk full
            index_dir.mkdir(parents=True, exist_ok=True)
            temp_path = index_dir / f".{_DIGEST_CACHE}.{os.getpid()}"
            temp_path.write_text(json.dumps(cache | {key: digest}, indent=1), encoding="utf-8")
            temp_path.replace(index_dir / _DIGEST_CACHE)
    return digest
