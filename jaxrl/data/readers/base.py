"""Reader interface: memory-efficient random access to the records of a source."""

from __future__ import annotations

import bisect
import datetime
import decimal
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxrl.utils.paths import suggest_path

Record = dict[str, Any]
"""Fields of a task as JSON values, by name."""


ANSWER_KEYS = ("answers", "golden_answers", "answer")
"""Field names for the accepted answers: ours, FlashRAG's, and the singular."""


class Reader(ABC):
    """Random access to the records of a source, with only an index in memory.

    A reader's factory accepts some of these arguments by name: `source` (the configured string),
    `config_key` (the key that holds it, for error messages), `split`, `columns` and the configured
    settings. It raises a `ValueError` or `OSError` with a one-line message.

    Attributes:
        pads_with_nulls: True if all objects in a column have the same fields, with nulls for
            missing values, as in Arrow tables.
    """

    pads_with_nulls: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records."""

    @abstractmethod
    def read(self, indices: Sequence[int]) -> list[Record]:
        """Read the records at `indices`. Consecutive indices are fastest.

        Raises:
            ValueError: A record cannot be read. The message names its location.
            OSError: The file cannot be read.
        """

    @abstractmethod
    def location(self, index: int) -> str:
        """Return the location `file:row` of a record. The location is also its default id."""

    def folder(self, index: int) -> Path:
        """Return the base folder for relative paths in a record, by default its file's folder."""
        return Path(self.location(index).rpartition(":")[0]).parent


