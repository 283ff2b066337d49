"""A run, or several, as one page to look at and pictures to keep: `python -m jaxrl.report RUN`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path


def write_report(
    workdirs: Sequence[Path], *, out: Path | None = None, ignore: Sequence[str] = ()
) -> Path:
    """Writes the page, and `plots/*.png` beside it.

    Args:
        workdirs: of the runs, finished or not.
        out: the file; by default `report.html` in the run, or where several runs lie.
        ignore: keys or sections of the configuration in which runs of one group may differ,
            besides the seed.

    Returns:
        Where the page is.

    Raises:
        FileNotFoundError: one of them is no run.
    """
    # Imported here: a run loads matplotlib when it has something to draw.
    from jaxrl.report.curves import charts_of, group_runs
    from jaxrl.report.drawing import png
    from jaxrl.report.facts import facts_of
    from jaxrl.report.page import page
    from jaxrl.report.reading import read_run

    runs = [facts_of(read_run(workdir)) for workdir in workdirs]
    groups = group_runs(runs, ignore)
    charts, zero = charts_of(groups)
    if out is None:
        folders = [workdir.resolve() for workdir in workdirs]
        folder = folders[0] if len(folders) == 1 else os.path.commonpath(f.parent for f in folders)
        out = Path(folder) / "report.html"
    plots = out.parent / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        png(chart, plots / f"{chart.name}.png")
    unfinished = out.with_name(f"{out.name}.tmp")
    # Text of a model may hold halves of characters, which UTF-8 has no bytes for.
    unfinished.write_bytes(page(groups, charts, zero, out.parent).encode("utf-8", "replace"))
    unfinished.replace(out)
    return out


def write_or_warn(workdir: Path, say: Callable[[str], None]) -> None:
    """The report at the end of a run, which no mistake in it may spoil."""
    try:
        say(f"report: {write_report([workdir])}")
    except Exception as error:
        say(
            f"warning: no report: {error!r}. The run is whole; "
            f"python -m jaxrl.report {workdir} tries again."
        )
