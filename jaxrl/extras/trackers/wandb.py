"""Tracker that logs metrics to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.extras.trackers.run_id import make_random_id, read_or_create_id
from jaxrl.logs.records import Record
from jaxrl.logs.writers import Table


class WandB:
    """Tracker for a Weights & Biases run, with `step` as the x-axis of charts."""

    package = "wandb"

    def __init__(self, workdir: Path, project: str, config: Mapping[str, Any]):
        """Start or resume the W&B run."""
        import wandb  # an optional dependency

        self._make_table = wandb.Table
        self._run = wandb.init(
            project=project,
            id=read_or_create_id(workdir, "wandb", make_random_id),
            resume="allow",
            name=workdir.name,
            dir=str(workdir),
            config=dict(config),
        )
        self._run.define_metric("*", step_metric="step")
        self._num_logged = self._run.step

    def write(self, index: int, record: Record, tables: Mapping[str, Table]) -> None:
        """Send a record and its tables, unless W&B already has them."""
        if index < self._num_logged:
            return
        values = {
            name: self._make_table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
            for name, rows in tables.items()
        }
        self._run.log({**record, **values}, step=index)

    def close(self) -> None:
        """Wait until all records are sent or, if offline, written to disk."""
        self._run.finish()
