"""Rich console for terminals, files and notebooks."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def make_console(**settings: Any) -> Console:
    """Return a rich console that prints plain lines in a notebook.

    By default, rich turns every line into HTML output in a notebook, even if the console writes to
    a file.

    Args:
        settings: Arguments of rich's `Console`.
    """
    if Console().is_jupyter:
        settings = {"force_terminal": False, **settings}
    return Console(force_jupyter=False, **settings)
