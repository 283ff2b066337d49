"""JSON Lines reader. If a file is not JSONL, the error identifies its format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl.utils.json_io import parse_json

OTHER_FORMATS = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b": "compressed (gzip)",
    b"\x28\xb5\x2f\xfd": "compressed (zstd)",
    b"PK\x03\x04": "a zip archive",
    b"[": "a JSON array",
}
"""Formats that users often pass instead of JSONL, by their first bytes."""


def read_objects(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Stream the objects of a JSONL file with their locations (`file:line`), skipping blank lines.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file has a different format, or a line is not a JSON object.
    """
    with open(path, "rb") as lines:
        reject_other_formats(path, lines.peek(4096))
        for number, line in enumerate(lines, start=1):
            if line.strip():
                location = f"{path}:{number}"
                yield parse_line(line, location), location


def reject_other_formats(path: Path, start: bytes) -> None:
    """Raise a ValueError if a file's first bytes identify a format other than JSONL."""
    head = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    for magic, name in OTHER_FORMATS.items():
        if head.startswith(magic):
            raise ValueError(f"{path} is {name}; expected JSONL, one JSON object per line.")


def parse_line(line: bytes, location: str) -> dict[str, Any]:
    """Parse a line of JSONL.

    Raises:
        ValueError: The line is not a JSON object in UTF-8. The message starts with `location`.
    """
    try:
        fields = parse_json(line.decode("utf-8-sig").strip(), location)
        if b"\\u" in line:  # may be a lone surrogate, which UTF-8 cannot encode
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{location} contains half of a surrogate pair (\\ud800 to \\udfff), which is not text."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{location} is not valid JSON in UTF-8: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{location} is a {type(fields).__name__}; expected a JSON object.")
    return fields
