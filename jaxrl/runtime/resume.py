"""Record of a run in its workdir, and changes of the configuration when a run resumes.

The configuration is stored in `config.json`, in the position in every checkpoint, and in
`config_history.jsonl`, so that losing one file hides no change. Each launch with changes appends a
line to the history with the time, the step, and the old and new value of every changed key.

A rollback is recorded in `roll_backs.jsonl` before it is applied, so that nothing is lost if the
process is killed in between. A line has `number` from 1, `sign`, `from_step`, `to_step`, `lr_scale`
and the usage so far (`ledger`). Files and records after `to_step` move to `rolled_back/<number>/`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.environments import expand_environments, split_environment_key
from jaxrl.config.keys import EVALUATION, FREE, RESULTS
from jaxrl.config.schema import KEYS, find_missing_extra, read_flat_config, serialize_config
from jaxrl.utils.files import append_line, atomic_write, open_atomic
from jaxrl.utils.json_io import parse_json

HISTORY_FILE = "config_history.jsonl"
ROLLBACKS_FILE = "roll_backs.jsonl"
ROLLED_BACK_FOLDER = "rolled_back"

_FOLDERS = ("trajectories", "eval")
_STEP_FILE = re.compile(r"(?:step|sft|train|evaluate)_(\d+)\.\w+")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Record of a run, read from its workdir."""

    step: int  # step of the newest checkpoint; 0 if none is readable
    config: dict[str, Any]  # flat configuration, with defaults for unrecorded keys
    contents: dict[str, str]  # fingerprints of the files that the run read
    warnings: list[str] = field(default_factory=list)  # lines to print for the user


@dataclass(frozen=True, kw_only=True)
class ConfigChange:
    """Key or file that differs between a run and the launch that resumes it."""

    key: str  # config key, or fingerprint name followed by ` (content)`
    before: Any
    now: Any
    is_free: bool  # True if it does not need --accept_changes

    def __str__(self) -> str:
        """Return `config.key: before -> now`; for a file, `config.key (content): changed`."""
        if self.key.endswith(" (content)"):
            return f"config.{self.key}: changed"
        return f"config.{self.key}: {self.before!r} -> {self.now!r}"


def check_checkpoint_exists(folder: Path, step: int) -> None:
    """Check that a step has a checkpoint.

    Raises:
        ValueError: The step has no checkpoint. The message lists the steps that have one.
    """
    from jaxrl.runtime.checkpoint import list_steps

    if step not in (steps := list_steps(folder)):
        available = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"--step={step}: {folder} has no such checkpoint; available: {available}.")


def read_record(workdir: Path, *, accept_changes: bool = False) -> RunRecord | None:
    """Read the record of the run in a workdir; return None if it has no checkpoints.

    Args:
        workdir: Folder with `checkpoints/` and `config.json`.
        accept_changes: True to resume even if the configuration cannot be read or has unknown keys.

    Raises:
        ValueError: `accept_changes` is False, and the configuration has unknown keys or can be read
            neither from `config.json` nor from the checkpoint.
    """
    # Imported here because the viewer reads the history without loading JAX.
    from jaxrl.runtime.checkpoint import has_checkpoint, read_latest_position

    if not has_checkpoint(workdir / "checkpoints"):
        return None
    # config.json is authoritative; if it is lost, use the checkpoint's configuration.
    step, position = read_latest_position(workdir / "checkpoints")
    saved = position.get("config") or {}
    warnings: list[str] = []
    path = workdir / "config.json"
    try:
        configured = read_flat_config(path)
    except (OSError, ValueError) as error:
        configured = {}
        damage = f"{path} is missing or cannot be read ({' '.join(str(error).split())[:200]})"
        if not (saved or accept_changes):
            raise ValueError(
                f"{damage}; no checkpoint records the configuration either. Restore the file, or "
                "name another --workdir; with --accept_changes the run continues with the current "
                "configuration."
            ) from error
        source = f"checkpoint {step}" if saved else "nothing"
        warnings.append(f"warning: {damage}; {source} records the configuration")
    # config.json is written last, so an earlier start has accepted its keys.
    unknown = sorted((configured or saved).keys() - KEYS.keys())
    unknown = [key for key in unknown if not find_missing_extra(key)]
    if unknown:
        names = ", ".join(f"config.{key}" for key in unknown)
        line = f"{workdir} holds a run with keys that this version does not have: {names}"
        if not accept_changes:
            raise ValueError(
                f"{line}. Name another --workdir to start over; --accept_changes continues without "
                "them."
            )
        warnings.append(f"warning: {line}; its checkpoints may contain other arrays too")
    if configured:  # remove keys that an earlier start dropped with --accept_changes
        saved = {key: value for key, value in saved.items() if key in KEYS or key in configured}
    # Later starts may have changed files, so the history overrides the checkpoint's fingerprints.
    lines, num_damaged = read_history(workdir)
    contents = dict(position.get("contents") or {})
    if num_damaged or (contents and not (workdir / HISTORY_FILE).exists()):
        warnings.append(
            f"warning: {workdir / HISTORY_FILE} is missing or has damaged lines; the changes "
            "recorded there are lost"
        )
    for change in lines:
        contents |= change.get("contents") or {}
    defaults = normalize_json({name: key.default for name, key in KEYS.items()})
    return RunRecord(
        step=step,
        config={**defaults, **normalize_json(saved), **normalize_json(configured)}
        if saved or configured
        else {},
        contents=contents,
        warnings=warnings,
    )


