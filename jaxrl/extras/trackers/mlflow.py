"""Tracker that logs metrics to MLflow."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.config.schema import flatten_config
from jaxrl.extras.trackers.run_id import read_or_create_id
from jaxrl.logs.records import Record
from jaxrl.logs.writers import Table

TABLES_TAG = "mlflow.loggedArtifacts"
"""Tag that lists the artifacts that MLflow shows as tables."""

MAX_TABLES = 100
"""Maximum number of tables in `TABLES_TAG`, which lists the newest tables. MLflow limits a tag to
8,000 characters."""

MAX_PARAMS, MAX_METRICS = 100, 1000
"""MLflow's limits on parameters and metrics in one request."""


class MLflow:
    """Tracker for an MLflow run, stored where `MLFLOW_TRACKING_URI` says.

    The step in charts is the record's index, and `step` is one of the metrics. Tables are run
    artifacts in the format of `mlflow.log_table`. Calling `mlflow.log_table` would rewrite all
    earlier rows at every step, or list every file in a tag of limited length.
    """

    package = "mlflow"

    def __init__(self, workdir: Path, project: str, config: Mapping[str, Any]):
        """Start or resume the MLflow run. `project` is the name of the MLflow experiment."""
        from mlflow import entities  # an optional dependency
        from mlflow.tracking import MlflowClient

        self._entities, self._client = entities, MlflowClient()

        def create_run() -> str:
            experiment = self._client.get_experiment_by_name(project)
            experiment_id = (
                self._client.create_experiment(project)
                if experiment is None
                else experiment.experiment_id
            )
            run = self._client.create_run(experiment_id, run_name=workdir.name)
            params = [
                entities.Param(key, str(value)) for key, value in flatten_config(config).items()
            ]
            for start in range(0, len(params), MAX_PARAMS):
                batch = params[start : start + MAX_PARAMS]
                self._client.log_batch(run.info.run_id, params=batch)
            return str(run.info.run_id)

        self._run_id = read_or_create_id(workdir, "mlflow", create_run)
        self._client.update_run(self._run_id, status="RUNNING")
        steps = [m.step for m in self._client.get_metric_history(self._run_id, "step")]
        self._num_logged = max(steps, default=-1) + 1
        tags = self._client.get_run(self._run_id).data.tags
        self._tables: list[dict[str, str]] = json.loads(tags.get(TABLES_TAG, "[]"))

    def write(self, index: int, record: Record, tables: Mapping[str, Table]) -> None:
        """Log a record and its tables, unless MLflow already has them."""
        if index < self._num_logged:
            return
        for name, rows in tables.items():
            path = f"{name}/{index:06d}.json"
            content = {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
            self._client.log_text(self._run_id, json.dumps(content, ensure_ascii=False), path)
            self._tables = [*self._tables, {"path": path, "type": "table"}][-MAX_TABLES:]
        if tables:
            self._client.set_tag(self._run_id, TABLES_TAG, json.dumps(self._tables))
        # `step` comes last: it marks the record as complete.
        numbers = {name: x for name, x in record.items() if isinstance(x, int | float)}
        numbers["step"] = numbers.pop("step")
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(to_metric_name(name), float(x), now_ms, index)
            for name, x in numbers.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            batch = metrics[start : start + MAX_METRICS]
            self._client.log_batch(self._run_id, metrics=batch)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def to_metric_name(name: str) -> str:
    """Replace characters that MLflow does not allow in the name of a metric."""
    return re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"))
