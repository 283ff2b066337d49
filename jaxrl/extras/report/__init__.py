"""The report of one run or several: `python -m jaxrl.extras.report RUN`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path


def write_report(
    workdirs: Sequence[Path],
    *,
    out: Path | None = None,
    ignore: Sequence[str] = (),
    log: Callable[[str], None] | None = None,
) -> Path:
    """Writes the page, and beside it pictures of its charts.

    Args:
        workdirs: of the runs, finished or not; one that is named twice counts once.
        out: the file, whose pictures go to `<its name>_plots/`; by default `report.html` in the
            run, or where several runs lie, with `plots/`.
        ignore: keys or sections of the configuration in which runs of one group may differ,
            besides the seed.
        log: told what the run came to, in a line, or several of them in a table.

    Returns:
        Where the page is.

    Raises:
        FileNotFoundError: one of them is no run.
    """
    # Imported here: a run loads matplotlib when it has something to draw.
    from jaxrl.extras.report.curves import CHART_NAMES, charts_of, group_runs
    from jaxrl.extras.report.drawing import png
    from jaxrl.extras.report.facts import facts_of, gain
    from jaxrl.extras.report.page import page
    from jaxrl.extras.report.reading import read_run
    from jaxrl.utils.files import written_whole

    folders = {workdir.resolve(): workdir for workdir in workdirs}
    runs = [facts_of(read_run(workdir)) for workdir in folders.values()]
    groups = group_runs(runs, ignore)
    charts, zero = charts_of(groups)
    plots = "plots" if out is None else f"{out.stem}_plots"
    if out is None:
        [first, *others] = folders
        out = Path(os.path.commonpath(f.parent for f in folders) if others else first)
        out /= "report.html"
    for chart in charts:
        png(chart, out.parent / plots / f"{chart.name}.png")
    for name in set(CHART_NAMES) - {chart.name for chart in charts}:
        (out.parent / plots / f"{name}.png").unlink(missing_ok=True)
    with written_whole(out) as file:
        file.write(page(groups, charts, zero, plots))
    if log and len(runs) > 1:
        from jaxrl.extras.report.table import table

        log(table(groups))
    elif log and (summary := gain(runs[0])):
        log(summary)
    return out


def write_or_warn(workdir: Path, log: Callable[[str], None]) -> None:
    """Writes the report at the end of a run; an error in it is a warning, as the run is whole.

    Logs what the run came to, in a line, and where the page is.
    """
    try:
        log(f"report: {write_report([workdir], log=log)}")
    except Exception as error:
        log(
            f"warning: no report: {error!r}. The run is whole; "
            f"python -m jaxrl.extras.report {shlex.quote(str(workdir))} tries again."
        )
