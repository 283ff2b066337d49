"""The command: `python -m jaxrl.extras.view RUN [RUN ...] [--port=N]`."""

from __future__ import annotations

from jaxrl.runtime.preemption import end_on_signals
from jaxrl.utils.text import printable, replace_unencodable

if __name__ == "__main__":
    end_on_signals("ended", code=None)
    replace_unencodable()

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.extras.view.pages import Pages, open_runs
from jaxrl.extras.view.server import Server
from jaxrl.utils.files import system_message

PORT = 8780


def main(argv: Sequence[str] | None = None) -> None:
    """Serves the page of the runs that are named, until a signal ends it."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.extras.view",
        description="Shows runs in a browser on this machine: curves, trajectories, questions.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's workdir")
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"default: {PORT}; 0: any that is free"
    )
    arguments = parser.parse_args(argv)
    try:
        if not 0 <= arguments.port < 2**16:
            raise ValueError(f"--port={arguments.port}; expected 0 to 65535.")
        pages = Pages(open_runs(arguments.runs))
        server = Server(pages, arguments.port)
    except (OSError, ValueError) as error:
        known = system_message(error) if isinstance(error, OSError) else None
        sys.exit(printable(f"error: {known or error}"))
    pages.follow()
    print(f"{server.address} (end with Ctrl-C)", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
