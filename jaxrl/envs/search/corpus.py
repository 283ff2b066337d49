"""A corpus: documents in a JSONL file, and the digests that identify its content."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document
from jaxrl.utils.json_io import read_object
from jaxrl.utils.jsonl import read_objects
from jaxrl.utils.paths import similar_path


@dataclass(frozen=True, kw_only=True)
class Known:
    """The part of a corpus that was read before: its first lines.

    Attributes:
        num_bytes: of these lines.
        num_lines: blank ones too.
        ids: `id_hash` of the id of each document in them.
    """

    num_bytes: int = 0
    num_lines: int = 0
    ids: Sequence[int] = ()


def id_hash(document_id: str) -> int:
    """64-bit hash of an id, the same in every process: a corpus has millions of ids."""
    return int.from_bytes(hashlib.blake2b(document_id.encode(), digest_size=8).digest())


def read_corpus(path: Path, known: Known | None = None) -> Iterator[Document]:
    r"""Streams the documents of a JSONL corpus; blank lines are skipped.

    A line is `{"id", "title", "text"}`, or Search-R1's `{"id", "contents"}` where `contents` is
    `"title"\nbody`. Other keys are ignored.

    Args:
        path: of the corpus.
        known: a part that is not given again; no document behind it may have an id from there.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is something else or has the id of an earlier one, a document is blank,
            or there is none.
    """
    known = known or Known()
    seen = set(known.ids)
    for fields, place in read_objects(path, skip_bytes=known.num_bytes, skip_lines=known.num_lines):
        document = parse_document(fields, place)
        key = id_hash(document.id)
        for other, first in read_objects(path) if key in seen else ():
            if first == place:  # only the hashes are equal
                break
            if str(other["id"]) == document.id:
                raise ValueError(
                    f"{place}: the id {document.id!r} is that of line {first.rpartition(':')[2]} "
                    "already; give every document an id of its own."
                )
        seen.add(key)
        yield document
    if not seen:
        raise ValueError(f"the corpus {path} has no documents; expected one JSON object a line.")


def parse_document(fields: dict[str, Any], place: str) -> Document:
    """Parses a line of a corpus.

    Raises:
        ValueError: the line is something else, or blank; `place` says where it stands.
    """
    match fields:
        case {"id": str() | int() as key, "title": str() as title, "text": str() as text}:
            document = Document(str(key), " ".join(title.split()), text.strip())
        case {"id": str() | int() as key, "contents": str() as contents}:
            document = Document.of_contents(str(key), contents)
        case _:
            raise ValueError(
                f'{place}: expected "id", "title" and "text", or "id" and "contents", all of them '
                f"strings; got {json.dumps(fields, ensure_ascii=False)[:80]}"
            )
    if not (document.title or document.text):
        raise ValueError(
            f"{place}: the document {document.id!r} has neither title nor text; leave it out."
        )
    return document


class CorpusDocuments:
    """The documents of a corpus by their places in it; read from the file when asked for."""

    def __init__(
        self,
        corpus: Path,
        offsets: Sequence[int] | None = None,
        checks: Sequence[int] | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            corpus: a JSONL file, which stays as it is.
            offsets: where each document's line begins, in bytes; None: that is looked up on first
                use, in the whole file.
            checks: `line_check` of each document's line; None: lines are taken as they are.
        """
        self._path, self._known, self._checks = corpus, offsets, checks

    @functools.cached_property
    def _offsets(self) -> Sequence[int]:
        return line_starts(self._path) if self._known is None else self._known

    @functools.cached_property
    def _file(self) -> FileIO:
        return open(self._path, "rb", buffering=0)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._offsets)

    def __getitem__(self, place: int, /) -> Document:
        """The document at a place; safe to be called from several threads.

        Raises:
            ToolError: its line is not the one that was indexed.
        """
        begin = int(self._offsets[place])
        is_last = place + 1 == len(self._offsets)
        end = os.fstat(self._file.fileno()).st_size if is_last else int(self._offsets[place + 1])
        # Blank lines may follow, which belong to no document.
        line = os.pread(self._file.fileno(), max(end - begin, 0), begin).partition(b"\n")[0]
        if self._checks is not None and line_check(line) != int(self._checks[place]):
            raise ToolError(
                f"{self._path}, byte {begin}: this is not the line that was indexed. The file has "
                "changed since, or the index is damaged; start the run again, and if that does not "
                "help delete the index (config.search.dense.index)"
            )
        return parse_document(json.loads(line.decode("utf-8-sig")), f"{self._path}, byte {begin}")


def line_check(line: bytes) -> int:
    """CRC-32 of a line without its end, by which it is known again."""
    return zlib.crc32(line.removesuffix(b"\n"))


def line_starts(path: Path) -> Sequence[int]:
    """Offsets in bytes of the lines of a file that are not blank."""
    starts, begin = array("Q"), 0
    with open(path, "rb") as lines:
        for line in lines:
            if line.strip():
                starts.append(begin)
            begin += len(line)
    return starts


def index_folder(corpus: str | Path, index: str | Path = "") -> Path:
    """The folder of a corpus' indexes: `index`, by default a folder `index` beside it."""
    return Path(index) if index else Path(corpus).parent / "index"


