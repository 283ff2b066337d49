"""Checkpoints of a run, written by Orbax and verified by a manifest.

The checkpoint folder contains

- `<step>/`: Orbax's files, and `manifest.json` with the size and hash of every file;
- `saving`: the step being written. If that step has no manifest, its save failed;
- `<step>.orbax-checkpoint-tmp`, `<step>.removed`: checkpoints being written or removed;
- `<step>.replaced`: the previous checkpoint of a step, until the new one is complete;
- `damaged/`: damaged checkpoints, which are never read again.

In a multi-process job, all processes call Orbax; process 0 does all other work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from textwrap import shorten
from typing import Any

import orbax.checkpoint as ocp

from jaxrl.runtime import distributed
from jaxrl.types import Params, TrainState
from jaxrl.utils.files import begin_replacing, find_unused_path, open_atomic, recover, remove_atomic
from jaxrl.utils.json_io import read_object

MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """Error raised when a required checkpoint is missing or damaged, or cannot be restored."""


@contextlib.contextmanager
def filter_orbax_logs() -> Iterator[None]:
    """Hide Orbax's log lines about errors that are also raised.

    If the body raises an exception, the filters stay active, because Orbax logs some of these lines
    when Python exits.
    """
    loggers, hook = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook

    def is_shown(record: logging.LogRecord) -> bool:
        is_foreign = record.name == "asyncio" and "orbax" not in record.getMessage()
        return record.levelno < logging.ERROR or is_foreign

    def unraisablehook(ignored: Any) -> None:
        is_late = str(ignored.exc_value) == "Event loop is closed"
        if not (is_late or "orbax" in repr(ignored.object) or "async" in repr(ignored.object)):
            hook(ignored)

    for logger in loggers:
        logger.addFilter(is_shown)
    sys.unraisablehook = unraisablehook
    yield
    for logger in loggers:
        logger.removeFilter(is_shown)
    sys.unraisablehook = hook


class Checkpointer:
    """Checkpoint manager for `TrainState`, the reference parameters and the run's position.

    The position is a small JSON object. It is read before the arrays, because it determines the
    structure of the optimizer state.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_best: int = 0,
        log: Callable[[str], None] = print,
    ):
        """Open or create a checkpoint folder.

        The newest `keep` checkpoints and the `keep_best` with the highest evaluation scores are
        kept. `log` receives messages about damaged checkpoints.
        """
        self._folder = folder.absolute()
        self._keep, self._keep_best = keep, keep_best
        self._log = log
        if distributed.is_main():
            _finish_interrupted_changes(self._folder)
        distributed.barrier()
        options = ocp.CheckpointManagerOptions(
            # Keep all: `_finalize_save` removes old ones once the manifest of a newer one is
            # written.
            preservation_policy=ocp.checkpoint_managers.LatestN(n=None),
            cleanup_tmp_directories=True,
            lightweight_initialize=True,  # else damaged metadata fails here without a file name
            save_root_metadata=False,
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending_save: Future[None] | None = None

    def save(
        self,
        step: int,
        state: TrainState,
        position: dict[str, Any],
        ref_params: Params | None,
        *,
        value: float | None = None,
    ) -> None:
        """Save the state after global step `step`, replacing an earlier checkpoint of that step.

        The method returns once the arrays are copied to the host; the caller may then donate them.
        Writing continues in the background.

        Args:
            step: Global step; not lower than that of the newest checkpoint.
            state: Training state, on the devices.
            position: Run's position, as JSON values.
            ref_params: Reference parameters, if any.
            value: Score of the evaluation after this step, for `keep_best`; None without
                evaluation.
        """
        self.wait()
        items = {
            "params": ocp.args.StandardSave(state.params),
            "optimizer": ocp.args.StandardSave(make_optimizer_items(state)),
            "position": ocp.args.JsonSave(position),
        }
        if ref_params is not None:
            items["ref_params"] = ocp.args.StandardSave(ref_params)
        if distributed.is_main():
            with open_atomic(self._folder / "saving") as file:
                file.write(str(step))
            begin_replacing(self._folder / str(step))
        distributed.barrier()
        self._manager.reload()
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._pending_save = self._executor.submit(self._finalize_save, step, value)

    def _finalize_save(self, step: int, value: float | None) -> None:
        """Write the manifest once Orbax is done, then remove checkpoints that need not be kept."""
        self._manager.wait_until_finished()
        if not distributed.is_main():
            return
        write_manifest(self._folder / str(step), step, value)
        (self._folder / "saving").unlink()
        values = self._read_local_scores()
        for old in values.keys() - select_steps_to_keep(values, self._keep, self._keep_best):
            remove_atomic(self._folder / str(old))
        _finish_interrupted_changes(self._folder)

    def wait(self) -> None:
        """Wait until the last save is complete; raise its error if it failed."""
        if self._pending_save is not None:
            pending, self._pending_save = self._pending_save, None
            pending.result()

    def close(self) -> None:
        """Wait for the last save, then close the manager."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._manager.close()

    def read_scores(self) -> dict[int, float | None]:
        """Return the evaluation score of each saved step; None for a step without evaluation."""
        self.wait()
        pairs = list(self._read_local_scores().items()) if distributed.is_main() else []
        return dict(distributed.broadcast(pairs))  # as pairs: keys of JSON objects are strings

    def _read_local_scores(self) -> dict[int, float | None]:
        return {step: read_score(self._folder / str(step)) for step in list_steps(self._folder)}

    def find_latest_position(self) -> tuple[int, dict[str, Any]] | None:
        """Return the step and position of the newest undamaged checkpoint; None if there is none.

        Raises:
            CheckpointError: See `restore`.
        """
        step = self._choose_undamaged_step(sorted(self.read_scores(), reverse=True))
        return None if step is None else (step, self._read_position(step))

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints after `step`, unless all earlier checkpoints are damaged.

        Raises:
            CheckpointError: No checkpoint at or before `step` is undamaged; nothing is removed.
        """
        steps = sorted(self.read_scores(), reverse=True)
        earlier = [number for number in steps if number <= step]
        is_main = distributed.is_main()
        target = find_undamaged_step(self._folder, earlier)[0] if is_main else None
        if distributed.broadcast(target) is None:
            raise CheckpointError(
                f"the run must go back to step {step}, but {self._folder} has no complete "
                "checkpoint of it or of an earlier step. Restore one from a copy, remove "
                "roll_backs.jsonl to resume from the newest, or name another --workdir."
            )
        if is_main:
            for later in set(steps) - set(earlier):
                remove_atomic(self._folder / str(later))
        distributed.barrier()
        self._manager.reload()

    def restore(
        self, targets: Callable[[dict[str, Any]], dict[str, Any]], step: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Restore the position and items of a checkpoint; return None if there is none.

        Newer damaged checkpoints are logged and moved to `damaged/`.

        Args:
            targets: Function that maps a position to the shapes, dtypes and shardings of the items
                to restore: `params`, `optimizer` (see `make_optimizer_items`), `ref_params`.
            step: Step of the checkpoint; None for the newest undamaged checkpoint.

        Raises:
            CheckpointError: All checkpoints are damaged (none is moved), or restoring an undamaged
                checkpoint failed, for example because there is too little memory, the configuration
                changed, or another version of jaxrl wrote it.
        """
        step = self._choose_undamaged_step(
            [step] if step is not None else sorted(self.read_scores(), reverse=True)
        )
        if step is None:
            return None
        position = self._read_position(step)
        try:
            items = targets(position)
        except KeyError as error:
            raise CheckpointError(
                f"the position of checkpoint {step} in {self._folder} lacks {error}; expected a "
                "checkpoint of this version of jaxrl. Use the version that wrote it, or name "
                "another --workdir."
            ) from error
        return position, self._restore_items(step, items)

    def restore_best(self, state: TrainState) -> tuple[int, TrainState]:
        """Restore the checkpoint with the best evaluation score; return its step and state.

        `state` determines the shapes, dtypes and shardings.

        Raises:
            CheckpointError: No undamaged checkpoint has a score, or restoring it failed.
        """
        step = self._choose_undamaged_step(rank_steps(self.read_scores()))
        if step is None:
            raise CheckpointError(
                f"{self._folder} has no checkpoint with an evaluation score, so there is no "
                "best one to restore."
            )
        items = self._restore_items(
            step, {"params": state.params, "optimizer": make_optimizer_items(state)}
        )
        return step, TrainState(params=items["params"], **items["optimizer"])

    def _choose_undamaged_step(self, steps: Sequence[int]) -> int | None:
        """Return the first undamaged step in `steps`; move damaged ones before it to `damaged/`."""
        self.wait()
        is_main = distributed.is_main()
        step, damaged = find_undamaged_step(self._folder, steps) if is_main else (None, [])
        step, damaged = distributed.broadcast((step, damaged))
        if damaged and step is None:
            raise CheckpointError(
                f"{_describe_all_damaged(self._folder, damaged)} Restore one from a copy, or name "
                "another --workdir to start over."
            )
        if damaged:
            if is_main:
                damaged_folder = self._folder / "damaged"
                damaged_folder.mkdir(exist_ok=True)
                for bad, damage in damaged:
                    new_path = (self._folder / str(bad)).rename(
                        find_unused_path(damaged_folder / str(bad))
                    )
                    self._log(
                        f"warning: checkpoint {bad} is damaged ({damage}); moved to {new_path}"
                    )
                self._log(f"using checkpoint {step} instead")
            distributed.barrier()
            self._manager.reload()
        return step

    def _read_position(self, step: int) -> dict[str, Any]:
        return self._restore_from_orbax(step, {"position": ocp.args.JsonRestore()})["position"]

    def _restore_items(self, step: int, targets: Mapping[str, Any]) -> dict[str, Any]:
        items = {name: ocp.args.StandardRestore(tree) for name, tree in targets.items()}
        return self._restore_from_orbax(step, items)

    def _restore_from_orbax(self, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises exceptions of many kinds
            reason = shorten(str(error), 500, placeholder=" …")
            raise CheckpointError(
                f"checkpoint {step} in {self._folder} is undamaged, but restoring it failed: "
                f"{type(error).__name__}: {reason}. Undo changes to the configuration and the "
                "version of jaxrl, give the devices more memory, or name another --workdir."
            ) from error
        return {name: restored[name] for name in items}


def find_undamaged_step(
    folder: Path, steps: Iterable[int]
) -> tuple[int | None, list[tuple[int, str]]]:
    """Return the first undamaged step in `steps`, and (step, damage) for each step before it."""
    damaged: list[tuple[int, str]] = []
    for step in steps:
        damage = find_damage(folder / str(step), step)
        if damage is None:
            return step, damaged
        damaged.append((step, damage))
    return None, damaged


def _describe_all_damaged(folder: Path, damaged: Iterable[tuple[int, str]]) -> str:
    reasons = "; ".join(f"checkpoint {step}: {damage}" for step, damage in damaged)
    return f"no checkpoint in {folder} can be read: {reasons or 'there is none'}."


def list_steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints, damaged or not."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def has_checkpoint(folder: Path) -> bool:
    """Return True if a folder has a checkpoint, damaged or not."""
    return bool(list_steps(folder)) or any(folder.glob("*.replaced"))


def find_latest_complete_step(folder: Path) -> int | None:
    """Return the newest step with a complete checkpoint; None if there is none."""
    manifests = [path.parent for path in folder.glob(f"*/{MANIFEST}")]
    names = [path.name.removesuffix(".replaced") for path in manifests]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def read_latest_position(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the newest step with a readable position, and that position.

    Files are not verified. If no position is readable, return the newest step, or 0 if there is
    none, and {}.
    """
    steps = sorted(list_steps(folder), reverse=True)
    for step in steps:
        with contextlib.suppress(OSError, ValueError):
            return step, read_object(folder / str(step) / "position" / "metadata")
    return max(steps, default=0), {}


def restore_params(folder: Path, target: Params, step: int | None = None) -> tuple[int, Params]:
    """Restore the parameters of a checkpoint; return its step and the parameters.

    Nothing on disk changes, because the folder may belong to a running job.

    Args:
        folder: Checkpoint folder of a run.
        target: Shapes, dtypes and shardings of the parameters.
        step: Step of the checkpoint; None for the newest undamaged checkpoint.

    Raises:
        CheckpointError: There is no undamaged checkpoint.
    """
    steps = sorted(list_steps(folder), reverse=True) if step is None else [step]
    step, damaged = find_undamaged_step(folder, steps)
    if step is None:
        raise CheckpointError(_describe_all_damaged(folder, damaged))
    with ocp.StandardCheckpointer() as checkpointer:
        return step, checkpointer.restore(folder.absolute() / str(step) / "params", target)


def rank_steps(scores: Mapping[int, float | None]) -> list[int]:
    """Return the steps with a score, sorted by score (highest first) and then by step."""
    ranked = sorted((-score, step) for step, score in scores.items() if score is not None)
    return [step for _, step in ranked]


def select_steps_to_keep(scores: Mapping[int, float | None], keep: int, keep_best: int) -> set[int]:
    """Return the newest `keep` >= 1 steps, and the `keep_best` steps with the highest scores."""
    return {*sorted(scores)[-keep:], *rank_steps(scores)[:keep_best]}


def write_manifest(folder: Path, step: int, value: float | None) -> None:
    """Write a checkpoint's manifest: step, evaluation score, and size and hash of every file."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    content = {"step": step, "value": value, "files": _hash_files(folder, names)}
    with open_atomic(folder / MANIFEST) as file:
        json.dump({**content, "sha256": _hash_json(content)}, file, indent=1)


def read_score(folder: Path) -> float | None:
    """Return the evaluation score in a checkpoint's manifest; None if missing or unreadable."""
    try:
        return read_object(folder / MANIFEST)["value"]
    except (OSError, ValueError, KeyError):
        return None


def find_damage(folder: Path, step: int) -> str | None:
    """Return a description of the first file that does not match the manifest; None if all do."""
    try:
        content = read_object(folder / MANIFEST)
    except (OSError, ValueError):
        return f"{MANIFEST}: missing or unreadable"
    if content.pop("sha256", "") != _hash_json(content) or content["step"] != step:
        return f"{MANIFEST}: not the one that was written for checkpoint {step}"
    expected, actual = content["files"], _hash_files(folder, content["files"])
    damaged = [name for name in expected if actual[name] != expected[name]]
    return f"{damaged[0]}: missing, or not as it was written" if damaged else None


def _hash_files(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return the size and SHA-256 of each file; None for an unreadable file."""

    def hash_file(name: str) -> dict[str, Any] | None:
        try:
            with (folder / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return {"bytes": file.tell(), "sha256": digest}
        except OSError:
            return None

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(hash_file, names), strict=True))


def _hash_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _finish_interrupted_changes(folder: Path) -> None:
    """Finish or undo saves, replacements and removals that a killed process interrupted."""
    marker = folder / "saving"
    if marker.is_file():
        step = marker.read_text(encoding="utf-8", errors="replace")
        if step.isdecimal() and not (folder / step / MANIFEST).exists():
            shutil.rmtree(folder / step, ignore_errors=True)
        marker.unlink()
    for leftover in (*folder.glob("*.replaced"), *folder.glob("*.removed")):
        recover(leftover.with_suffix(""))


def make_optimizer_items(state: TrainState) -> dict[str, Any]:
    """Return the checkpoint items for the optimizer state and the update counters."""
    return {
        "opt_state": state.opt_state,
        "num_updates": state.num_updates,
        "num_skipped": state.num_skipped,
    }
