"""Readers for JSONL and CSV files."""

from __future__ import annotations

import ast
import csv
import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.data.readers.base import ANSWER_KEYS, Reader, Record, UnchangedFile, open_files
from jaxrl.utils.json_io import is_too_deep, parse_json
from jaxrl.utils.jsonl import parse_line


def open_jsonl(source: str, config_key: str) -> Reader:
    """Open JSONL files, which have one JSON object per line. Blank lines are skipped."""
    return open_files(
        _JsonlReader,
        source,
        config_key,
        expected="a JSONL file, one object per line",
        suffixes=(".jsonl",),
    )


class _JsonlReader(Reader):
    """Reader for a JSONL file. An initial pass finds the byte offset of each record."""

    def __init__(self, path: Path):
        self._source = UnchangedFile(path)
        self._offsets, self._line_numbers = array("Q"), array("Q")
        file, offset = self._source.file, 0
        for line_number, line in enumerate(file, start=1):
            if line.strip():
                self._offsets.append(offset)
                self._line_numbers.append(line_number)
            offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, indices: Sequence[int]) -> list[Record]:
        self._source.check_unchanged()
        file, records = self._source.file, []
        for index in indices:
            if file.tell() != self._offsets[index]:
                file.seek(self._offsets[index])
            records.append(parse_line(file.readline(), self.location(index)))
        return records

    def location(self, index: int) -> str:
        return f"{self._source.path}:{self._line_numbers[index]}"


def open_csv(
    source: str,
    config_key: str,
    columns: Mapping[str, str] | None = None,
    *,
    delimiter: str = "",
) -> Reader:
    """Open CSV or TSV files with a header line.

    A cell with a JSON list of strings becomes a list. The columns in `JSON_COLUMNS` may contain any
    JSON value, or any Python literal as pandas writes it. `_parse_answers` parses columns of
    answers. Empty cells are skipped, as are columns without a name, such as pandas' row numbers.

    Args:
        source: Path of a file, a pattern, or a folder with .csv and .tsv files.
        config_key: Config key of the source.
        columns: New name of each renamed column, by old name.
        delimiter: Single character; "" for a tab in .tsv files and a comma in other files.
    """
    if not isinstance(delimiter, str) or len(delimiter) > 1:
        raise ValueError(f"{config_key}: the delimiter is {delimiter!r}; expected one character.")
    return open_files(
        lambda path: _CsvReader(
            path, config_key, delimiter or ("\t" if path.suffix == ".tsv" else ","), columns or {}
        ),
        source,
        config_key,
        expected="a CSV file with a line of column names",
        suffixes=(".csv", ".tsv"),
    )


JSON_COLUMNS = ("messages", "prompt", "metadata", "reward_model", "extra_info")
"""Columns that may contain JSON objects."""

csv.field_size_limit(2**30)  # a cell may contain a complete document


class _CsvReader(Reader):
    """Reader for a CSV file that keeps all rows in memory as text."""

    def __init__(self, path: Path, config_key: str, delimiter: str, columns: Mapping[str, str]):
        self._path, self._columns = path, columns
        self._rows: list[list[str]] = []
        self._line_numbers = array("Q")
        line_number = 1  # first line of the row, since quoted cells may contain line breaks
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = csv.reader(file, delimiter=delimiter, strict=True)
                self._names = next(rows, [])
                names = [name for name in self._names if name.strip()]
                if not names or len(set(names)) < len(names):
                    raise ValueError(
                        f"{path} of {config_key} begins with the columns {self._names!r}; expected "
                        "a line of unique names."
                    )
                line_number = rows.line_num + 1
                for row in rows:
                    if row and len(row) != len(self._names):
                        raise ValueError(
                            f"{path}:{line_number} has {len(row)} cells, and {len(self._names)} "
                            f"columns have names ({', '.join(self._names)}); is {delimiter!r} the "
                            "delimiter?"
                        )
                    if row:  # blank lines are skipped
                        self._rows.append(row)
                        self._line_numbers.append(line_number)
                    line_number = rows.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}:{line_number} is not valid UTF-8 CSV: {error}; is a quote unpaired?"
            ) from error

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> list[Record]:
        return [
            {
                name: _parse_cell(self._columns.get(name, name), cell, self.location(index))
                for name, cell in zip(self._names, self._rows[index], strict=True)
                if name.strip() and cell.strip()
            }
            for index in indices
        ]

    def location(self, index: int) -> str:
        return f"{self._path}:{self._line_numbers[index]}"


def _parse_cell(field: str, cell: str, location: str) -> object:
    """Parse a cell as JSON or answers in some fields, otherwise as a list of strings or text."""
    if field in JSON_COLUMNS and cell.lstrip()[:1] in ("{", "["):
        return _parse_literal(cell, f"{location}: {field!r}")
    if field in ANSWER_KEYS:
        return _parse_answers(field, cell, f"{location}: {field!r}")
    if cell.startswith("["):
        try:
            value = parse_json(cell, location)
        except ValueError:
            return cell
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return value
    return cell


def _parse_literal(cell: str, location: str) -> Any:
    """Parse JSON, or a Python literal that equals the `repr` of its value.

    Other literals are ambiguous: NumPy prints an array of two strings as `['x' 'y']`, which Python
    parses as a list of one string.

    Raises:
        ValueError: The cell is neither JSON nor such a literal.
    """
    text = cell.strip()
    try:
        return parse_json(text, location)
    except ValueError as error:
        try:
            value = ast.literal_eval(text)
            is_exact = repr(value) == text and not is_too_deep(text, value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            is_exact = False
        if not is_exact:
            raise error from None
        return value


_STRING_LIST = re.compile(r"array\(|[\[{]\s*(?:['\"]|nan\b)")
"""Start of a list or dict of strings, as Python and NumPy print them."""


def _parse_answers(field: str, cell: str, location: str) -> Any:
    """Parse a cell with answers: a list, as JSON or a Python literal, or a single answer.

    A collection of numbers, such as the interval `[1, 2]`, is a single answer. Only in the fields
    `answers` and `golden_answers` is a list of numbers a list of answers.

    Raises:
        ValueError: The cell looks like a list but cannot be parsed.
    """
    text = cell.strip()
    is_list_field = field != "answer"
    value: Any = cell
    if text.startswith(("[", "(", "{", "array(")):
        try:
            value = _parse_literal(text, location)
        except ValueError:
            is_list = is_list_field and text.startswith("[") and text.endswith("]")
            if is_list or _STRING_LIST.match(text):
                raise _make_list_error(cell, location) from None
    if isinstance(value, list | tuple):
        is_single = _is_numeric(value) and not (is_list_field and isinstance(value, list))
        return cell if is_single else list(value)
    if isinstance(value, dict | set) and value and not _is_numeric(value):
        raise _make_list_error(cell, location)
    return cell


def _is_numeric(value: Any) -> bool:
    """Return True if the value is a number or a nonempty, possibly nested, list of numbers."""
    if isinstance(value, list | tuple | set):
        return len(value) > 0 and all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _make_list_error(cell: str, location: str) -> ValueError:
    return ValueError(
        f'{location} is {cell!r:.100}; expected one answer, or a list as JSON such as ["x", "y"].'
    )
