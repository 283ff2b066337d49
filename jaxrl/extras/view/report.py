"""Self-contained HTML report of runs, and a table that compares them in the terminal."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from jaxrl.extras.view.facts import list_suites
from jaxrl.extras.view.reader import open_runs
from jaxrl.extras.view.viewer import Viewer, sanitize_json
from jaxrl.logs.console import make_console
from jaxrl.logs.results import format_scores, read_scores
from jaxrl.utils.files import open_atomic

MAX_ANSWERS = 100
"""Maximum number of held-out answers per run and suite in the static page."""

MAX_TRAJECTORIES = 32
"""Maximum number of trajectories per run in the static page."""

MAX_DETAIL_BYTES = 8 * 2**20
"""Maximum total size of complete answers and trajectories in the static page, in bytes."""


def write_report(
    workdirs: Sequence[Path],
    *,
    out: Path | None = None,
    ignore: Sequence[str] = (),
    log: Callable[[str], None] | None = None,
) -> Path:
    """Write a self-contained HTML report of runs.

    Args:
        workdirs: Folders of the runs, finished or not.
        out: Path of the report; by default, `report.html` in the run's folder, or in the common
            parent folder of several runs.
        ignore: Config keys or sections that may differ between runs of a group.
        log: Function that receives lines about a single run, or a table of several runs.

    Returns:
        Path of the report.

    Raises:
        FileNotFoundError: A folder is not a run.
    """
    viewer = Viewer(open_runs(workdirs), ignore)
    viewer.refresh()
    if out is None:
        folders = [run.workdir for run in viewer.runs]
        parents = [folder.resolve().parent for folder in folders]
        folder = folders[0] if len(folders) == 1 else Path(os.path.commonpath(parents))
        out = folder / "report.html"
    page = render_page(collect_responses(viewer))
    with open_atomic(out) as file:
        file.write(page)
    if log and len(viewer.runs) > 1:
        log(format_comparison(viewer.respond("overview")["comparison"]))
    elif log:
        [run] = viewer.runs
        last_step = run.records[-1]["step"] if run.records else 0
        for line in format_scores(read_scores(run.workdir, last_step)):
            log(line)
    return out


def write_report_or_warn(workdir: Path, log: Callable[[str], None]) -> None:
    """Write the report at the end of a run; log a warning instead of raising errors."""
    try:
        log(f"report: {write_report([workdir], log=log)}")
    except Exception as error:
        command = f"jaxrl report {shlex.quote(str(workdir))}"
        log(f"warning: no report: {error!r}. The run is complete; to try again: {command}")


def collect_responses(viewer: Viewer) -> dict[str, Any]:
    """Collect the JSON responses to embed in the static page, keyed by address.

    Complete trajectories come first, then complete answers, up to `MAX_DETAIL_BYTES`.
    """
    data = {"overview": viewer.respond("overview")}
    details: list[str] = []
    for number, run in enumerate(viewer.runs):
        data[f"curves/{number}"] = viewer.respond(f"curves/{number}")
        table = data[f"trajectories/{number}/0/0/0"] = viewer.respond(
            f"trajectories/{number}/0/0/0"
        )
        table["rows"] = select_rows(table["rows"])
        used_tasks = {row[2] for row in table["rows"]}
        table["tasks"] = [t if n in used_tasks else ["", ""] for n, t in enumerate(table["tasks"])]
        details += [f"trajectory/{number}/{row[0]}/{row[1]}" for row in table["rows"]]
        for suite in range(len(list_suites(run))):
            address = f"answers/{number}/{suite}"
            data[address] = viewer.respond(address)[:MAX_ANSWERS]
            details += [detail for row in data[address] for detail in row["addresses"]]
    size = 0
    for address in sorted(details, key=lambda address: address.startswith("answer")):
        try:
            data[address] = viewer.respond(address)
        except (LookupError, ValueError, OSError) as error:
            data[address] = sanitize_json({"error": str(error)})
        size += len(json.dumps(data[address]))
        if size > MAX_DETAIL_BYTES:
            break
    return data


def select_rows(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """Select rows for the static page: half from the first steps, half from the last step."""
    ordered = sorted(rows, key=lambda row: (row[0], row[1]))
    half = MAX_TRAJECTORIES // 2
    if len(ordered) <= 2 * half:
        return ordered
    return ordered[:half] + [row for row in ordered[half:] if row[0] == ordered[-1][0]][:half]


def render_page(data: dict[str, Any]) -> str:
    """Return the HTML page with embedded style, script and data.

    A Content-Security-Policy allows only the embedded style and script, identified by their hashes.
    """
    folder = Path(__file__).parent
    html, css, js = (
        (folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )

    def compute_csp_hash(text: str) -> str:
        digest = hashlib.sha256(text.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    policy = (
        f"default-src 'none'; script-src {compute_csp_hash(js)}; "
        f"style-src {compute_csp_hash(css)}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )
    # In JSON, "<" occurs only in strings. Escape it, so that text cannot end the script element.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    data_tag = f'<script type="application/json" id="data">{text}</script>'
    head, rest = html.split('<link rel="stylesheet" href="/page.css">')
    body, end = rest.split('<script src="/page.js" defer></script>')
    return f"{head}{meta}<style>{css}</style>{body}{data_tag}<script>{js}</script>{end}"


def format_comparison(comparison: dict[str, Any]) -> str:
    """Format a comparison as a table that fits the terminal but never truncates numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for position, name in enumerate(comparison["columns"]):
        head = Text(name.replace(", ", ",\n"))
        # Only names and settings may wrap: wrapped numbers would be misread.
        table.add_column(head, overflow="fold", no_wrap=position > 0)
    for row in comparison["rows"]:
        # Text, not markup: names and settings are untrusted.
        table.add_row(*(Text(f"{value}\n{note}".rstrip()) for value, note in row["cells"]))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    console = make_console(file=io.StringIO(), width=width, color_system=None)
    console.width = max(width, Measurement.get(console, console.options, table).minimum)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
