"""BM25 without a service: an index on disk of a JSONL corpus."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import regex
import tantivy

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, DocumentSearch, Hit, Progress
from jaxrl.envs.search.corpus import (
    CorpusDocuments,
    Known,
    check_corpus,
    check_unchanged,
    corpus_digest,
    file_digest,
    id_hash,
    index_folder,
    longest_known,
    make_once,
    read_corpus,
)
from jaxrl.utils.concurrency import MAX_ERROR, side_by_side
from jaxrl.utils.json_io import read_object
from jaxrl.utils.text import UNSPACED, fold

# A letter or number, then also marks.
_WORD = regex.compile(r"[\p{L}\p{N}_][\p{L}\p{M}\p{N}_]*")

# A letter with the marks above, below and around it, and a part of a word that is all such.
_CLUSTER = regex.compile(rf"{UNSPACED}\p{{M}}*", regex.V1)
_UNSPACED_PART = regex.compile(rf"((?:{UNSPACED}\p{{M}}*)+)", regex.V1)

# Part of the key of every index: raise it when `tokenize` or what is stored changes.
_INDEX_VERSION = 4


def tokenize(text: str) -> list[str]:
    """Split `text` into lowercase words, and scripts without blanks into pairs of letters.

    A word is a letter or number followed by letters, marks, numbers and underscores, by their
    Unicode categories. Format characters are dropped. Compatibility forms count as equal (NFKC), so
    full-width letters and combining accents match the usual spelling.
    """
    text = fold(text)
    if text.isascii():
        return _WORD.findall(text)
    tokens: list[str] = []
    for word in _WORD.findall(text):
        if word.isascii():
            tokens.append(word)
            continue
        for part in filter(None, _UNSPACED_PART.split(word)):
            letters = _CLUSTER.findall(part)
            pairs = [first + second for first, second in itertools.pairwise(letters)]
            tokens += pairs or [part]
    return tokens


# Float32 sums of term scores depend on their order, so that equal documents may differ by this
# much, relative to the score.
_TIE = 1e-5


MAX_QUERY_WORDS = 1_000
"""Different words of a query that are looked up; each costs time, and a model may write many."""


# Tantivy searches without Python's lock.
_NUM_THREADS = min(os.cpu_count() or 1, 16)


class LocalSearch(DocumentSearch):
    """BM25 over a JSONL corpus, from an index on disk.

    A document matches when it shares a word with the query; words of the title count twice. There
    is no query syntax: `-` and `:` in a query are punctuation. Of a query's different words the
    first `MAX_QUERY_WORDS` count. Equal scores are broken by id, so the same corpus gives the same
    text wherever and whenever the index was built.

    The index is built on first use, in a folder of `index` named after the corpus' content,
    and opened from there afterwards; a corpus that changed gets a new folder. Where lines were
    appended to a corpus that has an index, only these are read: the new index goes on from a copy
    of the old one, and finds what one built afresh does, but that scores may differ by a few parts
    in a million. Several processes may start at once, and a build that was killed is begun afresh.
    Each opening compares all files with their checksums, so a damaged index answers nothing wrong.
    """

    def __init__(
        self,
        corpus: str | Path,
        index: str | Path = "",
        *,
        topk: int = 3,
        progress: Progress = lambda _: None,
    ) -> None:
        """Opens the index of `corpus`, building it if need be.

        Args:
            corpus: a JSONL file, as `read_corpus` describes it.
            index: where indexes live, by default a folder `index` beside the corpus; created if
                missing. Folders in it may be deleted.
            topk: documents an answer shows at most.
            progress: is told how many documents are read, where an index must be built.

        Raises:
            FileNotFoundError: there is no such corpus.
            PermissionError: corpus or index may not be read, or the index not be written.
            NotADirectoryError: `index` is a file.
            ValueError: the corpus is malformed or empty, its index damaged, or `topk` is below 1.
        """
        corpus, index_dir = Path(corpus), index_folder(corpus, index)
        if topk < 1:
            raise ValueError(f"topk is {topk}; a search must show at least 1 document.")
        self.topk = topk
        self.documents = CorpusDocuments(corpus)
        check_corpus(corpus, index_dir, section="search.local")
        digest = corpus_digest(corpus, index_dir)
        folder = index_dir / hashlib.sha256(f"{digest} {_format()}".encode()).hexdigest()[:32]
        make_once(
            folder,
            lambda: _build_index(corpus, digest, folder, progress),
            lock=index_dir / "lock",
            corpus=corpus,
            section="search.local",
        )
        with _damage_told(folder, ValueError):
            _check_files(folder, digest)
            opened = _open(folder)
            self._searcher = opened.searcher()
        self._folder, self._schema = folder, opened.schema

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The documents with the highest BM25 scores, several queries side by side.

        Documents of equal scores have the score of the first of them.
        """
        best = functools.partial(self._best, topk=topk)
        return side_by_side(best, queries, max_threads=_NUM_THREADS)

    def _best(self, query: str, topk: int) -> list[Hit]:
        words = list(dict.fromkeys(tokenize(query)))[:MAX_QUERY_WORDS]
        if not words:
            return []
        terms = [
            tantivy.Query.term_query(self._schema, "tokens", word, index_option="freq")
            for word in words
        ]
        best: list[Hit] = []
        with _damage_told(self._folder, _DAMAGED):  # since it was opened
            any_word = tantivy.Query.boolean_query([(tantivy.Occur.Should, t) for t in terms])
            # Ties are broken by id, which tantivy does not know: a group of equally good documents
            # is read to its end, and more are asked for until the last one needed is complete.
            limit = topk + 1
            while True:
                hits = self._searcher.search(any_word, limit, count=False).hits  # best first
                groups: list[tuple[float, list[Any]]] = []
                previous = float("inf")
                for score, address in hits:
                    if groups and previous - score <= _TIE * previous:
                        groups[-1][1].append(address)
                    else:
                        groups.append((score, [address]))
                    previous = score
                if len(hits) < limit or sum(len(group) for _, group in groups[:-1]) >= topk:
                    break
                limit *= 4
            for score, addresses in groups:
                records = [self._searcher.doc(address).get_first("record") for address in addresses]
                documents = sorted(Document(*json.loads(record)) for record in records)
                best += [Hit(document, score) for document in documents]
                if len(best) >= topk:
                    break
        return best[:topk]


