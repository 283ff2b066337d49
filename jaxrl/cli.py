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

DESCRIPTIONS = {
    "quickstart": """\
jaxrl quickstart [--config.a.b=v]

Generate a small dataset and model in data/quickstart, and train on it in runs/quickstart. Takes
two to five minutes on a laptop CPU. If the run exists, continue from its latest checkpoint. The
report is runs/quickstart/report.html. All flags of `jaxrl train` apply.

Example:
  jaxrl quickstart --config.seed=1
""",
    "plan": """\
jaxrl plan --config=FILE [--plan_devices=N --plan_memory_gib=GIB] [--config.a.b=v]

Estimate the memory that each device needs, from the configuration and the model's config.json.
Takes seconds, loads no weights and writes nothing unless --plan_json names a file. The exit code
is 0 if the run fits in memory, else 1.

Example:
  jaxrl plan --config=configs/search_r1.py --plan_devices=8 --plan_memory_gib=80

Flags:
""",
}
"""Help texts of the commands that share a module with `train`, whose help is its docstring."""

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
    if command in DESCRIPTIONS and {"-h", "--help"} & {*arguments}:
        print_help(command)
        return
    if command == "quickstart":
        # Generate the dataset unless its last file exists.
        if not (WORLD_FOLDER / "questions_eval.jsonl").is_file():
            world = importlib.import_module("examples.quickstart_world")
            world.main([f"--out={WORLD_FOLDER}", "--seed=0"])
        run_module("jaxrl.launch", [*QUICKSTART, *arguments])
    if command not in SUBCOMMANDS:
        sys.exit(f"error: jaxrl {command}: expected {', '.join(['quickstart', *SUBCOMMANDS])}.")
    module, *preset_arguments = SUBCOMMANDS[command]
    run_module(module, [*preset_arguments, *arguments])


def print_help(command: str) -> None:
    """Print a command's description in `DESCRIPTIONS`, and the flags that start with its name."""
    print(DESCRIPTIONS[command], end="")
    launch = importlib.import_module("jaxrl.launch")
    for flag in launch.flags.FLAGS.get_key_flags_for_module(launch):
        if flag.name.startswith(f"{command}_"):
            print(f"  --{flag.name:<16}  {flag.help}")


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
