"""BM25 search engine over a JSONL corpus, with an index on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import tempfile
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
    build_index_once,
    check_corpus,
    check_corpus_unchanged,
    compute_corpus_digest,
    get_index_folder,
    read_corpus,
)
from jaxrl.utils.concurrency import parallel_map
from jaxrl.utils.text import MAX_ERROR_CHARS, UNSPACED, fold_case

# A word: a letter, number or underscore; later characters may also be marks.
_WORD = regex.compile(r"[\p{L}\p{N}_][\p{L}\p{M}\p{N}_]*")

# A letter of a script without word spaces, with its marks; and a run of such letters.
_CLUSTER = regex.compile(rf"{UNSPACED}\p{{M}}*", regex.V1)
_UNSPACED_PART = regex.compile(rf"((?:{UNSPACED}\p{{M}}*)+)", regex.V1)

# Part of every index key. Increase it when `tokenize` or the stored data changes.
_INDEX_VERSION = 4


def tokenize(text: str) -> list[str]:
    """Split text into lowercase words, or into letter bigrams in languages without spaces.

    A word is a letter, number or underscore followed by letters, marks, numbers and underscores
    (Unicode categories). Format characters are dropped. Text is NFKC-normalized, so full-width
    letters and combining accents match their standard forms.
    """
    text = fold_case(text)
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


# Scores are float32 sums in varying order, so equal scores may differ by this relative amount.
_TIE_TOLERANCE = 1e-5


MAX_QUERY_WORDS = 1_000
"""Maximum number of distinct query words that are looked up."""


_NUM_THREADS = min(os.cpu_count() or 1, 16)  # tantivy releases the GIL


class LocalSearch(DocumentSearch):
    """BM25 search engine over a JSONL corpus, with an index on disk.

    A document matches if it shares a word with the query; title words count twice. Queries have no
    syntax, and only their first `MAX_QUERY_WORDS` distinct words count. Ties are ordered by id, so
    results are reproducible.

    The index is built on first use, in a subfolder of `index` named after a hash of the corpus.
    Several processes may start at the same time, and an interrupted build starts over.
    """

    def __init__(
        self,
        corpus: str | Path,
        index: str | Path = "",
        *,
        topk: int = 3,
        progress: Progress = lambda _: None,
    ) -> None:
        """Open the index of `corpus`, building it if needed.

        Args:
            corpus: JSONL file; see `read_corpus`.
            index: Folder for indexes, by default `index` next to the corpus.
            topk: Maximum number of documents per query.
            progress: Callback that receives the number of documents indexed so far.

        Raises:
            FileNotFoundError: The corpus does not exist.
            OSError: The corpus or index cannot be read, or the index cannot be written.
            ValueError: The corpus is malformed or empty, or the index is damaged.
        """
        corpus, index_dir = Path(corpus), get_index_folder(corpus, index)
        self.topk = topk
        self.documents = CorpusDocuments(corpus)
        check_corpus(corpus, section="search.local")
        # The folder's name depends on content and format, so a stale index is never opened.
        digest = compute_corpus_digest(corpus, index_dir)
        folder = (
            index_dir / hashlib.sha256(f"{digest} {_get_index_format()}".encode()).hexdigest()[:32]
        )
        build_index_once(
            folder,
            lambda: _build_index(corpus, digest, folder, progress),
            lock=index_dir / "lock",
        )
        with _convert_index_errors(folder, ValueError):
            tantivy_index = _open_index(folder)
            self._searcher = tantivy_index.searcher()
        self._folder, self._schema = folder, tantivy_index.schema

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return the documents with the highest BM25 scores. Queries run in parallel.

        All documents of a tie get the score of the first.
        """
        best = functools.partial(self._search, topk=topk)
        return parallel_map(best, queries, max_threads=_NUM_THREADS)

    def _search(self, query: str, topk: int) -> list[Hit]:
        words = list(dict.fromkeys(tokenize(query)))[:MAX_QUERY_WORDS]
        if not words:
            return []
        best: list[Hit] = []
        make_error = functools.partial(ToolError, is_permanent=True)
        with _convert_index_errors(self._folder, make_error):  # damaged after opening
            field = functools.partial(tantivy.Query.term_query, self._schema, "tokens")
            terms = [(tantivy.Occur.Should, field(word, index_option="freq")) for word in words]
            any_word = tantivy.Query.boolean_query(terms)
            # Tantivy cannot order ties by id, so each group of ties is read completely.
            limit = topk + 1
            while True:
                hits = self._searcher.search(any_word, limit, count=False).hits  # best first
                groups: list[tuple[float, list[Any]]] = []
                previous = float("inf")
                for score, address in hits:
                    if groups and previous - score <= _TIE_TOLERANCE * previous:
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