def num_lines(path: Path) -> int:
    """Number of lines of a file; 0 where there is none."""
    if not path.is_file():
        return 0
    with open(path, "rb") as content:
        chunks = iter(functools.partial(content.read, 2**20), b"")
        last, count = b"", 0
        for last in chunks:
            count += last.count(b"\n")
    return count + (not last.endswith(b"\n") if last else 0)


def longest_known(path: Path, parts: Mapping[str, int]) -> tuple[str, int]:
    """Finds the longest part that a corpus begins with; `parts` has bytes of each by its SHA-256.

    A part that ends within a line is none: that line is another one by now.

    Args:
        path: of the corpus.
        parts: bytes of each, by the SHA-256 of its content.

    Returns:
        Its SHA-256 and how many lines end in it; "" and 0 where there is none.
    """
    longest, hasher = ("", 0), hashlib.sha256()
    done, num_lines, ends_line = 0, 0, False
    with open(path, "rb") as content:
        for digest, size in sorted(parts.items(), key=lambda part: part[1]):
            while done < size and (chunk := content.read(min(2**20, size - done))):
                hasher.update(chunk)
                done += len(chunk)
                num_lines += chunk.count(b"\n")
                ends_line = chunk.endswith(b"\n")
            is_there = done == size and hasher.hexdigest() == digest
            if is_there and (ends_line or content.peek(1)[:1] in (b"\n", b"\r")):
                longest = digest, num_lines
    return longest


def check_corpus(corpus: Path, index_dir: Path, *, section: str) -> None:
    """Refuses a corpus that is not there, and a file where its indexes belong.

    Raises:
        FileNotFoundError, NotADirectoryError: names the key, of a section of the configuration.
    """
    if not corpus.is_file():
        raise FileNotFoundError(
            f"there is no corpus at {corpus}; expected a JSONL file with one document a line. "
            f"Set config.{section}.corpus to its path.{similar_path(corpus)}"
        )
    if index_dir.exists() and not index_dir.is_dir():
        raise NotADirectoryError(f"the index folder {index_dir} is a file; name a folder.")


def make_once(
    folder: Path, make: Callable[[], None], *, lock: Path, corpus: Path, section: str
) -> None:
    """Lets one process of all make an index that is missing; the others wait for it.

    Args:
        folder: of the index, in that of all indexes of the corpus.
        make: makes it.
        lock: a file beside it. The system frees the lock when the process dies.
        corpus: what is indexed; its digest is kept beside the index.
        section: of the configuration, for messages.

    Raises:
        PermissionError: the index may not be written.
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        held = lock.open("w")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise PermissionError(
            f"{folder.parent}, where the index of {corpus} belongs, cannot be written to: "
            f"{error.strerror}; name another folder for it by config.{section}.index."
        ) from error
    with held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not folder.is_dir():
            make()
    corpus_digest(corpus, folder.parent)  # there is a folder now to keep it in


def check_unchanged(corpus: Path, index_dir: Path, digest: str) -> None:
    """Refuses an index of a corpus that changed while it was read: it would bear a wrong name.

    Raises:
        ValueError: `digest`, taken before, is not that of the corpus.
    """
    if corpus_digest(corpus, index_dir) != digest:
        raise ValueError(
            f"{corpus} changed while it was indexed; run the same command again once nobody writes "
            "to it."
        )


_DIGESTS = "digests.json"

_SETTLED_NS = 2 * 10**9  # file systems count changes in steps, of up to two seconds


def corpus_digest(corpus: Path, index_dir: Path) -> str:
    """SHA-256 of a corpus' content.

    It is kept beside the indexes, and read there by the next start that finds the corpus with the
    same name, size and time of change, wherever both lie by then. A corpus that changed just now
    is read anew until it is settled: it might change again and look the same.
    """
    stat, now_ns = corpus.stat(), time.time_ns()
    key = f"{corpus.name} {stat.st_size} {stat.st_mtime_ns}"
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = read_object(index_dir / _DIGESTS)
    if not all(isinstance(digest, str) for digest in known.values()):
        known = {}
    is_settled = now_ns - stat.st_mtime_ns > _SETTLED_NS
    if is_settled and key in known:
        return known[key]
    # What may change again and look the same is remembered neither here nor on disk.
    hash_file = _digest if is_settled else _digest.__wrapped__
    digest = hash_file(corpus.resolve(), stat.st_size, stat.st_mtime_ns)
    if is_settled and index_dir.is_dir():
        with contextlib.suppress(OSError):  # of others, or full: the next start reads it again
            unfinished = index_dir / f".{_DIGESTS}.{os.getpid()}"
            unfinished.write_text(json.dumps(known | {key: digest}, indent=1), encoding="utf-8")
            unfinished.replace(index_dir / _DIGESTS)
    return digest


def is_indexed(corpus: Path, index_dir: Path) -> bool:
    """Return True if there is an index of a corpus as it is now, which names its digest."""
    made_of = [path for path in index_dir.glob("*/*.json") if path.parent.name != "building"]
    digest = corpus_digest(corpus, index_dir) if made_of else ""
    return any(digest in path.read_text("utf-8", "replace") for path in made_of)


@functools.lru_cache(maxsize=8)
def _digest(file: Path, size: int, mtime_ns: int) -> str:
    return file_digest(file)


def file_digest(file: Path) -> str:
    """SHA-256 of a file's content."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
