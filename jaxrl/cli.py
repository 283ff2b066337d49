"""The `jaxrl` command.

    jaxrl quickstart                              generate a small dataset and train on it
    jaxrl train --config=FILE --workdir=RUN       the same as `python -m jaxrl.launch`
    jaxrl plan --config=FILE                      estimate memory per device, without running
    jaxrl audit --config=FILE                     compare the tasks with the search corpus
    jaxrl evaluate RUN                            evaluate a run's model or a checkpoint
    jaxrl export RUN                              write a checkpoint in Hugging Face format
    jaxrl view RUN [RUN ...]                      watch runs in a browser
    jaxrl report RUN [RUN ...]                    write the same page to an HTML file
    jaxrl chat RUN [QUESTION ...]                 chat with a trained model and its search engine
    jaxrl serve RUN_OR_MODEL                      serve an OpenAI- and Anthropic-compatible API
    jaxrl tiny-model --texts=FILE --out=FOLDER    create a tiny random model for test runs
    jaxrl --version                               print the version

`jaxrl COMMAND --help` lists a command's flags. If a path `configs/...` does not exist in the
working directory, the file that ships with the package is used.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from jaxrl.utils.text import replace_unencodable_output

SUBCOMMANDS = {
    "train": ("jaxrl.launch",),
    "plan": ("jaxrl.launch", "--plan"),
    "audit": ("jaxrl.extras.audit",),
    "evaluate": ("jaxrl.extras.saved.evaluate",),
    "export": ("jaxrl.extras.saved.export",),
    "chat": ("jaxrl.extras.chat",),
    "view": ("jaxrl.extras.view",),
    "report": ("jaxrl.extras.view", "--static"),
    "serve": ("jaxrl.extras.serve",),
    "tiny-model": ("examples.tiny_model",),
}
"""Module of each command, and the arguments that precede the user's."""

QUICKSTART = ("--config=configs/quickstart.py", "--workdir=runs/quickstart")
WORLD_FOLDER = Path("data/quickstart")


def find_bundle_folder() -> Path:
    """Return the folder that contains configs/ and examples/: in the wheel or the checkout."""
    package = Path(__file__).parent
    installed = package / "bundled"
    return installed if installed.is_dir() else package.parent


def main() -> None:
    """Run the command given by the first argument."""
    replace_unencodable_output()
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help", "help"):
        print(__doc__.partition("\n\n")[2], end="")
        return
    if command == "--version":
        print(f"jaxrl {version('jaxrl')}")
        return
    # Append the folder, so that the user's configs/ and modules take precedence.
    sys.path.append(str(find_bundle_folder()))
    if command == "quickstart":
        # Generate the dataset unless its last file exists.
        has_world = (WORLD_FOLDER / "questions_eval.jsonl").is_file()
        if not (has_world or "--help" in arguments):
            world = importlib.import_module("examples.quickstart_world")
            world.main([f"--out={WORLD_FOLDER}", "--seed=0"])
        run_module("jaxrl.launch", [*QUICKSTART, *arguments])
    if command not in SUBCOMMANDS:
        sys.exit(f"error: jaxrl {command}: expected {', '.join(['quickstart', *SUBCOMMANDS])}.")
    module, *preset_arguments = SUBCOMMANDS[command]
    run_module(module, [*preset_arguments, *arguments])


def run_module(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run a module like `python -m`, but in this process, and exit with its exit code."""
    sys.argv[1:] = [resolve_bundled_path(argument) for argument in arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def resolve_bundled_path(argument: str) -> str:
    """Return the argument, with a `configs/...` path that does not exist replaced.

    The replacement is the file that ships with the package. Also handles
    `--flag=configs/file.py:argument`.
    """
    flag, equals, value = argument.rpartition("=")
    path, colon, rest = value.partition(":")
    if (
        not path.startswith("configs/")
        or Path(path).exists()
        or not (find_bundle_folder() / path).exists()
    ):
        return argument
    return f"{flag}{equals}{find_bundle_folder() / path}{colon}{rest}"


if __name__ == "__main__":
    main()
