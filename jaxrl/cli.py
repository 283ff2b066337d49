"""The command `jaxrl`: the programs of this package, each by one word.

    jaxrl quickstart                              a small world, and a model that learns to search
    jaxrl train --config=FILE --workdir=RUN       as `python -m jaxrl.launch`
    jaxrl plan --config=FILE                      the memory each device needs; runs nothing
    jaxrl chat RUN [QUESTION ...]                 questions for a trained model
    jaxrl view RUN [RUN ...]                      runs in a browser, live and token by token
    jaxrl report RUN [RUN ...]                    the same page as one file, to keep and to send
    jaxrl serve RUN_OR_FOLDER                     an endpoint as OpenAI's, over jaxrl's own engine
    jaxrl tiny-model --texts=FILE --out=FOLDER    a model of random weights, to rehearse a run

Everything behind the word is the program's own; `jaxrl WORD --help` lists it. A file
`configs/...` that the working folder does not have is the one that came with the package.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxrl.utils.text import replace_unencodable

PROGRAMS = {
    "train": ("jaxrl.launch",),
    "plan": ("jaxrl.launch", "--plan"),
    "chat": ("jaxrl.extras.chat",),
    "view": ("jaxrl.extras.view",),
    "report": ("jaxrl.extras.view", "--static"),
    "serve": ("jaxrl.extras.serve",),
    "tiny-model": ("examples.tiny_model",),
}
"""The module that runs for a word, and arguments before the user's."""

QUICKSTART = ("--config=configs/quickstart.py", "--workdir=runs/quickstart")
WORLD = Path("data/quickstart")


def bundle() -> Path:
    """Return the folder that holds configs/ and examples/: of the wheel, else of the checkout."""
    package = Path(__file__).parent
    installed = package / "bundled"
    return installed if installed.is_dir() else package.parent


def main() -> None:
    """Run the program that the first argument names."""
    replace_unencodable()
    word, *arguments = sys.argv[1:] or ["--help"]
    if word in ("-h", "--help", "help"):
        print(__doc__.partition("\n\n")[2], end="")
        return
    # Last, so that a user's own configs/ and modules come first.
    sys.path.append(str(bundle()))
    if word == "quickstart":
        # The last file of the world: without it an earlier start was interrupted.
        is_made = (WORLD / "questions_eval.jsonl").is_file()
        if not is_made and not {"-h", "--help", "--helpfull"} & {*arguments}:
            world = importlib.import_module("examples.quickstart_world")
            world.main([f"--out={WORLD}", "--seed=0"])
        run("jaxrl.launch", [*QUICKSTART, *arguments])
    if word not in PROGRAMS:
        sys.exit(f"error: jaxrl {word}: expected {', '.join(['quickstart', *PROGRAMS])}.")
    module, *own = PROGRAMS[word]
    run(module, [*own, *arguments])


def run(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run a module as `python -m` does, in this process; it ends with its exit code."""
    sys.argv[1:] = [came_with_the_package(argument) for argument in arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def came_with_the_package(argument: str) -> str:
    """Return the argument with the whole path of a `configs/...` that is only in the bundle.

    A config file may be followed by a colon and its own argument.
    """
    flag, equals, value = argument.rpartition("=")
    path, colon, rest = value.partition(":")
    if not path.startswith("configs/") or Path(path).exists() or not (bundle() / path).exists():
        return argument
    return f"{flag}{equals}{bundle() / path}{colon}{rest}"


if __name__ == "__main__":
    main()
