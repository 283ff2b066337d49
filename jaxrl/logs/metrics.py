"""What a run reports: `metrics.jsonl` and its mirrors, trajectories, the terminal's display."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from ml_collections import ConfigDict
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Column
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from jaxrl.runtime.files import printable, set_aside, written_whole
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
        say: Callable[[str], None] = print,
    ):
        """Opens the log, cut back to its first `num_records` records.

        Of several processes one writes; in the others, without a path, the log only counts. Lost
        records count too: what follows keeps its number.

        Args:
            path: of the file; it need not exist.
            num_records: that the run has written up to the checkpoint it goes on from.
            is_later: whether a record was written after that checkpoint. In a file that has lost
                some, there may be such among the first ones.
            say: tells what is damaged or lost.
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
                say(f"warning: {path}:{number} is no record and is left out; {aside} keeps it")
        kept = [line for line, record in found if record is not None and not is_later(record)]
        if len(kept) < num_records:
            where = "it is missing" if not path.exists() else "the first ones are lost"
            if kept:
                last = json.loads(kept[-1])
                where = f"the last one is of step {last['step']} ({last.get('stage', 'train')})"
            say(
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
        record = json.loads(line)
    except (ValueError, RecursionError):
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
    config: ConfigDict,
    say: Callable[[str], None],
    *,
    is_written: bool,
    is_later: Callable[[Record], bool] = lambda _: False,
) -> MetricsLog:
    """The workdir's log, cut back to `num_records` records, with its mirrors.

    Told are records that are lost or damaged, and files that they speak of and that are missing.
    """
    if not is_written:
        return MetricsLog(None, num_records)
    log = MetricsLog(workdir / "metrics.jsonl", num_records, is_later=is_later, say=say)
    for warning in missing_files(workdir, log.records()):
        say(warning)
    log.mirrors.append(TensorBoard(workdir / "tensorboard", log.records(), say))
    if config.log.wandb_project:
        log.mirrors.append(WandB(workdir, config.log.wandb_project, config.to_dict(), say))
    return log


class _Fallible:
    """A mirror that a failure ends, and not the run."""

    name: str

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._is_alive = True

    def _try(self, action: Callable[[], object]) -> None:
        if not self._is_alive:
            return
        try:
            action()
        except Exception as error:  # training goes on, whatever fails here
            self._is_alive = False
            self._say(f"warning: {self.name} failed and is left out from here on: {error!r}")


class TensorBoard(_Fallible):
    """Event files, made afresh from the kept records, so that no step beyond them lingers.

    Written at once: the thread of tensorboardX's own writer ends with a full disk, and who writes
    then waits for it for ever.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, records: Iterable[Record], say: Callable[[str], None]):
        """Replaces the folder by one that shows `records`."""
        super().__init__(say)
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
        self, workdir: Path, project: str, config: Mapping[str, Any], say: Callable[[str], None]
    ):
        """Starts or continues the run whose id the workdir keeps.

        Raises:
            RuntimeError: W&B refuses, for instance without a key.
        """
        super().__init__(say)
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


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Metrics as JSON has them; see `plain_number`."""
    return {name: plain_number(value) for name, value in metrics.items()}


def plain_number(value: Any) -> float | int | None:
    """A number as JSON has it; None for one that is not finite, and for None."""
    value = np.asarray(value).item()
    return value if value is not None and math.isfinite(value) else None


