"""Frozen settings of the stages, created by `builders.components`.

docs/configuration.md describes the fields that are named after a config key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STAGES = ("sft", "train", "evaluate")
"""Stages of a run, in order."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Suites, sampling and schedule of evaluations (config section `eval`)."""

    every_steps: int
    suites: Sequence[str]
    final_suites: Sequence[str]
    samples: int
    temperature: float
    top_p: float
    ks: Sequence[int]
    resamples: int
    best_metric: str
    patience: int
    min_delta: float
    correct: str  # reward part that makes an answer correct
    has_python: bool  # True if the model may call `python`
    tool_environments: Sequence[str]  # names of environments whose turns get observations
    section: Mapping[str, Any]  # complete section, for the result file
    depends_on: Mapping[str, Any]  # all settings that a score depends on


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Schedule and retention of checkpoints (config section `checkpoint`)."""

    every_steps: int
    keep: int
    keep_best: int


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    """Prices of tool calls and limits on spending (config section `ledger`)."""

    prices: Mapping[str, float]
    max_cost: float
    max_calls: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run, shared by all stages."""

    stages: tuple[str, ...]
    seed: int
    max_response_tokens: int
    max_failed_steps: int
    evaluation: EvaluationSettings
    checkpoint: CheckpointSettings
    ledger: LedgerSettings
    model_path: str  # `model.path`
    architecture: str  # `model.architecture`
    log_every_steps: int  # number of steps between console lines; 0 for a time interval
    num_logged_trajectories: int  # number of trajectories to write per step; -1 for all
    tokens: bool  # True to also write per-token values of the update
    replay_folder: str | None  # folder of an endpoint's recorded replies; "" for one in the workdir
    trackers: Mapping[str, Callable[..., Any]]  # constructors of `logs.writers.Tracker`, by name
    values: Mapping[str, Any]  # complete configuration, for comparison on resume
