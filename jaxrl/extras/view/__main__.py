"""Serve runs in a browser or export them to an HTML file: `python -m jaxrl.extras.view RUN`."""

from __future__ import annotations

from jaxrl.runtime.preemption import exit_on_signals

if __name__ == "__main__":
    exit_on_signals("ended", code=None)  # also during the imports below

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.extras.view.reader import open_runs
from jaxrl.extras.view.report import write_report
from jaxrl.extras.view.server import ViewServer
from jaxrl.extras.view.viewer import Viewer
from jaxrl.utils.files import format_os_error
from jaxrl.utils.text import escape_control_chars, replace_unencodable_output

PORT = 8780


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the page until a signal arrives or, with `--static`, write it to a file."""
    replace_unencodable_output()
    is_report = "--static" in (sys.argv[1:] if argv is None else argv)  # `jaxrl report`
    parser = argparse.ArgumentParser(
        prog="jaxrl report" if is_report else "jaxrl view",
        description="Write the page of `jaxrl view` to an HTML file."
        if is_report
        else "Show runs in a browser on this machine, live.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="workdir of a run")
    add("--static", action="store_true", help=argparse.SUPPRESS)
    if is_report:
        add("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    else:
        add("--port", type=int, default=PORT, help=f"default: {PORT}; 0 for any free port")
    add(
        "--ignore",
        type=lambda text: text.split(","),
        default=[],
        metavar="KEY,KEY",
        help="keys or sections that may differ between runs of a group, such as model,tasks",
    )
    arguments = parser.parse_args(argv)

    def log(text: str) -> None:
        print(escape_control_chars(text), flush=True)

    try:
        if arguments.static:
            out, ignore = arguments.out, arguments.ignore
            log(str(write_report(arguments.runs, out=out, ignore=ignore, log=log)))
            return
        if not 0 <= arguments.port < 2**16:
            raise ValueError(f"--port is {arguments.port}; expected 0 to 65535.")
        server = ViewServer(Viewer(open_runs(arguments.runs), arguments.ignore), arguments.port)
    except (OSError, ValueError) as error:
        known = format_os_error(error) if isinstance(error, OSError) else None
        sys.exit(escape_control_chars(f"error: {known or error}"))
    log(f"http://{server.hosts[0]}/ (Ctrl-C to end)")
    server.serve_forever()


if __name__ == "__main__":
    main()