def write_trajectories(
    path: Path,
    trajectories: Sequence[Trajectory],
    fields: Sequence[Mapping[str, Any]],
) -> None:
    """Writes trajectories as JSONL, each with its text, its turns and its token arrays.

    Args:
        path: of the file.
        trajectories: to write, with their advantages.
        fields: further JSON values of each.
    """
    with written_whole(path) as file:
        for trajectory, more in zip(trajectories, fields, strict=True):
            record = trajectory_record(trajectory) | dict(more)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON."""
    return {
        "task_id": trajectory.task_id,
        "question": trajectory.task.question,
        "query": trajectory.query,
        "answers": list(trajectory.task.answers),
        "data_source": trajectory.task.data_source,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "attempt": trajectory.attempt,
        "outcome": str(trajectory.outcome),
        "reward": None if trajectory.outcome == "environment_error" else trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "final_answer": trajectory.final_answer,
        "is_correct": trajectory.is_correct,
        "advantage": trajectory.advantage,
        "generated_text": trajectory.generated_text,
        "turns": [dataclasses.asdict(turn) for turn in trajectory.turns],
        "prompt_length": trajectory.prompt_length,
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.astype(int).tolist(),
        "rollout_logprobs": [round(float(x), 6) for x in trajectory.rollout_logprobs],
        "rollout_entropies": [round(float(x), 6) for x in trajectory.rollout_entropies],
        "policy_versions": trajectory.policy_versions.tolist(),
    }


def rollout_metrics(
    trajectories: Sequence[Trajectory], max_response_tokens: int, *, has_python: bool = False
) -> dict[str, float]:
    """Means over the trajectories that could be scored, under verl's names where it has one.

    Where none could, they are NaN: an environment error is no reward of 0. Calls of Python are
    counted where there is that tool.
    """
    scored = [t for t in trajectories if t.is_scored]
    lengths = [t.num_sampled for t in scored]
    rewards = [t.reward for t in scored]
    outcomes = [str(t.outcome) for t in trajectories]
    parts = sorted({name for t in scored for name in t.reward_parts})
    return {
        "critic/rewards/mean": mean(rewards),
        "critic/rewards/max": max(rewards, default=math.nan),
        "critic/rewards/min": min(rewards, default=math.nan),
        **{
            f"reward/{name}/mean": mean(
                [t.reward_parts[name] for t in scored if name in t.reward_parts]
            )
            for name in parts
        },
        "response_length/mean": mean(lengths),
        "response_length/max": max(lengths, default=math.nan),
        "response_length/clip_ratio": mean([n >= max_response_tokens for n in lengths]),
        "num_turns/mean": mean([len(t.turns) for t in scored]),
        "num_searches/mean": mean([len(t.searches) for t in scored]),
        **(
            {"num_python_calls/mean": mean([len(t.python_calls) for t in scored])}
            if has_python
            else {}
        ),
        **{
            f"outcome/{name}": outcomes.count(name) / max(len(outcomes), 1)
            for name in ("answered", "abstained", "malformed", "out_of_budget", "environment_error")
        },
    }


def mean(values: Sequence[float]) -> float:
    """The mean; NaN, without a warning, of nothing."""
    return float(np.mean(values)) if values else math.nan


class Display:
    """Progress on the terminal: a live line where there is one, else a line now and then."""

    def __init__(self, *, every_s: float = 5.0, part_every_s: float = 30.0, is_shown: bool = True):
        """Where the output is no terminal, lines come at most so often.

        Args:
            every_s: seconds between two lines of steps.
            part_every_s: seconds of silence before a line of a part of a step.
            is_shown: print at all.
        """
        self.console = Console(highlight=False, quiet=not is_shown)
        self._every_s, self._part_every_s = every_s, part_every_s
        self._last = -math.inf
        self._spoken = time.monotonic()  # the last line of any kind
        self._status: Status | None = None  # the live line outside of a stage
        self._first: tuple[int, float] | None = None  # a stage's first step and when it ended
        self._progress: Progress | None = None

    def say(self, text: str) -> None:
        """Prints a line; what it holds of foreign text does nothing to the terminal."""
        self._end_part()
        self._spoken = time.monotonic()
        self.console.print(printable(text), markup=False, emoji=False, soft_wrap=True)

    def start(self, stage: str, first_step: int, num_steps: int) -> None:
        """Begins a stage of `num_steps` steps, of which `first_step` are done."""
        self._end_part()
        self._stage, self._num_steps = stage, num_steps
        self._first, self._last = None, -math.inf
        if self.console.is_terminal and not self.console.quiet:
            self._progress = Progress(
                TextColumn("{task.description} {task.completed}/{task.total}"),
                *([BarColumn()] if self.console.width >= 140 else []),
                # Where there is little room, the numbers go on below rather than the time be cut.
                TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),
                TextColumn("{task.fields[part]}", table_column=Column(no_wrap=False)),
                TimeRemainingColumn(compact=True),
                console=self.console,
                speed_estimate_period=3600,  # of half a minute by default, too short for one step
            )
            self._progress.start()
            self._bar = self._progress.add_task(
                stage, total=num_steps, completed=first_step, numbers="", part=""
            )

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Shows the state after step number `step` of the stage."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in numbers.items())
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, numbers=text, part="")
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)  # speeds count from here on: the first step compiles
        if now - self._last < self._every_s and step < self._num_steps:
            return
        self._last = now
        first_step, started = self._first
        left = "--:--"
        if step > first_step:
            left = _duration((now - started) / (step - first_step) * (self._num_steps - step))
        self.say(f"{self._stage} {step}/{self._num_steps}  {text}  {left} left")

    def part(self, text: str) -> None:
        """Shows what a step, or what comes before the first one, is at."""
        if self._progress is not None:
            self._progress.update(self._bar, part=text)
        elif self.console.is_terminal and not self.console.quiet:
            if self._status is None:
                self._status = self.console.status("")
                self._status.start()
            self._status.update(escape(text))
        elif time.monotonic() - self._spoken >= self._part_every_s:
            self.say(text)

    def counter(self, what: str) -> Callable[[int, int], None]:
        """Shows a part of which so many are done, of so many."""
        return lambda done, total: self.part(f"{what} {done:,}/{total:,}")

    def _end_part(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def stop(self) -> None:
        """Ends the stage."""
        self._end_part()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _short(value: float) -> str:
    """Three digits, or a whole number with its thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
