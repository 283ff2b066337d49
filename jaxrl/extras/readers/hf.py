"""Memory-mapped reader for folders written by `save_to_disk` of Hugging Face `datasets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.data.readers.base import Reader, Record, shorten_error, to_record


def open_hugging_face(
    source: str, split: str, config_key: str, columns: Mapping[str, str] | None = None
) -> Reader:
    """Return a reader for a saved `Dataset`, or for one split of a saved `DatasetDict`.

    Columns that `columns` maps to "" are skipped.

    Raises:
        ValueError: The extra is not installed, the split is missing, or the folder is unreadable.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{config_key} is {source!r}, a folder of Hugging Face's datasets: {error}; install "
            "the extra: pip install 'jaxrl[datasets]'."
        ) from error
    folder = Path(source)
    try:
        rows = datasets.load_from_disk(str(folder))
    except Exception as error:  # several libraries raise various types
        raise ValueError(f"{folder} cannot be read: {shorten_error(error)}.") from error
    name = str(folder)
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            splits = ", ".join(map(repr, rows))
            location = config_key.removesuffix(".source") + ".split"
            raise ValueError(f"{location} is {split!r}; {folder} has the splits {splits}.")
        rows, name = rows[split], f"{folder} [{split}]"
    dropped = [name for name, field in (columns or {}).items() if field == ""]
    return _HuggingFaceReader(
        rows.remove_columns([c for c in dropped if c in rows.column_names]), name
    )


class _HuggingFaceReader(Reader):
    """Reader for a `Dataset`. Images and audio are not decoded."""

    pads_with_nulls = True

    def __init__(self, rows: Any, name: str):
        self._rows, self._name = rows.with_format("arrow"), name

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> list[Record]:
        rows = self._rows[list(indices)].to_pylist()
        return [to_record(row, self.location(i)) for row, i in zip(rows, indices, strict=True)]

    def location(self, index: int) -> str:
        return f"{self._name}:{index + 1}"