def normalize_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Round-trip a flat configuration through JSON."""
    return json.loads(json.dumps(dict(config)))


def check_fixed_keys(
    workdir: Path, record: RunRecord, config: Mapping[str, Any], fixed: Sequence[str]
) -> None:
    """Check that no key in `fixed` has changed, since the checkpoints depend on these keys.

    A key of a missing extra counts as 0.

    Raises:
        ValueError: A key has changed. The message names it.
    """
    config, begun = (
        normalize_json(expand_environments(values)) for values in (config, record.config)
    )
    for key in fixed:
        now = config.get(key, 0)
        before = begun.get(key, 0 if key.startswith("environments.") else now)
        if before != now:
            folder = find_missing_extra(key)
            remedy = f"put jaxrl/extras/{folder}" if folder else "set it"
            raise ValueError(
                f"config.{key} is {now!r}, but {workdir} began with {before!r}; {remedy} back to "
                "resume, or set --workdir to another folder to start over."
            )


def find_changes(
    record: RunRecord, config: Mapping[str, Any], contents: Mapping[str, str]
) -> list[ConfigChange]:
    """Return the differences between a run and this launch.

    `contents` holds the fingerprints of this launch's files.
    """
    now, begun = (normalize_json(expand_environments(values)) for values in (config, record.config))
    of_environments = [key for key in now | begun if key.startswith("environments.")]
    compared_keys = [*(key for key in now if key in begun), *of_environments]
    changed_keys = [key for key in dict.fromkeys(compared_keys) if begun.get(key) != now.get(key)]
    # A 0 in these keys is replaced after this comparison.
    automatic = ("micro_rows", "num_steps")
    changed_keys = [
        key for key in changed_keys if not (key.endswith(automatic) and now.get(key) == 0)
    ]
    # A missing extra's keys are not a change. Settings that need it are rejected elsewhere.
    removed_keys = [
        key for key in record.config.keys() - KEYS.keys() if not find_missing_extra(key)
    ]
    changes = []
    for key in [*changed_keys, *sorted(removed_keys)]:
        # A new path to the same files changes nothing.
        files = _select_fingerprints(key, contents)
        is_moved = bool(files) and files == _select_fingerprints(key, record.contents)
        is_known = key not in removed_keys
        is_allowed = is_known and (may_change_freely(key, record.config, config) or is_moved)
        before, after = {**record.config, **begun}.get(key), now.get(key)
        change = ConfigChange(key=key, before=before, now=after, is_free=is_allowed)
        changes.append(change)
    # Files with new contents under an unchanged key. A new or missing file counts as a change only
    # for the model.
    for name in sorted({*contents, *record.contents}):
        key, is_model = name.partition("/")[0], name.startswith("model.path/")
        is_known = is_model and any(n.startswith("model.path/") for n in record.contents)
        is_read = name in contents or (is_model and contents)
        if key in changed_keys or not is_read or not (name in record.contents or is_known):
            continue
        before, after = record.contents.get(name), contents.get(name)
        if before != after:
            is_allowed = may_change_freely(key, record.config, config)
            changes.append(
                ConfigChange(key=f"{name} (content)", before=before, now=after, is_free=is_allowed)
            )
    return changes


def may_change_freely(key: str, before: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return True if a key, and the files that it refers to, may change freely on resume.

    Other changes require `--accept_changes`.
    """
    # A key of one of several environments follows the rule of the key that it overrides.
    environment, key = split_environment_key(key)
    if environment and key == "weight":
        key = "environments"
    # A fingerprint such as `loss.name's file` follows the rule of its key.
    suffixes = {name: key[len(name) :] for name in KEYS if key.startswith(name)}
    matches = [name for name, suffix in suffixes.items() if not re.match(r"\w", suffix)]
    restart = KEYS[max(matches, key=len)].restart if matches else RESULTS
    stages = config["stages"]
    if set(stages) == {"evaluate"}:
        holdout_key = f"environments.{environment}.tasks.eval.holdout"
        holdout = expand_environments(config).get(holdout_key, config["tasks.eval.holdout"])
        is_held_out = key.startswith("tasks.train.") and holdout
        return restart != RESULTS and not is_held_out
    if key in ("num_steps", "num_epochs", "sft.num_steps"):
        # A decaying learning rate depends on the number of steps.
        schedule = f"{key.rpartition('num_')[0]}optimizer.schedule"
        is_constant = {before.get(schedule), config[schedule]} == {"constant"}
        return is_constant or (key.startswith("sft") and "sft" not in stages)
    if key.startswith("sft.") and "sft" not in stages:
        return True
    if key == "ledger.prices" and config["rollout.max_cost"]:
        return False  # prices decide when trajectories end
    has_gate = config["shaping.boundary_aware"] and config["shaping.stage_level"]
    depends_on_eval = config["checkpoint.keep_best"] or config["eval.patience"] or has_gate
    return restart == FREE or (restart == EVALUATION and not depends_on_eval)


