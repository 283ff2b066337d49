"""A workdir's record of the run that began in it, and how far the present start differs from it.

Three places know it, so that no single file's loss hides a difference: `config.json`, every
checkpoint's position, and `config_history.jsonl`, to which each start that changes something adds
a line: when, after which step, and every key with its value before and now.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config import EVALUATION, FREE, KEYS, RESULTS, flat_json, flatten, to_json
from jaxrl.envs.json_text import parse_json
from jaxrl.runtime.files import append_line, set_aside, written_whole
from jaxrl.training.settings import has_gate

HISTORY = "config_history.jsonl"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A difference to the run's configuration so far."""

    key: str  # with sections; or a name of `versions.fingerprints` and ` (content)`
    before: Any
    now: Any
    is_free: bool

    def __str__(self) -> str:
        """Key: before -> now."""
        if self.key.endswith(" (content)"):
            return f"config.{self.key}: another one than before"
        return f"config.{self.key}: {self.before!r} -> {self.now!r}"


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
        told = flat_json(path)
    except (OSError, ValueError) as error:
        told = {}
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
    unknown = sorted((told or saved).keys() - KEYS.keys())
    if unknown and not is_accepted:
        raise ValueError(
            f"{workdir} holds a run with keys that this version does not have: "
            f"{', '.join(f'config.{key}' for key in unknown)}. Name another --workdir to begin "
            "anew; --accept_changes goes on without them."
        )
    if told:  # without what was once accepted to be left out
        saved = {key: value for key, value in saved.items() if key in KEYS or key in told}
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
        config={**defaults, **plain(saved), **plain(told)} if saved or told else {},
        contents=contents,
        warnings=warnings,
    )


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration as it comes back from JSON."""
    return json.loads(json.dumps(dict(config)))


def changes_since(
    begun: Begun, config: ConfigDict, contents: Mapping[str, str] | None = None
) -> list[Change]:
    """Differences to the run's configuration so far; without `contents`, files are not compared.

    Args:
        begun: the run so far.
        config: the present one.
        contents: fingerprints of the files it names; None: files are not compared yet.
    """
    now = plain(flatten(config))
    different = [key for key in now if key in begun.config and begun.config[key] != now[key]]
    # 0 stands for what the memory holds, which is chosen later.
    different = [key for key in different if not (key.endswith("micro_rows") and now[key] == 0)]
    if contents is None:  # another path may hold the same
        different = [key for key in different if not _own(key, begun.contents)]
        contents = {}
    found = []
    for key in different:
        # A key that names another place with the same files changes nothing.
        files = _own(key, contents)
        is_moved = bool(files) and files == _own(key, begun.contents)
        free = is_free(key, begun.config, config) or is_moved
        found.append(Change(key=key, before=begun.config[key], now=now[key], is_free=free))
    gone = begun.config.keys() - KEYS.keys()
    found += [
        Change(key=key, before=begun.config[key], now=None, is_free=False) for key in sorted(gone)
    ]
    for name in sorted({*contents, *begun.contents}):
        key, is_model = name.partition("/")[0], name.startswith("model.path/")
        is_known = is_model and any(n.startswith("model.path/") for n in begun.contents)
        is_read = name in contents or (is_model and contents)
        if key in different or not is_read or not (name in begun.contents or is_known):
            continue
        before, after = begun.contents.get(name), contents.get(name)
        if before != after:
            free = is_free(key, begun.config, config)
            change = Change(key=f"{name} (content)", before=before, now=after, is_free=free)
            found.append(change)
    return found


def is_free(key: str, before: Mapping[str, Any], config: ConfigDict) -> bool:
    """Return True if a key may change without consent.

    Args:
        key: with its sections; or the name of a file that it names.
        before: the flat configuration so far.
        config: the present one.
    """
    # Files have names as `loss.name's file` and `tasks.train.sources[0].format's file`, and
    # are as free as the key in it.
    rests = {name: key[len(name) :] for name in KEYS if key.startswith(name)}
    named = [name for name, rest in rests.items() if not re.match(r"\w", rest)]
    restart = KEYS[max(named, key=len)].restart if named else RESULTS
    if set(config.stages) == {"evaluate"}:
        return restart != RESULTS
    if key in ("num_steps", "sft.num_steps"):
        # The course of a rate that falls is a matter of how many steps there are.
        schedule = f"{key.removesuffix('num_steps')}optimizer.schedule"
        is_constant = {before.get(schedule), flatten(config)[schedule]} == {"constant"}
        return is_constant or (key.startswith("sft") and "sft" not in config.stages)
    if key.startswith("sft.") and "sft" not in config.stages:
        return True
    if key == "ledger.prices" and config.rollout.max_cost:
        return False  # they decide when trajectories end
    is_steered = config.checkpoint.keep_best or config.eval.patience or has_gate(config.shaping)
    return restart == FREE or (restart == EVALUATION and not is_steered)


def _own(key: str, contents: Mapping[str, str]) -> dict[str, str]:
    """The fingerprints of the files that a key names."""
    return {name: value for name, value in contents.items() if name.partition("/")[0] == key}


def check_changes(workdir: Path, begun: Begun, changes: Sequence[Change]) -> None:
    """Refuses changes that make another experiment.

    Raises:
        ValueError: names them all.
    """
    refused = [change for change in changes if not change.is_free]
    if refused:
        raise ValueError(
            f"{workdir} stands at step {begun.step} of a run with other settings: "
            f"{'; '.join(map(str, refused))}. Set them back to go on, or set --workdir to another "
            "folder to begin anew; --accept_changes goes on with them, and the history says so."
        )


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
    try:
        file = run / "environment.json"
        folder = Path(parse_json(file.read_bytes(), str(file))[-1]["folder"])
    except (OSError, ValueError, LookupError, TypeError):
        return Path.cwd()
    return folder if folder.is_dir() else Path.cwd()


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
