"""A workdir as it lies on disk, whole or not: every file may be missing, cut short or older."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.config.schema import flat_json
from jaxrl.config.settings import STAGES
from jaxrl.runtime.history import HISTORY, read_history
from jaxrl.utils.json_io import parse_json, read_object


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Readable contents of one run's files."""

    name: str
    workdir: Path
    config: dict[str, Any]  # flat, with dots; empty where there is none
    records: list[dict[str, Any]]  # of metrics.jsonl
    # Of eval/, oldest first, each with its stage, its step and that of its weights. Only the first
    # and the last one have their `questions`: they are most of what a run writes.
    evaluations: list[dict[str, Any]]
    starts: list[dict[str, Any]]  # of environment.json
    problems: list[str]  # what could not be read, for the reader of the report
    changes: list[dict[str, Any]] = field(default_factory=list)  # starts that changed settings
    error: str = ""  # text of the first environment error that a file still tells
    signs: list[dict[str, Any]] = field(default_factory=list)  # of sentinel.jsonl, oldest first


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
    path = workdir / "metrics.jsonl"
    written = _try(path, lambda p: p.read_bytes().splitlines(), problems) or []
    records = []
    for line in written:
        record: Any = None
        with contextlib.suppress(ValueError):
            record = parse_json(line, path.name)
        is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
        if is_record and isinstance(record.get("stage", "train"), str):
            records.append({"stage": "train", **record})
    if num_bad := len(written) - len(records):
        problems.append(f"{num_bad} of {len(written)} lines of {path.name} are cut or damaged")
    starts = _try(workdir / "environment.json", _starts, problems) or []
    evaluations = _read_evaluations(workdir / "eval", records, problems)
    config = _try(workdir / "config.json", flat_json, problems) or {}
    lines, bad = read_history(workdir)
    if bad:
        problems.append(f"{len(bad)} lines of {HISTORY} are cut or damaged")
    changes = []
    for line in (line for line in lines if line["changes"]):
        by_key = {key: mapping(change) for key, change in line["changes"].items()}
        accepted = line.get("accepted")
        accepted = accepted if isinstance(accepted, list) else []
        changes.append({**line, "changes": by_key, "accepted": accepted})
    # What a watch has seen; most runs have no such file.
    path = workdir / "sentinel.jsonl"
    signs = []
    written = _try(path, lambda p: p.read_bytes().splitlines(), problems) if path.exists() else []
    for line in written or []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            sign = parse_json(line, path.name)
            kinds = (("step", int), ("sign", str), ("text", str), ("action", str))
            if all(isinstance(sign[name], kind) for name, kind in kinds):
                signs.append(sign)
    if num_bad := len(written or []) - len(signs):
        problems.append(f"{num_bad} of {len(written)} lines of {path.name} are cut or damaged")
    return RunFiles(
        name=workdir.resolve().name,
        workdir=workdir,
        config=config,
        records=records,
        evaluations=evaluations,
        starts=starts,
        problems=problems,
        changes=changes,
        error=_first_error(workdir, records, evaluations),
        signs=signs,
    )


def _first_error(
    workdir: Path, records: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> str:
    """The first environment error's text, from a step's trajectories or an evaluation's answers."""
    failed = [r["step"] for r in records if r["stage"] == "train" and r.get(ENVIRONMENT_ERRORS)]
    for step in failed[:1]:
        try:
            lines = (workdir / "trajectories" / f"step_{step:06d}.jsonl").read_bytes().splitlines()
            turns = [turn for line in lines for turn in parse_json(line, "")["turns"]]
            return next(str(turn["error"]) for turn in turns if turn["error"])
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            pass  # not written, or not to be read
    asked = [q for evaluation in evaluations for qs in evaluation["questions"].values() for q in qs]
    return next((str(question["error"]) for question in asked if question.get("error")), "")


ENVIRONMENT_ERRORS = "outcome/environment_error"
"""The metric that is the share of a step's episodes that failed."""


def _try(path: Path, read: Callable[[Path], Any], problems: list[str]) -> Any:
    """Reads a file by `read`; None, with a note, where it cannot be read."""
    try:
        return read(path)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        problems.append(f"{path.name} could not be read: {error}")
    return None


def _starts(path: Path) -> list[dict[str, Any]]:
    starts = parse_json(path.read_bytes(), path.name)
    parts = ("versions", "machine", "model")
    return [
        {
            **start,
            **{part: mapping(start.get(part)) for part in parts},
            "kernels": [*map(mapping, start.get("kernels") or ())],
        }
        for start in starts
    ]


def _read_evaluations(
    folder: Path, records: list[dict[str, Any]], problems: list[str]
) -> list[dict[str, Any]]:
    """Reads evaluations up to the last record; later ones are of a run that was killed."""
    end = records[-1]["step"] if records else float("inf")
    names = [(re.fullmatch(r"(\w+)_(\d+)\.json", path.name), path) for path in folder.glob("*")]
    places = [
        ({"stage": name[1], "step": int(name[2])}, path)
        for name, path in names
        if name and int(name[2]) <= end
    ]
    evaluations: list[dict[str, Any]] = []
    first: dict[str, Any] = {}  # by suite
    last: dict[str, Any] = {}
    for at, path in sorted(places, key=lambda item: place(item[0])):
        content = _try(path, read_object, problems)
        if not isinstance(content, dict):
            continue
        weights = content.get("weights_step")
        weights = weights if isinstance(weights, int) else at["step"]
        asked: dict[str, list[dict[str, Any]]] = {}
        for suite, questions in mapping(content.pop("questions", None)).items():
            for record in questions if isinstance(questions, list) else ():
                if isinstance(record, dict):  # what is not one is left out
                    answers, outcome = record.get("answers"), record.get("outcome")
                    record["answers"] = answers if isinstance(answers, list) else []
                    record["outcome"] = outcome if isinstance(outcome, str) else ""
                    asked.setdefault(suite, []).append(record)
        evaluations.append({**content, **at, "weights_step": weights, "questions": {}})
        if asked:
            first |= {suite: evaluations[-1] for suite in asked if suite not in first}
            if last:  # no longer: it keeps the suites that it was the first to have
                kept = [suite for suite in last["questions"] if first[suite] is last]
                last["questions"] = {suite: last["questions"][suite] for suite in kept}
            last = evaluations[-1]
            last["questions"] = asked
    return evaluations


def mapping(value: Any) -> dict[str, Any]:
    """A mapping as it is; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def place(record: dict[str, Any]) -> tuple[int, int]:
    """Key that sorts records and evaluations in the order of a run: step, then stage."""
    stage = record["stage"]
    return record["step"], STAGES.index(stage) if stage in STAGES else len(STAGES)
