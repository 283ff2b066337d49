"""Tracker that logs metrics to Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.extras.trackers.run_id import make_random_id, read_or_create_id
from jaxrl.logs.records import Record
from jaxrl.logs.writers import Table


class Trackio:
    """Tracker for a Trackio run, stored on this machine, in a Space or on a server.

    `TRACKIO_SPACE_ID` names the Space, and `TRACKIO_SERVER_URL` the server.

    The step in charts is the record's index.
    """

    package = "trackio"

    def __init__(self, workdir: Path, project: str, config: Mapping[str, Any]):
        """Start or resume the Trackio run."""
        import trackio  # an optional dependency

        self._trackio = trackio
        # Trackio finds a run by its name, which must be unique in the project.
        name = read_or_create_id(workdir, "trackio", lambda: f"{workdir.name}-{make_random_id()}")
        self._run = trackio.init(
            project=project, name=name, resume="allow", config=dict(config), embed=False
        )
        self._num_logged = self._run._next_step  # Trackio has no public attribute for it

    def write(self, index: int, record: Record, tables: Mapping[str, Table]) -> None:
        """Log a record and its tables, unless Trackio already has them."""
        if index < self._num_logged:
            return
        values = {name: x for name, x in record.items() if name != "step" and x is not None}
        values |= {
            name: self._trackio.Table(data=[dict(row) for row in rows])
            for name, rows in tables.items()
        }
        self._run.log(values, step=index)

    def close(self) -> None:
        """Wait until all records are stored."""
        self._trackio.finish()
