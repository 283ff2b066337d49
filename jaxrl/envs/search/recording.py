"""Recorded search results on disk, so that a run can be repeated without the engine."""

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
    """Results of an engine with certain settings, by query, in files that only grow.

    ```text
    <folder>/<hash of engine and settings>/
        engine.json             engine and settings
        process_0.jsonl         one result a line, by process: {"key", "query", "result", "digest"}
    ```

    A key is the SHA-256 of engine, settings and query, a digest that of key and result; where they
    differ, the line is damaged. A result that is there once stays, whatever the engine finds later.
    Each process writes a file of its own; a line that a kill has cut or that is damaged is told and
    passed over. Lines of versions without digests are read. Memory holds a place in a file for
    every query, not its result.
    """

    def __init__(
        self,
        folder: Path,
        engine: Mapping[str, Any],
        *,
        process: int = 0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Reads what is there; nothing is written until there is a result.

        Args:
            folder: of all recordings of a run.
            engine: its name and settings, as JSON has them.
            process: number of this process, whose own results come before those of others.
            log: told of lines that are passed over.
        """
        self._engine = json.dumps(dict(engine), sort_keys=True, ensure_ascii=False)
        self.folder = folder / _digest(self._engine)[:16]
        self._own = self.folder / f"process_{process}.jsonl"
        self._places: dict[str, tuple[Path, int, int]] = {}  # by key: file, first byte, bytes
        self._lock = threading.Lock()
        others = sorted(self.folder.glob("process_*.jsonl")) if self.folder.is_dir() else []
        for path in [self._own, *(path for path in others if path != self._own)]:
            num_bad = start = 0
            if path.exists():
                with path.open("rb") as file:
                    for data in file:
                        if (entry := _read_line(data)) is not None:
                            self._places.setdefault(entry[0], (path, start, len(data)))
                        elif data.strip():
                            num_bad += 1
                        start += len(data)
            if num_bad:
                lines, them = ("1 line", "it") if num_bad == 1 else (f"{num_bad} lines", "them")
                verb = ("is", "It is") if num_bad == 1 else ("are", "They are")
                log(
                    f"warning: {path} has {lines} that {verb[0]} no result, or not the one that "
                    f"was written; a kill may have cut {them}, or the file is damaged. "
                    f"{verb[1]} left out"
                )

    def __len__(self) -> int:
        return len(self._places)

    def get(self, query: str) -> str | None:
        """The result of a query; None where there is none, or none any more.

        Raises:
            OSError: its file cannot be read.
        """
        key = self._key(query)
        with self._lock:
            place = self._places.get(key)
        if place is None:
            return None
        path, start, size = place
        with path.open("rb") as file:
            file.seek(start)
            entry = _read_line(file.read(size))
        if entry is not None and entry[0] == key:
            return entry[1]
        with self._lock:  # somebody has changed the file
            self._places.pop(key, None)
        return None

    def add(self, query: str, result: str) -> None:
        """Keeps a result, unless the query has one.

        Raises:
            OSError: it could not be written.
        """
        key = self._key(query)
        digest = _digest(f"{key}\n{result}")
        line = {"key": key, "query": query, "result": result, "digest": digest}
        try:
            data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 does not have
            data = json.dumps(line).encode() + b"\n"
        with self._lock:
            if key in self._places:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._own.exists():
                (self.folder / "engine.json").write_text(self._engine + "\n", encoding="utf-8")
            # In one write, behind the end of a line that a kill has cut.
            with self._own.open("a+b", buffering=0) as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                if file.write(data) != len(data):
                    raise OSError(f"{self._own}: a result could not be written whole")
                self._places[key] = (self._own, file.tell() - len(data), len(data))

    def _key(self, query: str) -> str:
        return _digest(f"{self._engine}\n{query}")


def recorded_engines(folder: Path) -> list[dict[str, Any]]:
    """Engines and settings of which a folder has recordings, those whose file can be read."""
    engines = []
    for path in sorted(folder.glob("*/engine.json")):
        with contextlib.suppress(OSError, ValueError):
            engines.append(read_object(path))
    return [engine for engine in engines if isinstance(engine.get("settings", {}), dict)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


_NAMES = {"key", "query", "result"}


def _read_line(data: bytes) -> tuple[str, str] | None:
    """Key and result; None where a line is not what was written."""
    with contextlib.suppress(ValueError):
        match parse_json(data, "a line"):
            case {"key": str() as key, "result": str() as result, **rest}:
                is_whole = rest.get("digest") == _digest(f"{key}\n{result}")
                if is_whole or {"key", "result", *rest} == _NAMES:  # of before there were digests
                    return key, result
    return None
