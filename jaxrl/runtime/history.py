"""A workdir's record of the run that began in it.

Three places know it, so that no single file's loss hides a difference: `config.json`, every
checkpoint's position, and `config_history.jsonl`, to which each start that changes something adds
a line: when, after which step, and every key with its value before and now.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from jaxrl.config.schema import KEYS, flat_json, missing_folder, to_json
from jaxrl.utils.files import append_line, set_aside, written_whole
from jaxrl.utils.json_io import parse_json

if TYPE_CHECKING:
    from jaxrl.runtime.changes import Change

HISTORY = "config_history.jsonl"


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A workdir's record of its run."""

    step: int  # of the newest checkpoint; 0 where none can be read
    config: dict[str, Any]  # flat; a key that nothing tells has its default
    contents: dict[str, str]  # fingerprints of the files it read; empty where nothing tells
    warnings: list[str] = field(default_factory=list)


def check_step(folder: Path, step: int) -> None:
    """Refuses a step of which the folder has no checkpoint.

    Raises:
        ValueError: names those that there are.
    """
    from jaxrl.runtime.checkpoint import steps_in

    if step not in (steps := steps_in(folder)):
        held = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"--step={step}: {folder} has no such checkpoint; it holds {held}.")


def read_begun(workdir: Path, *, is_accepted: bool = False) -> Begun | None:
    """Reads the record of the run that the workdir's checkpoints belong to; None without any.

    Args:
        workdir: the folder with `checkpoints/` and `config.json`.
        is_accepted: whatever the run began with, it may go on.

    Raises:
        ValueError: there are checkpoints, but neither they nor `config.json` tell the
            configuration.
    """
    # Imported here: the report reads the history, and loads no JAX.
    from jaxrl.runtime.checkpoint import has_any, read_newest_position

    if not has_any(workdir / "checkpoints"):
        return None
    step, position = read_newest_position(workdir / "checkpoints")
    saved = position.get("config") or {}
    warnings: list[str] = []
    path = workdir / "config.json"
    try:
        configured = flat_json(path)
    except (OSError, ValueError) as error:
        configured = {}
        damage = f"{path} cannot be read ({' '.join(str(error).split())[:200]}); "
        if isinstance(error, FileNotFoundError):
            damage = f"{path} is missing; "
        if saved:
            warnings.append(f"warning: {damage}checkpoint {step} tells how the run was configured")
        elif is_accepted:
            warnings.append(f"warning: {damage}nothing tells how the run was configured")
        else:
            raise ValueError(
                f"{damage}no checkpoint beside it tells how the run was configured either. Bring "
                "the file back, or name another --workdir; with --accept_changes the run goes on "
                "with the configuration that is given now."
            ) from error
    # What was written last, so that a run that was once accepted needs no further consent.
    unknown = sorted((configured or saved).keys() - KEYS.keys())
    unknown = [key for key in unknown if not missing_folder(key)]
    if unknown and not is_accepted:
        raise ValueError(
            f"{workdir} holds a run with keys that this version does not have: "
            f"{', '.join(f'config.{key}' for key in unknown)}. Name another --workdir to begin "
            "anew; --accept_changes goes on without them."
        )
    if unknown:
        warnings.append(
            f"warning: another version of jaxrl began {workdir}, with keys that this one does not "
            "have; its checkpoints may hold other arrays than this one reads"
        )
    if configured:  # without what was once accepted to be left out
        saved = {key: value for key, value in saved.items() if key in KEYS or key in configured}
    lines, bad = read_history(workdir)
    warnings += [f"warning: {workdir / HISTORY}:{number} is no line of it" for number in bad]
    if position.get("contents") and not (workdir / HISTORY).exists():
        warnings.append(f"warning: {workdir / HISTORY} is missing: earlier changes are forgotten")
    contents = dict(position.get("contents") or {})
    for line in lines:
        contents |= line.get("contents") or {}
    defaults = plain({name: key.default for name, key in KEYS.items()})
    return Begun(
        step=step,
        config={**defaults, **plain(saved), **plain(configured)} if saved or configured else {},
        contents=contents,
        warnings=warnings,
    )


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration as it comes back from JSON."""
    return json.loads(json.dumps(dict(config)))


def adopt(
    workdir: Path,
    begun: Begun | None,
    changes: Sequence[Change],
    config: ConfigDict,
    contents: Mapping[str, str],
) -> None:
    """Writes down that the run goes on with this configuration, first what that changes."""
    write_history(workdir, begun, changes, contents, config.stages)
    if begun is None or set(config.stages) != {"evaluate"}:
        write_config(workdir, config)


def write_history(
    workdir: Path,
    begun: Begun | None,
    changes: Sequence[Change],
    contents: Mapping[str, str],
    stages: Sequence[str],
) -> None:
    """Adds this start to the history, if it is the first or changes what is known.

    An evaluation by itself changes nothing of the run: of it only the differences are kept.
    """
    known = {} if begun is None else begun.contents
    is_run = set(stages) != {"evaluate"} or begun is None
    if begun is not None and not changes and not (is_run and contents.keys() - known.keys()):
        return
    line = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": 0 if begun is None else begun.step,
        "stages": list(stages),
        "changes": {change.key: {"before": change.before, "now": change.now} for change in changes},
        "accepted": [change.key for change in changes if not change.is_free],
        **({"contents": dict(contents)} if is_run else {}),
    }
    if begun is None:
        (workdir / HISTORY).unlink(missing_ok=True)  # of a run that left nothing to go on from
    append_line(workdir / HISTORY, json.dumps(line, ensure_ascii=False))


def folder_of(run: Path) -> Path:
    """The folder in which a run was started last; this one where nothing tells, or it is gone."""
    folder = _last_start(run).get("folder")
    return Path(folder) if isinstance(folder, str) and Path(folder).is_dir() else Path.cwd()


def find_code(run: Path) -> None:
    """Append the folders in which a run found the user's modules to `sys.path`."""
    folders = _last_start(run).get("code_folders")
    for folder in folders if isinstance(folders, list) else []:
        if isinstance(folder, str) and folder not in sys.path and Path(folder).is_dir():
            sys.path.append(folder)


