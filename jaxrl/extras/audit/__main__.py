"""Compare a run's tasks with its corpus: `jaxrl audit --config=FILE`."""

from __future__ import annotations

from jaxrl.runtime.preemption import exit_on_signals

if __name__ == "__main__":
    exit_on_signals("ended", code=None)  # also during the imports below

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from jaxrl.builders.saved_run import format_error_line
from jaxrl.builders.validation import validate
from jaxrl.config.loading import load_config_file, parse_overrides
from jaxrl.envs.base import ToolError
from jaxrl.extras.audit.statistics import Statistic, compute_statistics
from jaxrl.logs.console import make_console
from jaxrl.logs.display import Display
from jaxrl.utils.files import open_atomic
from jaxrl.utils.text import replace_unencodable_output


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jaxrl audit`."""
    parser = argparse.ArgumentParser(
        prog="jaxrl audit",
        description="Check the tasks of a run: accepted answers in no document, questions that "
        "retrieve an answer, answers that earn nothing, duplicates, and prompt lengths. Prints a "
        "table and writes a JSON file with the ids of the tasks. Reads the corpus once, at several "
        "minutes per million passages, and builds the search index if there is none.",
        epilog="--config.key=value sets a key. "
        "Example: jaxrl audit --config=configs/quickstart.py --max_tasks=500",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="FILE.py or FILE.py:ARGUMENT of the run")
    add("--max_tasks", type=int, default=0, metavar="N", help="sampled per split; default: all")
    add("--out", type=Path, default=Path("audit.json"), metavar="FILE", help="default: audit.json")
    arguments, settings = parser.parse_known_args(argv)
    display = Display(is_enabled=True)
    try:
        if arguments.max_tasks < 0:
            raise ValueError(f"--max_tasks is {arguments.max_tasks}; expected 0 or more.")
        overrides = parse_overrides(settings)
        # The config file and dotted names may import modules from the config's folder.
        sys.path.append(str(Path(arguments.config.partition(":")[0]).absolute().parent))
        config = load_config_file(arguments.config)
        config.update_from_flattened_dict(overrides)
        statistics: dict[str, dict[str, Statistic]] = {}
        for name, environment in validate(config).environments.items():
            by_split = compute_statistics(
                environment,
                max_tasks=arguments.max_tasks,
                show=display.show_activity,
                log=display.log,
            )
            statistics |= {f"{name} {split}".strip(): values for split, values in by_split.items()}
        with open_atomic(arguments.out) as file:
            file.write(json.dumps(statistics, indent=2, ensure_ascii=False) + "\n")
    except (OSError, ValueError, ToolError) as error:
        sys.exit(format_error_line(error))
    finally:
        display.stop()
    console = make_console(highlight=False, soft_wrap=True)
    console.print(format_table(statistics))
    console.print(f"the ids of these tasks are in {arguments.out}", markup=False, emoji=False)


def format_table(statistics: Mapping[str, Mapping[str, Statistic]]) -> Table:
    """Format the statistics as a table with a column per split."""
    table = Table()
    table.add_column("tasks")
    for split in statistics:
        table.add_column(split, justify="right")
    for name in dict.fromkeys(name for split in statistics.values() for name in split):
        cells = [
            f"{statistic['count']:,} of {statistic['of']:,} ({statistic['share']:.1%})"
            if (statistic := split.get(name))
            else ""
            for split in statistics.values()
        ]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    replace_unencodable_output()
    main()