# Another search would fail alike.
_DAMAGED = functools.partial(ToolError, is_permanent=True)


@contextlib.contextmanager
def _damage_told(folder: Path, kind: Callable[[str], Exception]) -> Iterator[None]:
    """Raises tantivy's errors and panics over a damaged index as `kind`, in one line."""
    try:
        yield
    except BaseException as error:
        # A panic is a BaseException of a module that cannot be imported.
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise kind(
            f"the index {folder} is damaged; delete that folder, and the next start builds it "
            f"anew. ({' '.join(str(error).split())[:MAX_ERROR]})"
        ) from error


def _check_files(folder: Path, corpus_sha256: str) -> None:
    """Refuses an index with a file that is not as it was written; about a second a GB.

    Raises:
        PermissionError: one may not be read.
        ValueError: one is another, or missing, or the index is of another corpus.
    """
    try:
        read = dict(json.loads((folder / _READ).read_text(encoding="utf-8")))
        digests, made_of = dict(read["files"]), (read["sha256"], read["format"])
    except FileNotFoundError:
        raise ValueError(f"{_READ} is missing") from None
    except (LookupError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{_READ} is not the file that was written") from None
    if made_of != (corpus_sha256, _format()):
        raise ValueError(f"{_READ} says that it was made of another corpus, or in another format")
    for name, digest in _digests(folder, list(digests)).items():
        if digest != digests[name]:
            what = "is not the file that was written" if digest else "is missing"
            raise ValueError(f"{name} {what}")


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of files of a folder; "" for one that is missing."""

    def digest(name: str) -> str:
        try:
            return file_digest(folder / name)
        except FileNotFoundError:
            return ""

    digests = side_by_side(digest, names, max_threads=_NUM_THREADS)
    return dict(zip(names, digests, strict=True))


def _open(folder: Path) -> Any:
    """Opens an index, also one that this user may only read.

    tantivy writes a lock beside the files. Where it may not, links to them are opened in a
    temporary folder; nothing of an index is looked up by name once it is open.
    """
    try:
        return tantivy.Index.open(str(folder))
    except ValueError as error:
        if "Lockfile" not in str(error):
            raise
    # The library's threads may write a lock there while it is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as links:
        for part in folder.absolute().iterdir():
            if part.suffix != ".lock":
                (Path(links) / part.name).symlink_to(part)
        return tantivy.Index.open(links)


def _format() -> str:
    """Format of an index: our tokens and tantivy's files."""
    return f"{_INDEX_VERSION} {version('tantivy')}"


def _build_index(corpus: Path, digest: str, folder: Path, progress: Progress) -> None:
    """Builds an index beside its folder, then renames it, so that it is whole or absent."""
    building = folder.parent / "building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        old, known = _known_part(corpus, folder.parent)
        for part in old.iterdir() if old is not None else ():
            if part.suffix == ".lock" or part.name in (_READ, _IDS):
                continue
            # Files that never change are shared, where they are ours and the system has links.
            is_fixed = part.suffix not in ("", ".json") and part.stat().st_uid == os.geteuid()
            try:
                if not is_fixed:
                    raise OSError  # as where there are no links: it is copied
                os.link(part, building / part.name)
            except OSError:
                shutil.copyfile(part, building / part.name)
        ids = _write_index(corpus, building, known, progress)
        (building / _IDS).write_bytes(ids.tobytes())
        read: dict[str, Any] = {"sha256": digest, "num_bytes": corpus.stat().st_size}
        read["files"] = _digests(
            building, sorted(p.name for p in building.iterdir() if p.suffix != ".lock")
        )
        (building / _READ).write_text(json.dumps(read | {"format": _format()}), encoding="utf-8")
        for part in building.iterdir():  # some of tantivy's files are their owner's alone
            part.chmod(building.stat().st_mode & 0o666)
        check_unchanged(corpus, folder.parent, digest)
        building.rename(folder)
    except ValueError as error:
        if not any(name in str(error) for name in ("io::Error", "IoError", "IO error")):
            raise
        free = shutil.disk_usage(building).free / 2**20
        raise OSError(
            f"the index of {corpus} could not be written to {folder.parent}, where {free:,.0f} MiB "
            "are free; an index needs about as much as its corpus. Free some space, or name "
            f"another folder for it by config.search.local.index. (tantivy: {error})"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


# Beside tantivy's files: what was read for an index, with the SHA-256 of all its files; and
# `id_hash` of its documents in 8 bytes each, by which an index of a longer corpus goes on.
_READ, _IDS = "corpus.json", "ids"


def _known_part(corpus: Path, index_dir: Path) -> tuple[Path | None, Known]:
    """The index of the longest part that the corpus begins with, and that part."""
    folders: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    for path in index_dir.glob(f"*/{_READ}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            read = read_object(path)
            if read["format"] == _format() and path.parent.name != "building":
                folders[read["sha256"]] = path.parent
                sizes[read["sha256"]] = int(read["num_bytes"])
    digest, num_lines = longest_known(corpus, sizes)
    if not digest:
        return None, Known()
    ids = array("Q")
    try:
        with _damage_told(folders[digest], ValueError):
            _check_files(folders[digest], digest)
            ids.frombytes((folders[digest] / _IDS).read_bytes())
            num_documents = _open(folders[digest]).searcher().num_docs
    except (OSError, ValueError):  # damaged, or not ours to read: built afresh
        return None, Known()
    if num_documents != len(ids):
        return None, Known()
    return folders[digest], Known(num_bytes=sizes[digest], num_lines=num_lines, ids=ids)


def _write_index(corpus: Path, folder: Path, known: Known, progress: Progress) -> array[int]:
    """Indexes the documents that are not known yet; returns `id_hash` of all ids."""
    if known.ids:
        index = tantivy.Index.open(str(folder))
    else:
        schema = (
            tantivy.SchemaBuilder()
            .add_text_field("tokens", tokenizer_name="whitespace", index_option="freq")
            .add_bytes_field("record", stored=True)
            .build()
        )
        index = tantivy.Index(schema, path=str(folder))
    ids = array("Q", known.ids)
    # One thread and one commit: with more, ranks of equal documents differ from build to build.
    # Leaving the block commits and waits for tantivy's threads, after an error too.
    with index.writer(heap_size=256_000_000, num_threads=1) as writer:
        for document in read_corpus(corpus, known):
            title = tokenize(document.title)
            tokens = " ".join(title + title + tokenize(document.text))
            record = json.dumps(document).encode()
            writer.add_document(tantivy.Document(tokens=tokens, record=record))
            ids.append(id_hash(document.id))
            if len(ids) % 1000 == 0:
                progress(len(ids))
        progress(len(ids))
    # Where the disk is full only at the end, tantivy commits nothing and does not say so.
    index.reload()
    if index.searcher().num_docs != len(ids):
        raise ValueError(f"IoError: {index.searcher().num_docs} of {len(ids)} documents")
    return ids