class ConcatReader(Reader):
    """Concatenation of several readers."""

    def __init__(self, readers: Sequence[Reader]):
        self._readers = readers
        self.pads_with_nulls = any(reader.pads_with_nulls for reader in readers)
        self._ends = np.cumsum([len(reader) for reader in readers]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the index of a record's reader, and the record's index in that reader."""
        reader_index = bisect.bisect_right(self._ends, index)
        return reader_index, index - (self._ends[reader_index - 1] if reader_index else 0)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """See `Reader`."""
        records = []
        for reader_index, run in itertools.groupby(
            map(self._locate, indices), key=lambda pair: pair[0]
        ):
            records += self._readers[reader_index].read([index for _, index in run])
        return records

    def location(self, index: int) -> str:
        """See `Reader`."""
        reader_index, index = self._locate(index)
        return self._readers[reader_index].location(index)


class SequenceReader(Reader):
    """Reader over a user-supplied sequence of mappings."""

    def __init__(self, records: Any, name: str, key: str):
        """Wrap a sequence of records.

        Args:
            records: Sequence of mappings. Its `location(index)` method is used if it has one.
            name: Configured name of the factory that returned the sequence.
            key: Config key that holds the name.
        """
        if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
            raise ValueError(
                f"{key} names {name!r}, which returned a {type(records).__name__}; expected a "
                "sequence of objects with the fields of a task."
            )
        self._records, self._name = records, name

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """See `Reader`."""
        records = []
        for index in indices:
            record, location = self._records[index], self.location(index)
            if not isinstance(record, Mapping):
                kind = type(record).__name__
                raise ValueError(f"{location} is a {kind}; expected an object with fields.")
            records.append(to_record(record, location))
        return records

    def location(self, index: int) -> str:
        """See `Reader`."""
        get_location = getattr(self._records, "location", None)
        return str(get_location(index)) if get_location else f"{self._name}:{index + 1}"

    def folder(self, index: int) -> Path:
        """See `Reader`. Without a `location` method, return the working directory."""
        return super().folder(index) if hasattr(self._records, "location") else Path()


class UnchangedFile:
    """Open file that may be renamed or removed, but must not be modified while it is read."""

    def __init__(self, path: Path):
        self.path = path
        self.file: BinaryIO = path.open("rb")
        self._stamp = self._read_stamp()

    def _read_stamp(self) -> tuple[int, int]:
        stat = os.fstat(self.file.fileno())
        return stat.st_size, stat.st_mtime_ns

    def check_unchanged(self) -> None:
        """Raise a ValueError if the file was modified since it was opened."""
        if self._read_stamp() != self._stamp:
            raise ValueError(f"{self.path} was changed while the run was reading it.")


def open_files(
    open_file: Callable[[Path], Reader],
    source: str,
    key: str,
    *,
    expected: str,
    suffixes: Sequence[str],
) -> Reader:
    """Open a reader for a file, for all files that match a pattern, or for the files in a folder.

    Args:
        open_file: Function that opens the reader of a file.
        source: Path of a file or folder, or pattern with `*` in the last part.
        key: Config key of the source, for error messages.
        expected: Description of the expected files, for error messages.
        suffixes: Suffixes, with the dot, of the files to read in a folder.

    Raises:
        FileNotFoundError: No file matches.
    """
    files = find_files(source, suffixes)
    if not files:
        raise FileNotFoundError(
            f"{source!r} is not a file; set {key} to {expected}.{suggest_path(source)}"
        )
    readers = [open_file(file) for file in files]
    return readers[0] if len(readers) == 1 else ConcatReader(readers)


def find_files(source: str, suffixes: Sequence[str]) -> list[Path]:
    """Return the sorted paths of the files that a source refers to. See `open_files`."""
    path = Path(source)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in suffixes)
    if not path.exists() and "*" in path.name:
        return sorted(file for file in path.parent.glob(path.name) if file.is_file())
    return [path] if path.is_file() else []


def to_record(fields: Mapping[str, Any], location: str) -> Record:
    """Convert a row to a record: JSON values without null fields. See `to_json_value`.

    Raises:
        ValueError: A value cannot be represented in JSON. The message names the field and
            `location`.
    """
    record = {}
    for name, value in fields.items():
        try:
            plain = to_json_value(value)
        except TypeError as error:
            raise ValueError(
                f"{location}: {name!r} holds {error}; {_format_drop_hint(name)}."
            ) from error
        if plain is not None:
            record[str(name)] = plain
    return record


def reject_bytes(record: Record, location: str) -> None:
    """Raise a ValueError if a field other than `images` contains bytes."""
    for name, value in record.items():
        if name != "images" and _has_bytes(value):
            raise ValueError(
                f"{location}: {name!r} is not valid UTF-8; name images by columns="
                f"{{{name!r}: 'images'}}; {_format_drop_hint(name)}."
            )


def _has_bytes(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(_has_bytes, inner))


def _format_drop_hint(name: str) -> str:
    return f"drop the column with columns={{{name!r}: ''}}"


def shorten_error(error: Exception) -> str:
    """Format an error as one line of at most 300 characters without a final period."""
    return " ".join(str(error).split())[:300].rstrip(".")


def to_json_value(value: Any) -> Any:
    """Convert a Python, NumPy or Arrow value to a JSON value. Bytes that are not UTF-8 stay bytes.

    Raises:
        TypeError: The type cannot be represented in JSON.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return None if value != value else value  # tables store a missing value as NaN
        case bytes():
            try:
                return value.decode("utf-8")
            except UnicodeDecodeError:
                return value
        case np.ndarray() | np.generic():
            return to_json_value(value.tolist())
        case list() | tuple():
            return [to_json_value(item) for item in value]
        case Mapping():
            return {str(name): to_json_value(item) for name, item in value.items()}
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return str(value)
    raise TypeError(f"a {type(value).__name__}")


def split_range(count: int, size: int) -> Iterable[range]:
    """Split `range(count)` into consecutive ranges of at most `size` indices."""
    return (range(start, min(start + size, count)) for start in range(0, count, size))


READERS: Mapping[str, str] = {
    "jsonl": "jaxrl.data.readers.lines.open_jsonl",
    "csv": "jaxrl.data.readers.lines.open_csv",
    "parquet": "jaxrl.extras.readers.parquet.open_parquet",
    "tfds": "jaxrl.extras.readers.tfds.open_tfds",
    "hf": "jaxrl.extras.readers.hf.open_hugging_face",
    "reasoning_gym": "jaxrl.extras.readers.generated.open_reasoning_gym",
}
"""Dotted path of the reader factory for each built-in format."""
