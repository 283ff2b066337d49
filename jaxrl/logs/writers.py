"""Where a run writes what it measured: `metrics.jsonl` and its mirrors, and trajectories."""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from jaxrl.codecs import trajectory_record
from jaxrl.envs.json_text import parse_json
from jaxrl.logs.metrics import plain_numbers
from jaxrl.runtime.files import set_aside, taking_place, written_whole
from jaxrl.settings import Settings
from jaxrl.types import Trajectory

Record = Mapping[str, Any]
"""A line of `metrics.jsonl`: `step`, `stage`, and numbers, None for those that are not finite."""


class Mirror(Protocol):
    """Another place where records are shown; `metrics.jsonl` stays the truth."""

    def write(self, index: int, record: Record) -> None:
        """Shows record number `index` of the run."""
        ...

    def close(self) -> None:
        """Ends it, with all that was written safe."""
        ...


class MetricsLog:
    """`metrics.jsonl`: one object a record, `step` and `stage` first."""

    def __init__(
        self,
        path: Path | None,
        num_records: int,
        *,
        is_later: Callable[[Record], bool] = lambda _: False,
        log: Callable[[str], None] = print,
    ):
        """Opens the log, cut back to its first `num_records` records.

        Of several processes one writes; in the others, without a path, the log only counts. Lost
        records count too: what follows keeps its number.

        Args:
            path: `metrics.jsonl`, which need not exist; None: nothing is written.
            num_records: that the run has written up to the checkpoint it goes on from.
            is_later: whether a record was written after that checkpoint. In a file that has lost
                some, there may be such among the first ones.
            log: tells what is damaged or lost.
        """
        self._path = path
        self.num_records = num_records
        self.mirrors: list[Mirror] = []
        self._carried: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()
        if path is None:
            return
        # A killed process may have left a last line that is not whole.
        whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        found = [(line, parse_record(line)) for line in whole[:num_records]]
        bad = [number for number, (_, record) in enumerate(found, start=1) if record is None]
        if bad:
            aside = set_aside(path, is_copied=True)
            for number in bad:
                log(f"warning: {path}:{number} is no record and is left out; {aside} keeps it")
        kept = [line for line, record in found if record is not None and not is_later(record)]
        if len(kept) < num_records:
            where = "it is missing" if not path.exists() else "the first ones are lost"
            if kept:
                last = json.loads(kept[-1])
                where = f"the last one is of step {last['step']} ({last.get('stage', 'train')})"
            log(
                f"warning: {path} holds {len(kept)} of the {num_records} records that the run has "
                f"written; {where}. What is lost is in no report"
            )
        with written_whole(path) as file:
            file.writelines(line.decode("utf-8") + "\n" for line in kept)

    def records(self) -> list[Record]:
        """What the log holds."""
        if self._path is None:
            return []
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def carry(self, name: str, value: float) -> None:
        """Adds to a metric of the next record, for what happens between two of them."""
        self._carried[name] += value

    def write(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Appends a record; numbers that are not finite become null, as JSON has no others.

        `timing_s/wall` is the time since the record before it, or since the log was opened.
        """
        now = time.perf_counter()
        metrics = {**metrics, **self._carried, "timing_s/wall": now - self._last}
        self._last = now
        self._carried.clear()
        record = {"step": step, "stage": stage, **plain_numbers(metrics)}
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        for mirror in self.mirrors:
            mirror.write(self.num_records, record)
        self.num_records += 1

    def close(self) -> None:
        """Closes the mirrors."""
        for mirror in self.mirrors:
            mirror.close()


def parse_record(line: bytes) -> dict[str, Any] | None:
    """A line of `metrics.jsonl`; None for what is none."""
    try:
        record = parse_json(line, "")
    except ValueError:
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_record and isinstance(record.get("stage", "train"), str) else None


def missing_files(workdir: Path, records: Iterable[Record]) -> list[str]:
    """A warning where files that the records speak of are missing; else none."""
    names = []
    for record in records:
        stage, step = record.get("stage", "train"), record["step"]
        if any(name.startswith("val-") for name in record):
            names.append(f"eval/{stage}_{step}.json")
        if stage == "train" and "timing_s/step" in record:
            names.append(f"trajectories/step_{step:06d}.jsonl")
    missing = [name for name in names if not (workdir / name).exists()]
    if not missing:
        return []
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return [f"warning: missing in {workdir}: {', '.join(missing[:3])}{more}"]


def open_log(
    workdir: Path,
    num_records: int,
    settings: Settings,
    log: Callable[[str], None],
    *,
    is_written: bool,
    is_later: Callable[[Record], bool] = lambda _: False,
) -> MetricsLog:
    """The workdir's `metrics.jsonl`, cut back to `num_records` records, with its mirrors.

    Told are records that are lost or damaged, and files that they speak of and that are missing.
    """
    if not is_written:
        return MetricsLog(None, num_records)
    metrics_log = MetricsLog(workdir / "metrics.jsonl", num_records, is_later=is_later, log=log)
    for warning in missing_files(workdir, metrics_log.records()):
        log(warning)
    metrics_log.mirrors.append(TensorBoard(workdir / "tensorboard", metrics_log.records(), log))
    if settings.wandb_project:
        mirror = WandB(workdir, settings.wandb_project, settings.values, log)
        metrics_log.mirrors.append(mirror)
    return metrics_log


class _Fallible:
    """A mirror that a failure ends, and not the run."""

    name: str

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._is_alive = True

    def _try(self, action: Callable[[], object]) -> None:
        if not self._is_alive:
            return
        try:
            action()
        except Exception as error:  # training goes on, whatever fails here
            self._is_alive = False
            self._log(f"warning: {self.name} failed and is left out from here on: {error!r}")


class TensorBoard(_Fallible):
    """Event files, made afresh from the kept records, so that no step beyond them lingers.

    Written at once: the thread of tensorboardX's own writer ends with a full disk, and who writes
    then waits for it for ever.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, records: Iterable[Record], log: Callable[[str], None]):
        """Replaces the folder by one that shows `records`."""
        super().__init__(log)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._writer = EventsWriter(str(folder / "events"))
        for record in records:
            self._try(functools.partial(self._write, record))
        self._try(self._writer.flush)

    def write(self, index: int, record: Record) -> None:
        """Appends one event that holds the record's numbers."""
        self._try(functools.partial(self._write, record))
        self._try(self._writer.flush)

    def _write(self, record: Record) -> None:
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if name not in ("step", "stage") and value is not None
        ]
        event = Event(wall_time=time.time(), step=record["step"], summary=Summary(value=values))
        self._writer.write_event(event)

    def close(self) -> None:
        """Writes what is still in memory."""
        self._try(self._writer.close)


