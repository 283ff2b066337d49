"""JSON Lines reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl.utils.json_io import parse_json


def read_objects(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Stream the objects of a JSONL file with their locations (`file:line`), skipping blank lines.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is not a JSON object.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                location = f"{path}:{number}"
                yield parse_line(line, location), location


def parse_line(line: bytes, location: str) -> dict[str, Any]:
    """Parse a line of JSONL.

    Raises:
        ValueError: The line is not a JSON object in UTF-8. The message starts with `location`.
    """
    try:
        fields = parse_json(line.decode("utf-8-sig").strip(), location)
        if b"\\u" in line:  # may be a lone surrogate, which UTF-8 cannot encode
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ValueError(f"{location} is not valid JSON in UTF-8: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{location} is a {type(fields).__name__}; expected a JSON object.")
    return fields