def _last_start(run: Path) -> dict[str, Any]:
    """The last start in a run's `environment.json`; empty where it cannot be read."""
    try:
        file = run / "environment.json"
        start = parse_json(file.read_bytes(), str(file))[-1]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return start if isinstance(start, dict) else {}


def prompt_time(run: Path) -> datetime:
    """The time that prompts of a run are written at: that of the first start which wrote one.

    Chat templates may ask for today's date. A run that goes on tomorrow keeps that of its start.
    """
    try:
        file = run / "environment.json"
        starts = parse_json(file.read_bytes(), str(file))
        times = [start["prompt_time"] for start in starts if "prompt_time" in start]
        return datetime.fromisoformat(times[0])
    except (OSError, ValueError, LookupError, TypeError):
        return datetime.now().replace(microsecond=0)


def read_history(workdir: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The lines of a workdir's history, oldest first, and the numbers of those that are damaged."""
    path = workdir / HISTORY
    data = path.read_bytes() if path.is_file() else b""
    lines: list[dict[str, Any]] = []
    bad: list[int] = []
    for number, text in enumerate(data.splitlines(), start=1):
        try:
            line = parse_json(text, str(path))
        except ValueError:
            line = None
        fields = (line.get("changes"), line.get("contents", {})) if isinstance(line, dict) else ()
        if fields and all(isinstance(value, dict) for value in fields):
            lines.append(line)
        elif text.strip():
            bad.append(number)
    return lines, bad


def write_config(workdir: Path, config: ConfigDict) -> None:
    """Writes `config.json`; one that cannot be read is kept beside it."""
    path = workdir / "config.json"
    if path.exists():
        try:
            flat_json(path)
        except (OSError, ValueError):
            set_aside(path)
    with written_whole(path) as file:
        file.write(to_json(config))
