"""A table of several runs for the terminal: their differing settings and their results."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from jaxrl.extras.report.curves import Group
from jaxrl.extras.report.facts import SUITES, held_out
from jaxrl.extras.report.page import interval, score, seconds, spread_of, tokens, visible

MAX_VALUE = 60  # characters shown of a setting's value: its beginning and its end


def table(groups: Sequence[Group]) -> str:
    """A line for each run, and for each group of seeds one of means, as wide as the terminal.

    It is wider where the numbers need more, and where the output is no terminal.
    """
    runs = [run for group in groups for run in group.runs]
    scores = list(dict.fromkeys(name for run in runs for name in held_out(run)))
    grid = Table(box=box.SIMPLE, pad_edge=False)
    grid.add_column("run", overflow="fold")
    if len(groups) > 1:
        grid.add_column("what differs", overflow="fold")
    # Names and settings are folded; a number that is cut is another number.
    grid.add_column("step", justify="right", no_wrap=True)
    for measure, suite in scores:
        head = Text(visible(f"{measure},\n{SUITES.get(suite, (suite,))[0]}"))
        grid.add_column(head, no_wrap=True)
    grid.add_column("tokens\nsampled", justify="right", no_wrap=True)
    grid.add_column("time", justify="right", no_wrap=True)

    def add(*cells: str) -> None:
        # Not as markup: names, keys and values are foreign text.
        grid.add_row(*(Text(cell) for cell in cells))

    for group in groups:
        settings = []
        for key, value in group.config.items():
            text, half = repr(value), MAX_VALUE // 2
            cut = text if len(text) <= MAX_VALUE else f"{text[:half]}…{text[-half:]}"
            settings.append(f"{key}={cut}")
        differs = [visible("\n".join(settings))] if len(groups) > 1 else []
        for run in group.runs:
            step = f"{run.files.records[-1]['step']:,}" if run.files.records else "–"
            cells = []
            for name in scores:
                before, after = held_out(run).get(name, (None, None))
                start = f"{score(before)} → " if before else ""
                cells.append(f"{start}{score(after)}\n{interval(after)}".rstrip())
            step += "" if run.is_finished else "\nnot finished"
            add(visible(run.name), *differs, step, *cells, tokens(run), seconds(run))
        if len(group.runs) > 1:
            means = []
            for name in scores:
                first, last, count = spread_of(group.runs, name)
                start = f"{first} → " if first else ""
                means.append(f"{start}{last}\nof {count} finished" if last else "–")
            add("mean ± deviation", *differs, "", *means, "", "")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.width = max(width, Measurement.get(console, console.options, grid).minimum)
    with console.capture() as lines:
        console.print(grid)
    return "\n".join(line.rstrip() for line in lines.get().splitlines() if line.strip())
