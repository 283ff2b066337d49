"""JSONL and CSV by byte offsets: a pass over the file finds where each record begins."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxrl.envs.json_text import parse_json
from jaxrl.envs.jsonl import parse_line, refuse_other_formats
from jaxrl.readers.base import Held, Reader, Record, open_files


def jsonl(source: str, config_key: str) -> Reader:
    """JSONL: one JSON object a line; blank lines are skipped."""
    return open_files(
        lambda path: _JsonLines(path, config_key),
        source,
        config_key,
        what="a JSONL file, one object a line",
        suffixes=(".jsonl",),
    )


class _JsonLines(Reader):
    """One file of JSONL."""

    def __init__(self, path: Path, key: str):
        """Finds where each line begins; parses none."""
        self._held = Held(path)
        file = self._held.file
        refuse_other_formats(path, file.read(4096))
        file.seek(0)
        self._offsets, self._numbers = array("Q"), array("Q")
        at = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                self._offsets.append(at)
                self._numbers.append(number)
            at += len(line)
        if not self._offsets:
            raise ValueError(f"{path} holds no line; {key} must name a file with at least one.")

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, indices: Sequence[int]) -> list[Record]:
        self._held.check()
        file, records = self._held.file, []
        for index in indices:
            if file.tell() != self._offsets[index]:
                file.seek(self._offsets[index])
            records.append(parse_line(file.readline(), self.place(index)))
        return records

    def place(self, index: int) -> str:
        return f"{self._held.path}:{self._numbers[index]}"


def csv_table(source: str, config_key: str, *, delimiter: str = "") -> Reader:
    """CSV or TSV with a line of column names.

    A cell that holds a JSON list of texts is such a list; `messages`, `prompt`, `metadata`,
    `reward_model` and `extra_info` may hold any JSON. An empty cell is no value, and a column
    without a name, such as pandas writes for row numbers, is not read.

    Args:
        source: a file, a pattern, or a folder of .csv and .tsv files.
        config_key: that names it.
        delimiter: of cells, one character; "": a tab in .tsv files, and else a comma.
    """
    if not isinstance(delimiter, str) or len(delimiter) > 1:
        raise ValueError(f"{config_key}: the delimiter is {delimiter!r}; expected one character.")
    return open_files(
        lambda path: _Csv(path, config_key, delimiter or ("\t" if path.suffix == ".tsv" else ",")),
        source,
        config_key,
        what="a CSV file with a line of column names",
        suffixes=(".csv", ".tsv"),
    )


OBJECTS = ("messages", "prompt", "metadata", "reward_model", "extra_info")
"""Columns whose cells may hold any JSON."""

csv.field_size_limit(2**30)  # a cell may hold a whole document


class _Csv(Reader):
    """One file of CSV; a cell in quotes may hold line ends."""

    def __init__(self, path: Path, key: str, delimiter: str):
        """Finds where each row begins, and checks that each has as many cells as the header."""
        self._held, self._delimiter = Held(path), delimiter
        self._offsets, self._numbers = array("Q"), array("Q")
        self._at = self._number = 0
        rows = self._rows(0, 0)
        self._names = next(rows, [])
        if self._names:
            self._names[0] = self._names[0].removeprefix("\ufeff")
        named = [name for name in self._names if name.strip()]
        if not named or len(set(named)) < len(named):
            raise ValueError(
                f"{path} begins with the columns {self._names!r}, of {key}; expected a line of "
                "names, each once."
            )
        begin = self._at, self._number + 1
        for row in rows:
            if row:  # blank lines are skipped
                if len(row) != len(self._names):
                    raise ValueError(
                        f"{path}:{begin[1]} has {len(row)} cells, and {len(self._names)} columns "
                        f"have names ({', '.join(self._names)}); is {delimiter!r} the delimiter?"
                    )
                self._offsets.append(begin[0])
                self._numbers.append(begin[1])
            begin = self._at, self._number + 1
        if not self._offsets:
            raise ValueError(f"{path} holds no row; {key} must name a file with at least one.")

    def _rows(self, offset: int, number: int) -> Iterator[list[str]]:
        """The rows from an offset on; a row is read with as many lines as it has, and no more."""
        self._at, self._number = offset, number
        self._held.file.seek(offset)
        try:
            yield from csv.reader(self._lines(), delimiter=self._delimiter, strict=True)
        except csv.Error as error:
            place = f"{self._held.path}:{self._number}"
            raise ValueError(f"{place} is no CSV: {error}; is a quote unpaired?") from error

    def _lines(self) -> Iterator[str]:
        while line := self._held.file.readline():
            self._at += len(line)
            self._number += 1
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                place = f"{self._held.path}:{self._number}"
                raise ValueError(f"{place} is not valid UTF-8: {error}") from error

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, indices: Sequence[int]) -> list[Record]:
        self._held.check()
        records = []
        for index in indices:
            cells = next(self._rows(self._offsets[index], self._numbers[index] - 1))
            named = zip(self._names, cells, strict=True)
            place = self.place(index)
            filled = ((name, cell) for name, cell in named if name.strip() and cell.strip())
            records.append({name: _value(name, cell, place) for name, cell in filled})
        return records

    def place(self, index: int) -> str:
        return f"{self._held.path}:{self._numbers[index]}"


def _value(name: str, cell: str, place: str) -> object:
    """Reads a cell: JSON in the columns that may hold it, lists of texts, text."""
    if name in OBJECTS and cell.lstrip()[:1] in ("{", "["):
        return parse_json(cell, f"{place}: {name!r}")
    if cell.startswith("["):
        try:
            value = parse_json(cell, place)
        except ValueError:
            return cell
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            return value
    return cell
