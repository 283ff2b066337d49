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
    """The section `eval`, and what evaluations read beside it.

    Attributes:
        correct: the reward part that makes an answer correct.
        has_python: the model may call `python`.
        has_results: something answers a turn.
        section: all of it, for the record.
        depends_on: every setting that a score depends on.
    """

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
    correct: str
    has_python: bool
    has_results: bool
    section: Mapping[str, Any]
    depends_on: Mapping[str, Any]


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
    """Settings of all stages.

    Attributes:
        model_path, architecture: what the run begins with, `model.path`, `model.architecture`.
        trajectories: of a step that are written; -1: all.
        tokens: with what the update knows of each token.
        kept_replies: where the replies of an endpoint's model are recorded; "": beside the run;
            None where they are not.
        wandb_project: that metrics also go to; "": none.
        values: the whole configuration as plain values, which a restart compares and W&B shows.
    """

    stages: tuple[str, ...]
    seed: int
    max_response_tokens: int
    max_failed_steps: int
    evaluation: Evaluation
    checkpoint: Checkpointing
    ledger: Costs
    model_path: str
    architecture: str
    trajectories: int
    tokens: bool
    kept_replies: str | None
    wandb_project: str
    values: Mapping[str, Any]
