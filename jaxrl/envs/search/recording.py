"""On-disk recording of search results, for repeating a run without the engine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl.utils.json_io import parse_json, read_object


class Recording:
    """Recording of one engine's search results, by query, in append-only files.

    ```text
    <folder>/<hash of engine and settings>/
        engine.json             engine and settings
        process_0.jsonl         one result per line: {"key", "query", "result", "digest"}
    ```

    A key is the SHA-256 of engine, settings and query; a digest is the SHA-256 of key and result.
    Truncated lines, and lines with a wrong digest, are ignored with a warning. If a query has
    several results, the first is used. Each process writes its own file. Memory holds only the
    file positions of the results.
    """

    def __init__(
        self,
        folder: Path,
        engine: Mapping[str, Any],
        *,
        process: int = 0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Index the existing results. The first `add` creates the file.

        Args:
            folder: Folder of all recordings of a run.
            engine: Name and settings of the engine, as JSON values.
            process: Index of this process. Results that it recorded take precedence.
            log: Callback for warnings about damaged lines.
        """
        self._engine = json.dumps(dict(engine), sort_keys=True, ensure_ascii=False)
        self.folder = folder / _hash_text(self._engine)[:16]
        self._write_path = self.folder / f"process_{process}.jsonl"
        self._positions: dict[str, tuple[Path, int, int]] = {}  # by key: file, first byte, bytes
        self._lock = threading.Lock()
        paths = self.folder.glob("process_*.jsonl")
        for path in sorted(paths, key=lambda path: (path != self._write_path, path)):
            num_damaged = start = 0
            with path.open("rb") as file:
                for data in file:
                    if entry := _parse_line(data):
                        self._positions.setdefault(entry[0], (path, start, len(data)))
                    elif data.strip():
                        num_damaged += 1
                    start += len(data)
            if num_damaged:
                log(
                    f"warning: {path} has damaged lines ({num_damaged}), which are ignored; a "
                    "killed process may have truncated them"
                )

    def __len__(self) -> int:
        return len(self._positions)

    def get(self, query: str) -> str | None:
        """Return the result of a query, or None.

        Raises:
            OSError: The file cannot be read.
        """
        key = self._make_key(query)
        with self._lock:
            position = self._positions.get(key)
        if position is None:
            return None
        path, start, size = position
        with path.open("rb") as file:
            file.seek(start)
            entry = _parse_line(file.read(size))
        if entry and entry[0] == key:
            return entry[1]
        with self._lock:  # the file has changed
            self._positions.pop(key, None)
        return None

    def add(self, query: str, result: str) -> None:
        """Record a result unless the query already has one.

        Raises:
            OSError: The result could not be written.
        """
        key = self._make_key(query)
        digest = _hash_text(f"{key}\n{result}")
        line = {"key": key, "query": query, "result": result, "digest": digest}
        try:
            data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # half of a surrogate pair
            data = json.dumps(line).encode() + b"\n"
        with self._lock:
            if key in self._positions:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._write_path.exists():
                (self.folder / "engine.json").write_text(self._engine + "\n", encoding="utf-8")
            with self._write_path.open("a+b", buffering=0) as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a kill truncated the last line
                        file.write(b"\n")
                if file.write(data) != len(data):
                    raise OSError(f"{self._write_path}: a result could not be written completely")
                self._positions[key] = (self._write_path, file.tell() - len(data), len(data))

    def _make_key(self, query: str) -> str:
        return _hash_text(f"{self._engine}\n{query}")


def list_recorded_engines(folder: Path) -> list[dict[str, Any]]:
    """Return the engine and settings of each readable recording in a folder."""
    engines = []
    for path in sorted(folder.glob("*/engine.json")):
        with contextlib.suppress(OSError, ValueError):
            engines.append(read_object(path))
    return [engine for engine in engines if isinstance(engine.get("settings", {}), dict)]


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _parse_line(data: bytes) -> tuple[str, str] | None:
    """Return the key and result of a line, or None if it is damaged."""
    with contextlib.suppress(ValueError):
        match parse_json(data, "a line"):
            case {"key": str() as key, "result": str() as result, "digest": digest}:
                if digest == _hash_text(f"{key}\n{result}"):
                    return key, result
    return None
