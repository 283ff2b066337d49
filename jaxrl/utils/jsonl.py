"""JSON Lines: the objects of a file, and errors that name the format of another file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl.utils.json_io import is_too_deep

MAGIC = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b": "compressed (gzip)",
    b"\x28\xb5\x2f\xfd": "compressed (zstd)",
    b"PK\x03\x04": "a zip archive",
}
"""First bytes of files that people have in place of JSONL."""


def read_objects(
    path: Path, *, skip_bytes: int = 0, skip_lines: int = 0
) -> Iterator[tuple[dict[str, Any], str]]:
    """Streams the objects of a JSONL file, each with its place (`file:line`); skips blank lines.

    Args:
        path: of the file.
        skip_bytes: that are not read, as they have been before; none of them is of a line that is.
        skip_lines: that are in these bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is of another format, or a line is no JSON object (the place is named).
    """
    with open(path, "rb") as lines:
        refuse_other_formats(path, lines.peek(4096))
        lines.seek(skip_bytes)
        for number, line in enumerate(lines, start=skip_lines + 1):
            if line.strip():
                place = f"{path}:{number}"
                yield parse_line(line, place), place


def refuse_other_formats(path: Path, start: bytes) -> None:
    """Refuses files in other formats by name, from their first bytes."""
    new, name = path.with_name(f"{path.stem}_lines.jsonl"), json.dumps(str(path))
    expected = "expected JSONL, one JSON object a line"
    for magic, what in MAGIC.items():
        if start.startswith(magic):
            how = "Unpack or convert it first."
            if magic == b"PAR1":
                rows = f"q.read_table({name}).to_pylist()"
                convert = _conversion("json, pyarrow.parquet as q", rows, new)
                how = f"With pyarrow installed, this converts it: {convert}"
            raise ValueError(f"{path} is {what}; {expected}. {how}")
    head = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"[") and head[1:].lstrip()[:1] in (b"{", b""):
        convert = _conversion("json", f"json.load(open({name}))", new)
        raise ValueError(f"{path} is a JSON array; {expected}. This converts it: {convert}")


def _conversion(modules: str, rows: str, new: Path) -> str:
    """A command that writes what Python reads as JSONL, for a shell."""
    program = f"import {modules}; [print(json.dumps(x, default=str)) for x in {rows}]"
    return f"python -c {shlex.quote(program)} > {shlex.quote(str(new))}"


def parse_line(line: bytes, place: str) -> dict[str, Any]:
    """Parses a line of JSONL.

    Raises:
        ValueError: it holds none; `place` is named.
    """
    try:
        fields = json.loads(line.decode("utf-8-sig"))
        is_text = True
        if b"\\u" in line:  # escapes may leave what no file can hold
            try:
                json.dumps(fields, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                is_text = False
        if is_too_deep(line, fields):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{place} is nested too deeply to be read; flatten it.") from None
    except json.JSONDecodeError as error:  # its own text would count lines within this one
        raise ValueError(
            f"{place} is not valid JSON in UTF-8: {error.msg}, at character {error.pos + 1}; "
            "expected one JSON object a line."
        ) from error
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON in UTF-8: {error}") from error
    if not is_text:
        raise ValueError(f"{place} holds half of a surrogate pair (\\ud800 to \\udfff): no text.")
    if not isinstance(fields, dict):
        raise ValueError(f"{place} holds a {type(fields).__name__}; expected a JSON object.")
    return fields
