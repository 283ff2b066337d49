"""Checkpoints: everything a restart needs, through Orbax, and proof that it is as it was written.

A run's folder of checkpoints holds

- `<step>/`: what Orbax wrote, and `manifest.json` with the size and hash of every file;
- `saving`: the number of the step being written. Without a manifest, that step never finished;
- `<step>.orbax-checkpoint-tmp`, `<step>.removed`: being written, being removed;
- `<step>.replaced`: the earlier checkpoint of a step, until the new one is complete;
- `damaged/`: checkpoints that could not be read. Nothing here looks at them again.

With several processes, all take part in what Orbax does; the first one does the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from textwrap import shorten
from typing import Any

import orbax.checkpoint as ocp

from jaxrl.runtime import distributed
from jaxrl.types import Params, TrainState
from jaxrl.utils.files import begin_replacing, free_name, remove_whole, settle, written_whole
from jaxrl.utils.json_io import read_object

MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """Raised where there are checkpoints, but the one to go on with cannot be read."""


@contextlib.contextmanager
def raises_once() -> Iterator[None]:
    """Silences Orbax and its threads where they print what they raise too, a thousand lines of it.

    Where saving fails it logs each tensor's failure as an error, with a traceback, leaves others to
    asyncio, which logs them, and tells event loops that are closed by then, which Python prints.
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
    # Not after an error: some of it comes when Python ends.
    for logger in loggers:
        logger.removeFilter(is_shown)
    sys.unraisablehook = hook


