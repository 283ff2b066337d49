"""Checkpoints: everything that a restart needs, written by Orbax and checked by a manifest.

The folder of a run's checkpoints holds

- `<step>/`: what Orbax wrote, and `manifest.json` with the size and hash of every file;
- `saving`: the step that is being written. Without a manifest, that save never finished;
- `<step>.orbax-checkpoint-tmp`, `<step>.removed`: being written, being removed;
- `<step>.replaced`: the earlier checkpoint of a step, until the new one is complete;
- `damaged/`: checkpoints that could not be read, which nothing here reads again.

With several processes, all take part in what Orbax does; the first one does the rest.
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
from jaxrl.utils.files import begin_replacing, free_name, recover, remove_whole, written_whole
from jaxrl.utils.json_io import read_object

MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """There are checkpoints, but the one to resume from cannot be read."""


@contextlib.contextmanager
def raises_once() -> Iterator[None]:
    """Hide what Orbax and its threads print of errors that they also raise, a thousand lines.

    After an error the filters stay: some of the lines come when Python ends.
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
    """Saves and restores `TrainState`, frozen reference parameters and the run's position.

    The position is a small JSON object. It is read first, since it says which optimizer's state
    to expect.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_best: int = 0,
        log: Callable[[str], None] = print,
    ):
        """Open or create a folder of checkpoints; `log` receives lines about damaged ones.

        The newest `keep` stay, and the `keep_best` with the highest values.
        """
        self._folder = folder.absolute()
        self._keep, self._keep_best = keep, keep_best
        self._log = log
        if distributed.is_main():
            _clean(self._folder)
        distributed.barrier()
        options = ocp.CheckpointManagerOptions(
            # Keep all: one is removed only when the manifest of a newer one is written.
            preservation_policy=ocp.checkpoint_managers.LatestN(n=None),
            cleanup_tmp_directories=True,
            lightweight_initialize=True,  # damaged metadata would fail here, without a name
            save_root_metadata=False,
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._unfinished: Future[None] | None = None

    def save(
        self,
        step: int,
        state: TrainState,
        position: dict[str, Any],
        ref_params: Params | None,
        *,
        value: float | None = None,
    ) -> None:
        """Save the state after global step `step`; a checkpoint of the same step is replaced.

        Returns when the arrays are copied to the host, so that they may be donated. Writing
        continues in the background.

        Args:
            step: Step, not below that of the newest checkpoint.
            state: State on the devices.
            position: Plain JSON values.
            ref_params: Reference parameters, if any.
            value: Value of the evaluation after this step, for `keep_best`.
        """
        self.wait()
        items = {
            "params": ocp.args.StandardSave(state.params),
            "optimizer": ocp.args.StandardSave(optimizer_items(state)),
            "position": ocp.args.JsonSave(position),
        }
        if ref_params is not None:
            items["ref_params"] = ocp.args.StandardSave(ref_params)
        if distributed.is_main():
            with written_whole(self._folder / "saving") as file:
                file.write(str(step))
            begin_replacing(self._folder / str(step))
        distributed.barrier()
        self._manager.reload()
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._unfinished = self._background.submit(self._finish, step, value)

    def _finish(self, step: int, value: float | None) -> None:
        """Write the manifest once Orbax is done, then remove what it makes superfluous."""
        self._manager.wait_until_finished()
        if not distributed.is_main():
            return
        write_manifest(self._folder / str(step), step, value)
        (self._folder / "saving").unlink()
        values = self._values()
        for old in values.keys() - kept_steps(values, self._keep, self._keep_best):
            remove_whole(self._folder / str(old))
        _clean(self._folder)

    def wait(self) -> None:
        """Wait until the last save is complete; its error, if any, is raised here."""
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            unfinished.result()

    def close(self) -> None:
        """Wait for the last save."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._manager.close()

    def values(self) -> dict[int, float | None]:
        """Return the steps that have a checkpoint, each with the value of its evaluation."""
        self.wait()
        pairs = list(self._values().items()) if distributed.is_main() else []
        return dict(distributed.broadcast(pairs))  # as pairs: keys of JSON objects are strings

    def _values(self) -> dict[int, float | None]:
        return {step: read_value(self._folder / str(step)) for step in steps_in(self._folder)}

    def newest_position(self) -> tuple[int, dict[str, Any]] | None:
        """Return step and position of the newest undamaged checkpoint, or None without any.

        Raises:
            CheckpointError: See `restore`.
        """
        step = self._select(sorted(self.values(), reverse=True))
        return None if step is None else (step, self._position(step))

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, if an undamaged earlier one is there.

        Raises:
            CheckpointError: There is none. Nothing is removed.
        """
        steps = sorted(self.values(), reverse=True)
        earlier = [number for number in steps if number <= step]
        is_main = distributed.is_main()
        found = choose_step(self._folder, earlier)[0] if is_main else None
        if distributed.broadcast(found) is None:
            raise CheckpointError(
                f"the run is to go back to step {step}, and {self._folder} has no whole checkpoint "
                "of it or of an earlier step. Bring one back from a copy, remove "
                "roll_backs.jsonl to go on from the newest, or name another --workdir."
            )
        if is_main:
            for later in set(steps) - set(earlier):
                remove_whole(self._folder / str(later))
        distributed.barrier()
        self._manager.reload()

    def restore(
        self, targets: Callable[[dict[str, Any]], dict[str, Any]], step: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return position and items of a checkpoint, or None without any.

        Damaged checkpoints that are newer are named and moved to `damaged/`.

        Args:
            targets: Function from a position to the items to restore, with the shapes, dtypes and
                shardings wanted: `params`, `optimizer` (see `optimizer_items`), `ref_params`.
            step: Step of the checkpoint; None for the newest undamaged one.

        Raises:
            CheckpointError: All are damaged; or the selected one is undamaged and cannot be
                restored, as there is too little memory or the configuration has changed. Then
                nothing is moved.
        """
        step = self._select([step] if step is not None else sorted(self.values(), reverse=True))
        if step is None:
            return None
        position = self._position(step)
        return position, self._items(step, targets(position))

    def restore_best(self, state: TrainState) -> tuple[int, TrainState]:
        """Return the step with the highest value and its state, as arrays like those of `state`.

        Raises:
            CheckpointError: No checkpoint with a value can be read.
        """
        step = self._select(by_value(self.values()))
        if step is None:
            raise CheckpointError(
                f"{self._folder} holds no checkpoint with an evaluation's value, so there is no "
                "best one to end with."
            )
        items = self._items(step, {"params": state.params, "optimizer": optimizer_items(state)})
        return step, TrainState(params=items["params"], **items["optimizer"])

    def _select(self, steps: Sequence[int]) -> int | None:
        """Return the first undamaged one of `steps`, and move the damaged ones before it away."""
        self.wait()
        is_main = distributed.is_main()
        step, damaged = choose_step(self._folder, steps) if is_main else (None, [])
        step, damaged = distributed.broadcast((step, damaged))
        if damaged and step is None:
            raise CheckpointError(
                f"{_unreadable(self._folder, damaged)} Bring one back from a copy, or name another "
                "--workdir to begin anew."
            )
        if damaged:
            if is_main:
                aside = self._folder / "damaged"
                aside.mkdir(exist_ok=True)
                for bad, damage in damaged:
                    moved = (self._folder / str(bad)).rename(free_name(aside / str(bad)))
                    self._log(f"warning: checkpoint {bad} is damaged ({damage}); moved to {moved}")
                self._log(f"using checkpoint {step} instead")
            distributed.barrier()
            self._manager.reload()
        return step

    def _position(self, step: int) -> dict[str, Any]:
        return self._restore(step, {"position": ocp.args.JsonRestore()})["position"]

    def _items(self, step: int, targets: Mapping[str, Any]) -> dict[str, Any]:
        items = {name: ocp.args.StandardRestore(tree) for name, tree in targets.items()}
        return self._restore(step, items)

    def _restore(self, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises exceptions of many kinds
            reason = shorten(str(error), 500, placeholder=" …")
            raise CheckpointError(
                f"checkpoint {step} in {self._folder} is as it was written, but restoring it "
                f"failed: {type(error).__name__}: {reason}. Undo what was changed since it was "
                "written, the version of jaxrl too, give the devices more memory, or name another "
                "--workdir."
            ) from error
        return {name: restored[name] for name in items}


def choose_step(folder: Path, steps: Iterable[int]) -> tuple[int | None, list[tuple[int, str]]]:
    """Return the first undamaged one of `steps`, and the damage of those before it."""
    damaged: list[tuple[int, str]] = []
    for step in steps:
        damage = find_damage(folder / str(step), step)
        if damage is None:
            return step, damaged
        damaged.append((step, damage))
    return None, damaged


def _unreadable(folder: Path, damaged: Iterable[tuple[int, str]]) -> str:
    reasons = "; ".join(f"checkpoint {step}: {damage}" for step, damage in damaged)
    return f"no checkpoint in {folder} can be read: {reasons or 'there is none'}."


def steps_in(folder: Path) -> list[int]:
    """Return the steps of all checkpoints, damaged or not."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def has_any(folder: Path) -> bool:
    """Return True if a folder holds a checkpoint, damaged or not."""
    return bool(steps_in(folder)) or any(folder.glob("*.replaced"))


def newest_whole(folder: Path) -> int | None:
    """Return the newest step whose checkpoint was written to its end, or None without any."""
    manifests = [path.parent for path in folder.glob(f"*/{MANIFEST}")]
    names = [path.name.removesuffix(".replaced") for path in manifests]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def read_newest_position(folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the newest step whose position can be read, and the position, unchecked.

    If none can be read, return the newest step and {}.
    """
    steps = sorted(steps_in(folder), reverse=True)
    for step in steps:
        with contextlib.suppress(OSError, ValueError):
            return step, read_object(folder / str(step) / "position" / "metadata")
    return max(steps, default=0), {}


def restore_params(folder: Path, target: Params, step: int | None = None) -> tuple[int, Params]:
    """Return the parameters of a checkpoint, by default the newest undamaged one, and its step.

    Changes nothing: the folder may be that of a running job.

    Args:
        folder: Folder of a run's checkpoints.
        target: Shapes, dtypes and shardings.
        step: Step of the checkpoint.

    Raises:
        CheckpointError: There is none.
    """
    steps = sorted(steps_in(folder), reverse=True) if step is None else [step]
    step, damaged = choose_step(folder, steps)
    if step is None:
        raise CheckpointError(_unreadable(folder, damaged))
    with ocp.StandardCheckpointer() as checkpointer:
        return step, checkpointer.restore(folder.absolute() / str(step) / "params", target)


def by_value(values: Mapping[int, float | None]) -> list[int]:
    """Return the steps that have a value, the highest first; of equal ones the earlier."""
    ranked = sorted((-value, step) for step, value in values.items() if value is not None)
    return [step for _, step in ranked]


def kept_steps(values: Mapping[int, float | None], keep: int, keep_best: int) -> set[int]:
    """Return the newest `keep` steps (at least 1), and the `keep_best` of the highest value."""
    return {*sorted(values)[-keep:], *by_value(values)[:keep_best]}


def write_manifest(folder: Path, step: int, value: float | None) -> None:
    """Write the size and hash of every file of a checkpoint, last of all and atomically."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    content = {"step": step, "value": value, "files": _describe(folder, names)}
    with written_whole(folder / MANIFEST) as file:
        json.dump({**content, "sha256": _hash_of(content)}, file, indent=1)


def read_value(folder: Path) -> float | None:
    """Return the value in a checkpoint's manifest, or None if it has none or is unreadable."""
    try:
        return read_object(folder / MANIFEST)["value"]
    except (OSError, ValueError, KeyError):
        return None


def find_damage(folder: Path, step: int) -> str | None:
    """Name the first file of a checkpoint that differs from what was written, if there is one."""
    try:
        content = read_object(folder / MANIFEST)
    except (OSError, ValueError):
        return f"{MANIFEST}: missing or unreadable"
    if content.pop("sha256", "") != _hash_of(content) or content["step"] != step:
        return f"{MANIFEST}: not the one that was written for checkpoint {step}"
    written, found = content["files"], _describe(folder, content["files"])
    damaged = [name for name in written if found[name] != written[name]]
    return f"{damaged[0]}: missing, or not as it was written" if damaged else None


def _describe(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return the size and SHA-256 of files, or None for those that cannot be read."""

    def describe(name: str) -> dict[str, Any] | None:
        try:
            with (folder / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return {"bytes": file.tell(), "sha256": digest}
        except OSError:
            return None

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(describe, names), strict=True))


def _hash_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _clean(folder: Path) -> None:
    """Finish what a killed process began: saves, replacements and removals."""
    marker = folder / "saving"
    if marker.is_file():
        step = marker.read_text(encoding="utf-8", errors="replace")
        if step.isdecimal() and not (folder / step / MANIFEST).exists():
            shutil.rmtree(folder / step, ignore_errors=True)
        marker.unlink()
    for left in (*folder.glob("*.replaced"), *folder.glob("*.removed")):
        recover(left.with_suffix(""))


def optimizer_items(state: TrainState) -> dict[str, Any]:
    """Return the items of a state other than its parameters, as they are saved."""
    return {
        "opt_state": state.opt_state,
        "num_updates": state.num_updates,
        "num_skipped": state.num_skipped,
    }
