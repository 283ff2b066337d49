"""The part of a configuration that the stages read, frozen by `builders.components`.

A field that has the name of a key holds what docs/configuration.md says of that key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STAGES = ("sft", "train", "evaluate")
"""Stages of a run, in their order."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The section `eval`, and what evaluations read beside it."""

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
    has_python: bool  # the model may call `python`
    has_results: bool  # something answers a turn
    section: Mapping[str, Any]  # the whole section, for the record
    depends_on: Mapping[str, Any]  # every setting that a score depends on


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The section `checkpoint`."""

    every_steps: int
    keep: int
    keep_best: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The section `ledger`."""

    prices: Mapping[str, float]
    max_cost: float
    max_calls: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all stages."""

    stages: tuple[str, ...]
    seed: int
    max_response_tokens: int
    max_failed_steps: int
    evaluation: Evaluation
    checkpoint: Checkpointing
    ledger: Costs
    model_path: str  # `model.path`
    architecture: str  # `model.architecture`
    trajectories: int  # number of each step to write; -1 for all
    tokens: bool  # write per-token values of the update too
    kept_replies: str | None  # folder of recorded replies of an endpoint; "" for one in the workdir
    wandb_project: str  # "" for none
    values: Mapping[str, Any]  # the whole configuration, which a restart compares and W&B shows
