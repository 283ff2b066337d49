"""Every documented command is accepted by the program that it starts."""

import argparse
import importlib
import json
import re
import shlex
import sys

import pytest
from absl.testing import flagsaver

from jaxrl import launch
from jaxrl.builders.validation import validate
from jaxrl.cli import SUBCOMMANDS
from tests.helpers import ROOT, blocks, shown_config

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

PROMPTED = re.compile(r"""^(?:[A-Z_]+=(?:"[^"]*"|'[^']*'|[^\s"']*) +)+(?=\S)""")
DEPARTED = re.compile(
    r"(?:^|(?<=until ))(?:taskset -c \d )?(?:python -m ([\w.]+)|jaxrl ([\w-]+))(.*)$"
)


def commands_of(page):
    """The commands of a page, lines that go on joined, without variables before them."""
    for code in blocks(page, "sh"):
        for line in code.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+", " ", line.partition(" # ")[0].strip())
            if line and not line.startswith("#"):
                yield PROMPTED.sub("", line)


COMMANDS = [(page, line) for page in PAGES for line in commands_of(page)]
LARGER = next(line for _, line in COMMANDS if line.startswith("LARGER="))


def name(command):
    page, line = command
    return f"{page.stem}: {line[:60]}"


def module_and_arguments(line):
    """What `python -m` or `jaxrl` is given; None for another command."""
    found = DEPARTED.search(line)
    if not found:
        return None
    module, *own = SUBCOMMANDS[found[2]] if found[2] else (found[1],)
    given = found[3].replace("$LARGER", shlex.split(LARGER)[0].partition("=")[2])
    given = given.replace("$i", "0").replace("$lr", "1e-6")
    return module, [*own, *shlex.split(given.removesuffix("; do").removesuffix(" &"))]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the repository's own folders, configurations of pages and what they name."""
    folder = tmp_path_factory.mktemp("place")
    for own in ("configs", "examples", "benchmarks", "launch", "docs"):
        (folder / own).symlink_to(ROOT / own)
    for page, file, model in (
        (ROOT / "README.md", "my_run.py", "qwen3-4b"),
        (ROOT / "docs" / "guide.md", "first.py", "qwen2.5-0.5b"),
    ):
        config = shown_config(page)
        (folder / file).write_text(config.code)
        path = folder / config.get_config().model.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(ROOT / "configs" / "models" / model)
    task = {"question": "?", "answers": ["x"]}
    for file in ("my_data/train.jsonl", "my_data/test.jsonl"):
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"id": f"{i}", **task}) + "\n" for i in range(3)))
    for run in ("my_run", "seed0", "seed1", "seed2", "first", "lr_1e-6", "lr_3e-6"):
        (folder / "runs" / run).mkdir(parents=True)
        record = {"step": 1, "stage": "train", "critic/rewards/mean": 0.5}
        (folder / "runs" / run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_the_commands_are_found():
    assert len(COMMANDS) > 80
    lines = [line for _, line in COMMANDS]
    assert "python -m examples.math_world --out=data/math" in lines
    assert module_and_arguments("until python -m jaxrl.launch --config=a.py; do") == (
        *("jaxrl.launch", ["--config=a.py"]),
    )
    assert module_and_arguments("jaxrl plan --config=a.py") == (
        *("jaxrl.launch", ["--plan", "--config=a.py"]),
    )


OWN = ("jaxrl", "examples", "benchmarks")  # of other packages the flags are theirs


class ParsedError(Exception):
    """The arguments have been read."""


MODULES = [
    (page, line)
    for page, line in COMMANDS
    if (found := module_and_arguments(line)) and found[0].partition(".")[0] in OWN
]


@pytest.mark.parametrize("command", MODULES, ids=name)
def test_flags_and_keys_are_those_of_the_program(command, place, monkeypatch):
    module, arguments = module_and_arguments(command[1])
    monkeypatch.chdir(place)
    if module == "jaxrl.launch":
        argv = ["launch", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "path", [*sys.path])
        with flagsaver.flagsaver():
            config, _ = launch._load_config(launch.parse_flags(argv))
        validate(config, needs_data=False)
        return
    extras = ("chat", "serve", "view")
    is_package = module in [f"jaxrl.extras.{name}" for name in extras]
    program = importlib.import_module(f"{module}.__main__" if is_package else module)
    takes_keys = {
        "jaxrl.extras.chat": "answer_questions",
        "jaxrl.extras.serve": "serve",
        "jaxrl.extras.saved.evaluate": "evaluate",
    }
    if module in takes_keys:  # of the configuration, beside its own flags

        def begin(*_):
            raise ParsedError

        monkeypatch.setattr(program, takes_keys[module], begin)
    else:

        def parse(self, args=None, namespace=None):
            _, others = self.parse_known_args(args, namespace)
            assert not others
            raise ParsedError

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(ParsedError):
        program.main(arguments)
