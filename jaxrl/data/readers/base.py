"""The interface of readers: random access to the records of a source, in little memory."""

from __future__ import annotations

import bisect
import datetime
import decimal
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxrl.utils.paths import similar_path

Record = dict[str, Any]
"""The fields of a task by name, as JSON has them."""


ANSWER_KEYS = ("answers", "golden_answers", "answer")
"""Fields of the accepted answers: our name, FlashRAG's, and the plain singular."""


class Reader(ABC):
    """The records of a source by their index from 0; an index of places, not the records, is held.

    A factory of one takes `source` (the configured text), `config_key` (that configured it, for
    messages) and what else it needs: `split`, `columns`, settings of its own. It raises
    `ValueError` or `OSError`, in one line that names file, row and key.

    Attributes:
        fills_gaps: True where the objects in a column all have the same fields, and those that an
            object lacks are null, as in tables of Arrow.
    """

    fills_gaps: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Number of records, at least one."""

    @abstractmethod
    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads records; neighbours at a time are the quickest.

        Raises:
            ValueError: one cannot be read; the text names its place.
            OSError: the file cannot be.
        """

    @abstractmethod
    def place(self, index: int) -> str:
        """The place of a record, for messages and as its id where it has none: `file:row`."""

    def folder(self, index: int) -> Path:
        """The folder in which the relative paths in a record begin: that of its file."""
        return Path(self.place(index).rpartition(":")[0]).parent


class Joined(Reader):
    """Concatenation of several files' readers, in their order."""

    def __init__(self, readers: Sequence[Reader]):
        """A reader over these, at least one."""
        self._readers = readers
        self.fills_gaps = any(reader.fills_gaps for reader in readers)
        self._ends = np.cumsum([len(reader) for reader in readers]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, index: int) -> tuple[Reader, int]:
        """The reader that has a record, and the record's index in it."""
        at = bisect.bisect_right(self._ends, index)
        return self._readers[at], index - (self._ends[at - 1] if at else 0)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """See `Reader`."""
        places = [self._find(index) for index in indices]
        records: dict[tuple[int, int], Record] = {}
        for reader in dict.fromkeys(reader for reader, _ in places):
            within = [index for one, index in places if one is reader]
            for index, record in zip(within, reader.read(within), strict=True):
                records[id(reader), index] = record
        return [records[id(reader), index] for reader, index in places]

    def place(self, index: int) -> str:
        """See `Reader`."""
        reader, within = self._find(index)
        return reader.place(within)

    def folder(self, index: int) -> Path:
        """See `Reader`."""
        reader, within = self._find(index)
        return reader.folder(within)


class Listed(Reader):
    """Reader over an object of the user's: anything with `len` and an object at each index."""

    def __init__(self, records: Any, name: str, key: str):
        """Checks what there is to read.

        Args:
            records: a sequence; where it has a method `place(index)`, that tells places.
            name: what made it, as it is configured.
            key: that configured it.
        """
        if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
            raise ValueError(
                f"{key} names {name!r}, which made a {type(records).__name__}; expected something "
                "with len() whose items are objects with the fields of a task."
            )
        self._records, self._name = records, name
        if not len(records):
            raise ValueError(f"{name} holds no task; {key} must name at least one.")

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """See `Reader`."""
        records = []
        for index in indices:
            record, place = self._records[index], self.place(index)
            if not isinstance(record, Mapping):
                kind = type(record).__name__
                raise ValueError(f"{place} is a {kind}; expected an object with fields.")
            records.append(present(record, place))
        return records

    def place(self, index: int) -> str:
        """See `Reader`."""
        tell = getattr(self._records, "place", None)
        return str(tell(index)) if tell else f"{self._name}:{index + 1}"

    def folder(self, index: int) -> Path:
        """See `Reader`; where no places are told, paths begin in the working directory."""
        return super().folder(index) if hasattr(self._records, "place") else Path()


class Held:
    """An open file that must not change while it is read; it may be renamed or removed."""

    def __init__(self, path: Path):
        """Opens the file."""
        self.path = path
        self.file: BinaryIO = path.open("rb")
        self._stamp = self._now()

    def _now(self) -> tuple[int, int]:
        stat = os.fstat(self.file.fileno())
        return stat.st_size, stat.st_mtime_ns

    def check(self) -> None:
        """Refuses a file that was written to since it was opened.

        Raises:
            ValueError: names it.
        """
        if self._now() != self._stamp:
            raise ValueError(f"{self.path} was changed while the run was reading it.")


