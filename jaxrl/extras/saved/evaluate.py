"""Evaluate a saved run: `jaxrl evaluate RUN [--step=N] [--config.key=value]`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.builders.saved_run import format_error_line
from jaxrl.runtime.resume import read_launch_folder
from jaxrl.utils.text import replace_unencodable_output

STAGES = "--config.stages=('evaluate',)"


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jaxrl evaluate`."""
    parser = argparse.ArgumentParser(
        prog="jaxrl evaluate",
        description="Evaluate the model of a run on its held-out tasks. Scores are printed and "
        "written to RUN/eval. Without checkpoints, the model of config.model.path is evaluated.",
        epilog="--config.key=value sets a key, such as --config.eval.samples=8. "
        "Example: jaxrl evaluate runs/my_run --step=80",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="workdir of the run")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint; default: the newest")
    arguments, settings = parser.parse_known_args(argv)
    evaluate(arguments.run, arguments.step, settings)


def evaluate(run: Path, step: int | None, settings: Sequence[str]) -> None:
    """Run the `evaluate` stage of a run, in the folder in which the run was started."""
    run = run.absolute()
    if not (run / "config.json").is_file():
        sys.exit(
            format_error_line(
                FileNotFoundError(f"{run} has no config.json; expected a run's workdir.")
            )
        )
    os.chdir(read_launch_folder(run))
    config = Path(__file__).with_name("config.py")
    steps = [] if step is None else [f"--step={step}"]
    sys.argv[1:] = [f"--config={config}:{run}", f"--workdir={run}", STAGES, *steps, *settings]
    runpy.run_module("jaxrl.launch", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    replace_unencodable_output()
    main()
