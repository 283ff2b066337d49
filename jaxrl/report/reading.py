"""A workdir as it lies on disk, whole or not: every file may be missing, cut short or older."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config import STAGES, flat_json


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What could be read of one run."""

    name: str
    workdir: Path
    config: dict[str, Any]  # flat, with dots; empty where there is none
    records: list[dict[str, Any]]  # of metrics.jsonl
    evaluations: list[dict[str, Any]]  # of eval/, oldest first, each with its stage and step
    starts: list[dict[str, Any]]  # of environment.json
    problems: list[str]  # what could not be read, for the reader of the report


def read_run(workdir: Path) -> RunFiles:
    """Reads a workdir.

    Raises:
        FileNotFoundError: it is no folder, or holds nothing that a run writes.
    """
    if not workdir.is_dir():
        raise FileNotFoundError(f"there is no run {workdir}; expected a folder given as --workdir.")
    names = ("metrics.jsonl", "config.json", "eval")
    if not any((workdir / name).exists() for name in names):
        raise FileNotFoundError(f"{workdir} is no run: it holds none of {', '.join(names)}.")
    problems: list[str] = []
    records = _read_records(workdir / "metrics.jsonl", problems)
    starts = _try(workdir / "environment.json", _starts, problems) or []
    return RunFiles(
        name=workdir.resolve().name,
        workdir=workdir,
        config=_try(workdir / "config.json", flat_json, problems) or {},
        records=records,
        evaluations=_read_evaluations(workdir / "eval", records, problems),
        starts=starts,
        problems=problems,
    )


def _try(path: Path, read: Callable[[Path], Any], problems: list[str]) -> Any:
    """What `read` makes of a file; None, with a note, where it cannot be read."""
    try:
        return read(path)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        problems.append(f"{path.name} could not be read: {error}")
    return None


def _starts(path: Path) -> list[dict[str, Any]]:
    starts = json.loads(path.read_text(encoding="utf-8"))
    needed = ("versions", "machine", "model")
    return [start for start in starts if all(isinstance(start.get(key), dict) for key in needed)]


def _read_records(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    lines = _try(path, lambda p: p.read_bytes().splitlines(), problems) or []
    records, bad = [], 0
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append({"stage": "train", **record})
        else:
            bad += 1
    if bad:
        problems.append(f"{bad} of {len(lines)} lines of {path.name} are cut or damaged")
    return records


def _read_evaluations(
    folder: Path, records: list[dict[str, Any]], problems: list[str]
) -> list[dict[str, Any]]:
    """Evaluations up to the last record: what a run killed later has left behind is not its own."""
    last = records[-1]["step"] if records else float("inf")
    found = []
    for path in sorted(folder.glob("*.json")):
        name = re.fullmatch(r"(\w+)_(\d+)\.json", path.name)
        content = _try(path, lambda p: json.loads(p.read_text(encoding="utf-8")), problems)
        if name is None or not isinstance(content, dict) or int(name[2]) > last:
            continue
        found.append({"stage": name[1], **content, "step": int(name[2])})
    return sorted(found, key=place)


def place(found: dict[str, Any]) -> tuple[int, int]:
    """Where a record or an evaluation stands in its run: step, then stage."""
    stage = found["stage"]
    return found["step"], STAGES.index(stage) if stage in STAGES else len(STAGES)