def _select_fingerprints(key: str, contents: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprints of the files that a key refers to."""
    return {name: value for name, value in contents.items() if name.partition("/")[0] == key}


def check_changes(workdir: Path, record: RunRecord, changes: Sequence[ConfigChange]) -> None:
    """Check that no change makes the run a different experiment.

    Raises:
        ValueError: Some changes do. The message lists them.
    """
    rejected = [change for change in changes if not change.is_free]
    if rejected:
        raise ValueError(
            f"{workdir} is at step {record.step} of a run with other settings: "
            f"{'; '.join(map(str, rejected))}. Set them back to resume, or set --workdir to "
            "another folder to start over; --accept_changes continues with them and records the "
            "change."
        )


def record_start(
    workdir: Path,
    record: RunRecord | None,
    changes: Sequence[ConfigChange],
    config: ConfigDict,
    contents: Mapping[str, str],
) -> None:
    """Record this launch: first its changes in the history, then its configuration."""
    write_history(workdir, record, changes, contents, config.stages)
    if record is None or set(config.stages) != {"evaluate"}:
        write_config(workdir, config)


def write_history(
    workdir: Path,
    record: RunRecord | None,
    changes: Sequence[ConfigChange],
    contents: Mapping[str, str],
    stages: Sequence[str],
) -> None:
    """Append this launch to the history if it is the first or has changes.

    A launch that only evaluates does not change the run, so only its changes are recorded.
    """
    known_contents = {} if record is None else record.contents
    is_run = set(stages) != {"evaluate"} or record is None
    if (
        record is not None
        and not changes
        and not (is_run and contents.keys() - known_contents.keys())
    ):
        return
    line = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": 0 if record is None else record.step,
        "stages": list(stages),
        "changes": {change.key: {"before": change.before, "now": change.now} for change in changes},
        "accepted": [change.key for change in changes if not change.is_free],
        **({"contents": dict(contents)} if is_run else {}),
    }
    if record is None:
        (workdir / HISTORY_FILE).unlink(missing_ok=True)  # from a run that left no checkpoint
    append_line(workdir / HISTORY_FILE, json.dumps(line, ensure_ascii=False))


def read_history(workdir: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the history; return its lines, oldest first, and the number of damaged lines."""
    path = workdir / HISTORY_FILE
    data = path.read_bytes() if path.is_file() else b""
    texts = [text for text in data.splitlines() if text.strip()]
    lines = []
    for text in texts:
        with contextlib.suppress(ValueError):
            line = parse_json(text, str(path))
            fields = [line.get("changes"), line.get("contents", {})] if type(line) is dict else [0]
            if all(isinstance(value, dict) for value in fields):
                lines.append(line)
    return lines, len(texts) - len(lines)


def write_config(workdir: Path, config: ConfigDict) -> None:
    """Write `config.json`."""
    with open_atomic(workdir / "config.json") as file:
        file.write(serialize_config(config))


def read_launch_folder(run: Path) -> Path:
    """Return the folder from which a run was last launched, or the current folder if unknown."""
    folder = Path(str(_read_launches(run)[-1].get("folder", "")))
    return folder if folder.is_absolute() and folder.is_dir() else Path.cwd()


def add_code_folders(run: Path) -> None:
    """Append to `sys.path` the folders from which a run imported user code."""
    for folder in _read_launches(run)[-1].get("code_folders", []):
        if folder not in sys.path and Path(folder).is_dir():
            sys.path.append(folder)


def read_prompt_time(run: Path) -> datetime:
    """Return the time that a run's chat template sees: that of its first launch, if recorded.

    Chat templates may insert the date. A run that resumes on another day keeps its first date.
    """
    times = [start["prompt_time"] for start in _read_launches(run) if "prompt_time" in start]
    return datetime.fromisoformat(times[0]) if times else datetime.now().replace(microsecond=0)


def _read_launches(run: Path) -> list[dict[str, Any]]:
    """Read the launches in a run's `environment.json`; return `[{}]` if there are none."""
    try:
        return read_launches(run / "environment.json") or [{}]
    except (OSError, ValueError):
        return [{}]


def read_launches(path: Path) -> list[dict[str, Any]]:
    """Read `environment.json`, which has one object per launch of a run.

    Raises:
        OSError, ValueError: The file is missing or damaged.
    """
    starts = parse_json(path.read_bytes(), str(path))
    if not (isinstance(starts, list) and all(isinstance(start, dict) for start in starts)):
        raise ValueError(f"{path} is not a list of objects")
    return starts


def append_rollback(workdir: Path, line: Mapping[str, Any]) -> None:
    """Record a rollback before applying it. If the process dies, the next launch applies it."""
    (workdir / ROLLED_BACK_FOLDER).mkdir(exist_ok=True)  # fail now, not at every later start
    lines = [*read_rollbacks(workdir), line]
    with open_atomic(workdir / ROLLBACKS_FILE) as file:
        file.writelines(json.dumps(rollback) + "\n" for rollback in lines)


def read_rollbacks(workdir: Path) -> list[dict[str, Any]]:
    """Read the rollbacks of a run, oldest first.

    Raises:
        ValueError: A line is damaged.
    """
    path = workdir / ROLLBACKS_FILE
    fields = {"number", "sign", "from_step", "to_step", "lr_scale", "ledger"}
    rollbacks = []
    for number, text in enumerate(path.read_bytes().splitlines() if path.exists() else [], start=1):
        line = parse_json(text, f"{path}:{number}")
        if not (isinstance(line, dict) and fields <= line.keys()):
            raise ValueError(
                f"{path}:{number} is {json.dumps(line):.80}; expected an object with "
                f"{', '.join(sorted(fields))}. Restore it from a copy, or name another "
                "--workdir."
            )
        rollbacks.append(line)
    return rollbacks


def archive_later_output(workdir: Path, step: int, number: int) -> None:
    """Archive the output after `step`, the step to which rollback `number` returns.

    Trajectories and evaluations are moved; `metrics.jsonl` and `sentinel.jsonl` are copied. If the
    process is killed, another call completes the work.
    """
    archive = workdir / ROLLED_BACK_FOLDER / str(number)
    done_marker = archive / "done"
    if done_marker.exists():
        return
    for path in (workdir / "metrics.jsonl", workdir / "sentinel.jsonl"):
        if path.exists() and not (archive / path.name).exists():
            archive.mkdir(parents=True, exist_ok=True)
            with atomic_write(archive / path.name) as unfinished:
                shutil.copyfile(path, unfinished)
    for path in _list_later_output(workdir, step):
        (archive / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.move(path, archive / path.parent.name / path.name)  # may be on another disk
    archive.mkdir(parents=True, exist_ok=True)
    done_marker.touch()


def delete_later_output(workdir: Path, step: int) -> None:
    """Delete files that a killed run wrote after `step`, the step it resumes from."""
    unfinished = (path for name in _FOLDERS for path in workdir.glob(f"{name}/*.unfinished"))
    for path in [*_list_later_output(workdir, step), *unfinished]:
        path.unlink()


def _list_later_output(workdir: Path, step: int) -> list[Path]:
    """Return the files with trajectories and evaluations of steps after `step`."""
    files = [path for name in _FOLDERS for path in workdir.glob(f"{name}/*")]
    steps = ((path, _STEP_FILE.fullmatch(path.name)) for path in files)
    return [path for path, match in steps if match and int(match[1]) > step]