def open_files(
    open_one: Callable[[Path], Reader], source: str, key: str, *, what: str, suffixes: Sequence[str]
) -> Reader:
    """A reader over the files that a source names: a file, a pattern with *, or a folder.

    Args:
        open_one: makes the reader of one file.
        source: of a folder, all files with one of the suffixes are read, in the order of names.
        key: the configuration key that named it.
        what: the files are, as `a JSONL file, one object a line`.
        suffixes: with their dots.

    Raises:
        FileNotFoundError: there is none.
    """
    files = find_files(source, suffixes)
    if not files:
        raise FileNotFoundError(
            f"{source!r} is not a file; set {key} to {what}.{similar_path(source)}"
        )
    readers = [open_one(file) for file in files]
    return readers[0] if len(readers) == 1 else Joined(readers)


def find_files(source: str, suffixes: Sequence[str]) -> list[Path]:
    """The files that a source names, sorted; see `open_files`."""
    path = Path(source)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in suffixes)
    if not path.exists() and "*" in path.name:
        return sorted(file for file in path.parent.glob(path.name) if file.is_file())
    return [path] if path.is_file() else []


def present(fields: Mapping[str, Any], place: str) -> Record:
    """The fields that are there, as JSON would have them, but for bytes that are no text.

    Raises:
        ValueError: a value is none that text can hold.
    """
    record = {}
    for name, value in fields.items():
        try:
            plain = as_plain(value)
        except TypeError as error:
            raise ValueError(_left_out(place, name, f"holds {error}")) from error
        if plain is not None:
            record[str(name)] = plain
    return record


def refuse_bytes(record: Record, place: str) -> None:
    """Refuses a field with bytes that are no text, as those of an image in a field of another name.

    Raises:
        ValueError: names place and field.
    """
    for name, value in record.items():
        if name != "images" and (data := _bytes_in(value)):
            try:
                data.decode("utf-8")
            except UnicodeDecodeError as error:
                why = f"is not valid UTF-8: {error}; name images by columns={{{name!r}: 'images'}}"
                raise ValueError(_left_out(place, name, why)) from error


def _bytes_in(value: Any) -> bytes:
    """The first bytes in a plain value; none where there are none."""
    match value:
        case bytes():
            return value
        case list():
            return next(filter(None, map(_bytes_in, value)), b"")
        case dict():
            return next(filter(None, map(_bytes_in, value.values())), b"")
    return b""


def _left_out(place: str, name: str, why: str) -> str:
    return f"{place}: {name!r} {why}; leave the column out, by columns={{{name!r}: ''}}."


def one_line(error: Exception) -> str:
    """An error of a library in one line of at most 300 characters, without a full stop."""
    return " ".join(str(error).split())[:300].rstrip(".")


def as_plain(value: Any) -> Any:
    """A value as JSON has it: text for bytes, times and decimals; numbers and lists for NumPy's.

    Bytes that are no text stay bytes, as those of an image.

    Raises:
        TypeError: something that JSON does not have.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return None if value != value else value  # what tables write for a gap
        case bytes():
            try:
                return value.decode("utf-8")
            except UnicodeDecodeError:
                return value
        case np.ndarray() | np.generic():
            return as_plain(value.tolist())
        case list() | tuple():
            return [as_plain(item) for item in value]
        case Mapping():
            return {str(name): as_plain(item) for name, item in value.items()}
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return str(value)
    raise TypeError(f"a {type(value).__name__}")


def without_gaps(value: Any) -> Any:
    """Return a plain value without the fields of objects that are null."""
    if isinstance(value, dict):
        return {name: without_gaps(item) for name, item in value.items() if item is not None}
    return [without_gaps(item) for item in value] if isinstance(value, list) else value


def blocks(count: int, size: int) -> Iterable[range]:
    """Ranges of at most `size` indices that cover a source."""
    return (range(start, min(start + size, count)) for start in range(0, count, size))


READERS: Mapping[str, str] = {
    "jsonl": "jaxrl.data.readers.lines.jsonl",
    "csv": "jaxrl.data.readers.lines.csv_table",
    "parquet": "jaxrl.extras.readers.parquet.parquet",
    "tfds": "jaxrl.extras.readers.tfds.tfds",
    "hf": "jaxrl.extras.readers.hf.hugging_face",
    "reasoning_gym": "jaxrl.extras.readers.generated.reasoning_gym",
}
"""Formats that a configuration can name, by what makes their readers; each imports its library."""
