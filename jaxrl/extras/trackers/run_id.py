"""Identifiers of a run in trackers, stored in the workdir."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

from jaxrl.utils.files import atomic_write


def read_or_create_id(workdir: Path, tracker: str, create: Callable[[], str]) -> str:
    """Return the identifier in the workdir's file `<tracker>/run_id`; create a missing file."""
    file = workdir / tracker / "run_id"
    if not file.exists():
        run_id = create()
        with atomic_write(file) as temp_path:
            temp_path.write_text(run_id, encoding="utf-8")
    return file.read_text(encoding="utf-8")


def make_random_id() -> str:
    """Return a random identifier."""
    return uuid.uuid4().hex[:12]