class WandB(_Fallible):
    """A run on Weights & Biases; started again on the same workdir, it is the same run.

    Its step is the record's number, since stages meet at a global step; `step` is the charts'
    axis. W&B keeps what it has: records repeated after a restart are the same ones and not sent.
    """

    name = "W&B"

    def __init__(
        self, workdir: Path, project: str, config: Mapping[str, Any], log: Callable[[str], None]
    ):
        """Starts or continues the run whose id the workdir keeps.

        Raises:
            RuntimeError: W&B refuses, for instance without a key.
        """
        super().__init__(log)
        import wandb  # an extra: only who asks for it has it

        id_file = workdir / "wandb" / "run_id"
        if not id_file.exists():
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project,
                id=id_file.read_text(encoding="utf-8"),
                resume="allow",
                name=workdir.name,
                dir=str(workdir),
                config=dict(config),
            )
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise RuntimeError(
                f"W&B did not start: {error}. Set WANDB_API_KEY, or WANDB_MODE=offline, in the "
                "environment, or config.log.wandb_project='' to do without."
            ) from error
        self._sent = self._run.step

    def write(self, index: int, record: Record) -> None:
        """Sends a record, unless W&B has it; a failure ends the mirror, not the run."""
        if index >= self._sent:
            self._try(lambda: self._run.log(dict(record), step=index))

    def close(self) -> None:
        """Waits until what was logged is sent or, offline, written."""
        self._try(self._run.finish)


def check_mirrors(project: str) -> None:
    """Refuses a W&B project where there is no package to write to it."""
    if project and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"config.log.wandb_project is {project!r}, but wandb is not installed; "
            "run pip install -e '.[wandb]', or set it to ''."
        )


def write_images(workdir: Path, trajectories: Iterable[Trajectory]) -> None:
    """Writes the images of trajectories that are in no file of their own, each once, by digest."""
    for trajectory in trajectories:
        for picture in trajectory.pictures:
            file = workdir / "images" / picture.digest
            if not picture.path and not file.exists():
                with taking_place(file) as unfinished:
                    unfinished.write_bytes(picture.data)


def write_trajectories(
    path: Path,
    trajectories: Sequence[Trajectory],
    fields: Sequence[Mapping[str, Any]],
) -> None:
    """Writes trajectories as JSONL, each with its text, its turns and its token arrays.

    Args:
        path: the JSONL file; it is replaced.
        trajectories: to write, with their advantages.
        fields: further JSON values of each.
    """
    with written_whole(path) as file:
        for trajectory, more in zip(trajectories, fields, strict=True):
            record = trajectory_record(trajectory) | dict(more)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
