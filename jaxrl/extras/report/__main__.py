"""The command: `python -m jaxrl.extras.report RUN [RUN ...] [--out=FILE] [--ignore=KEY,KEY]`."""

from __future__ import annotations

from jaxrl.runtime.preemption import end_on_signals
from jaxrl.utils.text import printable, replace_unencodable

if __name__ == "__main__":
    end_on_signals("ended", code=None)  # also while what draws is loaded
    replace_unencodable()

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.extras.report import write_report
from jaxrl.utils.files import system_message


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a report of the runs that are named."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.extras.report",
        description="Writes a page about a run, or one that compares several.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's workdir")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the run")
    parser.add_argument(
        "--ignore",
        default="",
        metavar="KEY,KEY",
        help="keys or sections of the configuration that may differ among the seeds of one curve, "
        "such as model,tasks",
    )
    arguments = parser.parse_args(argv)
    ignore = [key for key in arguments.ignore.split(",") if key]

    def log(text: str) -> None:
        print(printable(text))

    try:
        log(str(write_report(arguments.runs, out=arguments.out, ignore=ignore, log=log)))
    except OSError as error:
        sys.exit(printable(f"error: {system_message(error) or error}"))
    except Exception as error:  # a file with something in it that nobody thought of
        runs = ", ".join(map(str, arguments.runs))
        sys.exit(printable(f"error: no report of {runs}: {error!r}"))


if __name__ == "__main__":
    main()
