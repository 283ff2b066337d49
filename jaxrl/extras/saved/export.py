"""Export a saved run: `jaxrl export RUN [--step=N] [--out=FOLDER]`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.builders.components import build_model, export_model, read_model_and_tokenizer
from jaxrl.builders.method import build_policy_architecture
from jaxrl.builders.saved_run import (
    fit_config_to_host,
    format_error_line,
    load_weights,
    read_config,
    resolve_for_inference,
)
from jaxrl.config.schema import LOCAL_MODEL
from jaxrl.logs.display import Display
from jaxrl.runtime.checkpoint import CheckpointError, list_steps
from jaxrl.runtime.resume import check_checkpoint_exists, read_launch_folder
from jaxrl.runtime.sharding import make_mesh
from jaxrl.utils.text import replace_unencodable_output


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jaxrl export`; print the folder of the model."""
    parser = argparse.ArgumentParser(
        prog="jaxrl export",
        description="Write the model of a checkpoint in Hugging Face format, to FOLDER/export; "
        "an adapter also in PEFT's format, to FOLDER/adapter. The run does not change.",
        epilog="Example: jaxrl export runs/my_run --step=80 --out=models/my_model",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="workdir of the run")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint; default: the newest")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default: RUN/steps/N for step N"
    )
    arguments = parser.parse_args(argv)
    display = Display()
    try:
        folder = export_run(arguments.run, arguments.out, display, step=arguments.step)
    except (OSError, ValueError, CheckpointError) as error:
        sys.exit(format_error_line(error))
    finally:
        display.stop()
    print(folder / "export")


def export_run(run: Path, out: Path | None, display: Display, *, step: int | None = None) -> Path:
    """Export the model of a run's checkpoint in Hugging Face format.

    Args:
        run: Workdir of the run.
        out: Output folder; by default, `steps/<step>` in the run's workdir.
        display: Progress display.
        step: Step of the checkpoint; the latest by default.

    Returns:
        The output folder.

    Raises:
        FileNotFoundError, ValueError: The run or the step does not exist.
        CheckpointError: The checkpoint is damaged.
    """
    run = run.absolute()
    config = read_config(run)
    steps = list_steps(run / "checkpoints")
    if step is not None:
        check_checkpoint_exists(run / "checkpoints", step)
    elif not steps:
        raise FileNotFoundError(f"{run} has no checkpoint to export; train for a step first.")
    folder = (out or run / "steps" / str(step or steps[-1])).absolute()
    with contextlib.chdir(read_launch_folder(run)):
        config.policy.name = LOCAL_MODEL
        resolved = resolve_for_inference(config, has_overrides=False)
        fit_config_to_host(config)
        mesh = make_mesh(**config.mesh)
        architecture, tokenizer = read_model_and_tokenizer(
            resolved, mesh, is_local=True, log=display.log
        )
        policy = build_policy_architecture(resolved, architecture)
        model = build_model(resolved, mesh, policy, tokenizer)
        params, source = load_weights(model, config, run, None, display, step=step)
        display.log(f"weights: {source}")
        export_model(model, config.model.path, params, folder)
    return folder


if __name__ == "__main__":
    replace_unencodable_output()
    main()
