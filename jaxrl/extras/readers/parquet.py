"""Parquet reader that caches recently read row groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.data.readers.base import (
    Reader,
    Record,
    UnchangedFile,
    open_files,
    shorten_error,
    to_record,
)

HELD_BYTES = 2**25
"""Maximum size of all cached row groups, in bytes. The latest group is always cached."""


def open_parquet(source: str, config_key: str, columns: Mapping[str, str] | None = None) -> Reader:
    """Return a reader for a Parquet file, a folder, or a pattern such as `train-*.parquet`.

    Columns that `columns` maps to "" are skipped.
    """
    dropped_columns = {name for name, field in (columns or {}).items() if field == ""}
    return open_files(
        lambda path: _ParquetReader(path, dropped_columns),
        source,
        config_key,
        expected="a Parquet file",
        suffixes=(".parquet",),
    )


class _ParquetReader(Reader):
    """Reader for one Parquet file."""

    pads_with_nulls = True

    def __init__(self, path: Path, dropped_columns: set[str]):
        self._source = UnchangedFile(path)
        try:
            self._file = pq.ParquetFile(self._source.file)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} cannot be read as Parquet: {shorten_error(error)}."
            ) from error
        meta = self._file.metadata
        self._ends = np.cumsum([meta.row_group(i).num_rows for i in range(meta.num_row_groups)])
        self._names = [
            name for name in self._file.schema_arrow.names if name not in dropped_columns
        ]
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def read(self, indices: Sequence[int]) -> list[Record]:
        self._source.check_unchanged()
        row_indices = np.asarray(indices, np.int64)
        groups = np.searchsorted(self._ends, row_indices, side="right")
        # Slice runs of consecutive rows, since `Table.take` does not support Arrow's view types.
        split_points = np.flatnonzero((np.diff(row_indices) != 1) | (np.diff(groups) != 0)) + 1
        rows: list[Record] = []
        for run, group in zip(
            np.split(row_indices, split_points), groups[[0, *split_points]], strict=True
        ):
            start = int(run[0] - (self._ends[group - 1] if group else 0))
            rows += self._read_row_group(int(group)).slice(start, len(run)).to_pylist()
        return [to_record(row, self.location(i)) for row, i in zip(rows, indices, strict=True)]

    def _read_row_group(self, group: int) -> pa.Table:
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group]
        try:
            table = self._file.read_row_group(group, columns=self._names)
        except (pa.ArrowException, OSError) as error:
            location = f"{self._source.path}, row group {group + 1}"
            raise ValueError(f"{location} cannot be read: {shorten_error(error)}.") from error
        self._groups[group] = table
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > HELD_BYTES:
            self._groups.popitem(last=False)
        return table

    def location(self, index: int) -> str:
        return f"{self._source.path}:{index + 1}"