class Checkpointer:
    """Saves and restores `TrainState`, frozen reference parameters and the run's position.

    The position is a small JSON object. It is read first, since it tells which optimizer's state
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
        """Opens a folder of checkpoints.

        Args:
            folder: it is made.
            keep: the newest so many stay.
            keep_best: beside them, those with the so many highest values.
            log: prints a line, about checkpoints that could not be read.
        """
        self._folder = folder.absolute()
        self._keep, self._keep_best = keep, keep_best
        self._log = log
        if distributed.is_main():
            _clean(self._folder)
        distributed.meet()
        options = ocp.CheckpointManagerOptions(
            # All of them: a checkpoint is removed only when the manifest of a newer one stands.
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
        """Saves the state after global step `step`.

        Returns when the arrays are copied to the host, so that they may be donated; writing them
        goes on in the background. A checkpoint of the same step is replaced.

        Args:
            step: above that of every other checkpoint, or equal to the newest.
            state: on the devices.
            position: plain JSON values.
            ref_params: saved beside the state unless None.
            value: of the evaluation after this step, for `keep_best`; None: there was none.
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
        distributed.meet()
        self._manager.reload()
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._unfinished = self._background.submit(self._finish, step, value)

    def _finish(self, step: int, value: float | None) -> None:
        """Writes the manifest once Orbax is done, then removes what that makes superfluous."""
        self._manager.wait_until_finished()
        if not distributed.is_main():
            return
        write_manifest(self._folder / str(step), step, value)
        (self._folder / "saving").unlink()
        values = self._values()
        for old in values.keys() - kept_steps(values, self._keep, self._keep_best):
            remove_whole(self._folder / str(old))
        _clean(self._folder)

    def steps(self) -> list[int]:
        """The steps of which there are checkpoints, the last save included."""
        self.wait()
        return distributed.from_main(steps_in(self._folder) if distributed.is_main() else [])

    def newest_position(self) -> tuple[int, dict[str, Any]] | None:
        """Step and position of the newest checkpoint that is as it was written; None without any.

        Newer ones that are not are named and moved to `damaged/`.

        Raises:
            CheckpointError: there are some, but all are damaged.
        """
        self.wait()
        step = self._choose(lambda: sorted(steps_in(self._folder), reverse=True))
        if step is None:
            return None
        return step, self._restore(step, position=ocp.args.JsonRestore())["position"]

    def forget_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, once it is sure that an earlier one is whole.

        Raises:
            CheckpointError: none is; all stay.
        """
        self.wait()
        chosen = None
        if distributed.is_main():
            earlier = [one for one in steps_in(self._folder) if one <= step]
            chosen, _ = choose_step(self._folder, sorted(earlier, reverse=True))
        if distributed.from_main(chosen) is None:
            raise CheckpointError(
                f"the run is to go back to step {step}, and {self._folder} has no whole checkpoint "
                "of it or of an earlier step. Bring one back from a copy, remove "
                "roll_backs.jsonl to go on from the newest, or name another --workdir."
            )
        if distributed.is_main():
            for later in (one for one in steps_in(self._folder) if one > step):
                remove_whole(self._folder / str(later))
        distributed.meet()
        self._manager.reload()

    def values(self) -> dict[int, float | None]:
        """The value of each checkpoint's evaluation; None where it has none."""
        pairs = list(self._values().items()) if distributed.is_main() else []
        return dict(distributed.from_main(pairs))  # as pairs, since JSON makes texts of keys

    def wait(self) -> None:
        """Waits until the last save is complete; an error of it is raised here."""
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            unfinished.result()

    def restore(
        self, targets: Callable[[dict[str, Any]], dict[str, Any]], step: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Position and items of a checkpoint that is as it was written; None without any.

        Newer ones that are not are named and moved to `damaged/`.

        Args:
            targets: from a position to the items to restore, with the shapes, dtypes and
                shardings wanted: `params`, `optimizer` (see `optimizer_items`), `ref_params`.
            step: of the checkpoint; None: the newest that is not damaged.

        Raises:
            CheckpointError: there are some, but all are damaged; or the one to use is whole and
                cannot be restored, for want of memory or since the configuration was changed.
                Nothing is moved then.
        """
        wanted_steps = None if step is None else [step]
        step = self._choose(lambda: wanted_steps or sorted(steps_in(self._folder), reverse=True))
        if step is None:
            return None
        position = self._restore(step, position=ocp.args.JsonRestore())["position"]
        wanted = targets(position)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
        return position, self._restore(step, **items)

    def restore_best(self, state: TrainState) -> tuple[int, TrainState]:
        """The step with the highest value and its state, as arrays like those of `state`.

        Raises:
            CheckpointError: no checkpoint with a value can be read.
        """
        self.wait()
        step = self._choose(lambda: by_value(self._values()))
        if step is None:
            raise CheckpointError(
                f"{self._folder} holds no checkpoint with an evaluation's value, so there is no "
                "best one to end with."
            )
        wanted = {"params": state.params, "optimizer": optimizer_items(state)}
        items = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
        restored = self._restore(step, **items)
        return step, TrainState(params=restored["params"], **restored["optimizer"])

    def _values(self) -> dict[int, float | None]:
        return {step: read_value(self._folder / str(step)) for step in steps_in(self._folder)}

    def _choose(self, steps: Callable[[], Sequence[int]]) -> int | None:
        """The first of `steps` that is not damaged, the same in all processes."""
        chosen: int | None = None
        damaged: dict[int, str] = {}
        if distributed.is_main():
            chosen, damaged = choose_step(self._folder, steps())
        # As pairs: what processes exchange is JSON, which would make texts of the keys.
        chosen, pairs = distributed.from_main((chosen, list(damaged.items())))
        damaged = dict(pairs)
        if chosen is None and damaged:
            lines = "; ".join(f"checkpoint {step}: {what}" for step, what in damaged.items())
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be read: {lines}. Bring one back from a "
                "copy, or name another --workdir to begin anew."
            )
        if damaged:
            if distributed.is_main():
                aside = self._folder / "damaged"
                aside.mkdir(exist_ok=True)
                for step, what in damaged.items():
                    moved = (self._folder / str(step)).rename(free_name(aside / str(step)))
                    self._log(f"warning: checkpoint {step} is damaged ({what}); moved to {moved}")
                self._log(f"using checkpoint {chosen} instead")
            distributed.meet()
            self._manager.reload()
        return chosen

    def _restore(self, step: int, **items: Any) -> dict[str, Any]:
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises whatever it comes upon
            reason = shorten(str(error), 500, placeholder=" …")
            raise CheckpointError(
                f"checkpoint {step} in {self._folder} is as it was written, but restoring it "
                f"failed: {type(error).__name__}: {reason}. Undo what was changed since it was "
                "written, the version of jaxrl too, give the devices more memory, or name another "
                "--workdir."
            ) from error
        return {name: restored[name] for name in items}

    def close(self) -> None:
        """Waits for the last save."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._manager.close()


def choose_step(folder: Path, steps: Sequence[int]) -> tuple[int | None, dict[int, str]]:
    """The first of `steps` whose files are as they were written, and the damage of those before."""
    damaged: dict[int, str] = {}
    for step in steps:
        damage = find_damage(folder / str(step), step)
        if damage is None:
            return step, damaged
        damaged[step] = damage
    return None, damaged


def steps_in(folder: Path) -> list[int]:
    """The numbers of all checkpoints, whatever their state."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def has_any(folder: Path) -> bool:
    """Return True if a folder holds a checkpoint, whatever its state."""
    return bool(steps_in(folder)) or any(folder.glob("*.replaced"))


def read_newest_position(folder: Path) -> tuple[int, dict[str, Any]]:
    """Step and position of the newest checkpoint whose position can be read.

    Only read, not checked against its manifest. The newest step and {} where none can be read.
    """
    steps = sorted(steps_in(folder), reverse=True)
    for step in steps:
        try:
            path = folder / str(step) / "position" / "metadata"
            return step, read_object(path)
        except (OSError, ValueError):
            continue
    return max(steps, default=0), {}


def restore_params(folder: Path, target: Params, step: int | None = None) -> tuple[int, Params]:
    """Step and parameters of a checkpoint; see `restore_items`."""
    step, items = restore_items(folder, {"params": target}, step)
    return step, items["params"]


def restore_items(
    folder: Path, targets: Mapping[str, Any], step: int | None = None
) -> tuple[int, dict[str, Any]]:
    """Step and items of that checkpoint, or of the newest that is as it was written.

    Nothing is changed: the folder may be that of a run under way.

    Args:
        folder: the one that holds all checkpoints, each in a folder of its step.
        targets: by item, as `params` or `optimizer`, shapes, dtypes and shardings.
        step: of the checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    steps = sorted(steps_in(folder), reverse=True) if step is None else [step]
    step, damaged = choose_step(folder, steps)
    if step is None:
        what = "; ".join(f"checkpoint {step}: {why}" for step, why in damaged.items())
        raise CheckpointError(f"no checkpoint in {folder} can be read: {what or 'there is none'}.")
    place = (folder / str(step)).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        items = {name: checkpointer.restore(place / name, one) for name, one in targets.items()}
    return step, items


def newest_whole(folder: Path) -> int | None:
    """The newest step whose checkpoint was written to its end; None: there is none."""
    manifests = [path.parent for path in folder.glob(f"*/{MANIFEST}")]
    names = [path.name.removesuffix(".replaced") for path in manifests]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def by_value(values: Mapping[int, float | None]) -> list[int]:
    """Steps that have a value, the highest first; of equal ones the earlier."""
    ranked = sorted((-value, step) for step, value in values.items() if value is not None)
    return [step for _, step in ranked]


def kept_steps(values: Mapping[int, float | None], keep: int, keep_best: int) -> set[int]:
    """Steps to keep: the newest `keep`, and the `keep_best` of the highest value.

    Args:
        values: of each step; None where there was no evaluation.
        keep: at least 1.
        keep_best: 0 or more.
    """
    return {*sorted(values)[-keep:], *by_value(values)[:keep_best]}


def write_manifest(folder: Path, step: int, value: float | None) -> None:
    """Writes down size and hash of every file of a checkpoint, last of all and at once."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    content: dict[str, Any] = {
        "step": step,
        "value": value,
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
            for name, digest in zip(names, _hashes(folder, names), strict=True)
        },
    }
    with written_whole(folder / MANIFEST) as file:
        json.dump({**content, "sha256": _hash_of(content)}, file, indent=1)


def read_value(folder: Path) -> float | None:
    """The value in a checkpoint's manifest; None where it has none or cannot be read."""
    try:
        return read_object(folder / MANIFEST)["value"]
    except (OSError, ValueError, KeyError):
        return None


def find_damage(folder: Path, step: int) -> str | None:
    """Describes the damage to a checkpoint's files, the first one by name; None: there is none."""
    try:
        content = read_object(folder / MANIFEST)
        digest = content.pop("sha256")
        files = {
            name: (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()
        }
        if digest != _hash_of(content):
            return f"{MANIFEST}: its own hash differs"
    except (FileNotFoundError, NotADirectoryError):
        return f"{MANIFEST}: missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: not what was written ({type(error).__name__})"
    if content["step"] != step:
        return f"{MANIFEST}: it is the one of checkpoint {content['step']}"
    for name, (size, _) in files.items():
        if not (folder / name).is_file():
            return f"{name}: missing"
        if (folder / name).stat().st_size != size:
            return f"{name}: {(folder / name).stat().st_size} bytes, {size} were written"
    for (name, (_, written)), digest in zip(files.items(), _hashes(folder, files), strict=True):
        if digest != written:
            return f"{name}: its hash differs from what was written"
    return None


def _hashes(folder: Path, names: Sequence[str] | Mapping[str, Any]) -> Iterator[str]:
    """SHA-256 of each file, several at a time; what cannot be read has the empty hash."""

    def sha256(name: str) -> str:
        try:
            with (folder / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return ""

    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(sha256, names)


def _hash_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _clean(folder: Path) -> None:
    """Finishes what a killed process began: saves, replacements and removals."""
    marker = folder / "saving"
    if marker.is_file():
        step = marker.read_text(encoding="utf-8", errors="replace")
        if step.isdecimal() and not (folder / step / MANIFEST).exists():
            shutil.rmtree(folder / step, ignore_errors=True)
        marker.unlink()
    for left in (*folder.glob("*.replaced"), *folder.glob("*.removed")):
        settle(left.with_suffix(""))


def optimizer_items(state: TrainState) -> dict[str, Any]:
    """The items of a state but its parameters, as they are saved."""
    return {
        "opt_state": state.opt_state,
        "num_updates": state.num_updates,
        "num_skipped": state.num_skipped,
    }
