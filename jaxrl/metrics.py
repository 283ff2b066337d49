"""What a run reports: `metrics.jsonl`, trajectories, and the display on the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from jaxrl.files import written_whole
from jaxrl.types import Trajectory


class MetricsLog:
    """`metrics.jsonl`: one object a record, `step` and `stage` first."""

    def __init__(self, path: Path, num_records: int):
        """Opens the log, cut back to its first `num_records` records."""
        self._path = path
        # A killed process may have left a last line that is not whole.
        whole = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        kept = whole[:num_records]
        with written_whole(path) as file:
            file.writelines(line + "\n" for line in kept)
        self.num_records = len(kept)

    def write(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Appends a record; numbers that are not finite become null, as JSON has no others."""
        record = {"step": step, "stage": stage, **plain_numbers(metrics)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.num_records += 1


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Metrics as JSON has them; see `plain_number`."""
    return {name: plain_number(value) for name, value in metrics.items()}


def plain_number(value: Any) -> float | int | None:
    """A number as JSON has it; None for one that is not finite, and for None."""
    value = np.asarray(value).item()
    return value if value is not None and math.isfinite(value) else None


def write_trajectories(
    path: Path, trajectories: Sequence[Trajectory], advantages: np.ndarray
) -> None:
    """Writes trajectories as JSONL, each with its text, its turns and its token arrays."""
    with written_whole(path) as file:
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            record = trajectory_record(trajectory) | {"advantage": float(advantage)}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON."""
    return {
        "task_id": trajectory.task_id,
        "question": trajectory.task.question,
        "answers": list(trajectory.task.answers),
        "data_source": trajectory.task.data_source,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "attempt": trajectory.attempt,
        "outcome": str(trajectory.outcome),
        "reward": None if trajectory.outcome == "environment_error" else trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "final_answer": trajectory.final_answer,
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
    trajectories: Sequence[Trajectory], max_response_tokens: int
) -> dict[str, float]:
    """Means over the trajectories that could be scored, under verl's names where it has one.

    Where none could, they are NaN: an environment error is no reward of 0.
    """
    scored = [t for t in trajectories if t.outcome != "environment_error"]
    lengths = [t.num_sampled for t in scored]
    rewards = [t.reward for t in scored]
    outcomes = [str(t.outcome) for t in trajectories]
    parts = sorted({name for t in scored for name in t.reward_parts})
    return {
        "critic/rewards/mean": mean(rewards),
        "critic/rewards/max": max(rewards, default=math.nan),
        "critic/rewards/min": min(rewards, default=math.nan),
        **{f"reward/{name}/mean": mean([t.reward_parts[name] for t in scored]) for name in parts},
        "response_length/mean": mean(lengths),
        "response_length/max": max(lengths, default=math.nan),
        "response_length/clip_ratio": mean([n >= max_response_tokens for n in lengths]),
        "num_turns/mean": mean([len(t.turns) for t in scored]),
        "num_searches/mean": mean([t.num_tool_calls for t in scored]),
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

    def __init__(self, *, every_s: float = 5.0):
        """A line at least every `every_s` seconds where the output is no terminal."""
        self.console = Console(highlight=False)
        self._every_s = every_s
        self._last = -math.inf
        self._first: tuple[int, float] | None = None  # a stage's first step and when it ended
        self._progress: Progress | None = None

    def say(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def start(self, stage: str, first_step: int, num_steps: int) -> None:
        """Begins a stage of `num_steps` steps, of which `first_step` are done."""
        self._stage, self._num_steps = stage, num_steps
        self._first, self._last = None, -math.inf
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description} {task.completed}/{task.total}"),
                *([BarColumn()] if self.console.width >= 140 else []),
                # Where there is little room, the numbers go on below rather than the time be cut.
                TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),
                TimeRemainingColumn(compact=True),
                console=self.console,
                speed_estimate_period=3600,  # of half a minute by default, too short for one step
            )
            self._progress.start()
            self._bar = self._progress.add_task(
                stage, total=num_steps, completed=first_step, numbers=""
            )

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Shows the state after step number `step` of the stage."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in numbers.items())
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, numbers=text)
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

    def stop(self) -> None:
        """Ends the stage."""
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