@contextlib.contextmanager
def _convert_index_errors(folder: Path, make_error: Callable[[str], Exception]) -> Iterator[None]:
    """Convert tantivy's errors and panics for a damaged index to one-line errors."""
    try:
        yield
    except BaseException as error:
        # A panic is a BaseException from a module that cannot be imported.
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise make_error(
            f"the index {folder} is damaged; delete that folder, and the next start rebuilds "
            f"it. ({' '.join(str(error).split())[:MAX_ERROR_CHARS]})"
        ) from error


def _open_index(folder: Path) -> Any:
    """Open an index, even if this user may not write to its folder.

    Tantivy writes a lock file into the folder. If that fails, link the files into a temporary
    folder and open that. The links can be deleted afterwards, because an open index no longer looks
    up files by name.
    """
    try:
        return tantivy.Index.open(str(folder))
    except ValueError as error:
        if "Lockfile" not in str(error):
            raise
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as link_folder:
        for file in folder.absolute().iterdir():
            if file.suffix != ".lock":
                (Path(link_folder) / file.name).symlink_to(file)
        return tantivy.Index.open(link_folder)


def _get_index_format() -> str:
    """Return the index format: the versions of our tokenizer and of tantivy."""
    return f"{_INDEX_VERSION} {version('tantivy')}"


def _build_index(corpus: Path, digest: str, folder: Path, progress: Progress) -> None:
    """Build an index in a temporary folder and rename the folder when the index is complete."""
    building = folder.parent / "building"
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir()
        _write_index(corpus, building, progress)
        source = {"sha256": digest, "format": _get_index_format()}
        (building / "corpus.json").write_text(json.dumps(source), encoding="utf-8")
        for file in building.iterdir():  # tantivy lets only the owner read some files
            file.chmod(building.stat().st_mode & 0o666)
        check_corpus_unchanged(corpus, folder.parent, digest)
        building.rename(folder)
    except ValueError as error:
        if not any(name in str(error) for name in ("io::Error", "IoError", "IO error")):
            raise
        free = shutil.disk_usage(folder.parent).free / 2**20
        raise OSError(
            f"the index of {corpus} could not be written to {folder.parent}, where {free:,.0f} MiB "
            "are free; an index needs about as much as its corpus. Free some space, or set "
            f"config.search.local.index to another folder. (tantivy: {error})"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_index(corpus: Path, folder: Path, progress: Progress) -> None:
    """Index all documents of a corpus."""
    schema = (
        tantivy.SchemaBuilder()
        .add_text_field("tokens", tokenizer_name="whitespace", index_option="freq")
        .add_bytes_field("record", stored=True)
        .build()
    )
    index, count = tantivy.Index(schema, path=str(folder)), 0
    # One thread and one commit; otherwise the order of tied documents varies between builds.
    # Leaving the block commits and waits for tantivy's threads.
    with index.writer(heap_size=256_000_000, num_threads=1) as writer:
        for count, document in enumerate(read_corpus(corpus), start=1):
            title = tokenize(document.title)
            tokens = " ".join(title + title + tokenize(document.text))
            record = json.dumps(document).encode()
            writer.add_document(tantivy.Document(tokens=tokens, record=record))
            if count % 1000 == 0:
                progress(count)
        progress(count)
    # If the disk is full at the end, tantivy commits nothing and raises no error.
    index.reload()
    if index.searcher().num_docs != count:
        raise ValueError(f"IoError: {index.searcher().num_docs} of {count} documents")
